"""What a plan is: a description of a tree that prints as code, and makes the same tree as often as it is asked to."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORT = (torch.float16, torch.bfloat16, torch.uint16, torch.int16)
_HALVES = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


class Numbers:
    """Makes tensors whose elements are unique by position, over all tensors of a tree, and holds what is shared.

    Attributes:
        next: The next number.
        made: The containers, objects and tensors of the tree so far, each as soon as it was whole.
    """

    def __init__(self) -> None:
        self.next = 1
        self.made: list[Any] = []
        self._bases: dict[int, torch.Tensor] = {}

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor with the next numbers. Where a dtype is too short to count far, its bits count."""
        count = math.prod(shape)
        numbers = torch.arange(self.next, self.next + count, device="cpu")
        self.next += count
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


@runtime_checkable
class Plan(Protocol):
    """How a value is made."""

    def make(self, numbers: Numbers) -> Any:
        """Make the value, with elements counted by ``numbers``."""


class Printed:
    """A dataclass that prints as the code which makes it, without what is as it is by default."""

    def __repr__(self) -> str:
        shown = []
        positional = True
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and _alike(value, field.default):
                positional = False
                continue
            shown.append(code(value) if positional else f"{field.name}={code(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001 - as IPython and hypothesis call it
        printer.text(repr(self))


def build(plan: Any) -> Any:
    """Return the tree of a plan: an equal one every time, on new memory. What is no plan is returned as it is."""
    return plan.make(Numbers()) if isinstance(plan, Plan) else plan


def code(value: Any) -> str:
    """Return an expression for a plan, or for a plain value in one.

    It needs the names of ``statetree.testing``, its module ``samples``, and torch.
    """
    if type(value) is float:
        return _code_of_float(value)
    if type(value) is complex:
        return f"complex({code(value.real)}, {code(value.imag)})"
    if type(value) is tuple:
        return f"({', '.join(map(code, value))}{',' if len(value) == 1 else ''})"
    if type(value) is frozenset and value:  # equal ones may differ in their order
        return f"frozenset({{{', '.join(sorted(map(code, value)))}}})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{_name(type(value))}{code(tuple(value))}"
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _NAMED):
        return _name(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


def _code_of_float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    written = f'float("{value}")'
    bits, usual = (
        torch.tensor(number, dtype=torch.float64).view(torch.int64).item() for number in (value, eval(written))
    )
    return written if bits == usual else f"torch.tensor({bits}).view(torch.float64).item()"


def _name(value: Any) -> str:
    return f"samples.{value.__name__}" if value.__module__.endswith(".samples") else value.__name__


def _alike(value: Any, default: Any) -> bool:
    return type(value) is type(default) and repr(value) == repr(default)
