"""``bits``, against elements compared one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp
from torch.utils._python_dispatch import TorchDispatchMode

from statetree.spans import bits
from statetree.spans.bits import compare_memory, differ_in_more, differing, same_bytes
from statetree.spans.element_differences import tensor_difference
from statetree.torch_internals import negated_view

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex64]
DTYPES += [torch.complex128, torch.float8_e4m3fn]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result._base is None:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def raw(tensor):
    """Return the bytes of each element, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.bool:  # whose copies are 0 or 1
        plain = plain.view(torch.uint8)
    plain = plain.contiguous()
    flat = bytes(plain.untyped_storage())[plain.storage_offset() * plain.itemsize :]
    return [flat[start : start + plain.itemsize] for start in range(0, plain.numel() * plain.itemsize, plain.itemsize)]


def listed(a, b):
    return [position for positions in differing(a, b) for position in positions.tolist()]


@hyp.composite
def views(draw, shape, dtype):
    """Draw a view with the given shape, whose bytes are drawn too: any strides, any offset, any bits."""
    order = draw(hyp.permutations(range(len(shape))))
    expanded = draw(hyp.sets(hyp.sampled_from(range(len(shape))))) if shape else set()
    padding = [draw(hyp.integers(0, 2)) for _ in shape]
    offset = draw(hyp.integers(0, 9))
    stored = [1 if dim in expanded else shape[dim] + padding[dim] for dim in order]
    count = math.prod(stored) * dtype.itemsize
    storage = torch.frombuffer(bytearray(draw(hyp.binary(min_size=count, max_size=count)) + b"."), dtype=torch.uint8)
    memory = torch.zeros(offset * dtype.itemsize + count, dtype=torch.uint8)
    memory[offset * dtype.itemsize :] = storage[:count]
    view = memory.view(dtype)[offset:].view(stored).permute([order.index(dim) for dim in range(len(shape))])
    view = view[tuple(slice(0, size) for size in shape)].expand(shape)
    if dtype.is_complex and draw(hyp.booleans()):
        view = view.conj()
    return negated_view(view) if dtype == torch.float32 and draw(hyp.booleans()) else view


@given(hyp.data())
def test_differing_lists_exactly_the_elements_whose_bytes_differ(data):
    dtype = data.draw(hyp.sampled_from(DTYPES))
    shape = data.draw(hyp.lists(hyp.integers(0, 5), max_size=3))
    a, b = data.draw(views(shape, dtype)), data.draw(views(shape, dtype))
    if data.draw(hyp.booleans()):  # alike but for a few
        b = torch.empty_strided(a.shape, [10**step for step in range(a.dim())], dtype=dtype).copy_(a)
        with torch.no_grad():
            b.flatten()[: data.draw(hyp.integers(0, 3))].zero_()
    nbytes = data.draw(hyp.sampled_from([16, 64, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "_PIECE_BYTES", nbytes)
        expected = [index for index, (x, y) in enumerate(zip(raw(a), raw(b), strict=True)) if x != y]
        assert listed(a, b) == expected
        assert same_bytes(a, b) == (not expected)
        if expected:
            index = tuple(map(int, torch.unravel_index(torch.tensor(expected[0]), a.shape)))
            found = tensor_difference(a, b)
            assert (found.first, found.how_many) == (index, len(expected))
        else:
            assert tensor_difference(a, b) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("changed", [[], [0], [7], [4_999], [5_001], [0, 5_001], range(0, 5_002, 2)], ids=str)
def test_differing_finds_elements_at_both_ends_of_words_and_pieces(dtype, offset, changed, monkeypatch):
    monkeypatch.setattr(bits, "_PIECE_BYTES", 800)
    memory = torch.arange((offset + 5_002) * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    a = memory.view(dtype)[offset:]
    b = memory.clone()
    rows = b.view(-1, dtype.itemsize)[offset:]
    for index in changed:
        rows[index, -1] ^= 1
    assert listed(a, b.view(dtype)[offset:]) == list(changed)


def test_positions_are_not_empty_and_int64():
    a = torch.zeros(1 << 20)
    b = a.clone()
    b[[5, 1_000_000]] = 1
    found = list(differing(a, b))
    assert [positions.tolist() for positions in found] == [[5], [1_000_000]]
    assert {positions.dtype for positions in found} == {torch.int64}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_elements_that_differ_are_counted_exactly_where_they_are_many(dtype, transposed, monkeypatch):
    monkeypatch.setattr(bits, "_PIECE_BYTES", 800)
    ones = torch.ones(60, 50, dtype=torch.uint8).repeat_interleave(dtype.itemsize, 1)
    other = ones.clone()
    other.view(60, 50, dtype.itemsize)[:, :40] ^= 1  # 2,400 elements
    a, b = (memory.view(dtype).T if transposed else memory.view(dtype) for memory in (ones, other))
    assert [differ_in_more(a, b, most) for most in (0, 2_399, 2_400)] == [True, True, False]
    assert not differ_in_more(a, a, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "conjugate"])
def test_comparing_takes_a_few_megabytes(dtype, layout):
    a = torch.zeros(4096, (16 << 20) // 4096 // dtype.itemsize, dtype=dtype)
    b = torch.ones_like(a)
    if layout == "transposed":
        a, b = a.T, b.T
    elif layout == "strided":
        a, b = a[:, ::2], b[:, ::2]
    elif layout == "conjugate":
        a = a.conj()
    with Largest() as largest:
        assert not same_bytes(a, b)
        assert tensor_difference(a, b).first == (0, 0)
    assert largest.nbytes <= 8 << 20


def test_expanded_tensors_are_compared_by_their_distinct_elements():
    a = torch.arange(3.0)[:, None].expand(3, 1 << 40)
    b = torch.tensor([0.0, 1.0, 5.0])[:, None].expand(3, 1 << 40)
    assert same_bytes(a, a.clone().as_strided(a.shape, a.stride()) if a.numel() < 9 else a[:])
    assert not same_bytes(a, b)
    found = tensor_difference(a, b)
    assert (found.left, found.right, found.first, found.how_many, found.max_abs) == ("2.0", "5.0", (2, 0), 1 << 40, 3.0)


def test_without_memcmp_torch_compares(monkeypatch):
    monkeypatch.setattr(bits, "compare_memory", lambda *_: None)
    a = torch.arange(1000.0)
    b = a.clone()
    assert same_bytes(a, b)
    b[999] = -1
    assert not same_bytes(a, b)
    assert listed(a, b) == [999]


def test_memory_is_compared_by_bytes():
    a, b = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert compare_memory(a.data_ptr(), b.data_ptr(), 16)
    assert not compare_memory(a.data_ptr(), b.data_ptr(), 24)


def test_what_has_no_elements_is_like_its_kind():
    freed, other, meta = torch.ones(3), torch.ones(3), torch.ones(3, device="meta")
    freed.untyped_storage().resize_(0)
    assert not same_bytes(freed, other)
    assert not same_bytes(meta, other)
    assert same_bytes(meta, torch.ones(3, device="meta"))
    other.untyped_storage().resize_(0)
    assert same_bytes(freed, other)
    found = tensor_difference(freed, torch.ones(3)), tensor_difference(torch.ones(3), meta)
    assert [(each.left, each.right, each.max_abs) for each in found] == [
        ("freed", "bytes", None),
        ("bytes", "no bytes", None),
    ]


def test_zeros_of_autograd_have_elements():
    zeros = torch._efficientzerotensor(4)
    assert same_bytes(zeros, torch.zeros(4))
    assert listed(zeros, torch.tensor([0.0, 1.0, 0.0, 2.0])) == [1, 3]
