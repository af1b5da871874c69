"""The dtypes and the kinds of elements that generated tensors have, and which of them are hard to keep."""

from __future__ import annotations

import itertools

import torch

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
#: Which elements a tensor may have. What a dtype has none of is ``counted``; of integers, others but ``infinite`` are
#: ``precise``.
#:
#: - ``counted``: small whole numbers. Almost every conversion keeps these.
#: - ``precise``: they need all bits of the mantissa; integers that float32 or float64 rounds.
#: - ``zeros``: negative zero, then negative subnormals.
#: - ``infinite``: infinity, then the largest finite numbers. Of integers, the largest and the smallest ones.
#: - ``nan``: quiet NaNs, with other payloads.
ELEMENTS = ("counted", "precise", "zeros", "infinite", "nan")
#: Dtypes with elements that are lost by what keeps small whole numbers: a narrower dtype, arithmetic, a comparison.
HARD_TO_KEEP = (
    *itertools.product((torch.float32, torch.float64), ELEMENTS[1:]),
    *((dtype, "precise") for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.int32)),
)
#: More of these, which the first states show once, and generated states as often as any other.
HARD_TO_KEEP_TOO = (
    *((dtype, "precise") for dtype in (torch.int16, torch.uint8)),
    *((dtype, "infinite") for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16)),
    *itertools.product((torch.float16, torch.bfloat16), ELEMENTS[2:]),
    *itertools.product((torch.complex64, torch.complex128), ("precise", "zeros", "nan")),
)
