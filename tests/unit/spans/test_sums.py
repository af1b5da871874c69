"""Sums over elements: the same however tensors are cut, laid out and read, and others where a bit differs."""

import itertools
from unittest import mock

import pytest
import torch

from statetree.chunks.boxes import Box
from statetree.spans import sums
from statetree.spans.sums import ALL, piece_sums, sums_at, whole_sums

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex128, torch.bool, torch.uint16]
SHAPES = [(), (7,), (0, 3), (5000,), (3, 4096), (33, 129, 7), (8, 2048, 3), (1, 1, 5)]


def made(shape, dtype):
    count = torch.Size(shape).numel() * dtype.itemsize
    numbers = torch.arange(count) * 2654435761 >> 7
    numbers = numbers.to(torch.uint8) & (1 if dtype is torch.bool else 255)
    return numbers.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def whole(tensor):
    return piece_sums(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)), tuple(tensor.shape))


def one_by_one(tensor):
    return sums_at(torch.arange(tensor.numel()), tensor.contiguous().view(-1), count=ALL)[0]


@pytest.mark.parametrize(("shape", "dtype"), list(itertools.product(SHAPES, DTYPES)), ids=str)
def test_they_do_not_depend_on_how_elements_are_read(shape, dtype):
    tensor = made(shape, dtype)
    expected = whole(tensor)
    assert expected.equal(one_by_one(tensor))
    assert bool(expected.any()) or tensor.numel() < 2
    for dim in range(tensor.dim()):
        assert whole(tensor.transpose(0, dim).contiguous().transpose(0, dim)).equal(expected)
        total, size = torch.zeros(ALL, dtype=torch.int64), tensor.shape[dim]
        step = size // 3 + 1
        for start in range(0, size, step):
            part = tensor.narrow(dim, start, min(step, size - start))
            first = tuple(start if each == dim else 0 for each in range(tensor.dim()))
            box = Box(first, tuple(a + b for a, b in zip(first, part.shape, strict=True)))
            total += piece_sums(part, box, shape)
        assert total.equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8], ids=str)
def test_they_tell_patterns_apart_that_sums_modulo_a_power_of_two_miss(dtype):
    tensor = made((9000,), dtype)
    seen = {tuple(whole(tensor).tolist())}
    bits = tensor.view(torch.uint8)
    for first, second in itertools.combinations([0, 1, 2, 513, 4096, 8999], 2):
        other = bits.clone().view(9000, dtype.itemsize)
        other[first, -1] ^= 128  # the highest bits of two elements
        other[second, -1] ^= 128
        seen.add(tuple(whole(other.view(-1).view(dtype)).tolist()))
    swapped = tensor.clone()
    swapped[[5, 6]] = tensor[[6, 5]]
    seen.add(tuple(whole(swapped).tolist()))
    assert len(seen) == 17


def test_conjugate_and_negative_bits_are_read():
    tensor = made((40,), torch.complex128).nan_to_num()
    assert whole(tensor.conj()).equal(whole(tensor.conj().resolve_conj()))
    assert whole(tensor.conj().imag).equal(whole(tensor.conj().imag.resolve_neg()))


def test_elements_anywhere_have_the_sums_of_their_places():
    tensor = made((100_000,), torch.bfloat16)
    places = torch.arange(0, 100_000, 37)
    holes = torch.zeros_like(tensor)
    holes[places] = tensor[places]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    assert sums_at(places, tensor[places])[0].equal(whole(holes)[:2])
    assert sums_at(places[order], tensor[places[order]])[0].equal(whole(holes)[:2])
    both = sums_at(places, tensor[places], torch.zeros_like(tensor[places]), count=ALL)
    assert both[0].equal(whole(holes))
    assert not both[1].any()


def test_they_are_the_same_in_every_version():
    assert whole(torch.arange(5.0)).tolist() == EXPECTED


EXPECTED = [8317865920949125120, -1639245458918342656, 5789102886969409536, 2107816647367589888]


def test_small_tensors_are_summed_up_together_and_each_for_itself():
    dtypes = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
    tensors = [torch.arange(size).to(dtype) for size in (0, 1, 3, 511, 513, 1500, 5000) for dtype in dtypes]
    tensors += [torch.tensor(3.0), torch.arange(12.0).view(3, 4).T, torch.arange(12.0).conj(), torch.arange(9000.0)]
    tensors += [torch.arange(6) + 1j, (torch.arange(6) + 1j).conj(), (torch.arange(6) + 1j).conj().imag]
    tensors += [torch.arange(12.0)[1:2].as_strided((1, 1), (7, 3)), torch.arange(12.0)[::3][:0]]
    assert len(tensors) < sums._TOGETHER
    assert [found.any() for found in whole_sums(tensors[-1:])] == [False]
    with mock.patch.object(sums, "_TOGETHER", 10):
        found = sums.whole_sums(tensors)
    for tensor, own, again in zip(tensors, found, whole_sums(tensors), strict=True):
        shape = tuple(tensor.shape)
        expected = piece_sums(tensor, Box((0,) * len(shape), shape), shape)
        assert own.equal(expected)
        assert again.equal(expected)
