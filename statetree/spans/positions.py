"""Positions of elements: as gaps between them, which take few bytes, and as places in the memory of a tensor."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import torch

from statetree.spans.bits import as_bits, from_bits
from statetree.spans.layout import extent_bytes
from statetree.torch_internals import negated_view

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What gaps are stored as: the first dtype that holds the largest one. (Those that safetensors and NumPy know.)
_GAP_DTYPES: Final = (torch.uint8, torch.uint16, torch.int32, torch.int64)
#: What is worked out at a time on a processor: torch starts no threads for it.
_BLOCK: Final = 1 << 15
_LIMITS: Final = {torch.uint8: 1 << 8, torch.uint16: 1 << 16, torch.int32: 1 << 31, torch.int64: 1 << 63}


def as_gaps(positions: torch.Tensor) -> torch.Tensor:
    """Return by how much each of some ascending positions is above the one before; a zero for the first."""
    if positions.numel() < 2:
        return torch.zeros_like(positions, dtype=torch.uint8)
    step = _BLOCK if positions.is_cpu else positions.numel()
    pairs = zip(positions[1:].split(step), positions[:-1].split(step), strict=True)
    blocks = [positions.new_zeros(1), *(after - before for after, before in pairs)]
    largest = max(int(block.max()) for block in blocks)
    dtype = next(dtype for dtype in _GAP_DTYPES if largest < _LIMITS[dtype])
    return torch.cat([block.to(dtype) for block in blocks])


def from_gaps(start: int, gaps: torch.Tensor) -> torch.Tensor | None:
    """Return the positions that gaps stand for; ``None`` if these do not ascend."""
    if not gaps.numel() or start < 0 or int(gaps[0]):
        return None if gaps.numel() else gaps.to(torch.int64)
    blocks: list[torch.Tensor] = []
    last = start
    for part in gaps.split(_BLOCK if gaps.is_cpu else gaps.numel()):
        wide = part.to(torch.int64)
        if int((wide <= 0).sum()) != (not blocks):  # the first of all is zero, and no other one
            return None
        blocks.append(wide.cumsum(0).add_(last))
        # Where the sum of the gaps is too large for an integer, it is negative now, or smaller than before.
        if int(blocks[-1].min()) < last:
            return None
        last = int(blocks[-1][-1])
    return torch.cat(blocks)


def places_of(positions: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return where elements lie in the ``hull`` of a tensor, by their positions in row-major order."""
    if tensor.is_contiguous():
        return positions
    places = torch.zeros_like(positions)
    rest = positions
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        places += rest % size * step
        rest = rest // size
    return places


def hull(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, as one dim of elements that copies do not change."""
    reach = extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize) // tensor.itemsize
    plain = tensor.detach()
    if plain.is_neg():
        plain = negated_view(plain)
    if plain.is_conj():
        plain = torch.conj(plain)
    return as_bits(plain.as_strided((reach,), (1,)))


def take(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor at some places of its hull, bit by bit as they read."""
    found = hull(tensor).index_select(0, places)  # several times as fast as take
    return _read(from_bits(found, tensor.dtype), tensor)


def put(tensor: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Write what ``stored`` gave to some places of a tensor's hull, in one call."""
    hull(tensor).scatter_(0, places, values)


def stored(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what has to lie in a tensor's memory for values to be read from it."""
    return as_bits(_read(values, tensor))


def _read(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what values that lie in a tensor's memory read like, or the other way about: both bits are involutions."""
    if tensor.is_conj():
        values = torch.conj(values).resolve_conj()
    if tensor.is_neg():
        values = negated_view(values).resolve_neg()
    return values


def within(positions: torch.Tensor, start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the positions in a shape of elements of a box in it, given by their positions in the box."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(first * step for first, step in zip(start, steps, strict=True))
    if tuple(sizes[1:]) == tuple(shape[1:]):  # one stretch
        return positions + begin if begin else positions
    result = torch.full_like(positions, begin)
    rest = positions
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        result += rest % size * step
        rest = rest // size
    return result


def in_box(
    positions: torch.Tensor, start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which positions in a shape lie in a box (``None`` for all), and the positions of these in the box."""
    if tuple(sizes) == tuple(shape):
        return None, positions
    inside = torch.ones_like(positions, dtype=torch.bool)
    result = torch.zeros_like(positions)
    rest, step = positions, 1
    for first, size, whole in zip(reversed(start), reversed(sizes), reversed(shape), strict=True):
        index = rest % whole - first
        inside &= (index >= 0) & (index < size)
        result += index * step
        rest, step = rest // whole, step * size
    return inside, result[inside]
