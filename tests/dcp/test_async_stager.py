"""``AsyncStager`` in DCP's own ``async_save``, with both executors, on 1, 2 and 4 ranks that train on meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import AsyncStager as Protocol
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import statetree
from statetree import dcp
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal
from tests.pace import units

# DCP warns wherever there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Run:
    """A small model on all ranks, its optimizer, and the state of both."""

    def __init__(self, kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            model = DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.steps = 0

    def train(self):
        batch = torch.arange(10.0).reshape(2, 5) + dist.get_rank() + self.steps
        self.model(batch).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}


class HeldWriter(torch_dcp.FileSystemWriter):
    """Writes only when it may."""

    may_write = threading.Event()

    def write_data(self, plan, planner):
        assert self.may_write.wait(units(15))
        return super().write_data(plan, planner)


def check_saved(kind, saved):
    """Compare checkpoints with what was alive when they were begun."""
    template = Run(kind)
    template.train()
    for checkpoint_id, expected in saved.items():
        assert_trees_equal(statetree.load(checkpoint_id, template.state(), in_place=True), expected, ties=False)


def save_in_threads(kind, directory, *, asynchronous):
    """Have two saves in flight at a time, each on a group of its own, and train meanwhile."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    HeldWriter.may_write.clear()
    run, saved, uploads = Run(kind), {}, []
    with dcp.AsyncStager(asynchronous=asynchronous) as stager:
        for group in groups:
            run.train()
            checkpoint_id = f"{directory}/{kind} {run.steps} {asynchronous}"
            saved[checkpoint_id] = statetree.offload(run.state())
            response = torch_dcp.async_save(
                run.state(), storage_writer=HeldWriter(checkpoint_id), async_stager=stager, process_group=group
            )
            if asynchronous:
                assert isinstance(response, AsyncSaveResponse)
                response.staging_completion.result(units(15))
                response = response.upload_completion
            uploads.append(response)
        run.train()
        assert not any(upload.done() for upload in uploads)
        HeldWriter.may_write.set()
        for upload in uploads:
            upload.result(units(15))
    check_saved(kind, saved)


def save_in_a_process(kind, directory):
    """Train while DCP's process writes. It takes one save at a time."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    run, saved = Run(kind), {}
    with dcp.AsyncStager(share_memory=True) as stager:
        for _ in range(3):
            run.train()
            checkpoint_id = f"{directory}/{kind} {run.steps} by a process"
            saved[checkpoint_id] = statetree.offload(run.state())
            upload = torch_dcp.async_save(
                run.state(),
                checkpoint_id=checkpoint_id,
                async_stager=stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            run.train()
            upload.result(units(30))
        # What the process is done with is written again.
        assert stager.stats.allocations <= 2  # the process may hold the last one a little longer
    check_saved(kind, saved)


def save_by_all_means(directory):
    multiprocessing.current_process()._config["daemon"] = False  # which may not have children
    for kind in ("fsdp", "ddp"):
        for asynchronous in (False, True):
            save_in_threads(kind, directory, asynchronous=asynchronous)
        save_in_a_process(kind, directory)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_saves_hold_the_values_of_their_steps(world_size, tmp_path):
    run_ranks(world_size, save_by_all_means, tmp_path, timeout=units(60))


def test_it_satisfies_dcps_protocol():
    with dcp.AsyncStager() as stager:
        assert isinstance(stager, Protocol)


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_in_staging_reaches_the_caller(asynchronous, tmp_path):
    with dcp.AsyncStager(asynchronous=asynchronous) as stager:
        with pytest.raises(statetree.UnsupportedLeaf, match=r"at a"):
            torch_dcp.async_save({"a": freed()}, checkpoint_id=tmp_path, async_stager=stager)
        upload = torch_dcp.async_save({"a": torch.arange(3)}, checkpoint_id=tmp_path, async_stager=stager)
        (upload.upload_completion if asynchronous else upload).result(units(15))
    assert_trees_equal(statetree.load(tmp_path, {"a": torch.zeros(3).long()}, in_place=True), {"a": torch.arange(3)})


class Slow:
    """Takes as long to be staged as it is told."""

    reached, go = threading.Event(), threading.Event()

    def __reduce__(self):
        self.reached.set()
        assert self.go.wait(units(15))
        return Slow, ()


def test_a_failure_in_the_background_is_the_futures(tmp_path):
    state = {"a": torch.ones(3)}
    with dcp.AsyncStager(asynchronous=True) as stager:
        before = threading.Thread(target=statetree.Stager.stage, args=(stager, [Slow()]))
        before.start()
        assert Slow.reached.wait(units(15))
        response = torch_dcp.async_save(state, checkpoint_id=tmp_path, async_stager=stager)
        state["a"].untyped_storage().resize_(0)
        Slow.go.set()
        before.join()
        for future in (response.staging_completion, response.upload_completion):
            with pytest.raises(statetree.UnsupportedLeaf, match="at a"):
                future.result(units(15))


def test_a_third_save_in_flight_is_refused(tmp_path):
    HeldWriter.may_write.clear()
    state = {"a": torch.arange(3)}
    uploads = []
    with dcp.AsyncStager() as stager:

        def save(step):
            return torch_dcp.async_save(state, storage_writer=HeldWriter(tmp_path / f"{step}"), async_stager=stager)

        uploads = [save(step) for step in range(2)]
        with pytest.raises(statetree.StagerBusy, match="2 staged trees are alive"):
            save(2)
        HeldWriter.may_write.set()
        for upload in uploads:
            upload.result(units(15))
        del upload, uploads
        save(3).result(units(15))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_closing_leaves_saves_in_flight_whole(asynchronous, tmp_path):
    HeldWriter.may_write.clear()
    state = {"a": torch.arange(1000)}
    stager = dcp.AsyncStager(asynchronous=asynchronous)
    upload = torch_dcp.async_save(state, storage_writer=HeldWriter(tmp_path), async_stager=stager)
    if asynchronous:
        upload.staging_completion.result(units(15))
        upload = upload.upload_completion
    stager.close()
    state["a"].zero_()
    stager.close()
    with pytest.raises(statetree.StagerClosed, match="the stager is closed"):
        torch_dcp.async_save(state, checkpoint_id=tmp_path, async_stager=stager)
    HeldWriter.may_write.set()
    upload.result(units(15))
    assert_trees_equal(statetree.load(tmp_path, state, in_place=True), {"a": torch.arange(1000)})


def test_a_frozen_leaf_is_copied_once_for_all_saves(tmp_path):
    state = {"base": torch.arange(1000.0), "adapter": torch.arange(3.0)}
    with dcp.AsyncStager(frozen="base") as stager:
        for step in range(2):
            state["adapter"] += 1
            torch_dcp.async_save(state, checkpoint_id=tmp_path / str(step), async_stager=stager).result()
        staged = [stager.stage(state) for _ in range(2)]
        assert staged[0]["base"].data_ptr() == staged[1]["base"].data_ptr()
        assert staged[0]["adapter"].data_ptr() != staged[1]["adapter"].data_ptr()
    loaded = {"base": torch.zeros(1000), "adapter": torch.zeros(3)}
    torch_dcp.load(loaded, checkpoint_id=tmp_path / "1")
    assert_trees_equal(loaded, state)


def test_a_frozen_leaf_that_was_written_is_found():
    state = {"base": torch.arange(4.0)}
    with dcp.AsyncStager(frozen="base", check=True) as stager:
        stager.stage(state)
        state["base"][2] = 0
        with pytest.raises(statetree.TreeMismatch, match="base"):
            stager.stage(state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_views_that_torch_loses_between_processes_are_staged_as_their_values(asynchronous):
    numbers = torch.randn(3, 2, dtype=torch.complex64)
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "w": torch.ones(2)}
    with dcp.AsyncStager(asynchronous=asynchronous) as stager:
        staged = stager.stage(state)
        staged = staged.result() if asynchronous else staged
    assert not any(leaf.is_conj() or leaf.is_neg() for leaf in staged.values())
    assert all(torch.equal(staged[name], leaf) for name, leaf in state.items())


def save_views_in_a_process(directory):
    multiprocessing.current_process()._config["daemon"] = False  # which may not have children
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    state = {"conj": torch.randn(3, 2, dtype=torch.complex64).conj()}
    state["neg"] = state["conj"].imag
    with dcp.AsyncStager(share_memory=True) as stager:
        options = {"async_stager": stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        torch_dcp.async_save(state, checkpoint_id=directory, **options).result(units(30))
    like = {name: torch.zeros_like(leaf.resolve_conj().resolve_neg()) for name, leaf in state.items()}
    torch_dcp.load(like, checkpoint_id=directory)
    assert all(torch.equal(like[name], leaf) for name, leaf in state.items())


@pytest.mark.slow
def test_another_process_writes_the_values_of_views(tmp_path):
    run_ranks(1, save_views_in_a_process, tmp_path, timeout=units(60))
