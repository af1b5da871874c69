"""The collective that the how-to "Write a new transform" shows, on real ranks: alone, in a chain and as a stream."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import statetree as st
from statetree.exchange import exchange, layout_of
from statetree.testing import Layout, check_transform, run_ranks
from tests.collectives.checks import attempt, check_in_step


@st.leafwise
@st.collective
def shards_of_next_rank(tree, *, group=None, timeout=None):
    with exchange("shards_of_next_rank", group, timeout) as run:
        source, size = run.manifest(tree, complete=True), run.group.size

        def rule(chunks):
            return layout_of(chunks.shape, {rank: chunks.layout.boxes_of((rank + 1) % size) for rank in range(size)})

        return run.move(source, run.destination(source, rule))


def rotate():
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout((2 * size + 1, 3), tuple(range(size)), ("S0",))
    tree = {"w": layout.build(), "plain": torch.arange(3.0), "step": 3}
    expected = torch.chunk(layout.full(), size)[(rank + 1) % size]
    for call in (
        shards_of_next_rank,
        st.chain(shards_of_next_rank, partial(st.offload, copy=False)),
        lambda given: {str(path): leaf for path, leaf in st.stream(given, shards_of_next_rank)},
    ):
        found = call(tree)
        assert torch.equal(found["w"], expected)
        assert (found["plain"] is tree["plain"], found["step"]) == (True, 3)
    assert attempt(lambda: shards_of_next_rank(tree if rank else {"w": 1}))[0] == "RankMismatch"
    check_in_step()


def leave_early():
    def transform(tree):
        with exchange("halfway") as run:
            source = run.manifest(tree)
            return run.move(source, run.destination(source, lambda chunks: chunks.layout)) if dist.get_rank() else tree

    name, message = attempt(lambda: transform({"w": torch.ones(2)}))
    assert "ended without an agreement" in message, message
    assert name == ("RankMismatch" if dist.get_rank() else "StateTreeError")
    check_in_step()


def test_a_block_that_ends_early_makes_all_raise():
    run_ranks(2, leave_early)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_gets_the_shard_of_the_next(world_size):
    run_ranks(world_size, rotate)


def test_the_laws_of_what_it_does_not_change_hold_on_ranks():
    laws = ["accepts", "pure", "stable", "structure", "streams"]
    check_transform(shards_of_next_rank, laws=laws, ranks=(2,), examples=20)
