"""Plans and layouts print as the code that makes them."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import math
import struct
import types
from typing import Any

import torch

from statetree.testing import samples

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class PrintsAsCode:
    """A dataclass that prints as the code which makes it, without what is as it is by default."""

    def __repr__(self) -> str:
        shown = []
        positional = True
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and repr(value) == repr(field.default):
                positional = False
            else:
                shown.append(code(value) if positional else f"{field.name}={code(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001 - as IPython and hypothesis call it
        printer.text(repr(self))


def has_code(value: Any) -> bool:
    """Whether ``code`` returns an expression that makes the value."""
    if isinstance(value, (tuple, frozenset)) and type(value) in (tuple, frozenset, samples.NamedPair):
        return all(map(has_code, value))
    if isinstance(value, _NAMED):
        return any(getattr(module, value.__name__, None) is value for module in (samples, builtins))
    return type(value) in _PLAIN or isinstance(value, samples.Color)


def code(value: Any) -> str:
    """Return an expression for a plain value, or for a plan by the names of ``statetree.testing.plans``."""
    if type(value) is str:
        is_simple = value.isprintable() and not set(value) & set("\"'\\")
        return f'"{value}"' if is_simple else repr(value)
    if type(value) is float and not math.isfinite(value):
        usual = struct.pack("<d", value) == struct.pack("<d", float(repr(value)))
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        return f'float("{value}")' if usual else f"torch.tensor({bits}).view(torch.float64).item()"
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
    return f'torch.device("{value}")' if isinstance(value, torch.device) else repr(value)


def _name(value: Any) -> str:
    return f"samples.{value.__name__}" if value.__module__ == samples.__name__ else value.__name__
