"""``Geometry``: when a snapshot that was laid out for some tensors fits others."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

from statetree.spans.columns import Columns
from statetree.spans.layout import MIN_GAP_BYTES, extents, lay_out, make_views
from statetree.spans.memory import Memory
from statetree.spans.replicate import copy_spans
from statetree.stager.snapshot import Geometry
from statetree.torch_internals import quietly
from tests.judge import assert_trees_equal


def ramp(count, start=0, dtype=torch.float32):
    return torch.arange(start, start + count).to(dtype)


def fits(first, second):
    """Whether tensors fit the geometry of others. It must not depend on which came first."""
    first, second = Columns(list(first)), Columns(list(second))
    there, back = Geometry(first).fits(second), Geometry(second).fits(first)
    assert there is back
    return there


def world(start=0):
    """Return tensors on storages of their own, the same geometry for every start."""
    number = torch.complex(ramp(4, start), ramp(4, start + 1))
    return [ramp(6, start).reshape(2, 3).t(), ramp(8, start)[3:], number.conj(), number[:0], torch.tensor(float(start))]


CHANGES = {
    "dtype": lambda t: t.view(torch.int32),
    "shape": lambda t: t.reshape(6),
    "size": lambda t: t[:1],
    "stride": lambda t: ramp(6).reshape(3, 2),
    "negative": lambda t: torch._neg_view(t),
}


def test_tensors_of_the_same_geometry_fit_whatever_they_hold():
    assert fits(world(), world(50))
    assert fits([], [])


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_geometry_shows(change):
    other = world()
    other[0] = CHANGES[change](other[0])
    assert not fits(world(), other)


def test_the_conjugate_bit_shows():
    other = world()
    other[2] = other[2].conj()
    assert not fits(world(), other)


def test_the_number_of_tensors_shows():
    assert not fits(world(), world()[:-1])
    assert not fits([], [ramp(1)])


def test_a_tie_that_is_made_or_broken_shows():
    base = ramp(10)
    tied, apart = [base[:5], base[5:]], [ramp(5), ramp(5, start=5)]
    assert not fits(tied, apart)
    assert not fits(tied, [ramp(30)[7:12], ramp(30)[12:17]])  # as far apart, on two storages
    other = ramp(30)
    assert fits(tied, [other[7:12], other[12:17]])  # elsewhere on a storage, at the same distance
    assert not fits(tied, [other[7:12], other[13:18]])
    assert not fits(tied, [other[12:17], other[7:12]])  # the other way round
    assert not fits(tied, [other[7:12], other[7:12]])


def test_it_matters_which_tensors_are_tied():
    base, other = ramp(10), ramp(10)
    assert not fits([base[:5], base[5:], other[:5]], [base[:5], other[5:], other[:5]])
    assert not fits([base[:5], base[5:], other[:5]], [base[:5], other[:5], base[5:]])


def test_alignment_shows():
    """A byte before a number begins its span at another distance from where the span does."""

    def pair(start):
        base = torch.zeros(64, dtype=torch.uint8)
        return [base[start : start + 2], base.view(torch.float64)[2:3]]

    assert fits(pair(9), pair(9))
    assert not fits(pair(9), pair(10))


def test_a_gap_that_is_cut_out_need_not_be_as_large():
    far = torch.empty(9 * MIN_GAP_BYTES, dtype=torch.uint8)
    first, second, near = ([far[:8], far[gap:][:8]] for gap in (2 * MIN_GAP_BYTES, 5 * MIN_GAP_BYTES, 100))
    assert fits(first, second)
    assert not fits(first, near)


def test_it_keeps_no_tensor_alive():
    tensors = world()
    geometry = Geometry(Columns(tensors))
    dead = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(t.untyped_storage()) for t in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert geometry.fits(Columns(world()))


def test_spans_are_those_of_the_tensors_at_hand():
    base = ramp(100)
    geometry = Geometry(Columns([base[:3], base[1:9]]))
    other = Columns([base[40:43], base[41:49]])
    assert geometry.fits(other)
    assert [(span.source, span.start, span.stop) for span in lay_out(other, extents(other)).spans] == [(0, 160, 196)]


view_plans = hyp.lists(
    hyp.tuples(
        hyp.integers(0, 1),
        hyp.sampled_from([torch.uint8, torch.float32, torch.complex64]),
        hyp.integers(0, 3),
        hyp.integers(0, 3),
        hyp.integers(1, 2),
    ),
    min_size=1,
    max_size=4,
)


def views_of(plans, shift, shared):
    bases = [torch.arange(128, dtype=torch.uint8).mul(3 + shift) for _ in range(2)]
    if shared:
        bases = [bases[0], bases[0]]
    return [
        bases[base].view(dtype)[(shift * 8) // dtype.itemsize + start :][: count * step : step]
        for base, dtype, start, count, step in plans
    ]


@given(first=view_plans, second=hyp.none() | view_plans, shift=hyp.integers(0, 2), shared=hyp.booleans())
def test_what_fits_can_be_copied_into_what_was_laid_out_for_the_first(first, second, shift, shared):
    """Exactly what staging a second time does."""
    old = Columns(views_of(first, 0, shared))
    new = Columns(views_of(first if second is None else second, shift, shared))
    geometry = Geometry(old)
    told = geometry.fits(new)
    if second is None:
        assert told
    if told:
        buffers = Memory().carve([span.stop - span.start for span in geometry.layout.spans])
        views = make_views(old, geometry.layout, buffers, torch.device("cpu"))
        layout = geometry.layout._replace(spans=lay_out(new, extents(new)).spans)
        quietly(copy_spans)(new, layout, buffers, views)
        assert_trees_equal(views, new.tensors, storages=False)
        assert layout.span_of == lay_out(new, extents(new)).span_of
