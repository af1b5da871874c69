"""What goes wrong while writing is a CheckpointError that says where and why."""

from __future__ import annotations

import errno
import subprocess

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

import statetree
from statetree import dcp
from statetree.dcp import saving
from statetree.testing import assert_trees_equal
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
    with pytest.raises(statetree.CheckpointError, match=rf"(?s)save: the checkpoint {small_disk}/a: .*disk is full"):
        dcp.save({"w": torch.zeros(200_000)}, checkpoint_id=small_disk / "a")
    with pytest.raises(statetree.CheckpointError, match=r"no .metadata file: .*incomplete"):
        dcp.load(checkpoint_id=small_disk / "a")


def test_a_full_disk_leaves_the_last_checkpoint(small_disk):
    with dcp.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(10_000)})
        with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*disk is full|No space left"):
            checkpointer.save(2, {"w": torch.zeros(200_000)})
        assert checkpointer.steps() == [1]
        assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
        future = checkpointer.async_save(2, {"w": torch.zeros(200_000)})
        with pytest.raises(statetree.CheckpointError, match=r"(?s)save: .*disk is full|No space left"):
            future.result()
        checkpointer.save(3, {"w": torch.ones(10_000)})
        assert checkpointer.restore()["w"].sum() == 10_000


class FullWriter(FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_writers_error_is_told(tmp_path):
    with pytest.raises(statetree.CheckpointError, match=r"save: the checkpoint .*rank 0: OSError: .*No space left"):
        dcp.save({"w": 1}, checkpoint_id=tmp_path, storage_writer=FullWriter("x"))


def test_an_interrupt_stays_one(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_pickled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dcp.save({"w": 1}, checkpoint_id=tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(statetree.CheckpointError, match=r"save: the checkpoint .*file/a.*NotADirectoryError"):
        dcp.save({"w": 1}, checkpoint_id=tmp_path / "file" / "a")


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
    with pytest.raises(statetree.CheckpointError, match=r"save: the checkpoint .*rank 0: OSError: .*Read-only"):
        dcp.save({"w": torch.zeros(10)}, checkpoint_id=small_disk / "a")
