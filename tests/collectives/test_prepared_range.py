"""Prepared transfers that convert whole tensors: what is too large is refused whenever it moves."""

import functools

import pytest
import torch
import torch.distributed as dist

import statetree as st
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, check_in_step, check_same


def trees():
    return {"x": torch.arange(3.0), "y": torch.arange(2.0)}, {"x": torch.zeros(3, dtype=torch.float16), "y": ones()}


def ones():
    return torch.ones(2)


@pytest.mark.parametrize("verb", [st.reshard, st.distribute])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_this_process_alone_converts_is_looked_at_each_time(verb, in_place):
    tree, like = trees()
    with st.prepare(verb, tree, like, in_place=in_place, cast=True) as sync:
        result = sync()
        tree["x"].fill_(1e9)
        tree["y"].fill_(1e9)
        with pytest.raises(st.TreeMismatch, match="range differs at x"):
            sync()
        assert result["x"].tolist() == [0, 1, 2]
        assert result["y"].tolist() == [0, 1]
        tree["x"].fill_(5)
        assert sync()["x"].tolist() == [5, 5, 5]
        assert result["y"].tolist() == [1e9, 1e9]


def overflow(verb, src):
    tree, like = trees()
    given = tree if src in (None, dist.get_rank()) else None
    options = {"in_place": True, "cast": True} | ({} if verb is st.reshard else {"src": src})
    sync = st.prepare(verb, given, like, **options)
    sync()
    before = st.offload(like)
    if dist.get_rank() == 1:
        tree["x"][2] = 1e6
    for call in (sync, functools.partial(verb, given, like, **options)):
        name, message = attempt(call)
        assert name == ("TreeMismatch" if dist.get_rank() == 1 else "RankMismatch"), (name, message)
        assert "range differs at x: expected values up to 65504" in message, message
        check_same(like, before)
        check_in_step()


@pytest.mark.parametrize(("verb", "src"), [(st.reshard, None), (st.distribute, 1)])
def test_all_ranks_hear_of_it_and_nothing_moves(verb, src):
    run_ranks(2, overflow, verb, src)
