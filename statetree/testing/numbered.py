"""Elements that are unique by position, over all tensors of a tree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORT = (torch.float16, torch.bfloat16, torch.uint16, torch.int16)
_HALVES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Numbers:
    """Makes the tensors of one tree, and holds what is shared in it.

    Attributes:
        made: The containers, objects and tensors of the tree so far, each as soon as it was whole.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._next = 1
        self._bases: dict[int, torch.Tensor] = {}

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor with the next numbers. Where a dtype is too short to count far, its bits count."""
        count = math.prod(shape)
        numbers = torch.arange(self._next, self._next + count, device="cpu")
        self._next += count
        if dtype is torch.bool:
            made = numbers.remainder(2).bool()
        elif dtype in _HALVES:
            real = numbers.to(_HALVES[dtype])
            made = torch.complex(real, real + 0.5)
        elif dtype.itemsize == 1 or dtype in _SHORT:
            raw = numbers.to(torch.int32).view(torch.uint8).view(count, 4)[:, : dtype.itemsize]
            made = raw.contiguous().view(dtype)
        else:
            made = numbers.to(dtype)
        return made.reshape(tuple(shape))

    def base(self, index: int) -> torch.Tensor:
        """Return one of the tensors of 24 numbers on whose storages views are made."""
        if index not in self._bases:
            self._bases[index] = self((4, 6), torch.float32)
        return self._bases[index]
