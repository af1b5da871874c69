"""The elements of two stored tensors, compared a bucket at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.torch_internals import WITHOUT_KERNELS

if TYPE_CHECKING:
    from statetree.files.stored import StoredTensor


class Unequal(NamedTuple):
    """How the elements of two tensors differ: how many do, the first one, and the largest differences of numbers.

    ``max_rel`` is relative to the larger one of two elements.
    """

    how_many: int
    first: tuple[int, ...]
    left: str
    right: str
    max_abs: float | None
    max_rel: float | None


class Tolerance(NamedTuple):
    """Up to where elements are taken as equal: ``abs(a - b) <= atol + rtol * abs(b)``. With zeros, bit by bit."""

    rtol: float = 0.0
    atol: float = 0.0


def compare_elements(left: StoredTensor, right: StoredTensor, tolerance: Tolerance) -> Unequal | None:
    """Compare tensors of one shape. Returns ``None`` if they are equal."""
    if left.location() == right.location():
        return None
    count, start, first, shown = 0, 0, -1, ("", "")
    distances: list[tuple[float, float] | None] = []
    if left.is_repetitive != right.is_repetitive or (left.is_repetitive and left.stride() != right.stride()):
        return Unequal(left.numel, (0,) * len(left.shape), "elements that are repeated", "others", None, None)
    wider = left if left.dtype.itemsize >= right.dtype.itemsize else right
    for index in wider.boxes():
        a, b = left.read(index).flatten(), right.read(index).flatten()
        places = _places(a, b, tolerance)
        if len(places):
            if first < 0:
                first = start + int(places[0])
                shown = _shown(_taken(a, places[:1])), _shown(_taken(b, places[:1]))
            count += len(places)
            distances.append(_distances(_taken(a, places), _taken(b, places)))
        start += len(a)
    if not count:
        return None
    measured = [found for found in distances if found is not None]
    max_abs, max_rel = map(max, zip(*measured, strict=True)) if len(measured) == len(distances) else (None, None)
    at = tuple(int(part) for part in torch.unravel_index(torch.tensor(first), left.shape)) if left.shape else ()
    return Unequal(count, at, *shown, max_abs, max_rel)


def _taken(elements: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some elements of any dtype: by their bytes, as torch cannot index all dtypes."""
    rows = elements.view(torch.uint8).view(len(elements), -1)
    return rows[places].view(-1).view(elements.dtype)


def _places(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return which elements differ."""
    if a.dtype == b.dtype:
        left, right = a.view(torch.uint8), b.view(torch.uint8)
        if torch.equal(left, right):
            return torch.empty(0)
        if tolerance == Tolerance() or as_wide(a[:0]) is None:
            return (left != right).view(len(a), -1).any(1).nonzero().flatten()
    if (wide := _both_wide(a, b)) is None:
        return torch.arange(len(a))
    return (~torch.isclose(wide[0], wide[1], *tolerance, equal_nan=True)).nonzero().flatten()


def as_wide(elements: torch.Tensor) -> torch.Tensor | None:
    """Return elements as float64 or complex128; ``None`` if they are no numbers."""
    if elements.dtype in WITHOUT_KERNELS:
        return None
    try:
        return elements.to(torch.complex128 if elements.dtype.is_complex else torch.float64)
    except (RuntimeError, NotImplementedError):  # two numbers in a byte
        return None


def _both_wide(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor] | None:
    found = [wide for wide in (as_wide(a), as_wide(b)) if wide is not None]
    dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return [wide.to(dtype) for wide in found] if len(found) == 2 else None


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float] | None:
    """Return the largest absolute and relative difference; infinity where one is no number and the other is."""
    if (wide := _both_wide(a, b)) is None:
        return None
    one, other = wide
    same = torch.isclose(one, other, 0, 0, equal_nan=True)
    is_long = a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64)
    apart = _distances_of_longs(a, b) if is_long else (one - other).abs().masked_fill(same, 0)
    larger = torch.maximum(one.abs(), other.abs())
    relative = (apart / larger).masked_fill(apart == 0, 0)
    largest = [float(found.nan_to_num(nan=math.inf, posinf=math.inf).max()) for found in (apart, relative)]
    return largest[0], largest[1]


def _distances_of_longs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return how far integers of 64 bits are apart, which float64 has no place for: the subtraction comes first."""
    if a.dtype == torch.uint64:  # in the order of signed ones, which torch has more functions for
        a, b = (each.view(torch.int64) ^ torch.iinfo(torch.int64).min for each in (a, b))
    wrapped = (torch.maximum(a, b) - torch.minimum(a, b)).to(torch.float64)
    return torch.where(wrapped < 0, wrapped + 2.0**64, wrapped)


def _shown(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except (RuntimeError, NotImplementedError):
        return f"0x{bytes(element.view(torch.uint8).tolist())[::-1].hex()}"
