"""Elements that are converted on their way, to the dtypes of the tree whose layouts they take."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same, sent_by
from tests.kept_calls import of_one_call

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float8_e4m3fn),
    (torch.float16, torch.bfloat16),
    (torch.bool, torch.int64),
    (torch.uint8, torch.float32),
    (torch.complex64, torch.complex128),
    (torch.int32, torch.int64),
]


def trees(before, after, shape=(5, 6)):
    """Return a tree of one dtype, one in other layouts and of another dtype, and what the first one holds whole."""
    ranks = tuple(range(dist.get_world_size()))
    kinds = {
        "rows": ("S0", "S1"),
        "columns": ("S1", "R"),
        "whole": ("S0", None),
        "spread": (None, "S0"),
        "plain": (None, None),
    }
    tree, like, full = {}, {}, {}
    for key, (source, target) in kinds.items():
        layouts = [Layout(shape, ranks, (kind or "R",), dtype) for kind, dtype in ((source, before), (target, after))]
        full[key] = layouts[0].full()
        tree[key] = layouts[0].build() if source else full[key].clone()
        like[key] = layouts[1].build() if target else torch.empty(shape, dtype=after)
    like["again"], tree["again"], full["again"] = like["rows"], tree["rows"], full["rows"]
    return tree, like, full


def convert(before, after):
    tree, like, full = trees(before, after)
    rank = dist.get_rank()
    converted = {key: leaf.to(after) for key, leaf in full.items()}
    expected = statetree.distribute(converted, like)
    check_same(statetree.distribute(full, like, cast=True), expected)
    for bucket_bytes in (64 << 20, 20):
        options = {"cast": True, "bucket_bytes": bucket_bytes}
        check_same(statetree.distribute(full if rank == 1 else None, like, src=1, **options), expected)
        check_same(statetree.reshard(tree, like, **options), expected)
    place = blank(like)
    sync = statetree.prepare(statetree.reshard, tree, place, in_place=True, cast=True)
    sync()
    check_same(place, expected)
    again = statetree.prepare(statetree.distribute, full if rank == 1 else None, blank(like), src=1, cast=True)
    check_same(again(), expected)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_elements_are_converted_on_their_way(before, after):
    run_ranks(2, convert, before, after)


def convert_large():
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        ranks = tuple(range(dist.get_world_size()))
        full = torch.arange(1 << 20).view(1024, 1024).remainder(251).to(before)
        rows, columns = ({"w": Layout((1024, 1024), ranks, (kind,), before).build()} for kind in ("S0", "S1"))
        statetree.distribute({"w": full}, rows, in_place=True)
        for like in (columns, {"w": torch.empty(1024, 1024)}):
            like = statetree.map_leaves(operator.methodcaller("to", after), like)
            expected = statetree.distribute({"w": full.to(after)}, like)
            check_same(statetree.reshard(rows, like, cast=True), expected)
            check_same(statetree.distribute({"w": full}, like, src=0, cast=True), expected)


def test_large_boxes_are_converted():
    run_ranks(2, convert_large)


def count_bytes(before, after):
    """Return how many bytes this rank sends, and how many elements."""
    tree, like, _ = trees(before, after, (64, 64))
    chosen = {key: (tree[key], like[key]) for key in ("rows", "whole")}
    sides = ({key: pair[side] for key, pair in chosen.items()} for side in range(2))
    return sent_by(lambda: statetree.reshard(*sides, cast=True))[1]


@of_one_call
@pytest.mark.parametrize(("before", "after"), [PAIRS[0], PAIRS[1]], ids=["narrower", "wider"])
def test_the_smaller_dtype_travels(before, after):
    # A quarter of the rows changes sides, and all of what becomes whole goes to the other rank.
    assert run_ranks(2, count_bytes, before, after) == [(64 * 64 // 4 + 64 * 64 // 2) * 2] * 2


def refuse():
    tree, like, full = trees(torch.complex64, torch.float32)
    before = statetree.offload(like)
    for call in (
        functools.partial(statetree.reshard, tree, like),
        functools.partial(statetree.distribute, full, like),
        functools.partial(statetree.distribute, full, like, src=0),
    ):
        name, message = attempt(functools.partial(call, in_place=True, cast=True))
        assert name in ("TreeMismatch", "RankMismatch"), (name, message)
        assert "dtype differs at" in message, message
        check_same(like, before)
        check_in_step()
    tree, like, _ = trees(torch.float32, torch.bfloat16)
    name, message = attempt(functools.partial(statetree.reshard, tree, like))
    assert (name, "dtype differs at" in message, "cast=True" in message) == ("TreeMismatch", True, True), message
    options = {"cast": dist.get_rank() == 0}
    name, message = attempt(functools.partial(statetree.reshard, tree, like, **options))
    assert name in ("TreeMismatch", "RankMismatch"), message
    check_in_step()


def test_what_copy_into_does_not_convert_is_refused():
    run_ranks(2, refuse)


def overflow():
    """Refuse values that the other dtype has no place for, also once they turn up in a prepared transfer."""
    ranks = tuple(range(dist.get_world_size()))
    full = torch.arange(24.0).view(4, 6)
    tree = {"a": {"w": Layout((4, 6), ranks, ("S0",), torch.float32).build()}, "plain": full.clone()}
    like = {
        "a": {"w": Layout((4, 6), ranks, ("S1",), torch.float16).build()},
        "plain": Layout((4, 6), ranks, ("S1",), torch.float16).build(),
    }
    sync = statetree.prepare(statetree.reshard, tree, like, in_place=True, cast=True)
    sync()
    before = statetree.offload(like)
    if dist.get_rank() == 1:
        tree["a"]["w"]._local_tensor[0, 0] = 1e6
    whole = statetree.gather(tree, dst=1)
    for call in (
        sync,
        functools.partial(statetree.reshard, tree, like, in_place=True, cast=True),
        functools.partial(statetree.distribute, whole, like, src=1, in_place=True, cast=True),
    ):
        name, message = attempt(call)
        assert name == ("TreeMismatch" if dist.get_rank() == 1 else "RankMismatch"), (name, message)
        assert "range differs at a.w: expected values up to 65504" in message, message
        check_same(like, before)
        check_in_step()


def test_values_that_are_too_large_are_refused():
    run_ranks(2, overflow)


def change_the_source():
    """Distribute from sources of two dtypes into one tree: what was planned for the first is not used for the other."""
    _, like, _ = trees(torch.float32, torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float64):
        full = trees(dtype, torch.float32)[2]
        given = full if dist.get_rank() == 0 else None
        expected = statetree.distribute({key: leaf.float() for key, leaf in full.items()}, like)
        check_same(statetree.distribute(given, like, src=0, cast=True), expected)


def test_sources_of_other_dtypes_have_plans_of_their_own():
    run_ranks(2, change_the_source)
