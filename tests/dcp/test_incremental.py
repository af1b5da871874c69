"""Incremental checkpoints: what did not change is linked, and each step is complete whatever happens to the others."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree
from statetree import dcp
from statetree.dcp import data_writer
from statetree.dcp.file_manifest import read_manifest
from statetree.files.tensor_archives import archive_of
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal


def state_of(step, size=1000):
    """A base that does not change, and something small that does."""
    base = {f"layer {number}": torch.arange(size) * (number + 1) for number in range(10)}
    return {"base": base, "lora": torch.arange(8.0) + step, "step": step, "name": "a run"}


def files(directory, step):
    path = directory / f"step-{step:08}"
    return {file.name: file.stat() for file in path.glob("*.distcp")}


def written(directory, step, before):
    """Return how many bytes of data a step has that another one has not."""
    shared = {found.st_ino for found in files(directory, before).values()}
    return sum(found.st_size for found in files(directory, step).values() if found.st_ino not in shared)


def test_what_did_not_change_is_linked(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(4):
            saved.save(step, state_of(step))
        whole = sum(found.st_size for found in files(tmp_path, 0).values())
        for step in range(1, 4):
            assert 0 < written(tmp_path, step, step - 1) < whole / 10
            assert sum(found.st_size for found in files(tmp_path, step).values()) < whole * 1.2
        for step in range(4):
            assert_trees_equal(saved.restore(step=step), state_of(step))


def test_a_state_that_did_not_change_at_all(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(3):
            saved.save(step, state_of(0))
        assert written(tmp_path, 1, 0) == written(tmp_path, 2, 0) == 0
        assert_trees_equal(saved.restore(), state_of(0))


@pytest.mark.slow
def test_many_small_tensors_come_to_lie_apart_from_those_that_change(tmp_path):
    def state(step):
        return {str(number): torch.arange(10) + number + (step if number % 100 == 0 else 0) for number in range(1000)}

    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(4):
            saved.save(step, state(step))
            assert len(files(tmp_path, step)) < 200
        whole = sum(found.st_size for found in files(tmp_path, 3).values())
        assert written(tmp_path, 3, 2) < whole / 10
        for step in range(4):
            assert_trees_equal(saved.restore(step=step), state(step))


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_no_step_needs_another(removed, tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(3):
            saved.save(step, state_of(step))
        shutil.rmtree(tmp_path / f"step-{removed:08}")
        saved.save(3, state_of(3))
        for step in {0, 1, 2, 3} - {removed}:
            assert_trees_equal(saved.restore(step=step), state_of(step))


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_another_writer_removes_while_it_is_compared_is_written_anew(count, tmp_path, monkeypatch):
    original = data_writer.PieceSource.is_in

    def is_in(*args):
        shutil.rmtree(tmp_path / "step-00000000", ignore_errors=True)
        return original(*args)

    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, state_of(0))
        monkeypatch.setattr(data_writer.PieceSource, "is_in", is_in)
        saved.save(1, state_of(1))
        assert saved.steps() == [1]
        assert_trees_equal(saved.restore(), state_of(1))


def test_old_ones_are_pruned(tmp_path):
    with dcp.Checkpointer(tmp_path, keep=1, incremental=True) as saved:
        for step in range(3):
            saved.save(step, state_of(step))
            assert saved.steps() == [step]
            assert_trees_equal(saved.restore(), state_of(step))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_each(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(2):
            saved.save(step, state_of(step))
    template = {"base": {f"layer {number}": torch.zeros(1000).long() for number in range(10)}, "lora": torch.zeros(8)}
    torch_dcp.load(template, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert_trees_equal(template, {key: state_of(1)[key] for key in template})


@pytest.mark.parametrize("changed", ["value", "dtype", "shape", "conj", "sign", "last"])
def test_whatever_changes_is_written(changed, tmp_path):
    before = torch.tensor([0.0, 1.0])
    after = {
        "value": torch.tensor([0.0, 2.0]),
        "dtype": before.view(torch.int32),
        "shape": before[None],
        "sign": torch.tensor([-0.0, 1.0]),
    }.get(changed)
    if changed == "last":
        before = torch.arange(1 << 19)  # several blocks
        after = before.clone()
        after[-1] += 1
    if changed == "conj":
        before = torch.tensor([1 + 2j])
        after = before.conj()
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, {"a": before, "b": 1})
        saved.save(1, {"a": after, "b": 1})
        for step, tensor in enumerate((before, after)):
            loaded = saved.restore(step=step)["a"]
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)
            assert torch.equal(torch.signbit(loaded.real), torch.signbit(tensor.resolve_conj().real))
        assert written(tmp_path, 1, 0) > 0


def test_strides_are_no_change(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step, tensor in enumerate((torch.arange(4.0).view(2, 2), torch.tensor([[0.0, 2.0], [1.0, 3.0]]).T)):
            saved.save(step, {"a": tensor})
            assert_trees_equal(saved.restore(), {"a": torch.arange(4.0).view(2, 2)})
        assert written(tmp_path, 1, 0) == 0


@pytest.mark.parametrize("tensor", [torch.arange(10.0), torch.arange(12).view(3, 4).T, torch.empty(0, 3)], ids=str)
@pytest.mark.parametrize("part", ["before the memory", "the memory", "behind it"])
def test_a_flipped_bit_in_any_part_of_a_piece_is_a_change(tensor, part, tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, {"a": tensor})
        files_ = read_manifest(tmp_path / "step-00000000").files
        ((name, piece),) = [
            (n, p) for n, file in files_.items() for index, p in file.pieces.items() if index.key == "a"
        ]
        place = len(archive_of(tensor.dtype, tensor.shape).head)
        ends = [0, place, place + tensor.nbytes, piece.length]
        first, last = dict(zip(("before the memory", "the memory", "behind it"), pairwise(ends), strict=True))[part]
        path = tmp_path / "step-00000000" / name
        data = path.read_bytes()
        for at in {first, (first + last) // 2, last - 1} if last > first else ():
            damaged = bytearray(data)
            damaged[piece.offset + at] ^= 1
            path.write_bytes(damaged)
            saved.save(1, {"a": tensor})
            assert name not in files(tmp_path, 1)
            assert_trees_equal(saved.restore(step=1), {"a": tensor.contiguous()})
            shutil.rmtree(tmp_path / "step-00000001")


def test_keys_that_come_and_go(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(4):
            state = {"a": torch.arange(100), f"only {step % 2}": torch.arange(50), "b": {"c": torch.arange(step + 1)}}
            saved.save(step, state)
            assert_trees_equal(saved.restore(), state)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_where_there_are_no_links_all_is_written(error, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError(error, "planted")

    monkeypatch.setattr(os, "link", fail)
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(2):
            saved.save(step, state_of(step))
            assert_trees_equal(saved.restore(), state_of(step))
        assert written(tmp_path, 1, 0) > 80_000


def test_a_step_that_is_whole_is_not_linked_to_one_that_is_not(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, state_of(0))
        for path in (tmp_path / "step-00000000").glob("*.distcp"):
            os.truncate(path, 10)
        saved.save(1, state_of(1))
        assert_trees_equal(saved.restore(), state_of(1))
        (tmp_path / "step-00000001" / ".statetree_manifest").write_bytes(b"damaged")
        saved.save(2, state_of(2))
        assert_trees_equal(saved.restore(), state_of(2))


def test_a_damaged_file_is_written_again(tmp_path):
    """Its size and time are what they were."""
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, state_of(0))
        path = max((tmp_path / "step-00000000").glob("*.distcp"), key=lambda file: file.stat().st_size)
        status, data = path.stat(), bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(statetree.CheckpointError, match="has the checksum"):
            saved.restore()
        saved.save(1, state_of(1))
        assert_trees_equal(saved.restore(), state_of(1))


def test_a_file_that_says_it_is_of_another_save_is_written_again(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, state_of(0))
        for path in (tmp_path / "step-00000000").glob("*.distcp"):
            data = path.read_bytes()
            path.write_bytes(data[:-32] + b"0" * 32)
        saved.save(1, state_of(0))
        assert not set(files(tmp_path, 0)) & set(files(tmp_path, 1))
        assert_trees_equal(saved.restore(), state_of(0))


def test_symbolic_links_are_not_linked_to(tmp_path):
    """What they lead to may go away."""
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        saved.save(0, state_of(0))
        for path in list((tmp_path / "step-00000000").glob("*.distcp")):
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        saved.save(1, state_of(0))
        assert not any(path.is_symlink() for path in (tmp_path / "step-00000001").iterdir())
        assert_trees_equal(saved.restore(), state_of(0))


def save_on_two(directory):
    """The second rank's file holds nothing that one rank would save later."""
    mesh = init_device_mesh("cpu", (2,))
    with dcp.Checkpointer(directory) as saved:
        saved.save(0, {"base": distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)])})


def test_after_ordinary_saves_of_other_ranks(tmp_path):
    run_ranks(2, save_on_two, tmp_path)
    save_on_one(tmp_path)
    assert dcp.Checkpointer(tmp_path).restore()["base"].tolist() == list(range(4000))


def test_after_ordinary_saves(tmp_path):
    """Which put all in one file."""
    dcp.Checkpointer(tmp_path).save(0, state_of(0))
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in (1, 2):
            saved.save(step, state_of(step))
            assert_trees_equal(saved.restore(), state_of(step))
    plain = dcp.Checkpointer(tmp_path)
    plain.save(3, state_of(3))
    for step in range(4):
        assert_trees_equal(plain.restore(step=step), state_of(step))


@pytest.mark.filterwarnings("ignore:.*not above that of the latest")
def test_a_step_that_is_replaced(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True, keep=2) as saved:
        for value in range(3):
            saved.save(7, state_of(value))
            assert_trees_equal(saved.restore(), state_of(value))


def test_a_linked_file_of_another_save_is_noticed(tmp_path):
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in range(2):
            saved.save(step, state_of(step))
        older, newer = files(tmp_path, 0), files(tmp_path, 1)
        own = next(name for name in sorted(newer) if name not in older)
        gone = next(name for name in sorted(older) if name not in newer)
        shutil.copyfile(tmp_path / "step-00000000" / gone, tmp_path / "step-00000001" / own)
        with pytest.raises(statetree.CheckpointError, match=r"is damaged|two checkpoints are mixed"):
            saved.restore()


def test_readers_meanwhile(tmp_path):
    """Others restore while steps come and go."""
    errors = []
    done = threading.Event()

    def read():
        other = dcp.Checkpointer(tmp_path)
        while not done.is_set():
            try:
                found = other.restore()
                assert_trees_equal(found, state_of(found["step"], 100))
            except BaseException as error:
                errors.append(error)
                return

    with dcp.Checkpointer(tmp_path, keep=2, incremental=True) as saved:
        saved.save(0, state_of(0, 100))
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(1, 15):
            saved.async_save(step, state_of(step, 100))
        saved.restore()
        done.set()
        for thread in threads:
            thread.join()
    assert not errors


def save_on_ranks(directory):
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    with dcp.Checkpointer(directory, incremental=True) as saved:
        for step in range(3):
            base = distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)])
            moving = distribute_tensor(torch.arange(40.0) + step, mesh, [Shard(0)])
            saved.save(step, {"base": base, "moving": moving, f"rank {rank}": torch.arange(5), "step": step})
        for step in range(3):
            template = {"base": torch.zeros(4000), "moving": torch.zeros(40), f"rank {rank}": torch.zeros(5).long()}
            loaded = saved.restore(template, step=step)
            assert loaded["base"].tolist() == list(range(4000))
            assert loaded["moving"].tolist() == list(range(step, 40 + step))
            assert loaded[f"rank {rank}"].tolist() == list(range(5))


def test_several_ranks(tmp_path):
    run_ranks(2, save_on_ranks, tmp_path)
    for step in (1, 2):
        assert 0 < written(tmp_path, step, step - 1) < 16_000


def save_on_one(directory):
    dcp.Checkpointer(directory, incremental=True).save(3, {"base": torch.arange(4000.0), "step": 3})


def test_other_ranks_later(tmp_path):
    """Whose pieces are others."""
    run_ranks(2, save_on_ranks, tmp_path)
    save_on_one(tmp_path)
    assert dcp.Checkpointer(tmp_path).restore()["base"].tolist() == list(range(4000))
