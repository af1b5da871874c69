"""What goes wrong while writing is a CheckpointError that says where and why."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree
from statetree import dcp
from statetree.dcp import data_writer, saving
from statetree.dcp.data_writer import DataWriter
from statetree.files import block_checksums, tensor_archives
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal
from tests.pace import units


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told(small_disk):
    with pytest.raises(statetree.CheckpointError, match=rf"save: cannot write {small_disk}/a: .*Make room"):
        statetree.save({"w": torch.zeros(200_000)}, small_disk / "a")
    with pytest.raises(statetree.CheckpointError, match=r"there is no such directory"):
        statetree.load(small_disk / "a")


def test_what_an_error_holds_can_be_collected(tmp_path, monkeypatch):
    """Python 3.12.1 crashes as it collects a cycle of an error's frames that holds BytesIO's own buffer."""

    def fail(*_):
        raise OSError(errno.EIO, "it is gone")

    monkeypatch.setattr(os, "pwritev", fail)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(statetree.CheckpointError, match="it is gone") as caught:
        statetree.save({"w": torch.zeros(3), "step": 3, "quantized": quantized}, tmp_path / "a")
    views = [value for value in gc.get_objects() if isinstance(value, memoryview)]
    assert [view for view in views if "BytesIO" in type(view.obj).__name__] == []
    assert caught.tb is not None


def test_a_full_disk_leaves_the_last_checkpoint(small_disk):
    with dcp.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(10_000)})
        with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*No space left"):
            checkpointer.save(2, {"w": torch.zeros(200_000)})
        assert checkpointer.steps() == [1]
        assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
        future = checkpointer.async_save(2, {"w": torch.zeros(200_000)})
        with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*No space left"):
            future.result()
        checkpointer.save(3, {"w": torch.ones(10_000)})
        assert checkpointer.restore()["w"].sum() == 10_000


def fill_the_disk(directory, rank):
    """Save more than fits: on a disk that is full for all ranks, or for the writes of elements of one of them."""
    too_many = 200_000 if rank is None else 200  # else nothing but that rank's error may tell
    mesh = init_device_mesh("cpu", (2,))

    def state(count, step):
        return {"w": distribute_tensor(torch.arange(float(count)), mesh, [Shard(0)]), "step": step}

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with dcp.Checkpointer(directory) as saved, pytest.MonkeyPatch.context() as patch:
        saved.save(1, state(100, 1))
        if rank == dist.get_rank():
            patch.setattr(data_writer.os, "pwritev", full)
        with pytest.raises(statetree.CheckpointError, match=r"save: .*No space left"):
            saved.save(2, state(too_many, 2))
        with pytest.raises(statetree.CheckpointError, match=r"save: .*No space left"):
            saved.async_save(2, state(too_many, 2)).result(units(30))
        assert saved.steps() == [1]
        dist.barrier()
        assert os.listdir(directory) == ["step-00000001"]
        patch.undo()
        saved.save(3, state(100, 3))
        assert saved.restore()["w"].tolist() == list(range(100))
        assert saved.restore(state(100, 0), step=1)["step"] == 1


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["all ranks", "the first rank", "another rank"])
def test_a_full_disk_is_told_to_all_ranks(rank, small_disk):
    run_ranks(2, fill_the_disk, small_disk, rank)


def save_every_other(directory, first, incremental):
    warnings.simplefilter("ignore")  # of steps that are not above the latest
    with dcp.Checkpointer(directory, keep=2, incremental=incremental) as saved:
        for step in range(first, first + 30, 2):
            saved.save(step, {"w": torch.arange(1000.0) + step, "same": torch.arange(1000.0), "step": step})


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_two_writers_of_one_directory_lose_nothing(incremental, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["statetree.dcp"])
    processes = [context.Process(target=save_every_other, args=(tmp_path, first, incremental)) for first in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(units(60))
    assert [process.exitcode for process in processes] == [0, 0]
    with dcp.Checkpointer(tmp_path) as saved:
        assert saved.latest_step() == 29
        for step in saved.steps():
            restored = saved.restore(step=step)
            assert_trees_equal(restored, {"w": torch.arange(1000.0) + step, "same": torch.arange(1000.0), "step": step})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_writers_error_is_told(tmp_path, monkeypatch):
    def write(self, groups, tag=""):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DataWriter, "write", write)
    with pytest.raises(statetree.CheckpointError, match=r"save: .*No space left"):
        statetree.save({"w": 1}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_stays_one(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_pickled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        statetree.save({"w": 1}, tmp_path)


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_an_interrupt_at_any_write_of_a_file_stays_one(incremental, tmp_path, monkeypatch):
    state = {"w": torch.arange(10.0), "n": 1}
    with dcp.Checkpointer(tmp_path, incremental=incremental) as checkpointer:
        checkpointer.save(0, state)
        for death in itertools.count(1):
            writes = itertools.count(1)

            def planted(call, writes=writes, death=death):
                def wrapper(*args):
                    if next(writes) == death:
                        raise KeyboardInterrupt
                    return call(*args)

                return wrapper

            state["w"] += 1
            with monkeypatch.context() as patch:
                for module in (block_checksums, tensor_archives):
                    patch.setattr(module, "crc32", planted(zlib.crc32))
                patch.setattr(os, "pwritev", planted(os.pwritev))
                try:
                    checkpointer.save(death, state)
                except KeyboardInterrupt:
                    gc.collect()
                    assert checkpointer.steps() == [0]
                    continue
            break
        assert death > 6
        assert checkpointer.steps() == [0, death]


def test_a_failure_after_an_interrupt_is_none(small_disk):
    with dcp.Checkpointer(small_disk) as checkpointer:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*OSError: .*No space left"):
                checkpointer.save(2, {"w": torch.zeros(200_000)})


def interrupted_on_one_rank(directory):
    def interrupt(*_args):
        raise KeyboardInterrupt

    tensor = distribute_tensor(torch.arange(40.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(block_checksums, "crc32", interrupt)
        rank = dist.get_rank()
        error, message = (KeyboardInterrupt, "") if rank else (statetree.CheckpointError, "rank 1: KeyboardInterrupt")
        with pytest.raises(error, match=message):
            statetree.save({"w": tensor}, directory)


def test_an_interrupt_of_one_rank_reaches_all(tmp_path):
    run_ranks(2, interrupted_on_one_rank, tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(statetree.CheckpointError, match=r"save: cannot write .*file/a: its directory does not exist"):
        statetree.save({"w": 1}, tmp_path / "file" / "a")


def test_a_directory_that_cannot_be_written_is_named(small_disk):
    with dcp.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(10)})
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(statetree.CheckpointError, match=r"save: .*first rank .*directory: OSError: .*Read-only"):
            checkpointer.save(2, {"w": torch.zeros(10)})
        future = checkpointer.async_save(3, {"w": torch.zeros(10)})
        with pytest.raises(statetree.CheckpointError, match=r"Read-only"):
            future.result(units(10))
        assert_trees_equal(checkpointer.restore(), {"w": torch.zeros(10)})  # reading still works
    with pytest.raises(statetree.CheckpointError, match=r"save: cannot write .*Read-only"):
        statetree.save({"w": torch.zeros(10)}, small_disk / "a")
