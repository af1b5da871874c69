"""Layouts over meshes, held against cutting a tensor of indices as torch does, one mesh dim after the other."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import Split, cut_intervals, layout_of, mesh_layout, whole_on
from statetree.chunks.local import local_pieces, location_of


def cut(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in zip(*box, strict=True))]


def indices_of(shape):
    return torch.arange(prod(shape)).view(shape)


def part(tensor, dim, count, number):
    """Return one of the parts that torch.chunk cuts a tensor into; an empty one where it returns fewer."""
    chunks = tensor.chunk(count, dim)
    return chunks[number] if number < len(chunks) else tensor.narrow(dim, 0, 0)


def local_indices(shape, mesh_shape, splits, coordinate):
    local = indices_of(shape)
    for mesh_dim, dim, factor in splits:
        count, number = mesh_shape[mesh_dim], coordinate[mesh_dim]
        local = torch.cat([part(piece, dim, count, number) for piece in local.chunk(factor, dim)], dim)
    return local


@st.composite
def meshes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dims = draw(st.permutations(range(len(mesh_shape))))
    cutting = dims[: draw(st.integers(0, len(dims)))]
    factors = st.sampled_from([1, 1, 2, 3])
    splits = tuple(Split(mesh_dim, draw(st.integers(0, len(shape) - 1)), draw(factors)) for mesh_dim in cutting)
    return shape, mesh_shape, splits


@given(mesh=meshes(), data=st.data())
def test_each_rank_holds_what_torch_would_give_it(mesh, data):
    shape, mesh_shape, splits = mesh
    ranks = data.draw(st.permutations(range(prod(mesh_shape))))
    layout = mesh_layout(shape, mesh_shape, tuple(ranks), splits)
    full = indices_of(shape)
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        local = local_indices(shape, mesh_shape, splits, coordinate)
        boxes = layout.boxes_of(rank)
        pieces = local_pieces(local, boxes)
        assert pieces is not None
        assert len(pieces) == len(boxes)
        for box, piece in zip(boxes, pieces, strict=True):
            assert torch.equal(piece, cut(full, box))
            assert piece.numel() > 0
        assert sum(piece.numel() for piece in pieces) == local.numel()
    assert layout.is_complete
    assert layout.ranks.tolist() == sorted(layout.ranks.tolist())


@given(mesh=meshes())
@example(mesh=((2, 1, 2), (2, 2), (Split(0, 0, 1), Split(1, 2, 1))))
def test_boxes_that_several_ranks_hold_are_listed_once(mesh):
    shape, mesh_shape, splits = mesh
    layout = mesh_layout(shape, mesh_shape, tuple(range(prod(mesh_shape))), splits)
    starts, stops, which = layout.distinct
    listed = [(tuple(a), tuple(b)) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    assert len(set(listed)) == len(listed)
    assert [listed[number] for number in which.tolist()] == [
        (tuple(a), tuple(b)) for a, b in zip(layout.starts.tolist(), layout.stops.tolist(), strict=True)
    ]
    assert sum(layout.volumes.tolist()) == sum(prod(Box(*listed[number]).sizes) for number in which.tolist())
    boxes = {rank: layout.boxes_of(rank) for rank in set(layout.ranks.tolist())}
    again = layout_of(shape, boxes)
    assert again.is_complete == layout.is_complete
    assert {tuple(box) for box in listed} == {
        (tuple(a), tuple(b)) for a, b in zip(*(bounds.tolist() for bounds in again.distinct[:2]), strict=True)
    }


def test_ranks_outside_of_the_group_hold_nothing():
    layout = mesh_layout((4,), (2,), (-1, 3), (Split(0, 0, 1),))
    assert layout.ranks.tolist() == [3]
    assert layout.boxes_of(3) == [Box((2,), (4,))]
    assert layout.boxes_of(0) == []
    assert not layout.is_complete


def test_each_rank_holds_a_scalar():
    layout = mesh_layout((), (2,), (0, 1), ())
    assert [layout.boxes_of(rank) for rank in (0, 1)] == [[Box((), ())]] * 2


@pytest.mark.parametrize(
    ("boxes", "complete"),
    [
        ({0: [Box((0, 0), (2, 3))]}, True),
        ({0: [Box((0, 0), (1, 3))], 1: [Box((1, 0), (2, 3))]}, True),
        ({0: [Box((0, 0), (2, 2))], 1: [Box((0, 1), (2, 3))]}, True),
        ({0: [Box((0, 0), (2, 2))], 1: [Box((0, 0), (2, 2))]}, False),
        ({0: [Box((0, 0), (2, 2)), Box((0, 2), (1, 3))]}, False),
        ({}, False),
    ],
    ids=["whole", "halves", "overlapping", "twice the same", "a corner is missing", "none"],
)
def test_whether_boxes_are_all_of_it(boxes, complete):
    assert layout_of((2, 3), boxes).is_complete is complete


def test_a_layout_counts():
    layout = whole_on((2, 3), [2, 0])
    assert layout.ranks.tolist() == [0, 2]
    assert layout.numel == 6
    assert layout.volumes.tolist() == [6, 6]
    assert whole_on((2, 3), [2, 0]) is layout
    assert whole_on((0, 3), [0]).boxes_of(0) == []
    assert whole_on((), [0, 1]).boxes_of(1) == [Box((), ())]
    assert len(whole_on((), [0, 1]).distinct.starts) == 1


def test_local_tensors_of_other_shapes_are_no_boxes():
    box = Box((0, 0), (2, 3))
    assert local_pieces(torch.zeros(3, 2), [box]) is None
    assert local_pieces(torch.zeros(2, 4), [box]) is None
    assert local_pieces(torch.zeros(2, 4), [box, Box((0, 5), (2, 7))]) is None
    assert local_pieces(torch.zeros(2), []) is None
    assert local_pieces(torch.zeros(0), []) == []
    [first, second] = local_pieces(torch.arange(10).view(2, 5), [box, Box((0, 5), (2, 7))])
    assert first.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert second.tolist() == [[3, 4], [8, 9]]


def test_strided_shards_of_what_lies_in_several_places():
    assert cut_intervals([(0, 8)], 2, 1) == [[(0, 4)], [(4, 8)]]
    assert cut_intervals([(0, 8)], 2, 2) == [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    assert cut_intervals([(0, 2), (10, 13)], 2, 1) == [[(0, 2), (10, 11)], [(11, 13)]]
    assert cut_intervals([(0, 2), (10, 13), (20, 22)], 2, 1) == [[(0, 2), (10, 12)], [(12, 13), (20, 22)]]
    assert cut_intervals([(0, 1)], 3, 1) == [[(0, 1)], [], []]


def test_what_is_in_one_place():
    base = torch.arange(6).to(torch.complex64)
    assert location_of(base[1:3]) == location_of(base[1:3])
    others = [base[1:4], base[2:4], base[1:5:2], base[1:3].conj(), base.clone()[1:3], torch._neg_view(base[1:3])]
    assert len({location_of(base[1:3]), *map(location_of, others)}) == 7
