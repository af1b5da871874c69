"""The dtypes of generated tensors, and code for elements that are unique by position."""

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
