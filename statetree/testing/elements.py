"""The dtypes of generated tensors, and code for elements that are unique by position and hard to keep."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Those of ordinary training states, of which torch can do arithmetic in all.
TRAINING_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
#: The dtypes of generated tensors.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int8, torch.int16),
    *(torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float4_e2m1fn_x2,
)
#: Those that may need gradients.
DIFFERENTIABLE = frozenset(
    dtype for dtype in DTYPES if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
)
#: Which elements a tensor may have. What a dtype has none of is ``counted``; of integers, others are ``precise``.
#:
#: - ``counted``: small whole numbers. Almost every conversion keeps these.
#: - ``precise``: they need all bits of the mantissa; integers that float32 or float64 rounds.
#: - ``zeros``: negative zero, then negative subnormals.
#: - ``infinite``: infinity, then the largest finite numbers.
#: - ``nan``: quiet NaNs, each with another payload. (Of dtypes of 16 bits they are ``precise``: torch negates these by
#:   way of float32, which loses payloads.)
ELEMENTS = ("counted", "precise", "zeros", "infinite", "nan")
#: Dtypes with elements that are lost by what keeps small whole numbers: a narrower dtype, arithmetic, a comparison.
HARD_TO_KEEP = (
    *itertools.product((torch.float32, torch.float64), ELEMENTS[1:]),
    *((dtype, "precise") for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.int32)),
)
#: More of these, which the first states show once, and generated states as often as any other.
HARD_TO_KEEP_TOO = (
    *((dtype, "precise") for dtype in (torch.int16, torch.uint8)),
    *itertools.product((torch.complex64, torch.complex128), ("precise", "zeros")),
)
_FLOATS = "torch.arange({a}.0, {b}.0)", "torch.arange({a}.5, {b}.5)"
_DOUBLES = [f"{code[:-1]}, dtype=torch.float64)" for code in _FLOATS]
_COUNTED = {
    torch.float32: _FLOATS[0],
    torch.float64: _DOUBLES[0],
    torch.complex64: f"torch.complex({', '.join(_FLOATS)})",
    torch.complex128: f"torch.complex({', '.join(_DOUBLES)})",
    torch.int64: "torch.arange({a}, {b})",
    torch.bool: "(torch.arange({a}, {b}) % 2 == 1)",
}
#: The odd numbers after these have more bits than the mantissa of a float of the same or half the size.
_LAST_EXACT = {
    **dict.fromkeys((torch.int64, torch.uint64), 53),
    **dict.fromkeys((torch.int32, torch.uint32), 24),
    **dict.fromkeys((torch.int16, torch.uint16), 11),
    torch.uint8: 7,
}
_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.int16),
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def numbered(shape: Sequence[int], dtype: torch.dtype, first: int, elements: str = "counted") -> str:
    """Return code for a tensor whose elements begin with a number, which stands in them in some way.

    Elements are unique by position, over all tensors that have other numbers; but for ``bool``, where a dtype is too
    short, and those of ``zeros`` and ``infinite``, which are so in one tensor.
    """
    flat = _flat(dtype, first, math.prod(shape), elements)
    return flat if len(shape) == 1 else f"{flat}.reshape({tuple(shape)})"


def _flat(dtype: torch.dtype, first: int, count: int, elements: str) -> str:
    if elements != "counted" and dtype in _PARTS:
        imaginary = _COUNTED[_PARTS[dtype]].replace(".0", ".5").format(a=first, b=first + count)
        return f"torch.complex({_flat(_PARTS[dtype], first, count, elements)}, {imaginary})"
    if elements != "counted" and dtype in _LAST_EXACT:
        code = f"(torch.arange({first}, {first + count}) * 2 + (2**{_LAST_EXACT[dtype]} + 1))"
        return code if dtype is torch.int64 else f"{code}.to({dtype})"
    if elements == "precise" and dtype in (torch.float32, torch.float64):
        return f"({_COUNTED[dtype].format(a=first, b=first + count)} + 0.1)"
    if elements != "counted" and dtype in _BITS:
        # Of the first element, all bits but the number are those of -0.0, of infinity, of a NaN, or of 1.0.
        elements = "precise" if elements == "nan" and dtype.itemsize == 2 else elements
        bits, mantissa = dtype.itemsize * 8, round(-math.log2(torch.finfo(dtype).eps))
        infinity = (2 ** (bits - 1 - mantissa) - 1) << mantissa
        one = (2 ** (bits - 2 - mantissa) - 1) << mantissa
        counting = f"torch.arange({first}, {first + count})"
        from_zero = f"torch.arange(0, {first * count}, {first})"  # other tensors count by other steps
        code = {
            "precise": f"{counting} * 2 + {one + 1:#x}",
            "zeros": f"{from_zero} - 2**{bits - 1}",
            "infinite": f"{infinity:#x} - {from_zero}",
            "nan": f"{counting} + {infinity + 2 ** (mantissa - 1):#x}",
        }[elements]
        converted = "" if bits == 64 else f".to({_BITS[dtype]})"
        return f"({code}){converted}.view({dtype})"
    code = _COUNTED.get(dtype, "torch.arange({a}, {b})").format(a=first, b=first + count)
    if dtype not in _COUNTED:  # where a dtype is too short to count far, its bits count
        bits_dtype = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, dtype)
        code += f".to({bits_dtype})" + (f".view({dtype})" if dtype not in (bits_dtype, torch.int8) else "")
        code = code.replace("uint8", "int8") if dtype is torch.int8 else code
    return code
