"""SIGKILL leaves a checkpoint that can be restored: at every touch of a file, and at random moments of whole runs.

``STATETREE_KILLS`` says how many runs are killed: 8 by default, 50 in `make thorough`.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from statetree.dcp import Checkpointer
from tests.judge import assert_trees_equal
from tests.pace import units

pytestmark = pytest.mark.slow

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
KILLS = int(os.environ.get("STATETREE_KILLS") or (50 if THOROUGH else 8))
WITHIN_S = 0.2  # some ten saves


def state_of(step):
    return {
        "w": [torch.arange(20_000.0) + step, torch.full((3, 5), step, dtype=torch.int64)],
        "step": step,
        "nested": {step: ("x", [step])},
    }


def train(directory, first, sender, rank, world_size, store):
    torch.set_num_threads(1)
    if world_size > 1:
        timeout = datetime.timedelta(seconds=units(10))
        store = dist.FileStore(str(store), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        mesh = init_device_mesh("cpu", (world_size,))
    with Checkpointer(directory, keep=1) as checkpointer:
        for step in range(first, first + 10_000):
            state = state_of(step)
            if world_size > 1:
                state["w"][0] = distribute_tensor(state["w"][0], mesh, [Shard(0)])
            checkpointer.async_save(step, state)
            sender.send(max(checkpointer.steps(), default=-1))


def run_and_kill(directory, first, world_size, store, moments, *, at_least=-1):
    """Kill a run's processes, one soon after the other, and return the last step that it saw complete.

    It goes on until a step is complete, at least.
    """
    # Forked from a process that has imported torch: that takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["statetree.dcp"])
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=train, args=(directory, first, sender, rank, world_size, store), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    sender.close()
    seen = -1
    assert receiver.poll(units(30))
    while seen < at_least and receiver.poll(units(30)):
        seen = receiver.recv()
    time.sleep(moments.uniform(0.0, WITHIN_S))
    victims = moments.sample(processes, world_size)
    for process in victims:
        with suppress(ProcessLookupError):  # the second may have failed by itself, without the first
            process.kill()
        time.sleep(moments.uniform(0.0, 0.05))
    for process in victims:
        process.join()
    assert victims[0].exitcode == -signal.SIGKILL
    try:
        while receiver.poll():
            seen = max(seen, receiver.recv())
    except (EOFError, OSError):  # the last message may be half a one
        pass
    return seen


@pytest.mark.timeout(units(450))
@pytest.mark.parametrize(("world_size", "kills"), [(1, KILLS), (2, max(2, KILLS // 4))], ids=["1 rank", "2 ranks"])
def test_a_killed_run_leaves_a_restorable_checkpoint(world_size, kills, tmp_path):
    moments = random.Random(world_size)
    directory = tmp_path / "run"
    latest, held = -1, 1
    for number in range(kills):
        at_least = 0 if latest < 0 and number == kills - 1 else -1  # the disk may be slow
        store = tmp_path / f"store {number}"
        seen = run_and_kill(directory, latest + 1, world_size, store, moments, at_least=at_least)
        checkpointer = Checkpointer(directory)
        if not checkpointer.steps():
            assert seen == latest == -1
            continue
        restored = checkpointer.restore()
        assert restored["step"] >= max(seen, latest)
        latest = restored["step"]
        for step in checkpointer.steps():
            assert_trees_equal(checkpointer.restore(step=step), state_of(step))
        # One is kept, and each run that is killed before it prunes leaves another.
        assert len(checkpointer.steps()) <= held + 1
        held = max(1, len(checkpointer.steps()))
        # What crashed runs left behind does not pile up.
        assert len([name for name in os.listdir(directory) if name.startswith(".")]) <= 2
    assert latest >= 0


def save_and_die(directory, step, value, death, *, incremental):
    """Save in a process that is killed before it touches the file system for the given time."""
    pid = os.fork()
    if pid == 0:
        touches = itertools.count(1)

        def count(event, args):
            if (event == "open" or event.startswith(("os.", "shutil."))) and next(touches) == death:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        Checkpointer(directory, keep=1, incremental=incremental).save(step, state_of(value))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status == 0


def die_everywhere(directory, step, incremental, sender):
    """Save over a checkpoint, killed at a later touch every time, until it is not. Sends how often it was killed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # steps are replaced
    checkpointer = Checkpointer(directory, keep=1, incremental=incremental)
    survived, death = False, 0
    while not survived:
        checkpointer.save(1, state_of(1))
        death += 1
        survived = save_and_die(directory, step, 2, death, incremental=incremental)
        restored = checkpointer.restore()
        assert_trees_equal(restored, state_of(2 if survived else restored["step"]))
        checkpointer.save(step, state_of(3))
        assert_trees_equal(checkpointer.restore(), state_of(3))
        assert len(os.listdir(directory)) == 1  # what was left behind is gone
        checkpointer.save(step + 1, state_of(4))
        shutil.rmtree(directory)
    sender.send(death - 1)


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "another"])
def test_a_save_killed_at_any_touch_of_a_file_leaves_a_checkpoint(step, incremental, tmp_path):
    context = multiprocessing.get_context("forkserver")  # it forks itself, which takes a process without threads
    context.set_forkserver_preload(["statetree.dcp"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=die_everywhere, args=(tmp_path / "run", step, incremental, sender))
    process.start()
    sender.close()
    process.join()
    assert process.exitcode == 0
    assert receiver.recv() > 15
