"""Boxes: cut into slabs that are them again, and known to cover a shape or not."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from statetree.chunks.boxes import Box, in_slabs, is_covered, slab_grids, slabs_within


def elements(box):
    return list(itertools.product(*(range(start, stop) for start, stop in zip(*box, strict=True))))


@st.composite
def boxes(draw, within=None, dims=None):
    if within is None:  # with elements: layouts leave empty ones out
        start = tuple(draw(st.lists(st.integers(0, 3), min_size=dims or 0, max_size=3 if dims is None else dims)))
        return Box(start, tuple(first + draw(st.integers(1, 9)) for first in start))
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in within]
    return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def test_a_box_knows_its_size():
    box = Box((1, 0), (4, 2))
    assert box.sizes == (3, 2)
    assert box.volume == 6
    assert Box((), ()).volume == 1


@given(box=boxes(), count=st.integers(1, 12))
def test_slabs_are_the_box_in_its_order(box, count):
    slabs = in_slabs(box, count)
    together = [element for part in slabs for element in elements(part)]
    assert sorted(together) == elements(box)
    assert [part.start for part in slabs] == sorted(part.start for part in slabs)
    assert all(part.volume for part in slabs)
    assert len(slabs) >= min(count, box.volume)


@given(
    # Of a box without dims there is no empty part: it is one slab, and nothing asks for another.
    held=st.integers(1, 3).flatmap(lambda dims: st.lists(boxes(dims=dims), max_size=4).map(lambda found: (dims, found)))
)
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_slabs_of_many_boxes_are_those_of_each(held, count):
    dims, found = held
    starts, stops = (
        torch.tensor([box[side] for box in found], dtype=torch.int64).view(len(found), dims) for side in (0, 1)
    )
    each = [in_slabs(box, count) for box in found]
    for number in range(max(map(len, each), default=0) + 1):
        begins, ends = slabs_within(starts, stops, count, number)
        for slabs, start, stop in zip(each, begins.tolist(), ends.tolist(), strict=True):
            part = Box(tuple(start), tuple(stop))
            assert part == slabs[number] if number < len(slabs) else not part.volume


@given(box=boxes(), count=st.integers(1, 12))
def test_slabs_are_of_about_the_same_size(box, count):
    """No side differs by more than one: the slabs of a round fit into what one of them needs."""
    for sides in zip(*(part.sizes for part in in_slabs(box, count)), strict=True):
        assert max(sides) - min(sides) <= 1


@pytest.mark.parametrize(
    ("sizes", "count", "grid"),
    [
        ((100, 5), 1, (1, 1)),
        ((100, 5), 2, (2, 1)),
        ((16, 5), 2, (2, 1)),
        ((15, 5), 2, (15, 1)),
        ((5, 100), 7, (5, 2)),
        ((3, 3), 9, (3, 3)),
        ((3, 3), 100, (3, 3)),
        ((), 4, ()),
    ],
)
def test_long_dims_are_cut_into_as_many_parts_as_are_asked_for(sizes, count, grid):
    assert tuple(slab_grids(torch.tensor([sizes], dtype=torch.int64), count)[0].tolist()) == grid


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@given(data=st.data(), shape=SHAPES)
def test_a_shape_is_covered_if_each_element_is(data, shape):
    parts = data.draw(st.lists(boxes(within=shape), max_size=8))
    whole = Box((0,) * len(shape), shape)
    covered = set(elements(whole)) == {element for part in parts for element in elements(part)}
    assert is_covered(whole, [part for part in parts if part.volume]) == covered


@given(data=st.data(), shape=SHAPES.filter(all), count=st.integers(1, 6))
def test_the_slabs_of_a_shape_cover_it_and_all_but_one_do_not(data, shape, count):
    whole = Box((0,) * len(shape), shape)
    slabs = in_slabs(whole, count)
    assert is_covered(whole, slabs)
    slabs.remove(data.draw(st.sampled_from(slabs)))
    assert not is_covered(whole, slabs)


@pytest.mark.parametrize("side", [40, 60])
def test_a_fine_grid_is_known_to_cover(side):
    parts = [Box((row, column), (row + 1, column + 1)) for row in range(side) for column in range(side)]
    whole = Box((0, 0), (side, side))
    assert is_covered(whole, parts)
    assert not is_covered(whole, parts[:-1])
    assert prod(whole.sizes) == len(parts)
