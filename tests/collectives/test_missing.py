"""``strict=False``: what both trees have is moved, the rest of ``like`` is left alone, and every difference is told."""

import functools

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same


def trees():
    """Return two trees that have some keys in common, and what the first one holds whole."""
    ranks = tuple(range(dist.get_world_size()))
    rows, columns = Layout((4, 6), ranks, ("S0",)), Layout((4, 6), ranks, ("S1",))
    tree = {
        "model": {"both": rows.build(), "old": rows.build(), "plain": torch.arange(3.0), "gone": torch.arange(2.0)},
        "step": 3,
        "schedule": {"rate": 0.5},
    }
    tree["model"]["tied"] = tree["model"]["old"]
    like = {
        "step": 1,
        "epoch": 2,
        "model": {"plain": torch.zeros(3), "both": blank(columns.build()), "new": blank(rows.build())},
    }
    like["model"]["tied"] = blank(columns.build())
    like["model"]["fresh"] = torch.full((2,), 5.0)
    return tree, like, rows.full()


LEFT = {"model.old", "model.gone", "schedule"}
RIGHT = {"model.new", "model.fresh", "epoch"}


def move(verb, in_place, prepared):
    tree, like, full = trees()
    rank = dist.get_rank()
    seen = []
    options = {"in_place": in_place, "strict": False, "on_missing": seen.append}
    if verb == "reshard":
        call = functools.partial(statetree.reshard, tree, like, **options)
    else:
        src = int(verb[-1]) if verb != "distribute" else None
        whole = statetree.offload(statetree.gather(tree))
        call = functools.partial(statetree.distribute, whole if src in (None, rank) else None, like, src=src, **options)
    before = statetree.offload(like)
    found = statetree.prepare(call)() if prepared else call()
    assert list(found) == list(like)
    assert list(found["model"]) == list(like["model"])
    assert (found["step"], found["epoch"]) == (3, 2)
    for key in ("both", "tied"):
        assert torch.equal(found["model"][key].full_tensor(), full)
        assert (found["model"][key] is like["model"][key]) == in_place
    assert torch.equal(found["model"]["plain"], torch.arange(3.0))
    for key in ("new", "fresh"):
        assert found["model"][key] is like["model"][key]
        check_same(like["model"][key], before["model"][key])
    assert {str(difference.path) for difference in seen} == LEFT | RIGHT
    assert all(difference.kind == "missing" for difference in seen)
    assert {str(difference.path) for difference in seen if difference.left == "absent"} == RIGHT
    check_in_step()


@pytest.mark.parametrize("prepared", [False, True], ids=["called", "prepared"])
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("verb", ["reshard", "distribute", "distribute from 1"])
def test_what_both_have_moves(verb, in_place, prepared):
    run_ranks(2, move, verb, in_place, prepared)


def refuse():
    tree, like, _ = trees()
    before = statetree.offload(like)
    calls = {
        "strict": functools.partial(statetree.reshard, tree, like, in_place=True),
        "another container": functools.partial(
            statetree.reshard, {**tree, "model": []}, like, in_place=True, strict=False
        ),
        "a shorter list": functools.partial(statetree.reshard, {"a": [1]}, {"a": [1, 2]}, strict=False),
    }
    for case, call in calls.items():
        name, message = attempt(call)
        assert name == "TreeMismatch", (case, name, message)
        check_in_step()
    check_same(like, before)

    def stop(difference):
        raise KeyError(str(difference.path))

    on_missing = stop if dist.get_rank() == 0 else None
    for call in (
        functools.partial(statetree.reshard, tree, like, in_place=True),
        functools.partial(statetree.distribute, statetree.gather(tree), like, src=1, in_place=True),
    ):
        name, message = attempt(functools.partial(call, strict=False, on_missing=on_missing))
        assert name == ("KeyError" if on_missing else "RankMismatch"), (name, message)
        check_in_step()
    check_same(like, before)
    name, message = attempt(functools.partial(statetree.reshard, tree, like, strict=bool(dist.get_rank())))
    assert name in ("TreeMismatch", "RankMismatch"), (name, message)
    check_in_step()


def test_other_differences_are_refused():
    run_ranks(2, refuse)
