"""``where=``: the leaves that are meant are moved, others are left alone, and the ranks must mean the same."""

import functools

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same
from tests.kept_calls import of_one_call

VERBS = pytest.mark.parametrize("verb", ["reshard", "distribute", "distribute from 0", "distribute from 1"])
CHOICES = {
    "glob": "model.*a",
    "path": statetree.Path(("model", "a")),
    "predicate": lambda path, leaf: isinstance(leaf, torch.Tensor) and path[-1] in ("a", "lora"),
}


def trees():
    ranks = tuple(range(dist.get_world_size()))
    rows, columns = Layout((4, 6), ranks, ("S0",)), Layout((4, 6), ranks, ("S1",))
    tree = {"model": {"a": rows.build(), "b": rows.build(), "plain": torch.arange(3.0)}, "other": rows.build()}
    like = {"model": {"b": columns.build(), "a": blank(columns.build()), "plain": torch.zeros(3)}, "step": 5}
    return tree, like, rows.full()


def call_of(verb, tree, like, **options):
    if verb == "reshard":
        return functools.partial(statetree.reshard, tree, like, **options)
    src = int(verb[-1]) if verb != "distribute" else None
    whole = statetree.offload(statetree.gather(tree))
    given = whole if src in (None, dist.get_rank()) else None
    return functools.partial(statetree.distribute, given, like, src=src, **options)


def move(verb, choice, in_place, prepared):
    tree, like, full = trees()
    before = statetree.offload(like)
    call = call_of(verb, tree, like, in_place=in_place, where=CHOICES[choice])
    found = statetree.prepare(call)() if prepared else call()
    assert list(found) == ["model", "step"]
    assert list(found["model"]) == ["b", "a", "plain"]
    assert torch.equal(found["model"]["a"].full_tensor(), full)
    assert (found["model"]["a"] is like["model"]["a"]) == in_place
    for key in ("b", "plain"):
        assert found["model"][key] is like["model"][key]
        check_same(like["model"][key], before["model"][key])
    check_in_step()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("in_place", [False, True])
@VERBS
def test_what_is_meant_is_moved_and_nothing_else(verb, in_place, choice):
    run_ranks(2, move, verb, choice, in_place, False)


@VERBS
def test_so_it_is_when_prepared(verb):
    run_ranks(2, move, verb, "predicate", True, True)


def mean_different_leaves(verb, how):
    tree, like, _ = trees()
    before = statetree.offload(like)
    where = f"model.{'ab'[dist.get_rank()]}"
    if how == "predicate":
        where = functools.partial(lambda named, path, _: str(path) == named, where)
    kind, message = attempt(call_of(verb, tree, like, in_place=True, where=where))
    assert kind == "RankMismatch"
    assert "the ranks do not hold the same at model.a (where)" in message
    assert "selected on rank 0; left out on rank 1" in message
    check_same(like, before)
    check_in_step()


@pytest.mark.parametrize("how", ["glob", "predicate"])
@pytest.mark.parametrize("verb", ["reshard", "distribute from 0", "distribute from 1"])
def test_ranks_that_mean_different_leaves_are_told_at_which_path(verb, how):
    run_ranks(2, mean_different_leaves, verb, how)


def one_rank_selects(verb):
    tree, like, _ = trees()
    options = {"where": "model.a"} if dist.get_rank() else {}
    kind, message = attempt(call_of(verb, tree, like, in_place=True, strict=False, **options))
    assert kind == "RankMismatch"
    assert "rank 0" in message
    check_in_step()


@pytest.mark.parametrize("verb", ["reshard", "distribute from 0", "distribute from 1"])
def test_ranks_of_which_one_selects(verb):
    run_ranks(2, one_rank_selects, verb)


def matches_nothing(verb):
    tree, like, _ = trees()
    call = call_of(verb, tree, like, where="model.c")
    assert "no path matches 'model.c'" in attempt(call)[1]
    check_in_step()


@VERBS
def test_a_glob_that_matches_nothing(verb):
    run_ranks(2, matches_nothing, verb)


def lacks(verb, strict):
    tree, like, _ = trees()
    seen = []
    call = call_of(verb, tree, like, where=["other", "model.a"], strict=strict, on_missing=seen.append)
    if strict:
        assert "other" in attempt(call)[1]
    else:
        call()
        assert [str(difference.path) for difference in seen] == ["other"]
    check_in_step()


@of_one_call
@pytest.mark.parametrize("strict", [True, False])
@VERBS
def test_what_is_meant_and_missing(verb, strict):
    run_ranks(2, lacks, verb, strict)
