"""What generated trees are made of: classes, at the top of a module so that trees can be pickled, and elements."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The odd numbers after these have more bits than the mantissa of a float of the same or half the size.
_LAST_EXACT = {
    **dict.fromkeys((torch.int64, torch.uint64), 53),
    **dict.fromkeys((torch.int32, torch.uint32), 24),
    **dict.fromkeys((torch.int16, torch.uint16), 11),
    torch.uint8: 7,
}
#: The smallest and the largest integers, as bits of int64.
_ENDS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)
} | {torch.uint64: (0, -1)}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITH_PAYLOADS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class DictSubclass(dict[Any, Any]):
    """A subclass of dict, whose instances may have attributes."""


class ListSubclass(list[Any]):
    """A subclass of list, whose instances may have attributes."""


class TupleSubclass(tuple[Any, ...]):
    """A subclass of tuple, whose instances may have attributes."""


class NamedPair(NamedTuple):
    """A namedtuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Pair:
    """A dataclass."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPair:
    """A dataclass that cannot be changed."""

    first: Any
    second: Any


@dataclasses.dataclass(slots=True)
class SlottedPair:
    """A dataclass without a ``__dict__``, whose ``__init__`` would do something else."""

    first: Any
    second: Any
    sum: Any = dataclasses.field(init=False, default=None)


class Thing:
    """An object of a class that nobody knows."""


class TensorSubclass(torch.Tensor):
    """A subclass of torch.Tensor."""


class Color(enum.Enum):
    """An enum."""

    RED = 1


def a_factory() -> list[Any]:
    """Return an empty list."""
    return []


def having(value: Any, **attributes: Any) -> Any:
    """Return an object with some more attributes."""
    for name, held in attributes.items():
        setattr(value, name, held)
    return value


def numbered(first: int, shape: Sequence[int], dtype: torch.dtype, elements: str = "counted") -> torch.Tensor:
    """Return a tensor whose elements count from a number, which stands in them in some way (see ``ELEMENTS``).

    They are unique by position, over all tensors that have other numbers; but for ``bool``, where a dtype is too
    short (of NaNs ``float16`` has 512, ``bfloat16`` 64), and those of ``zeros`` and ``infinite``, which are so in one
    tensor.
    """
    numbers = torch.arange(first, first + math.prod(shape), device="cpu").reshape(tuple(shape))
    if dtype.is_complex:
        real = dtype.to_real()
        return torch.complex(numbered(first, shape, real, elements), numbered(first, shape, real) + 0.5)
    if elements == "infinite" and dtype in _ENDS:
        (smallest, largest), steps = _ENDS[dtype], numbers - first
        return torch.where(steps % 2 == 0, largest - steps // 2, smallest + steps // 2).to(dtype)
    if elements != "counted" and dtype in _LAST_EXACT:
        return torch.add(numbers * 2, 2 ** _LAST_EXACT[dtype] + 1).to(dtype)
    if elements == "counted" or dtype not in _WITH_PAYLOADS:
        if dtype is torch.bool:
            return numbers % 2 == 1
        # Where a dtype is too short to count far, its bits count.
        return numbers.to(dtype) if dtype.itemsize > 2 else numbers.to(_BITS[dtype.itemsize]).view(dtype)
    if elements == "precise" and dtype.itemsize > 2:
        return numbers.to(dtype) + 0.1
    # Of the first element, all bits but the number are those of -0.0, of infinity, of a NaN, or of 1.0.
    size, mantissa = dtype.itemsize * 8, round(-math.log2(torch.finfo(dtype).eps))
    infinity = (2 ** (size - 1 - mantissa) - 1) << mantissa
    from_zero = (numbers - first) * first  # other tensors count by other steps
    bits: dict[str, torch.Tensor] = {
        "precise": numbers * 2 + (((2 ** (size - 2 - mantissa) - 1) << mantissa) + 1),
        "zeros": from_zero + -(2 ** (size - 1)),
        "infinite": infinity - from_zero,
        "nan": numbers % 2 ** (mantissa - 1) + (infinity + 2 ** (mantissa - 1)),
    }
    return bits[elements].to(_BITS[dtype.itemsize]).view(dtype)
