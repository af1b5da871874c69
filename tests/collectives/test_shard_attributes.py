"""Tensors that say themselves what they hold: torch's ``CheckpointableTensor``, and chunk lists on local tensors."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, check_in_step, check_same

FULL = torch.arange(35.0).view(5, 7)


def checkpointable(full, rank, *, padding=1):
    """Return rows 0 to 1 and 4 on rank 0, 2 to 3 on rank 1, one behind the other in a tensor with padding."""
    rows = [[(0, 2), (4, 5)], [(2, 4)]][rank]
    local = torch.full((sum(stop - start for start, stop in rows) + padding, full.shape[1]), -1.0)
    first = []
    position = padding
    for start, stop in rows:
        first.append((position, 0))
        local[position : position + stop - start] = full[start:stop]
        position += stop - start
    local.global_shape = tuple(full.shape)
    local.global_offsets = tuple((start, 0) for start, _ in rows)
    local.local_offsets = tuple(first)
    local.local_sizes = tuple((stop - start, full.shape[1]) for start, stop in rows)
    return local


def listed(full, rank):
    """Return a DTensor with uneven rows, which its local tensor lists: 4 on rank 0, 1 on rank 1."""
    start, stop = [(0, 4), (4, 5)][rank]
    local = full[start:stop].clone()
    sizes = local.shape
    mesh = init_device_mesh("cpu", (2,))
    found = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    found._local_tensor.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size([start, 0]), sizes)]
    return found


KINDS = {"checkpointable": checkpointable, "listed": listed}


def go_there_and_back(kind):
    rank = dist.get_rank()
    tree = {"w": KINDS[kind](FULL, rank), "plain": torch.arange(2.0)}
    whole = statetree.gather(tree)
    assert torch.equal(whole["w"], FULL)
    assert not isinstance(whole["w"], DTensor)
    assert not vars(whole["w"])
    check_same(statetree.gather(whole), whole)
    assert statetree.gather(tree, dst=0)["w"].is_meta == bool(rank)
    like = {"w": KINDS[kind](torch.zeros_like(FULL), rank), "plain": torch.zeros(2)}
    for call in (
        functools.partial(statetree.distribute, whole, like),
        functools.partial(statetree.distribute, whole if rank == 0 else None, like, src=0),
        functools.partial(statetree.reshard, whole, like),
        functools.partial(statetree.reshard, tree, like),
    ):
        check_same(statetree.gather(call()), whole)
    statetree.reshard(tree, like, in_place=True)
    check_same(statetree.gather(like), whole)
    if kind == "checkpointable":
        assert (like["w"][0] == -1).all()
    copied = statetree.offload(tree)
    check_same(statetree.gather(copied), whole)
    sent = statetree.broadcast(tree, src=1)
    check_same(statetree.gather(sent), whole)
    check_in_step()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tensor_says_it_holds_is_moved(kind):
    run_ranks(2, go_there_and_back, kind)


def refuse():
    wrong = {
        "global_offsets": (((0, 0),), "as many global_offsets"),
        "local_offsets": (((3, 0), (2, 0)), "inside of the shape"),
        "local_sizes": (((2, 7), (2, 7)), "inside of the shape"),
        "global_shape": ((5,), "1 dims of every shard"),
    }
    for name, (value, text) in wrong.items():
        leaf = checkpointable(FULL, 0)
        setattr(leaf, name, value)
        kind, message = attempt(functools.partial(statetree.gather, {"a": {"w": leaf}}))
        assert (kind, text in message, "at a.w" in message) == ("UnsupportedLeaf", True, True), (name, kind, message)
        check_in_step()
    half = checkpointable(FULL, 0)
    kind, message = attempt(functools.partial(statetree.gather, {"w": half}))
    assert kind in ("UnsupportedLeaf", "RankMismatch"), message
    for sizes, count in ((torch.Size([1, 1]), 1), (None, 2)):  # less than the local tensor, and all of it twice
        several = listed(FULL, dist.get_rank())
        local = several._local_tensor
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), sizes or local.shape)
        local.__create_chunk_list__ = lambda chunk=chunk, count=count: [chunk] * count
        kind, message = attempt(functools.partial(statetree.gather, {"w": several}))
        assert (kind, "lists chunks that are not all of the tensor" in message) == ("UnsupportedLeaf", True), message
        check_in_step()


def test_what_does_not_fit_is_refused():
    run_ranks(2, refuse)


def test_a_checkpoint_does_not_keep_one_part_alone(tmp_path):
    with pytest.raises(statetree.UnsupportedLeaf, match=r"the ranks of the group hold only a part of the leaf at w"):
        statetree.save({"w": checkpointable(FULL, 0)}, tmp_path)


def save_and_load(folder, kind):
    rank = dist.get_rank()
    tree = {"w": KINDS[kind](FULL, rank), "plain": torch.arange(2.0)}
    statetree.save(tree, folder / kind)
    statetree.Checkpointer(folder / f"steps of {kind}").save(1, tree)
    check_same(statetree.load(folder / kind)["w"], FULL)
    for load in (statetree.load, lambda _, like: restored(folder, kind, like)):
        fresh = load(folder / kind, {"w": KINDS[kind](torch.zeros_like(FULL), rank), "plain": torch.zeros(2)})
        assert torch.equal(statetree.gather(fresh)["w"], FULL)
    in_place = {"w": KINDS[kind](torch.zeros_like(FULL), rank), "plain": torch.zeros(2)}
    assert statetree.similarity(statetree.load(folder / kind, in_place, in_place=True), in_place)
    assert torch.equal(statetree.gather(in_place)["w"], FULL)
    plain = {"w": torch.zeros_like(FULL), "plain": torch.zeros(2)}
    torch_dcp.load(plain, checkpoint_id=folder / kind)
    assert torch.equal(plain["w"], FULL)


def save_in_part(folder):
    """Let both ranks hold the same part, so that nobody has the rest."""
    for number, kind in enumerate(("checkpointable", "listed")):
        tree = {"w": KINDS[kind](FULL, 0)}
        for save in (statetree.save, lambda tree, path: statetree.Checkpointer(path).save(1, tree)):
            name, message = attempt(lambda save=save, tree=tree, number=number: save(tree, folder / f"{number}"))
            assert name in ("CheckpointError", "UnsupportedLeaf"), (kind, name, message)
            check_in_step()


def test_what_the_ranks_hold_in_part_is_not_saved(tmp_path):
    run_ranks(2, save_in_part, tmp_path)


def test_a_checkpointer_does_not_keep_one_part_alone(tmp_path):
    with pytest.raises(
        statetree.UnsupportedLeaf, match="w: expected a tensor with elements, got a tensor of which each"
    ):
        statetree.Checkpointer(tmp_path).save(1, {"w": checkpointable(FULL, 0)})


def restored(folder, kind, like):
    return statetree.Checkpointer(folder / f"steps of {kind}").restore(like)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_together_save_and_load_what_they_hold(kind, tmp_path):
    run_ranks(2, save_and_load, tmp_path, kind)
