"""Distributed leaves that DCP would take for something else are refused by name, when saved and as templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import statetree
from statetree.testing import run_ranks


class Box:
    """An object that nothing knows."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Chunked:
    """A distributed tensor of a class of its own."""

    def __init__(self, start: int, piece: torch.Tensor) -> None:
        self.start, self.piece = start, piece


class ChunkedType:
    def unpack(self, value):
        return [value.piece], value.start

    def pack(self, context, parts):
        return Chunked(context, parts[0])

    def describe(self, value):
        return {"start": value.start}

    def layout(self, value):
        return [((4,), [(value.start,)])]


def sharded() -> DTensor:
    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def shard_tensor() -> Any:
    rank = dist.get_rank()
    piece = torch.arange(2.0) + 2 * rank
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(piece, [2 * rank], rank)], 4)


def without_memory(tensor: Any) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.local_shards()[0].tensor
    local.untyped_storage().resize_(0)
    return tensor


def uneven() -> DTensor:
    local = torch.arange(3.0) if dist.get_rank() == 0 else torch.arange(3.0, 4.0)
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], shape=(4,), stride=(1,))


def in_bits() -> DTensor:
    local = torch.arange(2, dtype=torch.uint8).view(torch.bits8)
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])


def refuse_on_ranks(directory: Path) -> None:
    rank = dist.get_rank()
    statetree.register_leaf_type(Chunked, ChunkedType())
    statetree.save({"a": torch.arange(4.0)}, directory / "good")
    refused = {
        "a DTensor without memory": (without_memory(sharded()), r"storage was freed or resized to 0 bytes"),
        "a ShardedTensor without memory": (without_memory(shard_tensor()), r"storage was freed or resized to 0 bytes"),
        "uneven": (uneven(), r"does not fit its placements"),
        "in an object": (Box([sharded()]), r"a Box with a distributed tensor inside.*Gather it"),
        "an object with that": (Box(Chunked(2 * rank, torch.arange(2.0))), r"a Box with a distributed tensor inside"),
        "bits": (in_bits(), r"a DTensor of torch.bits8. View it as numbers"),
    }
    for name, (leaf, message) in refused.items():
        with pytest.raises(statetree.UnsupportedLeaf, match=rf"(?s)save: .* at a\b.*{message}"):
            statetree.save({"a": leaf}, directory / name)
        assert not (directory / name / ".metadata").exists()
        if "memory" in name or name == "uneven":
            with pytest.raises(statetree.UnsupportedLeaf, match=rf"(?s)load: .* at a\b.*{message}"):
                statetree.load(directory / "good", {"a": leaf}, in_place=True)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    with pytest.raises(statetree.UnsupportedLeaf, match=r"save: .* at a: .*hold only a part.*Pass the process_group"):
        statetree.save({"a": sharded()}, directory / f"part {rank}", group=alone)
    own = shard_tensor()
    statetree.save({"a": own}, directory / "sharded")  # with memory, it is saved
    assert statetree.load(directory / "sharded")["a"].tolist() == [0, 1, 2, 3]


def test_what_dcp_would_save_wrongly_is_refused(tmp_path):
    run_ranks(2, refuse_on_ranks, tmp_path, fresh=True)


def load_into_expanded(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, saved in {"good": torch.arange(2.0).repeat_interleave(2), "bad": torch.arange(4.0)}.items():
        statetree.save({"a": saved}, directory / name)
    expanded = DTensor.from_local(torch.full((1,), -1.0).expand(2), mesh, [Shard(0)])
    with pytest.raises(statetree.TreeMismatch, match=r"load: overlap at a: .*overlaps itself"):
        statetree.load(directory / "bad", {"a": expanded}, in_place=True)
    assert expanded.to_local().tolist() == [-1, -1]
    statetree.load(directory / "good", {"a": expanded}, in_place=True)
    assert expanded.to_local().tolist() == [dist.get_rank()] * 2


def test_an_expanded_local_tensor_is_filled_if_the_checkpoint_agrees(tmp_path):
    run_ranks(2, load_into_expanded, tmp_path)


def cut_in_order(order: tuple[int, int], number: int) -> DTensor:
    """Return a DTensor of which this rank holds the chunk of a number."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    meta = TensorMeta(torch.Size([8]), (1,), torch.float32)
    mesh = init_device_mesh("cpu", (2, 2))
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=(ShardOrderEntry(0, order),))
    return DTensor(torch.arange(2.0) + 2 * number, spec, requires_grad=False)


def cut_right_to_left(directory: Path) -> None:
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    usual, other = cut_in_order((0, 1), rank), cut_in_order((1, 0), column * 2 + row)
    for leaf in (usual, other):
        assert statetree.gather({"a": leaf})["a"].tolist() == list(range(8))
    statetree.save({"a": usual}, directory / "good")
    assert statetree.load(directory / "good")["a"].tolist() == list(range(8))
    statetree.save({"a": other}, directory / "other")
    assert statetree.load(directory / "other")["a"].tolist() == list(range(8))
    for name, order in (("good", (1, 0)), ("other", (0, 1))):
        template = cut_in_order(order, 99)
        statetree.load(directory / name, {"a": template}, in_place=True)
        assert statetree.gather({"a": template})["a"].tolist() == list(range(8))


@pytest.mark.slow
def test_a_mesh_may_cut_in_another_order(tmp_path):
    run_ranks(4, cut_right_to_left, tmp_path)


def _load_tied(directory: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    other = torch.arange(8.0)
    other[7] = -1  # in the shard of the second rank
    saved = {
        "a": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]),
        "b": distribute_tensor(other, mesh, [Shard(0)]),
    }
    statetree.save(saved, directory)
    tied = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    with pytest.raises(statetree.TreeMismatch) as caught:
        statetree.load(directory, {"a": tied, "b": tied}, in_place=True)
    return str(caught.value)


def test_tied_shards_saved_with_different_values_on_one_rank(tmp_path):
    for message in run_ranks(2, _load_tied, tmp_path):
        assert "ties at b: values of its own cannot go into a tensor that shares memory" in message


def save_a_leaf_of_the_first_rank(directory):
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0])  # which the second rank is not in
    local = torch.empty(0) if rank else torch.arange(4.0)
    leaf = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    # The first rank writes the larger tensor, so that the other one would have its turn with the smaller.
    statetree.save({"large": torch.ones(100), "w": leaf}, directory, group=dist.group.WORLD)


def test_ranks_outside_of_a_mesh_have_no_say(tmp_path):
    run_ranks(2, save_a_leaf_of_the_first_rank, tmp_path / "saved")
    assert statetree.load(tmp_path / "saved")["w"].tolist() == [0, 1, 2, 3]


def save_what_ranks_disagree_on(directory):
    rank = dist.get_rank()
    held = [
        torch.ones(2) if rank else 1,
        torch.ones((2,) * (1 + rank)),
        torch.ones(2 + rank),
        torch.ones(2, dtype=torch.int32 if rank else torch.float32),
    ]
    for number, state in enumerate([{"w": torch.ones(3), "x": each} for each in held]):
        said = r"pieces of 'x' that make up no tensor|tensors 'x': expected one dtype and shape"
        with pytest.raises(statetree.CheckpointError, match=said):
            statetree.save(state, directory / f"{number}")
        assert not (directory / f"{number}").exists()


def test_ranks_that_hold_no_tensor_together_are_refused(tmp_path):
    run_ranks(2, save_what_ranks_disagree_on, tmp_path)
