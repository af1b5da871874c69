"""Optimizer states of a few bits, as torchao's: codes, one scale for each block of elements, and a table of values."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from statetree.chunks.cuts import Cut, cut_alike
from statetree.leaves.types.wrapper import WrapperType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LowBitType(WrapperType):
    """``OptimState8bit``, ``OptimState4bit`` and ``OptimStateFp8`` of torchao 0.18.

    Codes (of 4 bits, two in a byte) and scales lie in the row-major order of the elements. So a shard of rows has a
    stretch of each, if it is made of whole blocks.
    """

    def cuts(self, value: Any, inner: Sequence[torch.Tensor]) -> Sequence[tuple[Cut | None, ...]]:
        """Return how codes and scales are cut; the table is whole."""
        rows = value.shape[0]

        def flat(tensor: torch.Tensor) -> tuple[Cut | None, ...]:
            if tensor.shape == value.shape:
                return cut_alike(value.shape, tensor.shape)
            common = gcd(tensor.numel(), rows) or 1
            return (Cut(0, tensor.numel() // common, rows // common, is_flat=True),)

        codes, scale, *table = inner
        return [flat(codes), flat(scale), *[(None,) * tensor.dim() for tensor in table]]


LOW_BIT = LowBitType()
