"""The dtypes of generated tensors, and code for their elements: counted, or such that every loss shows."""

from __future__ import annotations

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


def counted(shape: Sequence[int], dtype: torch.dtype, first: int) -> str:
    """Return code for a tensor that counts from a number. Where a dtype is too short to count far, its bits count."""
    code = _COUNTED.get(dtype, "torch.arange({a}, {b})").format(a=first, b=first + math.prod(shape))
    if dtype not in _COUNTED:
        bits = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, dtype)
        code += f".to({bits})" + (f".view({dtype})" if dtype not in (bits, torch.int8) else "")
        code = code.replace("uint8", "int8") if dtype is torch.int8 else code
    return code if len(shape) == 1 else f"{code}.reshape({tuple(shape)})"


#: Of dtypes wide enough to lose something: the whole numbers of their bits, and the bits of 1.0, infinity and -0.0.
_FLOAT_BITS = {
    torch.float32: (torch.int32, 0x3F80_0000, 0x7F80_0000, -(2**31)),
    torch.float64: (torch.int64, 0x3FF0_0000_0000_0000, 0x7FF0_0000_0000_0000, -(2**63)),
    torch.float16: (torch.int16, 0x3C00, 0x7C00, -(2**15)),
    torch.bfloat16: (torch.int16, 0x3F80, 0x7F80, -(2**15)),
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
#: From where whole numbers are no float of half as many bits, and those of 64 bits no float64.
_LARGE = {torch.int32: 2**24, torch.uint32: 2**24, torch.int64: 2**53, torch.uint64: 2**53}


def revealing(shape: Sequence[int], dtype: torch.dtype, first: int) -> str:
    """Return code for a tensor of which every loss shows: of precision, of a sign of zero, of what a NaN carries.

    Negative zeros, NaNs, subnormals and infinities come in turn with full mantissas; whole numbers are odd, and beyond
    those that a float can hold. What is no wider than a byte is counted: all of its bits are in use.
    """
    count = math.prod(shape)
    reshaped = "" if len(shape) == 1 else f".reshape({tuple(shape)})"
    if dtype in _LARGE:
        cast = "" if dtype is torch.int64 else f".to({dtype})"
        return f"(2 * torch.arange({first}, {first + count}) + {_LARGE[dtype] + 1}){cast}{reshaped}"
    part = _PARTS.get(dtype, dtype)
    if part not in _FLOAT_BITS:
        return counted(shape, dtype, first)
    width = 2 if dtype in _PARTS else 1
    whole, *_ = _FLOAT_BITS[part]
    bits = [_bits(part, number) for number in range(first * width, (first + count) * width)]
    view = f".view({part})" + (f".view({dtype})" if dtype in _PARTS else "")
    return f"torch.tensor({bits}, dtype={whole}){view}{reshaped}"


def _bits(dtype: torch.dtype, number: int) -> int:
    """Return the bits of an element, as a whole number with a sign."""
    _, one, infinity, negative = _FLOAT_BITS[dtype]
    mantissa = infinity & -infinity  # the lowest bit of the exponent: all below it are the mantissa
    full = number * 0x9E37_79B9_7F4A_7C15 % mantissa | 1  # odd, so that the last bit is in use
    quiet = infinity | mantissa >> 1  # copies of a signalling NaN may be quiet
    rare = (
        negative,
        quiet | number % (mantissa >> 1) | 1,
        number % mantissa | 1,
        infinity | (negative * (number & 8) // 8),
    )
    return rare[number // 2 % 4] if number % 2 else one | full
