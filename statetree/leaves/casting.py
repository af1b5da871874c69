"""Conversions between dtypes: which are allowed, and which values are too large for them."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from statetree.spans.bits import cut
from statetree.torch_internals import WITHOUT_KERNELS, resolved

if TYPE_CHECKING:
    from statetree.errors import Difference

#: Dtypes that torch cannot convert, or only by throwing most of a value away (scales, which are powers of two).
_UNCONVERTIBLE: Final = WITHOUT_KERNELS | {torch.float4_e2m1fn_x2, torch.float8_e8m0fnu}
#: What to do about values that are too large.
RANGE_REMEDY: Final = "Choose a dtype with a larger range, or clamp the values first."
#: How many elements are looked at at a time.
_PIECE: Final = 1 << 18


def is_castable(found: Difference) -> bool:
    """Whether ``cast=True`` would do away with a difference, of which the source is left."""
    dtypes = found.left, found.right
    return found.kind == "dtype" and all(isinstance(dtype, torch.dtype) for dtype in dtypes) and castable(*dtypes)


def castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``cast=True`` converts between two dtypes.

    Losslessly, or between floating point types and between complex types. Never from complex to real, from floating
    point to integer, or to an integer type that does not hold every value.
    """
    if not {source, target}.isdisjoint(_UNCONVERTIBLE):
        return False
    if source.is_complex:
        return target.is_complex
    if source.is_floating_point:
        return target.is_floating_point or target.is_complex
    if source is torch.bool:
        return True
    if target is torch.bool:
        return False
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point or target.is_complex:
        whole = 2 / torch.finfo(target).eps  # every integer up to here is a value of the target
        return -whole <= low and high <= min(whole, torch.finfo(target).max)
    return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max


@cache
def _limit(target: torch.dtype) -> tuple[float, bool]:
    """Return from where on values are not rounded to the largest one of a dtype, and whether it has infinities."""
    largest = torch.finfo(target).max
    last = math.ldexp(torch.finfo(target).eps, math.frexp(largest)[1] - 1)  # between the two largest values
    kept = torch.tensor([math.inf], device="cpu").to(target)
    return largest + last / 2, bool((torch.view_as_real(kept) if target.is_complex else kept).float().isinf().any())


def out_of_range(source: torch.Tensor, target: torch.dtype) -> tuple[str, str] | None:
    """Say which elements of a tensor are too large for a dtype, and which are not; ``None`` if none is too large.

    Infinities are too large for a dtype that has none. It takes a few megabytes, whatever the size of the tensor.
    """
    if not source.is_floating_point() and not source.is_complex():
        return None
    limit, has_infinities = _limit(target)
    if has_infinities and torch.finfo(source.dtype).max < limit:
        return None
    count, example = 0, ""
    for piece, _ in cut(source, source, _PIECE):
        values = _parts(piece)
        largest = values.abs().amax() if values.numel() else values.new_zeros(())
        if bool(largest < limit):  # the usual case; no if there is a NaN
            continue
        outside = values.abs() >= limit
        if has_infinities:
            outside &= values.isfinite()
        if source.is_complex():
            outside = outside.any(-1)
        if bool(outside.any()):
            example = example or str(resolved(piece.detach())[outside][0].item())
            count += int(outside.sum())
    more = f" and {count - 1} more" if count > 1 else ""
    return (f"{example}{more}", f"values up to {torch.finfo(target).max} ({target})") if count else None


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return real values that can be compared: real and imaginary parts, and small floating point types widened."""
    plain = resolved(tensor.detach())
    if plain.is_complex() and plain.dtype.itemsize < torch.complex64.itemsize:  # torch computes little with these
        plain = plain.to(torch.complex64)
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.float() if real.dtype.itemsize < torch.float32.itemsize else real
