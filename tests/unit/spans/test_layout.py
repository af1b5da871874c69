"""``spans``: how storages are cut, and how what lies on them is copied."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hyp

from statetree.errors import UnsupportedLeaf
from statetree.key_paths import Path
from statetree.spans.columns import Columns
from statetree.spans.layout import (
    MIN_GAP_BYTES,
    Span,
    check_memory,
    extent_bytes,
    extents,
    holds_memory,
    is_dense,
    lay_out,
)
from statetree.spans.memory import LARGE_BYTES, Memory
from statetree.spans.replicate import copy_bytes, replicate_columns
from statetree.torch_internals import WITHOUT_KERNELS, quietly
from tests.judge import assert_trees_equal
from tests.judge.regions import raw_bytes
from tests.judge.watch import Watch
from tests.memory import shares_memory, storages

GAP = MIN_GAP_BYTES


def laid_out(*tensors):
    columns = Columns(list(tensors))
    return lay_out(columns, extents(columns))


@quietly
def replicated(tensors, memory=None, *, copy=True):
    columns = Columns(list(tensors))
    return replicate_columns(columns, extents(columns), memory or Memory(), copy=copy)


def ramp(*shape, dtype=torch.float32, start=0):
    return torch.arange(start, start + math.prod(shape)).to(dtype).reshape(shape)


def touched_bytes(tensor):
    """Return which bytes of its storage each element of a tensor lies in, one by one."""
    places = torch.tensor(tensor.storage_offset()) * torch.ones(tensor.shape, dtype=torch.long)
    for dim, step in enumerate(tensor.stride()):
        shape = [1] * tensor.dim()
        shape[dim] = tensor.shape[dim]
        places = places + torch.arange(tensor.shape[dim]).reshape(shape) * step
    size = tensor.element_size()
    return [place * size + byte for place in places.flatten().tolist() for byte in range(size)]


# Extents

geometries = hyp.lists(hyp.tuples(hyp.integers(0, 3), hyp.integers(0, 5)), max_size=3).map(
    lambda dims: (tuple(size for size, _ in dims), tuple(step for _, step in dims))
)


@given(geometry=geometries, dtype=hyp.sampled_from([torch.uint8, torch.float32, torch.complex128]))
@example(geometry=((3, 0), (2, 5)), dtype=torch.uint8)
def test_extent_and_density_are_what_the_elements_say(geometry, dtype):
    shape, stride = geometry
    tensor = torch.zeros(64, dtype=dtype).as_strided(shape, stride)
    touched = touched_bytes(tensor)
    extent = max(touched) - min(touched) + 1 if touched else 0
    assert extent_bytes(shape, stride, dtype.itemsize) == extent
    assert extents(Columns([tensor])) == [extent]
    once = len(touched) == extent == len(set(touched))
    assert is_dense(tensor.is_contiguous(), shape, stride) == once
    assert is_dense(contiguous=False, shape=shape, stride=stride) == once


# Cutting


def test_tensors_on_storages_of_their_own_are_a_span_each():
    base = ramp(10)
    layout = laid_out(base, ramp(3, 2).t(), ramp(8)[5:], torch.empty(0, 4))
    assert layout.spans == [Span(0, 0, 40), Span(1, 0, 24), Span(2, 20, 32), Span(3, 0, 0)]
    assert layout.span_of == [0, 1, 2, 3]
    assert layout.offsets == [0, 0, 0, 0]
    assert layout.dense == [True, True, True, True]


def test_a_storage_is_the_hull_of_its_views():
    base = ramp(100)
    layout = laid_out(base[60:70], ramp(2), base[10:20], base[15:30:5])
    assert layout.spans == [Span(2, 40, 280), Span(1, 0, 8)]
    assert layout.span_of == [0, 1, 0, 0]
    assert layout.offsets == [50, 0, 0, 5]
    assert layout.dense == [False, True]


def views_around_gap(gap, *, filled):
    """Return two views, of ``filled`` bytes together, with ``gap`` bytes between them."""
    base = torch.empty(gap + filled + 7, dtype=torch.uint8)
    return base[7 : 7 + filled // 2], base[7 + filled // 2 + gap :]


@pytest.mark.parametrize(
    ("gap", "filled", "spans"),
    [
        (GAP, 8, 1),  # not over the limit
        (GAP + 1, 8, 2),
        (GAP + 2, GAP + 2, 1),  # half of the hull, and not more
        (GAP + 4, GAP + 2, 2),
        (2 * GAP, 8, 2),
    ],
)
def test_a_storage_is_cut_only_at_gaps_over_half_of_the_hull_and_over_a_mebibyte(gap, filled, spans):
    first, second = views_around_gap(gap, filled=filled)
    layout = laid_out(first, second)
    assert len(layout.spans) == spans
    taken = sum(span.stop - span.start for span in layout.spans)
    assert taken == (filled if spans == 2 else filled + gap)
    assert layout.span_of == ([0, 1] if spans == 2 else [0, 0])


def test_gaps_count_together_and_are_all_cut_out():
    base = torch.empty(4 * GAP, dtype=torch.uint8)
    step = GAP // 2 + 64
    pieces = [base[start : start + 8] for start in (0, step, 2 * step)]
    layout = laid_out(*pieces)
    assert layout.spans == [Span(index, index * step, index * step + 8) for index in range(3)]
    assert layout.dense == [True] * 3


def test_views_that_overlap_or_touch_are_never_cut_apart():
    base = torch.empty(9 * GAP, dtype=torch.uint8)
    far = base[8 * GAP :]
    layout = laid_out(base[: 4 * GAP : GAP], far[:10], far[10:20], far[15:18])  # the first one has gaps of its own
    assert layout.spans == [Span(0, 0, 3 * GAP + 1), Span(1, 8 * GAP, 8 * GAP + 20)]
    assert layout.span_of == [0, 1, 1, 1]
    assert layout.offsets == [0, 0, 10, 15]


def test_a_view_within_another_does_not_end_a_run():
    base = torch.empty(4 * GAP, dtype=torch.uint8)
    layout = laid_out(base[:3000], base[5:6], base[2000:4000], base[3 * GAP :][:9])
    assert layout.spans == [Span(0, 0, 4000), Span(3, 3 * GAP, 3 * GAP + 9)]
    assert layout.span_of == [0, 0, 0, 1]
    assert layout.dense == [False, True]


def test_spans_begin_where_every_dtype_on_them_may():
    storage = torch.arange(64, dtype=torch.uint8)
    byte, number = storage[3:9], storage.view(torch.complex128)[1:2]
    layout = laid_out(byte, number)
    assert layout.spans == [Span(0, 0, 32)]
    assert layout.offsets == [3, 1]
    assert layout.dense == [False]
    reaching_to_the_end = laid_out(storage[3:32], number)
    assert reaching_to_the_end.spans == [Span(0, 0, 32)]
    assert reaching_to_the_end.dense == [False]


def test_runs_are_aligned_each_for_itself():
    base = torch.empty(4 * GAP, dtype=torch.uint8)
    layout = laid_out(base[5:7], base[2 * GAP + 6 :][:20], base.view(torch.float64)[2 * GAP // 8 + 1 :][:2])
    assert layout.spans == [Span(0, 5, 7), Span(1, 2 * GAP, 2 * GAP + 26)]
    assert layout.offsets == [0, 6, 1]


def test_empty_views_take_no_bytes_and_lie_with_the_others():
    base = ramp(10)
    assert laid_out(base[4:4], base[6:8]).spans == [Span(1, 24, 32)]
    only_empty = laid_out(base[4:4], base[7:7].reshape(0, 3))
    assert [span.stop - span.start for span in only_empty.spans] == [0]
    assert only_empty.span_of == [0, 0]
    assert only_empty.offsets == [0, 0]


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (lambda: ramp(2, 3, 4).permute(2, 0, 1), True),
        (lambda: ramp(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (lambda: ramp(6)[2:], True),
        (lambda: ramp(6)[::2], False),
        (lambda: ramp(1, 3).expand(4, 3), False),
        (lambda: ramp(9).as_strided((2, 3), (2, 1)), False),
        (lambda: torch.complex(ramp(2), ramp(2)).conj(), False),
        (lambda: torch._neg_view(ramp(3)), False),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), False),
    ],
    ids=["permuted", "channels_last", "slice", "steps", "expanded", "overlapping", "conj", "neg", "bits8"],
)
def test_dense_spans_are_those_that_one_tensor_covers_exactly_once(make, dense):
    tensor = make()
    assert laid_out(tensor).dense == [dense]
    # The same, when the storage is shared (with an empty view, which adds nothing).
    assert laid_out(tensor, tensor[:0]).dense == [dense]


pieces = hyp.lists(
    hyp.tuples(
        hyp.integers(0, 300),  # where it begins, in kilobytes
        hyp.integers(0, 5),  # where exactly
        hyp.integers(0, 40),  # elements
        hyp.sampled_from([1, 2, 3000]),  # stride
        hyp.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]),
    ),
    min_size=1,
    max_size=6,
)


@given(pieces=pieces)
def test_every_layout_covers_its_tensors_and_keeps_their_distances(pieces):
    base = torch.empty(16 << 20, dtype=torch.uint8)
    tensors = []
    for kilobytes, more, count, stride, dtype in pieces:
        view = base.view(dtype)
        tensors.append(view[(kilobytes << 13) // dtype.itemsize + more :][: count * stride : stride])
    columns = Columns(tensors)
    reach = extents(columns)
    layout = lay_out(columns, reach)
    for index, tensor in enumerate(tensors):
        span = layout.spans[layout.span_of[index]]
        begin = tensor.storage_offset() * tensor.element_size()
        if reach[index]:
            assert span.start + layout.offsets[index] * tensor.element_size() == begin
            assert begin + reach[index] <= span.stop
    by_place = sorted((index for index in range(len(tensors)) if reach[index]), key=lambda i: tensors[i].data_ptr())
    for index in by_place:  # overlapping ones are on one span
        for other in by_place:
            if tensors[index].data_ptr() <= tensors[other].data_ptr() < tensors[index].data_ptr() + reach[index]:
                assert layout.span_of[index] == layout.span_of[other]
    taken = sum(span.stop - span.start for span in layout.spans)
    union, stop = 0, 0
    for index in by_place:
        begin, end = tensors[index].data_ptr(), tensors[index].data_ptr() + reach[index]
        union += max(0, end - max(begin, stop))
        stop = max(stop, end)
    assert taken <= max(2 * union, union + GAP) + 16 * len(layout.spans)


# Copies


FAR = 7


def awkward():
    base = ramp(40)
    far = torch.zeros(3 * GAP, dtype=torch.uint8)
    far[:5], far[-7:] = 1, 2
    number = torch.complex(ramp(5, start=3), ramp(5, start=9))
    tensors = [base, base[3:9], base[::3], base[8:8], ramp(4, 5, start=7).t(), ramp(3, 1).expand(3, 4)]
    tensors += [far[-7:], far[:5], number.conj(), number, number.conj().imag, torch.empty(0), torch.empty(3, 0)]
    tensors += [torch.arange(6, dtype=torch.uint8).view(dtype) for dtype in sorted(WITHOUT_KERNELS, key=str)[:3]]
    tensors += [torch.empty_strided((1, 3), (9, 1)).fill_(4.0), torch.empty(2, 3, device="meta"), torch.tensor(4.5)]
    tensors += [ramp(LARGE_BYTES // 4 + 5), ramp(LARGE_BYTES // 4 - 1), torch.tensor([math.nan, -0.0])]
    return tensors


CONTAINERS = {"plain": {}, "shared": {"share_memory": True}}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_copies_are_exact(kind):
    tensors = awkward()
    watch = Watch(tensors)
    fresh = replicated(tensors, Memory(**CONTAINERS[kind]))
    watch.check()
    assert_trees_equal(fresh, tensors, storages=False)
    if kind == "plain":  # but for what was cut apart, storages are shared as they were
        assert_trees_equal(fresh[:FAR] + fresh[FAR + 1 :], tensors[:FAR] + tensors[FAR + 1 :])
    assert [tensor.stride() for tensor in fresh] == [tensor.stride() for tensor in tensors]
    assert not shares_memory(fresh, tensors)


@pytest.mark.parametrize("own", [True, False], ids=["own storages", "one storage"])
@pytest.mark.parametrize("dtype", sorted(WITHOUT_KERNELS, key=str), ids=str)
def test_dtypes_without_kernels_are_copied_bit_by_bit(dtype, own):
    base = torch.arange(8, dtype=torch.uint8).mul(37).view(dtype)
    tensors = [base[2:], *([] if own else [base[1:4]])]
    fresh = replicated(tensors)
    for copy, tensor in zip(fresh, tensors, strict=True):
        assert copy.dtype == dtype
        number = torch.uint8 if dtype.itemsize == 1 else torch.int16
        assert torch.equal(copy.view(number), tensor.view(number))
    assert fresh[0].untyped_storage().nbytes() < base.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", CONTAINERS)
def test_without_copy_the_geometry_is_the_same_and_nothing_is_read(kind):
    tensors = awkward()
    fresh = replicated(tensors, Memory(**CONTAINERS[kind]), copy=False)
    for new, tensor in zip(fresh, tensors, strict=True):
        assert (new.dtype, new.shape, new.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert (new.is_conj(), new.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert new.device.type == "cpu"  # meta tensors become real
    assert fresh[1].data_ptr() - fresh[0].data_ptr() == 12
    assert fresh[8].data_ptr() == fresh[9].data_ptr()
    freed = ramp(9)
    freed.untyped_storage().resize_(0)
    assert replicated([freed], Memory(**CONTAINERS[kind]), copy=False)[0].untyped_storage().nbytes() >= 36


def test_meta_tensors_stay_meta_in_a_copy_beside_real_ones_with_their_ties():
    meta = torch.empty(10, device="meta")
    fresh = replicated([meta[2:], ramp(3), meta[4:6]])
    assert [tensor.is_meta for tensor in fresh] == [True, False, True]
    assert fresh[0].untyped_storage()._cdata == fresh[2].untyped_storage()._cdata
    assert fresh[0].untyped_storage()._cdata != meta.untyped_storage()._cdata
    assert torch.equal(fresh[1], ramp(3))


def test_a_copy_to_meta_reads_nothing():
    base = ramp(10)
    fresh = replicated([base[2:], base[::3]], Memory("meta"))
    assert all(tensor.is_meta for tensor in fresh)
    assert [tensor.stride() for tensor in fresh] == [(1,), (3,)]
    assert fresh[0].untyped_storage()._cdata == fresh[1].untyped_storage()._cdata


def test_bits_are_kept_on_storages_of_their_own():
    number = torch.complex(ramp(3), ramp(3, start=4))
    tensors = [number.conj(), torch._neg_view(ramp(3, start=1)), torch._neg_view(number * 2).conj(), ramp(2), number]
    for chosen in ([0, 3], [1, 3], [2], [1], [3, 4]):
        assert_trees_equal(replicated([tensors[index] for index in chosen]), [tensors[index] for index in chosen])
        rows = [ramp(2, 3).t(), *(tensors[index] for index in chosen)]  # one more, which no clone is made of
        assert_trees_equal(replicated(rows), rows)


def test_a_small_view_of_a_large_storage_costs_what_it_covers():
    base = torch.zeros(64 << 20, dtype=torch.uint8)
    fresh = replicated([base[1000:1010], base[-5:]])
    assert sum(storage.nbytes() for storage in storages(fresh)) == 15


def test_bytes_between_views_come_along_and_those_around_do_not():
    base = ramp(20)
    fresh = replicated([base[3:5], base[8:9]])
    assert fresh[0].untyped_storage().nbytes() == 24
    assert torch.equal(raw_bytes(fresh[0].untyped_storage()), raw_bytes(base.untyped_storage())[12:36])


def test_copy_bytes_fills_tensors_of_the_same_geometry_and_touches_nothing_else():
    base, target = ramp(12), torch.full((20,), -1.0)
    copy_bytes(Columns([base[2:8:2], base[9:]]), Columns([target[1:7:2], target[10:13]]))
    assert target[:7].tolist() == [-1, 2, 3, 4, 5, 6, -1]  # what lies between the elements, too
    assert target[10:13].tolist() == [9, 10, 11]
    assert (target[7:10] == -1).all()
    assert (target[13:] == -1).all()
    number = torch.complex(ramp(3), ramp(3, start=5))
    into = torch.zeros(3, dtype=torch.complex64).conj()
    copy_bytes(Columns([number.conj()]), Columns([into]))
    assert torch.equal(into, number.conj())


# Freed and shrunk storages


def complaint(*tensors):
    """Return the error of ``check_memory``, or ``None``."""
    try:
        check_memory("verb", Columns(list(tensors)), lambda index: Path(("t", index)))
    except UnsupportedLeaf as error:
        return error
    return None


@pytest.mark.parametrize(
    ("cut", "left", "fits"),
    [
        (slice(None), 40, True),
        (slice(None), 39, False),
        (slice(None), 0, False),
        (slice(2, 6), 24, True),
        (slice(2, 6), 23, False),
        (slice(2, 6), 0, False),
        (slice(0, 10, 3), 40, True),
        (slice(0, 10, 3), 39, False),
        (slice(0, 9, 3), 28, True),  # the last element ends there
        (slice(0, 9, 3), 27, False),
        (slice(2, 10), 32, False),  # as many bytes as it has, but not those
        (slice(4, 4), 0, True),
        (slice(0, 1), 4, True),
    ],
    ids=str,
)
def test_storages_must_reach_as_far_as_the_tensors_on_them(cut, left, fits):
    tensor = ramp(10)[cut]
    tensor.untyped_storage().resize_(left)
    assert holds_memory(tensor) is fits
    error = complaint(ramp(2), tensor)
    assert (error is None) is fits
    if error is not None:
        assert tuple(error.path) == ("t", 1)
        start = cut.start or 0
        need = 4 * (start + (tensor.numel() - 1) * (cut.step or 1) + 1)
        assert f"verb: the storage of the leaf at t.1 was freed or resized: expected at least {need} bytes" in str(
            error
        )
        assert f"got {left}." in str(error)


def test_expanded_and_meta_tensors_and_larger_storages_have_their_memory():
    grown = ramp(3)
    grown.untyped_storage().resize_(100)
    assert complaint(ramp(3, 1).expand(3, 50), torch.empty(9, device="meta")[3:], grown, torch.empty(0)) is None


def test_the_first_tensor_without_memory_is_named():
    tensors = [ramp(5, start=index) for index in range(4)]
    for index in (3, 2):
        tensors[index].untyped_storage().resize_(3)
    error = complaint(*tensors)
    assert error is not None
    assert tuple(error.path) == ("t", 2)


def test_an_empty_tensor_does_not_end_the_search_for_one_without_memory():
    freed = ramp(3)
    freed.untyped_storage().resize_(0)
    error = complaint(torch.empty(0), freed)
    assert error is not None
    assert tuple(error.path) == ("t", 1)
