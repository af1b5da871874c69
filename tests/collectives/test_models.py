"""States of models under every parallelism that torch has: gathered, distributed, and resharded between any two."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import statetree
from statetree.testing import run_ranks
from tests.collectives.checks import blank, check_same, locals_of
from tests.collectives.models import CONTAINERS, Net, parallel, state_of, whole

RANKS = pytest.mark.parametrize("world_size", [2, 4])


def check_meta(tree, expected):
    found, _ = statetree.to_flat(tree)
    wanted, _ = statetree.to_flat(expected)
    assert found.keys() == wanted.keys()
    for key, leaf in found.items():
        assert leaf.is_meta, key
        assert (leaf.shape, leaf.dtype) == (wanted[key].shape, wanted[key].dtype), key


def distributed(tree):
    leaves = statetree.to_flat(tree)[0]
    return {key: leaf for key, leaf in leaves.items() if isinstance(leaf, DTensor | ShardedTensor)}


def memory_of(tree):
    tensors = [tensor for leaf in distributed(tree).values() for tensor in locals_of(leaf)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def take_each_there_and_back():
    expected = whole()
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, kind in enumerate(CONTAINERS):
        state = state_of(kind)
        assert bool(distributed(state)) == (kind != "ddp"), kind
        check_same(statetree.gather(state), expected)
        one = number % size
        there = statetree.gather(state, dst=one)
        if rank == one:
            check_same(there, expected)
        else:
            check_meta(there, expected)
        for src in (None, one):
            full = expected if src in (None, rank) else None
            like = blank(state)
            check_same(statetree.distribute(full, like, src=src), state)
            check_same(like, blank(state))  # nothing was written
            written = statetree.distribute(full, like, src=src, in_place=True)
            check_same(like, state)
            theirs = distributed(like)
            assert all(leaf is theirs[key] for key, leaf in distributed(written).items())


def reshard_between_any_two():
    states = {kind: state_of(kind) for kind in CONTAINERS}
    for one, other in itertools.product(CONTAINERS, repeat=2):
        moved = statetree.reshard(states[one], blank(states[other]))
        check_same(moved, states[other])
        assert memory_of(moved).isdisjoint(memory_of(states[one]) | memory_of(states[other]))


@RANKS
def test_states_are_gathered_and_distributed_exactly(world_size):
    run_ranks(world_size, take_each_there_and_back)


@pytest.mark.slow
@RANKS
def test_states_are_resharded_exactly(world_size):
    run_ranks(world_size, reshard_between_any_two)


def keep_classes():
    model = parallel("fsdp2_tp", Net())
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    tree = dict(model.named_parameters())
    expected = dict(Net().named_parameters())
    gathered = statetree.gather(tree)
    for name, found in gathered.items():
        assert type(found) is torch.nn.Parameter, name
        assert found.requires_grad == tree[name].requires_grad, name
        assert torch.equal(found, expected[name]), name
        assert found.is_leaf
    for result in (
        statetree.distribute(gathered, tree),
        statetree.distribute(gathered, tree, src=0),
        statetree.reshard(tree, tree),
        statetree.broadcast(tree),
    ):
        for name, found in result.items():
            own = tree[name]
            assert type(found) is type(own), name
            assert isinstance(found, torch.nn.Parameter), name
            assert found.requires_grad == own.requires_grad, name
            assert getattr(found, "placements", None) == getattr(own, "placements", None), name
            assert all(map(torch.equal, locals_of(found), locals_of(own))), name
    # A plain state dict that is distributed takes its classes from the layout.
    state = {name: tensor.detach() for name, tensor in gathered.items()}
    for name, found in statetree.distribute(state, tree).items():
        assert isinstance(found, torch.nn.Parameter), name
        assert found.requires_grad == tree[name].requires_grad, name


@RANKS
def test_parameters_stay_parameters(world_size):
    run_ranks(world_size, keep_classes)


def load_into_model():
    model = parallel("fsdp2_tp", Net())
    for parameter in model.parameters():
        parameter.detach().zero_()
    full = whole()["model"] if dist.get_rank() == 0 else None
    statetree.distribute(full, model.state_dict(), src=0, in_place=True)
    check_same(statetree.gather(model.state_dict()), whole()["model"])


@RANKS
def test_a_model_is_loaded_in_place(world_size):
    run_ranks(world_size, load_into_model)
