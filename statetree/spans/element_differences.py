"""How the elements of two tensors differ: how many do, where the first one is, and how large the differences are.

Tensors are compared block by block, so that no second copy of them is made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.errors import unsignalled
from statetree.spans.bits import as_bits, distinct_elements, from_bits, is_unreadable, pieces, without_elements
from statetree.torch_internals import WITHOUT_KERNELS

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What is said of tensors of which one has no elements to read.
_WITHOUT: Final = {"meta": "no bytes", "freed": "freed", "": "bytes"}
#: From here on the squares of numbers that are too small for float32 are no part of a sum of squares that shows in it.
_EXACT_SQUARES: Final = 1e-28


class Tolerance(NamedTuple):
    """Up to where numbers are equal: ``abs(a - b) <= atol + rtol * max(abs(a), abs(b))``. With zeros: bit for bit.

    It concerns floating-point and complex elements. If it is not zero, NaNs are equal, whatever their payload.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def check(self, verb: str) -> None:
        """Raise ``ValueError`` for what is no tolerance."""
        for name, value in self._asdict().items():
            if not _is_tolerance(value):
                raise ValueError(f"{verb}: {name} is no tolerance: expected a number of 0 or more, got {value!r}.")


def _is_tolerance(value: float | str) -> bool:
    try:
        return not isinstance(value, str) and float(value) >= 0
    except unsignalled(TypeError, ValueError):
        return False


#: Bit for bit.
EXACT: Final = Tolerance()


class Unequal(NamedTuple):
    """How the elements of two tensors differ."""

    how_many: int  # the number of elements that do
    first: tuple[int, ...]  # the index of the first
    left: str  # that element on the left, in words
    right: str  # and on the right
    #: The largest difference; infinity where one is NaN and the other is not; None without numbers.
    max_abs: float | None
    max_rel: float | None  # the largest one relative to the larger one of two elements
    num_nan: int = 0  # how many of them are NaN on one side alone
    #: `max_abs` relative to the root mean square of all finite elements: infinity where nothing is measured.
    size: float = math.inf


class ElementComparison:
    """A comparison of two tensors, of which blocks are added in row-major order."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._count, self._start, self._first, self._shown = 0, 0, -1, ("", "")
        self._is_measured, self._max_abs, self._max_rel, self._num_nan = True, 0.0, 0.0, 0
        self._norms = [0.0, 0.0]
        self._num_finite = [0, 0]

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two flat blocks of one dtype and length."""
        for side, block in enumerate((a, b)):
            norm, count = _norm(block)
            self._norms[side] = math.hypot(self._norms[side], norm)
            self._num_finite[side] += count
        places = _different_places(a, b, self._tolerance)
        if len(places):
            x, y = (_taken(block, places) if len(places) < len(block) else block for block in (a, b))
            if self._first < 0:
                self._first = self._start + int(places[0])
                self._shown = element_text(x[:1]), element_text(y[:1])
            self._count += len(places)
            self._measure(x, y)
        self._start += len(a)

    def result(self, shape: Sequence[int]) -> Unequal | None:
        """Return how the tensors of a shape differ, of which all blocks were added; ``None`` if they do not."""
        if not self._count:
            return None
        at = torch.unravel_index(torch.tensor(self._first, device="cpu"), tuple(shape)) if shape else ()
        index = tuple([int(part) for part in at])
        if not self._is_measured:
            return Unequal(self._count, index, *self._shown, None, None)
        pairs = zip(self._norms, self._num_finite, strict=True)
        largest = max(norm / math.sqrt(max(1, count)) for norm, count in pairs)
        size = self._max_abs / largest if largest else math.inf if self._max_abs else 0.0
        return Unequal(self._count, index, *self._shown, self._max_abs, self._max_rel, self._num_nan, size)

    def _measure(self, a: torch.Tensor, b: torch.Tensor) -> None:
        one, other = as_wide(a), as_wide(b)
        if one is None or other is None:
            self._is_measured = False
            return
        self._num_nan += int(one.isnan().ne(other.isnan()).sum())
        same = one.eq(other).logical_or_(one.isnan() & other.isnan())
        is_long = a.dtype in (torch.int64, torch.uint64)
        apart = _distances_of_longs(a, b) if is_long else (one - other).abs().masked_fill_(same, 0)
        relative = (apart / torch.maximum(one.abs(), other.abs())).masked_fill_(apart == 0, 0)
        largest = [float(found.nan_to_num_(nan=math.inf, posinf=math.inf).max()) for found in (apart, relative)]
        self._max_abs, self._max_rel = max(self._max_abs, largest[0]), max(self._max_rel, largest[1])


def tensor_difference(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance = EXACT) -> Unequal | None:
    """Return how two plain tensors of one dtype and shape differ; ``None`` if they are equal."""
    without = without_elements(a), without_elements(b)
    if any(without):
        left, right = map(_WITHOUT.__getitem__, without)
        return None if left == right else Unequal(a.numel(), (), left, right, None, None)
    if is_unreadable(a, b):
        return Unequal(a.numel(), (), f"negative bit {a.is_neg()}", f"negative bit {b.is_neg()}", None, None)
    # The first index of all is one of a distinct element: it is 0 along the dims in which these are repeated.
    x, y = distinct_elements(a, b)
    comparison = ElementComparison(tolerance)
    for _, bits_a, bits_b in pieces(x, y):
        comparison.add(from_bits(bits_a.cpu(), a.dtype), from_bits(bits_b.cpu(), b.dtype))
    found = comparison.result(x.shape)
    return None if found is None else found._replace(how_many=found.how_many * (a.numel() // x.numel()))


def _different_places(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    x, y = as_bits(a), as_bits(b)
    unequal = x.view(torch.int64).ne(y.view(torch.int64)).view(-1, 2).any(1) if x.is_complex() else x.ne(y)
    places = unequal.nonzero().flatten()
    if not len(places) or tolerance == EXACT or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return places
    one, other = (as_wide(_taken(each, places)) for each in (a, b))
    return places if one is None or other is None else places[~_close(one, other, tolerance)]


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return which numbers are equal within a tolerance. Infinities are equal to themselves alone."""
    finite = a.isfinite() & b.isfinite()
    largest = torch.maximum(a.abs(), b.abs())
    close = (a - b).abs() <= largest * tolerance.rtol + tolerance.atol
    huge = finite & largest.isinf()  # the magnitude of a finite complex number need not be finite: a quarter of it is
    if huge.any():
        close[huge] = _close(a[huge] / 4, b[huge] / 4, Tolerance(tolerance.rtol, tolerance.atol / 4))
    return a.eq(b) | (a.isnan() & b.isnan()) | (finite & close)


def _taken(elements: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some elements of any dtype: by their bytes, as torch cannot index all dtypes."""
    bits = as_bits(elements)
    if bits.is_complex():
        return bits.view(torch.int64).view(-1, 2)[places].view(-1).view(elements.dtype)
    return from_bits(bits[places], elements.dtype)


def as_wide(elements: torch.Tensor) -> torch.Tensor | None:
    """Return elements as float64 or complex128; ``None`` if they are no numbers."""
    if elements.dtype in WITHOUT_KERNELS:
        return None
    try:
        return elements.to(torch.complex128 if elements.dtype.is_complex else torch.float64)
    except unsignalled(RuntimeError, NotImplementedError):  # two numbers in a byte
        return None


def _norm(block: torch.Tensor) -> tuple[float, int]:
    """Return the root of the sum of the squares of the finite elements, and how many there are."""
    if block.dtype in (torch.float32, torch.float64):  # without a copy
        squares = float(block.dot(block))
        if _EXACT_SQUARES < squares < math.inf or not (squares or block.any()):
            return math.sqrt(squares), len(block)
    wide = as_wide(block)
    if wide is None:
        return 0.0, 0
    sizes = wide.abs()
    finite = sizes[sizes.isfinite()]
    largest = float(finite.max()) if len(finite) else 0.0
    finite /= largest or 1.0  # or the squares would be too small, or too large, for any float
    return largest * math.sqrt(float(finite.dot(finite))), len(finite)


def _distances_of_longs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return how far integers of 64 bits are apart, which float64 has no place for: the subtraction comes first."""
    if a.dtype == torch.uint64:  # in the order of signed ones, which torch has more functions for
        a, b = (each.view(torch.int64) ^ torch.iinfo(torch.int64).min for each in (a, b))
    wrapped = (torch.maximum(a, b) - torch.minimum(a, b)).to(torch.float64)
    return torch.where(wrapped < 0, wrapped + 2.0**64, wrapped)


def element_text(element: torch.Tensor) -> str:
    """Return one element in words."""
    try:
        return str(element.item())
    except unsignalled(RuntimeError, NotImplementedError):  # a dtype that has no Python number
        return f"0x{bytes(element.view(torch.uint8).tolist())[::-1].hex()}"
