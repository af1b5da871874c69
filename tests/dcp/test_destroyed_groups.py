"""A save that a job does not wait for before it destroys its groups fails on every rank, and publishes nothing."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree
from statetree import dcp
from statetree.dcp import background, saving
from statetree.testing import run_ranks
from tests.pace import units
from tests.ranks import rank_outcomes


def sharded(shift):
    return {"a": distribute_tensor(torch.arange(4.0) + shift, init_device_mesh("cpu", (2,)), [Shard(0)])}


def destroy_before_the_thread_begins(directory: Path) -> list[str]:
    """Return what is in the directory of the series at the end."""
    may_go = threading.Event()

    class SlowStager(statetree.Stager):
        """Stages in the thread that saves, once it may."""

        def stage(self, tree):
            staged, future = super().stage(tree), Future()
            threading.Thread(target=lambda: (may_go.wait(units(30)), future.set_result(staged))).start()
            return future

    with SlowStager(max_snapshots=4) as stager:
        series = dcp.Checkpointer(directory / "series", keep=1, stager=stager)
        series.save(0, sharded(0))
        first = series.async_save(1, sharded(10))
        lone = dcp.async_save(sharded(20), checkpoint_id=directory / "lone", stager=stager)
        queued = dcp.async_save(sharded(30), checkpoint_id=directory / "queued", stager=stager)
        dist.destroy_process_group()
        may_go.set()
        for future in (first, lone, queued):
            with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*(group|Connection closed by peer)"):
                future.result(units(30))
        assert series.steps() == [0]
        assert series.restore()["a"].tolist() == [0, 1, 2, 3]  # its future has said what there was to say
        with pytest.raises(statetree.CheckpointError, match=r"(incomplete|no such directory)"):
            statetree.load(directory / "lone")
        with pytest.raises(statetree.CheckpointError, match=r"(incomplete|no such directory)"):
            statetree.load(directory / "queued")
    return sorted(path.name for path in (directory / "series").iterdir())


def test_a_save_in_the_background_does_not_outlive_its_group(tmp_path):
    for names in run_ranks(2, destroy_before_the_thread_begins, tmp_path, fresh=True):
        assert "step-00000001" not in names
        assert "step-00000000" in names
    loaded = dcp.Checkpointer(tmp_path / "series").restore()
    assert loaded["a"].tolist() == [0, 1, 2, 3]


def save_where_another_group_was_destroyed(directory: Path) -> None:
    """Torch names groups by how many there are: a new one would get the name of one that is there."""
    evaluation, training = dist.new_group(), dist.new_group()
    dcp.Checkpointer(directory / "a", process_group=training).save(1, {"w": torch.ones(2)})
    dist.destroy_process_group(evaluation)
    for name in ("b", "c"):
        dcp.Checkpointer(directory / name, process_group=None if name == "b" else dist.new_group()).save(1, {"w": 1})
        assert statetree.load(directory / name / "step-00000001") == {"w": 1}


def test_a_group_that_was_destroyed_leaves_names_free(tmp_path):
    run_ranks(2, save_where_another_group_was_destroyed, tmp_path, fresh=True)


def use_a_destroyed_group(directory: Path) -> None:
    group = dist.new_group([0, 1])
    statetree.save({"a": 1}, directory / "a", group=group)
    dist.destroy_process_group(group)
    destroyed = r"the process group was destroyed: expected it to last.*Wait for what runs in the background"
    with pytest.raises(statetree.RankMismatch, match="save: the process group was destroyed"):
        statetree.save({"a": 2}, directory / "a", group=group)
    with pytest.raises(statetree.CheckpointError, match=f"save: {destroyed}"):
        dcp.async_save({"a": 2}, checkpoint_id=directory / "a", process_group=group)
    with pytest.raises(statetree.RankMismatch, match="load: the process group was destroyed"):
        statetree.load(directory / "a", group=group)
    assert statetree.load(directory / "a") == {"a": 1}


def test_a_destroyed_group_is_refused(tmp_path):
    run_ranks(2, use_a_destroyed_group, tmp_path)


def destroy_while_saving(directory: Path) -> str:
    """Let one rank lose its group in the middle of a save."""
    run, may_go = saving.StateSave.run, threading.Event()

    def run_late(*args):
        may_go.wait(units(30))
        return run(*args)

    saving.StateSave.run = run_late
    future = dcp.async_save(sharded(0), checkpoint_id=directory)
    if dist.get_rank():
        dist.destroy_process_group()
    may_go.set()
    error = future.exception(units(12))
    if dist.is_initialized():
        dist.destroy_process_group()
    assert isinstance(error, statetree.StateTreeError)
    return str(error)


def test_the_other_ranks_hear_of_a_group_that_one_destroys(tmp_path):
    waiting, destroying = run_ranks(2, destroy_while_saving, tmp_path, fresh=True, timeout=units(30))
    assert "peer" in waiting
    assert "group" in destroying


def lose_a_rank_while_groups_are_made(directory: Path, moment: str) -> list[str]:
    """Return what the other rank is told by each call, where one dies before or after the ranks have met for it."""
    assert background._MAKING.total_seconds() <= 300
    limit, new_group = datetime.timedelta(seconds=units(1)), background.new_gloo_group
    background._MAKING = limit

    def new_group_or_die(*args):
        assert args[1] == limit
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return new_group(*args)

    if moment == "after":
        background.new_gloo_group = new_group_or_die
    elif dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told, began = [], time.monotonic()
    series = dcp.Checkpointer(directory)
    calls = {
        "save": lambda: series.save(1, {"a": 1}),
        "async_save": lambda: dcp.async_save({"a": 1}, checkpoint_id=directory),
    }
    for verb, call in calls.items():
        expected = rf"{verb}: the ranks could not make a process group to use {directory}: .* job again"
        with pytest.raises(statetree.CheckpointError, match=expected) as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError | statetree.RankMismatch)
        told.append(str(caught.value))
    assert time.monotonic() - began < units(20)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_that_dies_while_groups_are_made_is_not_waited_for(moment, tmp_path):
    outcomes = rank_outcomes(2, lose_a_rank_while_groups_are_made, tmp_path, moment, timeout=units(30))
    assert [outcome.status for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))
    assert outcomes[0].value[0].startswith("save: ")


def lose_a_rank_between_calls(directory: Path, verb: str) -> None:
    """Have the other rank die after both have made every call once."""
    series = dcp.Checkpointer(directory, every=datetime.timedelta(days=1))
    calls = {
        "save": lambda: series.save(0, {"a": 1}),
        "async_save": lambda: series.async_save(1, {"a": 1}).result(),
        "restore": lambda: series.restore({"a": 0}),
        "due": lambda: series.due(1),
    }
    for call in calls.values():
        call()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(statetree.RankMismatch, match=f"{verb}: a rank of the group did not answer"):
        calls[verb]()


@pytest.mark.parametrize("verb", ["save", "async_save", "restore", "due"])
def test_a_rank_that_died_is_named_alike_by_every_call(verb, tmp_path):
    outcomes = rank_outcomes(2, lose_a_rank_between_calls, tmp_path, verb, timeout=units(30))
    assert [outcome.status for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


def wait_longer_than_making_takes(directory: Path) -> None:
    """Keep the others waiting for a save longer than groups may take to be made."""
    background._MAKING = datetime.timedelta(seconds=units(1))
    with dcp.Checkpointer(directory) as series:
        for step in (1, 2):
            series.save(step, {"step": step})
            if dist.get_rank() == step == 1:
                time.sleep(units(2))


@pytest.mark.slow
def test_ranks_may_wait_longer_for_each_other_in_a_save(tmp_path):
    run_ranks(2, wait_longer_than_making_takes, tmp_path, fresh=True)
    assert dcp.Checkpointer(tmp_path).steps() == [1, 2]
