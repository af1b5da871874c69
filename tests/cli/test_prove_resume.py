"""``statetree prove-resume``, on a loop that forgets something."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("resumable.py")
FORGOTTEN = {
    "scheduler": "scheduler CosineAnnealingLR",
    "random": "random state of torch",
    "optimizer": "optimizer AdamW",
    "loader": "batches of the DataLoader",
}


@pytest.mark.slow
def test_a_loop_that_forgets_nothing_is_resumed(statetree):
    ran = statetree("prove-resume", SCRIPT, "nothing", "--kill-at", "7")
    assert ran.out == "killed at step 7, and resumed bit for bit: compared at steps 8, 10, 12, 14, 16, 18, 20.\n"
    assert ran.status == 0


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_what_a_loop_forgets_is_named(forgotten, statetree):
    ran = statetree("prove-resume", "--kill-at", "7", SCRIPT, forgotten)
    assert "killed at step 7, resumed, and different at step 8." in ran.out
    assert f"forgotten: {FORGOTTEN[forgotten]}\n" in ran.out
    assert "model.0.weight" in ran.out
    assert ran.status == 1


UNSEEDED = """
import os, statetree
with statetree.Checkpointer("run") as saved:
    for step in range(1, 4):
        saved.save(step, {"x": os.urandom(4)})
"""
ANEW = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved:
    for step in range(1, 4):
        if step not in saved.steps():
            saved.save(step, {"x": step})
        else:
            saved.save(step, {"x": step})
"""
ANEW_AFTER_THE_FIRST = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved:
    if saved.steps():
        saved.restore()  # and makes nothing of it
    else:
        saved.save(0, {"x": 0})
    for step in range(1, 7):
        saved.save(step, {"x": step})
"""
OTHERWISE_BUILT = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved:
    state = saved.restore() if saved.steps() else {"x": 0, "beside": [(1, 2)], "empty": []}
    state["beside"] = list(state["beside"]) if not saved.steps() else tuple(state["beside"])
    for state["x"] in range(state["x"] + 1, 7):
        saved.save(state["x"], state)
"""
SAVING_NO_MORE = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved:
    for step in range(1, 7 if not saved.steps() else 1):
        saved.save(step, {"x": step})
"""

ENDING_EARLY = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved:
    step = saved.latest_step() or 0
    if step:
        saved.restore()
    for step in range(step + 1, 7 if not step else step + 2):
        saved.save(step, {"x": step})
"""
BY_THE_CLOCK = """
import os, sys, statetree
whole = not os.path.exists("ran")
with statetree.Checkpointer("run", keep=None) as saved, open("ran", "a"):
    start = saved.latest_step() or 0
    x = saved.restore()["x"] if start else 0
    for step in range(start + 1, 10):
        x += step
        if step % 2 == 0 if whole else step % 3 == 0 or step in (4, 8):  # as it were
            saved.save(step, {"x": x})
"""
OF_TWO = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved, statetree.Checkpointer("best", keep=None) as best:
    x = saved.restore()["x"] if saved.steps() else 0
    for step in range((saved.latest_step() or 0) + 1, 7):
        x += step
        if step % 2 == 0:
            best.save(step, {"best": x})
        saved.save(step, {"x": x})
"""
FROM_THE_RARER_ONE = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved, statetree.Checkpointer("rare", keep=None) as rare:
    x = rare.restore()["x"] if rare.steps() else 0
    for step in range((rare.latest_step() or 0) + 1, 7):
        x += step
        if step % 3 == 0:
            rare.save(step, {"x": x})
        saved.save(step, {"x": x})
"""
ONLY_EARLY = """
import statetree
with statetree.Checkpointer("run", keep=None) as saved, statetree.Checkpointer("best", keep=None) as best:
    x = saved.restore()["x"] if saved.steps() else 0
    for step in range((saved.latest_step() or 0) + 1, 7):
        x += step
        if step == 2:
            best.save(step, {"best": x})
        saved.save(step, {"x": x})
"""

NAMED_ALIKE = """
import statetree
all_of_it = [statetree.Checkpointer(where, keep=None) for where in ("a/run", "a_run", "é" * 120 + "/run")]
x = all_of_it[0].restore()["x"] if all_of_it[0].steps() else 0
for step in range((all_of_it[0].latest_step() or 0) + 1, 7):
    x += step
    for number, saved in enumerate(all_of_it):
        saved.save(step, {"x": x + number})
"""
MIRRORED = """
import statetree
with statetree.Checkpointer("run", mirror="memory://no-folder-of-this-process", keep=1) as saved:
    assert saved._mirror is None
    x = saved.restore()["x"] if saved.steps() else 0
    for step in range((saved.latest_step() or 0) + 1, 7):
        x += step
        saved.save(step, {"x": x})
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is not above")
@pytest.mark.parametrize(
    ("text", "kill_at", "status", "said"),
    [
        (UNSEEDED, 2, 2, r"differs from run to run, before any kill, at step 1: x. Seed it, and"),
        (ANEW, 2, 1, r"began anew after the kill: it restores nothing"),
        (ANEW_AFTER_THE_FIRST, 4, 1, "did not go on after the kill: it saved step 1, while step 3 was complete."),
        (OTHERWISE_BUILT, 4, 1, "so these of the state differ:\n  its containers (a tuple that was a list"),
        (SAVING_NO_MORE, 4, 1, "saved nothing after the kill that the whole run saved."),
        (ANEW, 9, 2, r"ended with status 0: expected a save at step 9 or later"),
        ("1 / 0", 9, 2, r"ended with status 1: expected success"),
        (ENDING_EARLY, 3, 1, "resumed, and saved last step 3 of run: the whole run step 6 of run."),
        (BY_THE_CLOCK, 4, 0, "resumed bit for bit: compared at steps 4, 6, 8.\nnot compared: steps 9, which the whole"),
        (NAMED_ALIKE, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
        (MIRRORED, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
        (OF_TWO, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
        (FROM_THE_RARER_ONE, 6, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
        (ONLY_EARLY, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
    ],
    ids=[
        "unseeded",
        "anew",
        "anew but for the first",
        "otherwise built",
        "saving no more",
        "never",
        "fails",
        "ends early",
        "by the clock",
        "named alike",
        "mirrored",
        "of two",
        "from the rarer of two",
        "one of two early",
    ],
)
def test_what_is_said_of_a_script(text, kill_at, status, said, tmp_path, statetree, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = statetree("prove-resume", script, "--kill-at", str(kill_at))
    assert said in ran.out + ran.err
    assert ran.status == status


RESUMING = """
import os, statetree, torch
seen = []
with statetree.Checkpointer("run", keep=None) as saved:
    state = {"x": torch.zeros(1), "step": 0}
    if saved.latest_step() is not None:
        state = saved.restore()
    for step in range(int(state["step"]) + 1, 5):
        seen.append(step)
        state = {"x": WHAT, "step": step}
        saved.save(step, state)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("state['x'] + len(seen)", 1, "what was forgotten is not known: "),
        (
            "torch.tensor(list(os.urandom(4))) if step > 2 else state['x']",
            2,
            "differs from run to run, without any kill",
        ),
    ],
    ids=["a list of the script's own", "random only after the kill"],
)
def test_that_nothing_known_was_forgotten_is_no_claim_that_nothing_was(what, status, said, tmp_path, statetree):
    script = tmp_path / "script.py"
    script.write_text(RESUMING.replace("WHAT", what))
    ran = statetree("prove-resume", script, "--kill-at", "2")
    assert said in ran.out, ran.err
    assert "forgotten: nothing" not in ran.out
    assert ran.status == status


ALIKE = """
import sys, statetree, torch
pairs = []
for _ in range(2):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)))
kept = [each for number, pair in enumerate(pairs) for each in pair[: 2 + (number >= int(sys.argv[1]))]]
with statetree.Checkpointer("run") as saved:
    step = saved.restore({"kept": kept, "step": 0})["step"] if saved.steps() else 0
    for step in range(step + 1, 6):
        for model, optimizer, scheduler in pairs:
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        saved.save(step, {"kept": kept, "step": step})
"""


LEFT_BEHIND = """
import gc, statetree, torch
gc.disable()  # so that what is made anew before a restore is still there
def made():
    model = torch.nn.utils.skip_init(torch.nn.Linear, 2, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler
m, o, s = made()
forgotten = 0.0
with statetree.Checkpointer("run") as saved:
    step = 0
    if saved.steps():
        m, o, s = made()
        state = saved.restore()
        step = state["step"]
        m.load_state_dict(state["m"])
        o.load_state_dict(state["o"])
        s.load_state_dict(state["s"])
    for step in range(step + 1, 9):
        forgotten += 1.0
        m(torch.ones(2) * forgotten).square().sum().backward()
        o.step()
        o.zero_grad()
        s.step()
        saved.save(step, {"m": m.state_dict(), "o": o.state_dict(), "s": s.state_dict(), "step": step})
"""


@pytest.mark.slow
def test_a_scheduler_that_a_script_has_replaced_is_not_named(tmp_path, statetree):
    script = tmp_path / "script.py"
    script.write_text(LEFT_BEHIND)
    ran = statetree("prove-resume", "--kill-at", "5", script)
    assert "what was forgotten is not known: " in ran.out, ran.out + ran.err


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_of_schedulers_that_are_alike_those_that_are_not_saved_are_named(left_out, tmp_path, statetree):
    script = tmp_path / "script.py"
    script.write_text(ALIKE)
    ran = statetree("prove-resume", "--kill-at", "4", script, str(left_out))
    assert ran.status == bool(left_out), ran.out + ran.err
    assert ("forgotten: scheduler StepLR" in ran.out) == bool(left_out)
