"""``overlaps``, against what the addresses of single elements say."""

import dataclasses
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as hyp

from statetree.spans.columns import Columns
from statetree.spans.overlaps import (
    all_disjoint,
    are_disjoint,
    conflicts,
    overlaps_itself,
    reads_of_written,
    shared_elements,
)
from statetree.torch_internals import quietly
from tests.pace import units
from tests.unit.spans.test_layout import touched_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.complex64]


def ramp(count, start=0):
    return torch.arange(start, start + count, dtype=torch.float32)


def bytes_in_memory(tensor):
    """Return the addresses of the bytes of a tensor's elements, one by one."""
    begin = tensor.untyped_storage().data_ptr()
    return [begin + byte for byte in touched_bytes(tensor)]


def bytes_to_write(target, source):
    """Return what writing a source into a target puts into each of ``bytes_in_memory(target)``."""
    value = source.detach().to(target.dtype).resolve_conj().resolve_neg()
    if target.is_conj():
        value = value.conj().resolve_conj()
    if target.is_neg():
        value = -value
    return list(value.numpy().tobytes())


def true_conflicts(targets, sources):
    """Return the targets that share a byte with another one which is to receive something else there."""
    written = {}
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        for place, value in zip(bytes_in_memory(target), bytes_to_write(target, source), strict=True):
            written.setdefault(place, {}).setdefault(value, set()).add(index)
    return set().union(*(set().union(*values.values()) for values in written.values() if len(values) > 1))


@quietly
def found(targets, sources):
    return conflicts(Columns(list(targets)), Columns(list(sources)))


def slices(size, steps=(1, 2, 3)):
    bounds = hyp.integers(0, size)
    return hyp.builds(lambda a, b, step: slice(min(a, b), max(a, b), step), bounds, bounds, hyp.sampled_from(steps))


# A tensor and itself


@given(dims=hyp.lists(hyp.tuples(hyp.integers(0, 4), hyp.integers(0, 13)), max_size=4))
@example(dims=[(3, 2), (2, 4)])  # together at 4
@example(dims=[(1, 0), (1, 5)])
@example(dims=[(2, 0), (0, 1)])
def test_overlaps_itself(dims):
    shape, stride = [size for size, _ in dims], [step for _, step in dims]
    places = touched_bytes(torch.zeros(200, dtype=torch.uint8).as_strided(shape, stride))
    assert overlaps_itself(shape, stride) or len(set(places)) == len(places)


@given(shape=hyp.lists(hyp.integers(0, 4), max_size=4), data=hyp.data())
def test_no_view_that_is_sliced_overlaps_itself(shape, data):
    base = torch.zeros(shape).permute(data.draw(hyp.permutations(range(len(shape)))))
    view = base[tuple([data.draw(slices(size)) for size in base.shape])]
    assert not overlaps_itself(view.shape, view.stride())


def test_overlap_of_large_tensors_is_told_without_counting():
    assert not overlaps_itself((1 << 20, 1 << 20), (1 << 20, 1))
    assert not overlaps_itself((1 << 20, 1 << 20), (1, 1 << 20))
    assert overlaps_itself((1 << 40, 2), (0, 1))


# Several tensors


@dataclasses.dataclass(frozen=True)
class View:
    """A view on one of the memories of a test, which are 96 bytes each."""

    memory: int
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool

    def on(self, memories):
        size = self.dtype.itemsize
        start = self.start * 8 // size
        last = start + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        assume((last + 1) * size <= 96)
        view = memories[self.memory].view(self.dtype).as_strided(self.shape, self.stride, self._at(memories, start))
        return view.conj() if self.conj and self.dtype.is_complex else view

    def _at(self, memories, start):
        return memories[self.memory].storage_offset() // self.dtype.itemsize + start


dims = hyp.lists(hyp.tuples(hyp.sampled_from([3, 4, 2, 5, 1, 0]), hyp.integers(1, 5)), min_size=1, max_size=2)
views = hyp.builds(
    lambda memory, dtype, start, dims, conj: View(
        memory, dtype, start, tuple(size for size, _ in dims), tuple(step for _, step in dims), conj
    ),
    hyp.sampled_from([0, 0, 1, 2]),
    hyp.sampled_from(DTYPES),
    hyp.integers(0, 6),
    dims,
    hyp.booleans(),
)


def torch_memories(fill=0):
    return [torch.full((96,), fill, dtype=torch.uint8) for _ in range(3)]


def numpy_memories(fill=0):
    """Return memories that lie over each other, each a storage of its own."""
    array = np.full(160, fill, dtype=np.uint8)
    return [torch.from_numpy(array[start : start + 96]) for start in (0, 32, 64)]


kinds = hyp.sampled_from([torch_memories, numpy_memories])


@given(plans=hyp.lists(views, min_size=2, max_size=5), kind=kinds, how=hyp.sampled_from([2, 0, 1, 3]), data=hyp.data())
def test_conflicts(plans, kind, how, data):
    targets = [plan.on(memories) for memories in [kind()] for plan in plans]
    assume(not any(overlaps_itself(target.shape, target.stride()) for target in targets))
    if how == 0:  # the same overlap elsewhere, whatever the values
        elsewhere = kind()
        elsewhere[0].copy_(torch.arange(96) % 7)
        elsewhere[2].copy_(torch.arange(96) % 5)
        sources = [plan.on(elsewhere) for plan in plans]
    elif how == 1:  # equal values everywhere, but for the conjugate bit
        sources = [torch.ones(target.shape, dtype=target.dtype) for target in targets]
    else:  # values of their own, and few of them, so that some agree
        limit = data.draw(hyp.sampled_from([2, 3, 9]))
        sources = [torch.arange(t.numel()).remainder(limit).reshape(t.shape).to(t.dtype) for t in targets]
        if how == 3:  # of another dtype
            sources = [source.real.to(torch.int64) for source in sources]
    truth = true_conflicts(targets, sources)
    pairs = found(targets, sources)
    assert pairs or not truth  # what is not refused does not depend on the order of writing
    assert found(targets[::-1], sources[::-1]) or not pairs  # nor does the answer on that of asking
    if how == 0:
        assert pairs == []


@given(plan=views, kind=kinds, values=hyp.sampled_from(["equal", "tied", "other"]), cast=hyp.booleans())
def test_the_same_view_twice_may_receive_equal_bits(plan, kind, values, cast):
    memories = kind()
    targets = [plan.on(memories), plan.on(memories)]
    assume(not overlaps_itself(targets[0].shape, targets[0].stride()))
    value = torch.arange(targets[0].numel()).reshape(targets[0].shape).to(torch.int64 if cast else plan.dtype)
    sources = [value, {"equal": value.clone(), "tied": value[:], "other": value + 1}[values]]
    assert bool(found(targets, sources)) == (values == "other" and value.numel() > 0)


def test_contiguous_tensors_on_the_same_elements_are_the_same_view_whatever_their_shapes():
    base, value = torch.zeros(6), ramp(6)
    assert found([base, base.view(2, 3)], [value, value.clone().view(2, 3)]) == []
    assert found([base, base.view(2, 3)], [value, value.view(3, 2).t().contiguous().view(2, 3)]) == [(0, 1)]
    assert found([base.view(2, 3), base.view(3, 2).t()], [torch.ones(2, 3), torch.ones(2, 3)]) == [(0, 1)]
    assert found([base, base[:5]], [torch.ones(6), torch.ones(5)]) == [(0, 1)]


def test_the_partner_is_the_one_that_disagrees():
    base = torch.zeros(10)
    values = torch.zeros(10)
    assert found([base, base[2:3], base[9:]], [values, torch.ones(1), values[9:]]) == [(0, 1)]


@given(left=hyp.lists(views, max_size=4), right=hyp.lists(views, max_size=4), kind=kinds, same=hyp.booleans())
def test_reads_and_addresses(left, right, kind, same):
    memories = kind()
    targets = [plan.on(memories) for plan in left]
    sources = [plan.on(memories if same else kind()) for plan in right]
    written = {place for target in targets for place in bytes_in_memory(target)}
    must = [index for index, source in enumerate(sources) if not written.isdisjoint(bytes_in_memory(source))]
    reads = reads_of_written(Columns(targets), Columns(sources))
    assert set(must) <= set(reads)
    if not same:
        assert reads == []
    for tensors, told in (
        (targets, are_disjoint(Columns(targets))),
        ([*targets, *sources], all_disjoint(Columns(targets), Columns(sources))),
    ):
        counts = Counter(place for tensor in tensors for place in set(bytes_in_memory(tensor)))
        apart = all(count == 1 for count in counts.values())
        if told:
            assert apart
        if apart and all(tensor.is_contiguous() and tensor.numel() for tensor in tensors):
            assert told


# What the cases are about


def test_tensors_that_touch_are_apart():
    base = ramp(10)
    assert are_disjoint(Columns([base[5:], base[:5]]))
    assert not are_disjoint(Columns([base[4:], base[:5]]))
    assert all_disjoint(Columns([base[5:]]), Columns([base[:5]]))
    assert not all_disjoint(Columns([base[5:]]), Columns([base[:6]]))
    assert not all_disjoint(Columns([base]), Columns([base]))
    assert not are_disjoint(Columns([base, base[2:4], base[8:]]))  # one ends within the first, after the second


def test_tied_targets_may_receive_tied_sources_of_any_values():
    base, source = torch.zeros(10), ramp(10)
    assert found([base[:6], base[4:]], [source[:6], source[4:]]) == []
    assert found([base[:6], base[4:]], [source[:6], source[3:9]]) == [(0, 1)]
    assert found([base[:6], base[4:]], [source[:6], source[4:].clone()]) == [(0, 1)]  # although they agree
    assert found([base[:6], base[4:], base[:6]], [source[:6], source[4:], source[:6].clone()]) == []


def test_tied_targets_of_another_dtype_are_as_many_elements_apart():
    base, source = torch.zeros(10, dtype=torch.bfloat16), ramp(10)
    assert found([base[:6], base[4:]], [source[:6], source[4:]]) == []
    assert found([base[:6], base[4:]], [source[:6], source[3:9]]) == [(0, 1)]
    assert found([base[:6], base.view(torch.int16)[4:]], [source[:6], source[4:]]) == [(0, 1)]


def test_tensors_that_begin_alike_but_have_other_strides_are_not_tied_alike():
    base, source = torch.zeros(10), ramp(10)
    assert found([base[:4], base[1:3]], [source[:8:2], source[1:3]]) == [(0, 1)]
    assert found([base[:4], base[1:4]], [source[:8:2], source[1:7:2]]) == [(0, 1)]
    assert found([base[:4].view(4, 1), base[1:4]], [source[:4].as_strided((4, 1), (1, 7)), source[1:4]]) == []


def test_tensors_as_many_bytes_apart_but_of_other_sizes_are_not_tied_alike():
    base, source = torch.zeros(10), ramp(10).double()
    assert found([base[:4], base[2:6]], [source[:4], source[1:5]]) == [(0, 1)]
    assert found([base[:4], base[2:6]], [source[:4], source[2:6]]) == []


def test_one_within_another_does_not_end_what_overlaps():
    base = torch.zeros(10)
    values = ramp(10)
    assert found([base, base[1:2], base[5:6]], [values, values[1:2], ramp(1, start=70)]) == [(0, 2)]


def test_foreign_storages_within_another():
    array = np.zeros(10, dtype=np.float32)
    whole, first, last = (torch.from_numpy(array[part]) for part in (slice(None), slice(1, 2), slice(5, 6)))
    values = ramp(10)
    assert found([whole, first, last], [values, values[1:2], ramp(1, start=70)]) == [(0, 2)]
    tied = [torch.from_numpy(values.numpy()[part]) for part in (slice(None), slice(1, 2), slice(5, 6))]
    assert found([whole, first, last], tied) == []
    assert reads_of_written(Columns([whole]), Columns([first, last])) == [0, 1]


def test_the_conflicting_pair_is_named():
    base = torch.zeros(20)
    targets = [base[15:], base[:5], base[8:12], base[11:14]]
    assert found(targets, [ramp(5), ramp(5), ramp(4), ramp(3, start=50)]) == [(2, 3)]
    values = ramp(12)
    assert found(targets, [ramp(5), ramp(5), values[8:], values[9:]]) == [(2, 3)]
    values = ramp(14)
    assert found(targets, [ramp(5), ramp(5), values[8:12], values[11:]]) == []


def test_the_partner_that_is_named_overlaps():
    base = torch.zeros(6)
    chain = [base[:3], base[2:5], base[3:]]  # the first and the last touch
    assert found(chain, [ramp(3, start=start) for start in (0, 10, 20)]) == [(0, 1), (1, 2)]
    assert shared_elements(Columns(chain)) == [(0, 1), (1, 2)]
    assert shared_elements(Columns([base[::5], base[3:5], base[4:6]])) == [(0, 2), (1, 2)]
    assert shared_elements(Columns([base[:2].expand(3, 2), base[1:2].expand(4)])) == [(0, 1)]
    assert shared_elements(Columns([base] * 300)) == [(index, index + 1) for index in range(299)]


def test_every_lost_target_is_named():
    base = torch.zeros(4)
    pairs = found([base, base, base], [ramp(4), ramp(4, start=1), ramp(4)])
    assert {first for first, _ in pairs} == {1}
    pairs = found([base, base, base], [ramp(4), ramp(4, start=1), ramp(4, start=2)])
    assert pairs == [(0, 2), (1, 2)]


def test_values_are_told_apart_by_their_bits():
    base = torch.zeros(1)
    nan = torch.tensor([math.nan])
    assert found([base, base.clone(), base], [nan, nan, nan]) == []
    assert found([base, base], [torch.tensor([0.0]), torch.tensor([-0.0])]) != []


def test_targets_of_different_dtypes_over_each_other():
    base = torch.zeros(2)
    number = base.view(torch.int32)
    one = torch.ones(2)
    assert found([base, number], [one, one.view(torch.int32)]) == []
    assert found([base, number], [one, one.view(torch.int32).clone()]) != []


def test_conjugate_targets():
    base = torch.zeros(2, dtype=torch.complex64)
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert found([base, base.conj()], [value, value.conj()]) == []
    assert found([base, base.conj()], [value, value]) != []
    assert found([base, base.conj()], [value, value.conj().resolve_conj()]) != []
    assert found([base.conj(), base.conj()], [value, value.clone()]) == []
    assert found([base.conj(), base.conj()], [value, value + 1]) != []
    assert found([base, base.imag], [value, value.imag]) == []
    assert found([base, base.conj().imag], [value, value.conj().imag]) == []
    assert found([base, base.conj().imag], [value, -value.imag]) != []


def test_memory_at_odd_addresses():
    buffer = bytearray(33)
    odd = torch.frombuffer(buffer, dtype=torch.float32, offset=1)
    number = torch.frombuffer(buffer, dtype=torch.float32, count=8)
    assert found([odd, number], [ramp(8), ramp(8)])
    assert found([odd, odd[:]], [ramp(8), ramp(8)]) == []
    assert found([odd], [torch.ones(8)]) == []
    source = ramp(8)
    assert found([odd, odd[2:]], [source, source[2:]]) == []  # whatever the values


def test_neither_targets_nor_sources_change():
    base, values = ramp(6), [ramp(4, start=9), ramp(4, start=40)]
    versions = [base._version, *(value._version for value in values)]
    assert found([base[:4], base[2:]], values)
    assert base.tolist() == ramp(6).tolist()
    assert [base._version, *(value._version for value in values)] == versions


def test_sources_in_memory_that_is_written_to_are_named():
    base, other = ramp(8), ramp(8)
    array = np.zeros(8, dtype=np.float32)
    foreign = torch.from_numpy(array[2:6])
    assert reads_of_written(Columns([base[:2]]), Columns([other, base[6:], base[:2], base[1:3], foreign])) == [2, 3]
    assert reads_of_written(Columns([foreign]), Columns([other, torch.from_numpy(array[4:]), base])) == [1]
    assert reads_of_written(Columns([torch.from_numpy(array[:2])]), Columns([foreign])) == []
    assert reads_of_written(Columns([]), Columns([base])) == []


@given(data=hyp.data(), bases=hyp.integers(1, 2), count=hyp.integers(0, 5))
def test_tensors_with_bytes_in_common_are_found(data, bases, count):
    stores = [torch.zeros(12) for _ in range(bases)]
    tensors = [data.draw(hyp.sampled_from(stores))[data.draw(slices(12))] for _ in range(count)]
    bytes_of = [set(bytes_in_memory(tensor)) for tensor in tensors]
    touching = {
        index
        for index, own in enumerate(bytes_of)
        if any(own & other for number, other in enumerate(bytes_of) if number != index)
    }
    assert touching <= {index for pair in shared_elements(Columns(tensors)) for index in pair}


@given(
    shape=hyp.lists(hyp.integers(1, 4), min_size=1, max_size=3),
    count=hyp.integers(2, 5),
    dtype=hyp.sampled_from(DTYPES),
    data=hyp.data(),
)
def test_of_boxes_of_one_tensor_those_that_intersect_are_found_and_no_others(shape, count, dtype, data):
    base = torch.zeros(shape, dtype=dtype).permute(data.draw(hyp.permutations(range(len(shape)))))
    boxes = [tuple([data.draw(slices(size, steps=(1,))) for size in base.shape]) for _ in range(count)]
    tensors = [base[box] for box in boxes]
    bytes_of = [set(bytes_in_memory(tensor)) for tensor in tensors]
    pairs = shared_elements(Columns(tensors))
    assert all(bytes_of[a] & bytes_of[b] for a, b in pairs)
    touching = {frozenset({a, b}) for a in range(count) for b in range(a) if bytes_of[a] & bytes_of[b]}
    assert {index for pair in pairs for index in pair} == set().union(*touching)


FUSED = torch.zeros(8, 12)


@pytest.mark.parametrize(
    "parts",
    [
        FUSED.split([6, 2, 4], dim=1),
        FUSED.split([5, 3], dim=0),
        FUSED.view(2, 4, 12).split([2, 1, 1], dim=1),
        FUSED.view(8, 4, 3).unbind(2),
        FUSED.view(8, 4, 3).unbind(1),
        [FUSED[:, 0::2], FUSED[:, 1::2]],
        [FUSED[0::2], FUSED[1::2]],
        [FUSED[:4, :6], FUSED[:4, 6:], FUSED[4:, :6], FUSED[4:, 6:]],
        [FUSED.t()[:6], FUSED[:, 6:]],
        [FUSED[0, 1:], FUSED[1:, 0]],
        [FUSED.diagonal(), FUSED.diagonal(1), FUSED.diagonal(-1)],
        [FUSED[:, 1::2], FUSED[1:, 0::2]],
    ],
    ids=[
        "columns",
        "rows",
        "groups",
        "interleaved",
        "heads",
        "even",
        "blocks",
        "quarters",
        "transposed",
        "cross",
        "diagonals",
        "shifted",
    ],
)
def test_the_parts_of_a_fused_tensor_are_apart(parts):
    assert shared_elements(Columns(list(parts))) == []
    whole = shared_elements(Columns([FUSED, *parts]))
    assert {index for pair in whole for index in pair} == set(range(len(parts) + 1))


def test_many_interleaved_tensors_are_told_apart_at_once():
    columns = Columns(list(torch.zeros(3, 1 << 14).unbind(1)))
    started = time.process_time()
    assert shared_elements(columns) == []
    assert time.process_time() - started < units(2)  # their pairs would take minutes
