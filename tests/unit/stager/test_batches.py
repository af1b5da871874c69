"""``batches``: small tensors that look the same are copied by one call, bit by bit."""

import pytest
import torch

import statetree as st
from statetree.spans.bits import same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extents, lay_out
from statetree.stager.batches import batched
from statetree.torch_internals import COPIED_AS_INTEGERS

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
PLAIN = [dtype for dtype in DTYPES if not str(dtype).removeprefix("torch.").startswith(("q", "bits", "uint1", "int1"))]
PLAIN = [dtype for dtype in PLAIN if dtype.itemsize > 1 or dtype in {torch.uint8, torch.int8, torch.bool}]


def groups_of(tensors):
    columns = Columns(tensors)
    return batched(columns, lay_out(columns, extents(columns)))


def ramps(count, *shape):
    length = torch.Size(shape).numel()
    return [torch.arange(number, number + length, dtype=torch.float32).reshape(shape) for number in range(count)]


def every_bit_pattern(dtype):
    """Return tensors that hold all 16 bits there are in each part of an element, and so NaNs of every kind."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    filler = torch.arange(1 << 16, dtype=torch.int32).mul(40_503).to(torch.int16)
    count = max(dtype.itemsize // 2, 1)
    arranged = [
        torch.stack([words if place == where else filler for place in range(count)], 1) for where in range(count)
    ]
    return [piece.clone().view(torch.uint8).view(dtype) for whole in arranged for piece in whole.split(128)]


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_bit_pattern_is_copied_as_it_is(dtype):
    tensors = every_bit_pattern(dtype)
    assert groups_of(tensors) or dtype is torch.bool or dtype in COPIED_AS_INTEGERS
    with st.Stager() as stager:
        for _ in range(2):
            staged = stager.stage(tensors)
            assert all(same_bytes(a, b) for a, b in zip(staged, tensors, strict=True))
            del staged


def test_tensors_of_one_dtype_and_shape_form_a_group():
    assert groups_of(ramps(20, 3, 5)) == [list(range(20))]
    assert groups_of([*ramps(10, 3), *ramps(10, 4), *ramps(10, 3)]) == [
        [*range(10), *range(20, 30)],
        list(range(10, 20)),
    ]
    assert groups_of(ramps(12)) == [list(range(12))]


def test_a_group_is_what_torch_stacks_in_one_pass():
    assert [len(group) for group in groups_of(ramps(100, 1024))] == [31, 31, 31]
    assert groups_of(ramps(7, 3)) == []


@pytest.mark.parametrize(
    "tensors",
    [
        [tensor.t() for tensor in ramps(20, 3, 5)],
        [tensor > 3 for tensor in ramps(20, 3)],
        ramps(20, 0, 3),
        ramps(20, 4097),
        [torch.complex(tensor, tensor).conj() for tensor in ramps(20, 3)],
        [tensor[1:] for tensor in ramps(1, 400)[0].expand(20, 400)],
    ],
    ids=["transposed", "bools", "empty", "large", "conjugated", "tied"],
)
def test_others_are_copied_each_by_itself(tensors):
    assert groups_of(tensors) == []
    with st.Stager() as stager:
        staged = stager.stage(tensors)
    assert all(map(torch.equal, staged, tensors))
    assert [tensor.stride() for tensor in staged] == [tensor.stride() for tensor in tensors]


class Plain(torch.Tensor):
    """A subclass that would notice to be stacked."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not torch.stack
        return super().__torch_function__(func, types, args, kwargs)


def in_inference_mode():
    with torch.inference_mode():
        return [tensor + 0 for tensor in ramps(20, 3)]


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.nn.Parameter(tensor) for tensor in ramps(20, 3)],
        [tensor.as_subclass(Plain) for tensor in ramps(20, 3)],
        in_inference_mode(),
    ],
    ids=["parameters", "subclass", "inference"],
)
def test_members_may_be_more_than_plain_tensors(tensors):
    with torch.no_grad():
        assert groups_of(tensors) == [list(range(20))]
    with st.Stager() as stager:
        staged = stager.stage(tensors)
    assert {type(tensor) for tensor in staged} == {type(tensors[0])}
    assert {tensor.requires_grad for tensor in staged} == {tensors[0].requires_grad}
    assert [tensor.tolist() for tensor in staged] == [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_memory_is_used_again_once_no_member_of_a_batch_is_held(shared):
    tensors = ramps(20, 3)
    with st.Stager(share_memory=shared, max_snapshots=2) as stager:
        held = stager.stage(tensors)[7]
        before = held.clone()
        for tensor in tensors:
            tensor.neg_()
        other = stager.stage(tensors)
        assert torch.equal(held, before)
        assert torch.equal(other[7], -before)
        allocations = stager.stats.allocations
        places = {tensor.data_ptr() for tensor in other}
        del other
        assert {tensor.data_ptr() for tensor in stager.stage(tensors)} == places
        del held
        stager.stage(tensors)
        assert stager.stats.allocations == allocations


def test_members_of_a_batch_have_storages_of_their_own():
    with st.Stager() as stager:
        staged = stager.stage(ramps(20, 3))
    assert {tensor.untyped_storage().nbytes() for tensor in staged} == {12}
    assert len({tensor.untyped_storage()._cdata for tensor in staged}) == 20
