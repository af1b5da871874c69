"""One rank of several is killed at a random moment of a save: the others raise in time, and no step is lost or wrong.

``STATETREE_KILLS`` says how many times, for each way of saving: 17 by default.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree
from statetree.dcp import Checkpointer, background
from statetree.testing import rank_calls
from tests.dcp.test_kill import state_of
from tests.judge import assert_trees_equal
from tests.pace import units

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("STATETREE_KILLS") or 17)
WITHIN_S = 0.2  # some ten saves
REFUSED = 7
KEPT = 2


def train(directory, kind, first, sender, rank, world_size, store):
    """Save step after step, until the library says that it cannot."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    background._MAKING = datetime.timedelta(seconds=units(1))
    store = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    dist.barrier()
    sender.send(-1)
    try:
        with Checkpointer(directory, keep=KEPT, incremental=kind == "incremental") as saved:
            for step in range(first, first + 10_000):
                state = state_of(step)
                whole = state["w"][0]
                own = whole.chunk(world_size)[rank]
                geometry = {"shape": whole.shape, "stride": whole.stride()}
                # Nothing here communicates but the library.
                state["w"][0] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, **geometry)
                (saved.async_save if kind == "async_save" else saved.save)(step, state)
                sender.send(max(saved.steps(), default=-1))
    except statetree.StateTreeError:
        os._exit(REFUSED)


def run_and_kill_one(directory, kind, first, world_size, store, moments):
    """Kill one rank of a run, and return the last step that a rank saw complete, once all have ended.

    One run in four is killed while it makes its groups and saves its first step; the others, after that.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(rank_calls.PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=train, args=(directory, kind, first, sender, rank, world_size, store), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    sender.close()
    victim = moments.choice(processes)
    seen = -1
    try:
        least = moments.choice([-1, first, first, first])
        ready = 0
        while ready < world_size or seen < least:
            assert receiver.poll(units(30)), "the ranks did not begin"
            seen = max(seen, receiver.recv())
            ready += 1
        time.sleep(moments.uniform(0.0, WITHIN_S))
        victim.kill()
        latest = time.monotonic() + units(20)
        while multiprocessing.connection.wait([receiver], max(0.0, latest - time.monotonic())):
            seen = max(seen, receiver.recv())  # until all ranks have ended
    except EOFError:
        pass
    finally:
        for process in processes:
            process.join(units(5))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hung:
            processes[rank].kill()
    assert not hung, f"rank {processes.index(victim)} was killed, and {hung} hung"
    codes = {process is victim: process.exitcode for process in processes}
    assert codes == {True: -signal.SIGKILL, False: REFUSED}
    return seen


@pytest.mark.timeout(units(450))
@pytest.mark.parametrize(("kind", "world_size"), [("save", 2), ("async_save", 3), ("incremental", 2)])
def test_a_rank_is_killed(kind, world_size, tmp_path):
    moments = random.Random(kind)
    directory, latest = tmp_path / "run", -1
    for number in range(KILLS):
        seen = run_and_kill_one(directory, kind, latest + 1, world_size, tmp_path / f"store {number}", moments)
        saved = Checkpointer(directory)
        steps = saved.steps()
        assert max(steps, default=-1) >= max(seen, latest)
        latest = max(steps, default=-1)
        assert len(steps) >= min(KEPT, latest + 1)
        for step in steps:
            assert_trees_equal(saved.restore(step=step), state_of(step))
    assert latest > KILLS
    with Checkpointer(directory, keep=KEPT) as saved:
        saved.save(latest + 1, state_of(latest + 1))
    assert sorted(os.listdir(directory)) == [f"step-{step:08}" for step in (latest, latest + 1)]
