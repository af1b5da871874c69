"""Owners: of what several ranks hold, one keeps each box."""

import pytest
from hypothesis import given

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import whole_on
from statetree.exchange.senders import choose_owners
from tests.unit.exchange.test_plan import RANKS, moves


def chosen(held, size):
    return [tuple(owners.tolist()) for owners in choose_owners(held, size)]


def test_the_largest_goes_first_and_to_the_least_loaded():
    held = [(whole_on((size,), [0, 1, 2]), 1) for size in (5, 9, 7, 4)]
    assert chosen(held, 3) == [(2,), (0,), (1,), (2,)]


def test_bytes_are_balanced_and_not_elements():
    held = [(whole_on((4,), [0, 1]), 8), (whole_on((16,), [0, 1]), 1), (whole_on((16,), [0, 1]), 1)]
    assert chosen(held, 2) == [(0,), (1,), (1,)]


def test_what_only_one_rank_has_counts():
    held = [(whole_on((9,), [0]), 1), (whole_on((4,), [0, 1]), 1), (whole_on((4,), [0, 1]), 1)]
    assert chosen(held, 2) == [(0,), (1,), (1,)]


@given(move=moves())
def test_an_owner_has_the_box(move):
    layout = move.source
    [owners] = choose_owners([(layout, 1)], RANKS)
    boxes = layout.distinct
    for start, stop, owner in zip(boxes.starts.tolist(), boxes.stops.tolist(), owners.tolist(), strict=True):
        assert Box(tuple(start), tuple(stop)) in layout.boxes_of(owner)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_replicas_are_shared_out_evenly(size):
    held = [(whole_on((10 + number,), range(size)), 4) for number in range(40)]
    loads = [0] * size
    for (layout, _), owners in zip(held, choose_owners(held, size), strict=True):
        loads[int(owners[0])] += layout.numel
    assert max(loads) - min(loads) <= 50
