"""Saving in the background: each save its own step's values, in order, and every failure told."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree import dcp
from statetree.dcp import saving
from statetree.dcp.background import RunningSave, SaveFuture
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal
from tests.pace import units


class Gate:
    """Holds saves up at their beginning until it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.saves = []
        run = saving.StateSave.run

        def wait_and_run(save):
            assert self.opened.wait(units(10))
            self.saves.append(save.directory.name)
            return run(save)

        monkeypatch.setattr(saving.StateSave, "run", wait_and_run)

    def open(self):
        self.opened.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.mark.parametrize("given", [False, True], ids=["own stager", "given stager"])
def test_two_saves_in_flight_hold_their_own_values(given, gate, tmp_path):
    weight = torch.zeros(3)
    with statetree.Stager() as stager:
        futures = []
        for step in range(2):
            weight += 1
            state = {"w": weight, "step": step}
            futures.append(dcp.async_save(state, checkpoint_id=tmp_path / f"{step}", stager=stager if given else None))
        weight.fill_(-1)
        assert not any(future.done() for future in futures)
        gate.open()
        for step, future in enumerate(futures):
            assert future.result(units(10)) is None
            assert_trees_equal(statetree.load(tmp_path / f"{step}"), {"w": torch.full((3,), step + 1.0), "step": step})
    assert gate.saves == ["0", "1"]


def test_a_stager_that_is_full_tells_the_caller(gate, tmp_path):
    weight = torch.zeros(3)
    with statetree.Stager(max_snapshots=1) as stager:
        first = dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "a", stager=stager)
        with pytest.raises(statetree.StagerBusy, match=r"staged trees? (is|are) alive"):
            dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "b", stager=stager)
        gate.open()
        first.result(units(10))
        dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "b", stager=stager).result(units(10))


def test_a_failure_in_staging_reaches_the_caller(tmp_path):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(statetree.UnsupportedLeaf, match=r"stage: .*at a"):
        dcp.async_save({"a": tensor}, checkpoint_id=tmp_path)


def test_a_failure_in_saving_is_the_futures_and_holds_no_memory(tmp_path):
    (tmp_path / "file").touch()
    with statetree.Stager(max_snapshots=1) as stager:
        future = dcp.async_save({"a": torch.ones(4)}, checkpoint_id=tmp_path / "file", stager=stager)
        error = future.exception(units(10))
        assert isinstance(error, statetree.CheckpointError)
        assert "file" in str(error)
        gc.disable()
        try:
            stager.stage({"a": torch.ones(4)})  # the snapshot is free again, though the error is alive
        finally:
            gc.enable()


def test_a_future_cannot_be_cancelled(gate, tmp_path):
    future = dcp.async_save({"a": 1}, checkpoint_id=tmp_path)
    assert not future.cancel()


def test_a_save_that_a_signals_handler_began_while_another_was_waited_for_is_waited_for_too():
    class Interrupted(SaveFuture):
        def exception(self, timeout=None):
            running.futures.append(second)
            return super().exception(timeout)

    running, first, second = RunningSave(), Interrupted(None), SaveFuture(None)
    running.futures.append(first)
    first.set_result(None)
    second.set_exception(ValueError("of the second"))
    with pytest.raises(ValueError, match=r"of the second"):
        running.raise_error("save")
    assert not running.futures


def save_elsewhere(directory):
    """Name another directory on each rank, and then the same one."""
    told = rf"async_save: checkpoint_id differs over the ranks: .*\n  rank 0: {directory}/0\n  rank 1: {directory}/1"
    with pytest.raises(statetree.RankMismatch, match=told):
        dcp.async_save({"a": 1}, checkpoint_id=directory / str(dist.get_rank()))
    dcp.async_save({"a": 1}, checkpoint_id=directory).result(units(10))


def test_ranks_that_name_other_directories_are_refused(tmp_path):
    run_ranks(2, save_elsewhere, tmp_path)
    assert statetree.load(tmp_path) == {"a": 1}
