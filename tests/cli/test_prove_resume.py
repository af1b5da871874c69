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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is not above")
@pytest.mark.parametrize(
    ("text", "kill_at", "status", "said"),
    [
        (UNSEEDED, 2, 2, r"differs from run to run, before any kill, at step 1: x. Seed it, and"),
        (ANEW, 2, 1, r"began anew after the kill: it restores nothing"),
        (ANEW, 9, 2, r"ended with status 0: expected a save at step 9 or later"),
        ("1 / 0", 9, 2, r"ended with status 1: expected success"),
        (ENDING_EARLY, 3, 1, "resumed, and saved last step 3 of run: the whole run step 6 of run."),
        (BY_THE_CLOCK, 4, 0, "resumed bit for bit: compared at steps 4, 6, 8."),
        (OF_TWO, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
        (ONLY_EARLY, 4, 0, "resumed bit for bit: compared at steps 4, 5, 6."),
    ],
    ids=["unseeded", "anew", "never", "fails", "ends early", "by the clock", "of two", "one of two early"],
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
