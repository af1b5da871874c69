"""No collective changes what it is given: bytes, version counters, containers, attributes."""

import functools

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step
from tests.collectives.models import state_of, whole
from tests.judge.watch import Watch

RANKS = pytest.mark.parametrize("world_size", [2, 4])


def make_tree():
    ranks = tuple(range(dist.get_world_size()))
    parameter = torch.nn.Parameter(Layout((5, 3), ranks, ("S0",)).build())
    base = torch.arange(12.0)
    complex_local = Layout((6,), ranks, ("S0",), torch.complex64).build()
    return {
        "parameter": parameter,
        "tied": [parameter, base, base.view(3, 4).t()],
        "transposed": Layout((4, 6), ranks, ("S1",), geometry="transposed").build(),
        "inside": Layout((6,), ranks, ("S0",), geometry="inside").build(),
        "partials": Layout((4,), ranks, ("P",)).build(),
        "complex": complex_local,
        "grad": torch.ones(3, requires_grad=True),
        "buffer": torch.nn.Buffer(torch.arange(3.0)),
        "number": 3,
    }


def verbs():
    """Return every collective, as functions of one tree that must not be changed."""
    rank = dist.get_rank()
    like = blank(without_summands(make_tree()))
    whole_tree = without_summands(statetree.gather(make_tree()))

    def by_reshard(tree):
        return statetree.reshard(without_summands(tree), like)

    def as_layout(tree, *, src):
        given = whole_tree if src is None or rank == src else None
        return statetree.distribute(given, without_summands(tree), src=src)

    return {
        "gather": statetree.gather,
        "gather to one": functools.partial(statetree.gather, dst=1),
        "gather elsewhere": functools.partial(statetree.gather, device="cpu"),
        "broadcast": functools.partial(statetree.broadcast, src=1),
        "partition_replicas": statetree.partition_replicas,
        "reshard": by_reshard,
        "distribute, sliced": functools.partial(as_layout, src=None),
        "distribute, sent": functools.partial(as_layout, src=0),
        "chain": statetree.chain(functools.partial(statetree.gather, dst=0), statetree.offload),
        "stream": lambda tree: list(statetree.stream(tree, statetree.gather)),
    }


def without_summands(tree):
    return {key: leaf for key, leaf in tree.items() if key != "partials"}


def change_nothing():
    for name, verb in verbs().items():
        tree = make_tree()
        watch = Watch(tree)
        verb(tree)
        try:
            watch.check()
        except AssertionError as error:
            error.add_note(name)
            raise


@RANKS
def test_what_is_given_stays_as_it_is(world_size):
    run_ranks(world_size, change_nothing)


def change_nothing_given():
    """Watch what is distributed, and the layouts."""
    rank = dist.get_rank()
    state, full = state_of("fsdp2_tp"), whole()
    like = blank(state)
    for call in (
        lambda: statetree.distribute(full, like),
        lambda: statetree.distribute(full if rank == 1 else None, like, src=1),
        lambda: statetree.reshard(state, like),
        lambda: statetree.reshard(full, like),
        lambda: statetree.reshard(state, full),
        lambda: statetree.distribute(full, {**like, "model": {}}),
        lambda: statetree.reshard(state, {**like, "more": 1}, in_place=True),
        lambda: statetree.distribute(full, {**like, "more": 1}, src=0, in_place=True),
    ):
        watches = [Watch(tree) for tree in (state, full, like)]
        attempt(call)
        check_in_step()
        for watch in watches:
            watch.check()


@RANKS
def test_sources_and_layouts_stay_as_they_are(world_size):
    run_ranks(world_size, change_nothing_given)


def write_only_there():
    """With in_place, the tensors of ``like`` are written, and nothing else about it changes."""
    full = whole()
    like = blank(state_of("fsdp2"))
    source = Watch(full)
    names = list(statetree.to_flat(like)[0])
    statetree.distribute(full, like, in_place=True)
    source.check()
    assert list(statetree.to_flat(like)[0]) == names


@RANKS
def test_only_the_tensors_of_the_target_are_written(world_size):
    run_ranks(world_size, write_only_there)


def differ_in_values():
    """What is not distributed and differs between ranks: each rank's own, or the source's."""
    rank = dist.get_rank()
    shards = Layout((4,), tuple(range(dist.get_world_size())), ("S0",)).build()
    full = {"w": torch.arange(4.0), "plain": torch.tensor([rank]), "number": rank}
    like = {"w": shards, "plain": torch.tensor([9]), "number": 9}
    found = statetree.distribute(full, like)
    assert (found["plain"].item(), found["number"]) == (rank, rank)
    found = statetree.distribute(full, like, src=1)
    assert (found["plain"].item(), found["number"]) == (1, 1)
    found = statetree.reshard({**full, "w": shards}, {**like, "w": torch.zeros(4)})
    assert (found["plain"].item(), found["number"]) == (rank, rank)
    found = statetree.gather({**full, "w": shards})
    assert found["plain"] is full["plain"]


@RANKS
def test_values_that_differ_are_each_ranks_own_or_the_sources(world_size):
    run_ranks(world_size, differ_in_values)
