"""Forked children, as a DataLoader makes them: they save on their own, and never stand in the parent's way."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager

import pytest
import torch

import statetree as st
from statetree import dcp
from statetree.dcp import Checkpointer, saving, series
from statetree.files.publishing import alone_in
from tests.pace import units

FORKS = {"by Python": os.fork, "in C code": ctypes.PyDLL(None).fork}
by_any_fork = pytest.mark.parametrize("fork", FORKS.values(), ids=list(FORKS))


def started(action, fork=os.fork):
    """Fork a child that does something, and return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        pid = fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def idle_child(fork):
    """Let a forked child live meanwhile."""
    pid = started(signal.pause, fork)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def assert_succeeds(pid):
    """Wait for a child, but not for ever."""
    deadline = time.monotonic() + units(10)
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child never ended")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 0


def in_time(action):
    """Do something in a thread that need not be waited for if it never ends."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(units(10))
    assert not thread.is_alive()


@by_any_fork
def test_a_child_forked_while_a_save_is_alone_in_the_directory_does_not_stop_the_next(fork, tmp_path, monkeypatch):
    reached, go = threading.Event(), threading.Event()
    clean = series.Series._clean

    def wait_and_clean(self):
        reached.set()
        assert go.wait(units(10))
        clean(self)

    monkeypatch.setattr(series.Series, "_clean", wait_and_clean)
    saved = Checkpointer(tmp_path)
    future = saved.async_save(1, {"w": torch.arange(3.0)})
    assert reached.wait(units(10))
    with idle_child(fork):
        go.set()
        future.result(units(10))
        in_time(lambda: saved.save(2, {"w": torch.arange(3.0)}))
        assert saved.steps() == [1, 2]


@by_any_fork
def test_a_child_that_outlives_a_killed_trainer_keeps_no_step_that_was_half_written(fork, tmp_path):
    told, tell = os.pipe()

    def train():
        made = series.Series(tmp_path).begin(1, [])
        child = started(signal.pause, fork)
        os.write(tell, f"{child} {made.path.name}".encode())
        signal.pause()

    trainer = started(train)
    child, name = os.read(told, 1000).decode().split()
    try:
        saved = Checkpointer(tmp_path)
        saved.save(2, {"w": torch.arange(3.0)})
        assert (tmp_path / name).exists()  # while the trainer lives
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        saved.save(3, {"w": torch.arange(3.0)})
        assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]
    finally:
        os.kill(int(child), signal.SIGKILL)
        os.close(told)
        os.close(tell)


def test_a_lock_does_not_outlive_an_interrupt_that_comes_as_it_is_released(tmp_path, monkeypatch):
    flock, interrupts = fcntl.flock, [KeyboardInterrupt]

    def interrupted(handle, operation):
        if operation == fcntl.LOCK_UN and interrupts:
            raise interrupts.pop()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt), alone_in(tmp_path):
        pass
    gc.collect()  # pytest's record of the error held the frame
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    "save",
    [lambda state, path: Checkpointer(path).save(1, state), lambda state, path: st.save(state, path / "a.pt")],
    ids=["a step", "a file"],
)
def test_a_child_of_a_trainer_that_was_killed_while_alone_in_the_directory_lets_others_save(save, tmp_path):
    told, tell = os.pipe()

    def train():
        with alone_in(tmp_path):
            os.write(tell, str(started(signal.pause)).encode())
            signal.pause()

    trainer = started(train)
    child = int(os.read(told, 1000))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        in_time(lambda: save({"w": torch.arange(3.0)}, tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(told)
        os.close(tell)


def test_a_child_saves_in_the_background_after_its_parent_did(tmp_path):
    dcp.async_save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path / "parent").result(units(10))

    def save():
        dcp.async_save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "child").result(units(10))

    assert_succeeds(started(save))
    assert st.load(tmp_path / "child")["w"].tolist() == [0, 1, 2, 3]


def test_a_child_saves_with_the_checkpointer_whose_parent_is_saving(tmp_path, monkeypatch):
    reached, go = threading.Event(), threading.Event()
    run, parent = saving.StateSave.run, os.getpid()

    def wait_and_run(*args):
        if os.getpid() == parent:
            reached.set()
            assert go.wait(units(10))
        return run(*args)

    monkeypatch.setattr(saving.StateSave, "run", wait_and_run)
    with Checkpointer(tmp_path) as saved:
        future = saved.async_save(1, {"w": torch.arange(3.0)})
        assert reached.wait(units(10))
        holder = threading.Thread(target=saved.save, args=(3, {"w": torch.arange(3.0)}))
        holder.start()  # it waits for the first save, and holds the lock of calls meanwhile
        time.sleep(0.05)
        assert_succeeds(started(lambda: saved.async_save(2, {"w": torch.arange(3.0)}).result(units(10))))
        assert saved.steps() == [2]
        go.set()
        future.result(units(10))
        holder.join(units(10))
        assert saved.steps() == [1, 2, 3]


AFTER_THE_GROUPS = """
import os, sys, torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 1), rank=0, world_size=1)
from statetree import Checkpointer, dcp  # now: torch's functions are imported, too, with this group as a default

saved = Checkpointer(sys.argv[1] + "/run")
saved.async_save(1, {"w": torch.arange(3.0)}).result()
dcp.async_save({"w": torch.arange(3.0)}, checkpoint_id=sys.argv[1] + "/more").result()
saved.close()
dist.destroy_process_group()
for _ in range(2):
    pid = os.fork()
    if not pid:
        alone = Checkpointer(sys.argv[1] + "/child")
        alone.async_save(1, {"w": torch.arange(3.0)}).result()
        del saved
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_child_of_a_process_that_has_destroyed_its_groups_lives(tmp_path):
    """As workers of a loader: what freed the parent's groups in a child ended it."""
    command = [sys.executable, "-W", "ignore", "-c", AFTER_THE_GROUPS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=units(60))
    assert done.returncode == 0, done.stderr
