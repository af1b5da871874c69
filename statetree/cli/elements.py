"""The elements of two stored tensors compared, a bucket at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.cli.stored import BUCKET_BYTES, StoredTensor
from statetree.torch_internals import WITHOUT_KERNELS

if TYPE_CHECKING:
    from statetree.cli.progress import Progress


_HALF: Final = 2**32


class Unequal(NamedTuple):
    """How the elements of two tensors differ.

    Attributes:
        how_many: How many do, bit by bit (or, between dtypes, in value).
        first: The index of the first one.
        left: What it is on the left.
        right: What it is on the right.
        max_abs: The largest absolute difference. ``None`` where elements are no numbers.
        max_rel: The largest difference relative to the larger one of two elements. ``None`` as above.
    """

    how_many: int
    first: tuple[int, ...]
    left: str
    right: str
    max_abs: float | None
    max_rel: float | None


def compare_elements(left: StoredTensor, right: StoredTensor, progress: Progress) -> Unequal | None:
    """Compare tensors of one shape. Returns ``None`` if they are equal."""
    step = max(1, BUCKET_BYTES // max(left.dtype.itemsize, right.dtype.itemsize))
    count, first, shown = 0, -1, ("", "")
    max_abs, max_rel = 0.0, 0.0
    can_measure = True
    for start in range(0, left.numel, step):
        stop = min(start + step, left.numel)
        a, b = left.read(start, stop), right.read(start, stop)
        differs = _differs(a, b)
        if differs is not None:
            places = differs.nonzero().flatten()
            if first < 0:
                first = start + int(places[0])
                shown = _shown(_taken(a, places[:1])), _shown(_taken(b, places[:1]))
            count += len(places)
            numbers = _numbers(_taken(a, places)), _numbers(_taken(b, places))
            if numbers[0] is None or numbers[1] is None:
                can_measure = False
            else:
                piece_abs, piece_rel = _measured(numbers[0], numbers[1])
                max_abs, max_rel = max(max_abs, piece_abs), max(max_rel, piece_rel)
        progress((stop - start) * (left.dtype.itemsize + right.dtype.itemsize))
    if not count:
        return None
    index = _index(first, left.shape)
    return Unequal(count, index, *shown, max_abs if can_measure else None, max_rel if can_measure else None)


def _taken(elements: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some elements of any dtype: by their bytes, as torch cannot index all dtypes."""
    rows = elements.view(torch.uint8).view(len(elements), -1)
    return rows[places].view(-1).view(elements.dtype)


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Return which elements differ; ``None`` if none does."""
    if a.dtype == b.dtype:
        left, right = a.view(torch.uint8), b.view(torch.uint8)
        if torch.equal(left, right):
            return None
        return (left != right).view(len(a), -1).any(1)
    left_numbers, right_numbers = _numbers(a), _numbers(b)
    if left_numbers is None or right_numbers is None:
        return torch.ones(len(a), dtype=torch.bool)
    found = ~_same(left_numbers, right_numbers)
    return found if bool(found.any()) else None


class _Numbers(NamedTuple):
    """Numbers, each ``high * 2**32 + low``: integers have 64 bits, of which one float64 has no place for all."""

    high: torch.Tensor
    low: torch.Tensor


def _numbers(tensor: torch.Tensor) -> _Numbers | None:
    """Return elements as numbers, exactly; ``None`` if they cannot be converted."""
    if tensor.dtype in WITHOUT_KERNELS:
        return None
    if tensor.dtype in (torch.int64, torch.uint64):
        whole = tensor.view(torch.int64)
        is_signed = tensor.dtype is torch.int64
        high = whole.div(_HALF, rounding_mode="trunc") if is_signed else whole >> 32 & (_HALF - 1)
        return _Numbers(high.to(torch.float64), (whole - high * _HALF).to(torch.float64))
    try:
        wide = tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
    except (RuntimeError, NotImplementedError):  # two numbers in a byte
        return None
    parts = torch.view_as_real(wide) if wide.is_complex() else wide
    high = torch.where(parts.isfinite(), (parts / _HALF).trunc(), 0.0)
    low = parts - high * _HALF
    return _Numbers(*map(torch.view_as_complex, (high, low))) if wide.is_complex() else _Numbers(high, low)


def _same(a: _Numbers, b: _Numbers) -> torch.Tensor:
    return ((a.high == b.high) & (a.low == b.low)) | (a.low.isnan() & b.low.isnan())


def _measured(a: _Numbers, b: _Numbers) -> tuple[float, float]:
    """Return the largest absolute and relative difference; infinity where one is no number and the other is."""
    apart = ((a.high - b.high) * _HALF + (a.low - b.low)).abs()
    larger = torch.maximum(*((each.high * _HALF + each.low).abs() for each in (a, b)))
    same = _same(a, b)
    relative = torch.where(larger == 0, torch.zeros_like(apart), apart / larger)
    found = (
        float(torch.where(same, torch.zeros_like(apart), part).nan_to_num(nan=math.inf, posinf=math.inf).max())
        for part in (apart, relative)
    )
    return next(found), next(found)


def _shown(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except (RuntimeError, NotImplementedError):
        return f"0x{bytes(element.view(torch.uint8).tolist())[::-1].hex()}"


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
