"""What a checkpointer decides and tells: when a save is due, events, metadata, paths of steps."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.dcp import Checkpointer, Event, schedule
from statetree.dcp.series import bytes_in
from statetree.testing import run_ranks
from tests.pace import units


def state_of(step):
    return {"w": torch.arange(4.0) + step, "step": step}


def test_the_path_of_a_step(tmp_path):
    with Checkpointer(tmp_path) as saved:
        with pytest.raises(
            statetree.CheckpointError, match=r"path: there is no complete checkpoint in .*: expected a "
        ):
            saved.path()
        for step in (1, 2):
            saved.save(step, state_of(step))
        assert saved.path() == tmp_path / "step-00000002"
        assert saved.path(1) == tmp_path / "step-00000001"
        assert statetree.files.open(saved.path(1))["step"] == 1
        with pytest.raises(statetree.CheckpointError, match=r"path: .*expected one of step 3, got steps: 1, 2"):
            saved.path(3)


def test_a_multiple_of_every_is_due(tmp_path):
    with Checkpointer(tmp_path, every=3) as saved:
        assert [step for step in range(8) if saved.due(step)] == [3, 6]
    with Checkpointer(tmp_path) as saved:
        assert not any(map(saved.due, range(5)))
        with pytest.raises(ValueError, match=r"due: step must be a number"):
            saved.due(-1)


def test_a_time_is_due_once_it_has_passed(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now[0])
    with Checkpointer(tmp_path, every=timedelta(seconds=10)) as saved:
        seen = []
        for now[0] in (105.0, 111.0, 112.0, 120.0, 122.0):
            seen.append(saved.due(1))
        assert seen == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("every", "error"), [(2.0, TypeError), (True, TypeError), (0, ValueError), (timedelta(0), ValueError)]
)
def test_every_is_a_number_of_steps_or_a_time(every, error, tmp_path):
    with pytest.raises(error, match=r"Checkpointer: every must be"):
        Checkpointer(tmp_path, every=every)


def test_a_signal_is_due_once_and_the_second_does_what_it_did_before(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("before"))
    try:
        with Checkpointer(tmp_path) as saved:
            saved.save_on(signal.SIGUSR1)
            assert not saved.due(1)
            signal.raise_signal(signal.SIGUSR1)
            assert saved.signalled is None
            assert [saved.due(2), saved.due(3)] == [True, False]
            assert saved.signalled == signal.SIGUSR1
            signal.raise_signal(signal.SIGUSR1)
            assert seen == ["before"]
            saved.save_on(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert seen == ["before", "before"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_calls_on_after_close_reaches_the_one_before(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("before"))
    try:
        runs = [Checkpointer(tmp_path / str(number)) for number in range(2)]
        for run in runs:
            run.save_on(signal.SIGUSR1)
        chained = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *given: (seen.append("own"), chained(*given)))
        for run in runs:
            run.close()
        signal.raise_signal(signal.SIGUSR1)
        assert seen == ["own", "before"]
        with pytest.raises(statetree.CheckpointError, match="save_on: the Checkpointer is closed"):
            runs[0].save_on(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_calls_on_stays(before, tmp_path):
    calls = []
    old = signal.signal(signal.SIGCHLD, before)  # whose default is to do nothing
    try:
        saved = Checkpointer(tmp_path)
        saved.save_on(signal.SIGCHLD)
        chained = signal.getsignal(signal.SIGCHLD)
        own = signal.signal(signal.SIGCHLD, lambda *given: (calls.append(1), chained(*given))) or chained
        saved.close()
        signal.raise_signal(signal.SIGCHLD)
        if before == signal.SIG_IGN:
            signal.raise_signal(signal.SIGCHLD)
            assert calls == [1, 1]
        assert own == chained
    finally:
        signal.signal(signal.SIGCHLD, old)


class Making:
    """Its state is made for each save."""

    def state_dict(self):
        made = torch.ones(3)
        self.made = weakref.ref(made)
        return {"w": made}

    def load_state_dict(self, state):
        raise AssertionError


def test_states_are_let_go_of_before_the_events(tmp_path):
    making, alive = Making(), []
    with Checkpointer(tmp_path, keep=1, on_event=lambda event: alive.append((event.kind, making.made()))) as saved:
        saved.save(1, {"a": making})
        saved.save(2, {"a": making})
    assert alive == [("save", None), ("save", None), ("removal", None)]


CLOSED = """
import os, signal, sys, statetree as st
runs = [st.Checkpointer(sys.argv[1]) for _ in range(2)]
for run in runs:
    run.save_on(signal.SIGTERM)
for run in runs:
    run.close()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_what_ended_the_process_does_so_after_close(tmp_path):
    assert subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path)], check=False).returncode == -signal.SIGTERM


def test_a_forked_worker_ends_by_the_signal(tmp_path):
    saved = Checkpointer(tmp_path)
    saved.save_on(signal.SIGTERM)
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    saved.close()


def signalled_on_one_rank(directory):
    with Checkpointer(directory) as saved:
        saved.save_on(signal.SIGUSR1)
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGUSR1)
        return [saved.due(step) for step in (1, 2)], saved.signalled


def test_a_signal_of_one_rank_is_due_on_all(tmp_path):
    assert run_ranks(2, signalled_on_one_rank, tmp_path) == [([True, False], signal.SIGUSR1)] * 2


PREEMPTED = """
import os, signal, sys, torch, statetree as st
with st.Checkpointer(sys.argv[1], every=1000) as saved:
    saved.save_on(signal.SIGTERM)
    for step in range(1, 1000):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if saved.due(step):
            saved.async_save(step, {"w": torch.full((3,), step)})
        if saved.signalled:
            sys.exit(0)
"""


@pytest.mark.slow
def test_a_preempted_job_saves_its_last_step(tmp_path):
    subprocess.run([sys.executable, "-c", PREEMPTED, str(tmp_path)], check=True)
    assert Checkpointer(tmp_path).restore()["w"].tolist() == [7, 7, 7]


def test_keys_of_metadata_are_texts(tmp_path):
    with Checkpointer(tmp_path) as saved:
        for about in ({1: "a", "1": "b"}, {"a": [({None: 1},)]}):
            with pytest.raises(TypeError, match=r"metadata must be a dict of what JSON holds .*: expected texts"):
                saved.save(1, state_of(1), metadata=about)
        saved.save(1, state_of(1), metadata={"betas": (0.9, 0.95)})
        assert saved.metadata() == {"betas": [0.9, 0.95]}


def test_metadata_come_back(tmp_path):
    about = {"commit": "abc", "tokens": 10**12, "config": {"lr": 1e-3, "layers": [1, 2]}}
    with Checkpointer(tmp_path, keep=1) as saved:
        saved.save(1, state_of(1))
        assert saved.metadata() == {}
        saved.async_save(2, state_of(2), metadata=about).result()
        assert saved.metadata(2) == about
        for save in (saved.save, saved.async_save):
            with pytest.raises(TypeError, match=r"save: metadata must be a dict of what JSON holds .*: .*Tensor"):
                save(3, state_of(3), metadata={"w": torch.ones(1)})
        assert saved.steps() == [2]


def test_events_tell_what_was_done(tmp_path, caplog):
    events = []
    with caplog.at_level(logging.INFO, "statetree"), Checkpointer(tmp_path, keep=1, on_event=events.append) as saved:
        saved.save(1, state_of(1))
        size = sum(file.stat().st_size for file in saved.path(1).iterdir())
        saved.async_save(2, state_of(2)).result()
        saved.restore()
    assert [(event.kind, event.step) for event in events] == [
        ("save", 1), ("stage", 2), ("save", 2), ("removal", 1), ("restore", 2)
    ]  # fmt: skip
    save, stage, later, removal, restore = events
    assert isinstance(save, Event)
    assert save.bytes == removal.bytes == size
    assert stage.bytes == 16
    assert later.bytes == restore.bytes > 16
    assert all(event.seconds > 0 for event in events)
    assert save.waited >= save.seconds
    assert 0 < stage.seconds <= stage.waited <= later.waited
    assert removal.waited == 0
    assert restore.waited == restore.seconds
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "save of step 1", "save of step 2", "removal of step 1", "restore of step 2"
    ]  # fmt: skip


def test_what_watches_does_not_stop_the_training(tmp_path, caplog):
    def fail(event):
        raise ZeroDivisionError

    with Checkpointer(tmp_path, on_event=fail) as saved:
        saved.save(1, state_of(1))
        assert saved.steps() == [1]
    assert "on_event failed with Event(kind='save', step=1" in caplog.text


@pytest.mark.parametrize("is_closing", [True, False], ids=["while close waits", "while nobody waits"])
@pytest.mark.parametrize("verb", ["save", "async_save", "restore", "close", "due", "result", "exception"])
def test_what_on_event_calls_does_not_wait_for_the_save_that_calls_it(verb, is_closing, tmp_path):
    futures, raised, may_call = [], [], threading.Event()
    calls = {
        "save": lambda: saved.save(5, state_of(5)),
        "async_save": lambda: saved.async_save(5, state_of(5)),
        "restore": lambda: saved.restore(),
        "close": lambda: saved.close(),
        "due": lambda: saved.due(5),
        "result": lambda: futures[0].result(),
        "exception": lambda: futures[0].exception(),
    }

    def answer(event):
        if event.kind == "save":
            may_call.wait(units(10))
            with pytest.raises(statetree.CheckpointError, match=rf"{verb}: it would wait for .* Note there what to do"):
                calls[verb]()
            raised.append(verb)

    saved = Checkpointer(tmp_path, on_event=answer, every=timedelta(hours=1))
    futures.append(saved.async_save(1, state_of(1)))
    threading.Timer(0.1 if is_closing else 0, may_call.set).start()
    if not is_closing:
        futures[0].result(units(10))
        assert saved.restore()["step"] == 1
    saved.close()
    assert raised == [verb]
    assert saved.steps() == [1]


def test_what_on_event_calls_after_a_save_that_the_caller_waits_for(tmp_path):
    restored = []
    with Checkpointer(
        tmp_path, on_event=lambda event: event.kind == "save" and restored.append(saved.restore())
    ) as saved:
        saved.save(1, state_of(1))
    assert [state["step"] for state in restored] == [1]


@pytest.mark.filterwarnings("ignore:.* is not above that of the latest checkpoint")
def test_a_kill_between_the_renamings_loses_nothing(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    saved.save(7, state_of(1))
    rename = os.rename

    def fail(source, target):
        if os.path.basename(target) == "step-00000007":
            raise OSError("planted")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(statetree.CheckpointError, match="planted"):
            saved.save(7, state_of(2))
    assert not (tmp_path / "step-00000007").exists()
    assert saved.steps() == [7]
    assert saved.restore()["w"].tolist() == [1, 2, 3, 4]
    saved.save(8, state_of(8))
    assert saved.path(7) == tmp_path / "step-00000007"
    assert saved.restore(step=7)["w"].tolist() == [1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]


def test_counting_bytes_that_are_removed_meanwhile_leaves_nothing_open(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "removed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert bytes_in(tmp_path) == 0
        gc.collect()
    assert caught == []


def test_the_log_has_the_bytes_of_a_stage_that_nobody_else_is_told_of(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "statetree")
    with Checkpointer(tmp_path) as saved:
        saved.async_save(1, state_of(1))
    assert [text for text in caplog.messages if text.startswith("stage of step 1: ") and " 16 bytes, " in text]
