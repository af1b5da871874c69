"""What plain values of a checkpoint are made of: functions that make objects of well-known classes from checked data.

A pickle names a function and its arguments. Those that are named here make objects of torch, NumPy and the standard
library. Each checks its arguments first, and makes nothing that runs code, opens anything, or takes memory beyond what
it was given. Where a class' own way to be unpickled trusts its arguments, it is not used.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import re
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.dcp import numpy_values
from statetree.dcp.numpy_values import expect
from statetree.files.pickled_values import check_keys
from statetree.files.safe_pickle import BadPickle, Named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NUMBERS: Final = (int, float)
_MOST_DIGITS: Final = 10_000
_FRACTION: Final = re.compile(r"-?\d+(/\d+)?")
_ARRAYS: Final = frozenset("bBhHiIlLqQfd")
#: Classes that a value may be, or that a ``defaultdict`` may call.
CLASSES: Final[Mapping[str, type]] = {
    f"builtins.{cls.__name__}": cls
    for cls in (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple, type(None))
} | {"builtins.long": int, "builtins.unicode": str, "collections.OrderedDict": collections.OrderedDict}


def _path(cls: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        expect(all(type(part) is str for part in parts), "a path")
        return cls(*parts)

    return make


def _zone(zone: Any) -> datetime.timezone | None:
    expect(zone is None or type(zone) is datetime.timezone, "a time")
    return zone  # type: ignore[no-any-return]


def _datetime(data: Any, zone: Any = None) -> datetime.datetime:
    # The class itself takes these bytes as they are, days and hours that do not exist included.
    expect(type(data) is bytes and len(data) == 10, "a datetime")
    year, month, day = int.from_bytes(data[:2], "big"), data[2] & 0x7F, data[3]
    hour, minute, second = data[4:7]
    micros = int.from_bytes(data[7:], "big")
    return datetime.datetime(year, month, day, hour, minute, second, micros, _zone(zone), fold=data[2] >> 7)


def _date(data: Any) -> datetime.date:
    expect(type(data) is bytes and len(data) == 4, "a date")
    return datetime.date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _time(data: Any, zone: Any = None) -> datetime.time:
    expect(type(data) is bytes and len(data) == 6, "a time")
    clock = (data[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:], "big"))
    return datetime.time(*clock, tzinfo=_zone(zone), fold=data[0] >> 7)


def _timedelta(*parts: Any) -> datetime.timedelta:
    expect(len(parts) <= 3 and all(type(part) is int for part in parts), "a timedelta")
    return datetime.timedelta(*parts)


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    expect(type(offset) is datetime.timedelta and all(type(part) is str for part in name), "a timezone")
    return datetime.timezone(offset, *name)


def _decimal(text: Any) -> decimal.Decimal:
    expect(type(text) is str and len(text) <= _MOST_DIGITS, "a Decimal")
    return decimal.Decimal(text)


def _fraction(*parts: Any) -> fractions.Fraction:
    if len(parts) == 1 and type(parts[0]) is str:  # "1e999999999" would be written out
        expect(_FRACTION.fullmatch(parts[0]) and len(parts[0]) <= _MOST_DIGITS, "a Fraction")
        return fractions.Fraction(parts[0])
    expect(1 <= len(parts) <= 2 and all(type(part) is int for part in parts), "a Fraction")
    return fractions.Fraction(*parts)


def _range(*parts: Any) -> range:
    expect(1 <= len(parts) <= 3 and all(type(part) is int for part in parts), "a range")
    return range(*parts)


def _slice(*parts: Any) -> slice:
    expect(len(parts) == 3 and all(part is None or type(part) in _NUMBERS for part in parts), "a slice")
    return slice(*parts)


def _frozenset(items: Any = ()) -> frozenset[Any]:
    expect(type(items) in (list, tuple), "a frozenset")
    check_keys(items)
    return frozenset(items)


def _deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    expect(type(items) in (list, tuple) and (maxlen is None or type(maxlen) is int), "a deque")
    return collections.deque(items, maxlen)


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    known = factory is None or (type(factory) is Named and factory.name in CLASSES)
    expect(known, "a defaultdict with a factory that is not builtin")
    return collections.defaultdict(None if factory is None else CLASSES[factory.name])


def _array(kind: Any, items: Any) -> array.array[Any]:
    is_plain = type(items) is list and all(type(item) in _NUMBERS for item in items)
    expect(type(kind) is str and kind in _ARRAYS and is_plain, "an array")
    return array.array(kind, items)


def _empty(cls: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        expect(not args, f"a {cls.__name__}")
        return cls.__new__(cls) if cls is uuid.UUID else cls()

    return make


def _generator(device: Any = None) -> torch.Generator:
    expect(type(device) is torch.device, "a Generator")
    return torch.Generator(device)


#: Functions by the names that pickles have for them.
CALLS: Final[dict[str, Callable[..., Any]]] = {
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "builtins.bytes": lambda: b"",  # pickle makes empty ones by calling the class
    "builtins.range": _range,
    "builtins.xrange": _range,
    "builtins.slice": _slice,
    "builtins.frozenset": _frozenset,
    "collections.deque": _deque,
    "collections.defaultdict": _defaultdict,
    "array.array": _array,
    "torch._C.Generator": _generator,
    **{
        f"{module}.{cls.__name__}": _path(cls)
        for module in ("pathlib", "pathlib._local")
        for cls in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    },
    **{
        f"{cls.__module__}.{cls.__qualname__}": _empty(cls)
        for cls in (argparse.Namespace, types.SimpleNamespace, uuid.UUID, random.Random)
    },
}


def set_state(target: Any, state: Any) -> bool:
    """Set the state of an object that one of these functions made; return whether that is known."""
    cls = type(target)
    if cls in (argparse.Namespace, types.SimpleNamespace):
        expect(type(state) is dict and all(type(name) is str for name in state), f"a {cls.__name__}")
        vars(target).update(state)
    elif cls is uuid.UUID:
        number = state.get("int") if type(state) is dict else None
        expect(type(number) is int and 0 <= number < 1 << 128, "a UUID")
        target.__setstate__({"int": number})
    elif cls is random.Random:
        expect(type(state) is tuple and len(state) == 3 and type(state[1]) is tuple, "a Random")
        expect(all(type(part) is int for part in state[1]), "a Random")
        expect(state[0] == 3 and (state[2] is None or type(state[2]) is float), "a Random")
        target.setstate(state)
    elif cls is torch.Generator:
        _set_generator(target, state)
    else:
        return numpy_values.set_state(target, state)
    return True


def _set_generator(target: torch.Generator, state: Any) -> None:
    expect(type(state) is tuple and len(state) == 3, "a Generator")
    seed, offset, data = state
    expect(type(seed) is int and (offset is None or type(offset) is int), "a Generator")
    expect(type(data) is torch.Tensor and data.dtype is torch.uint8, "a Generator")
    target.manual_seed(seed)
    if offset is not None:
        target.set_offset(offset)
    target.set_state(data.clone())


def enum_class(module: str, name: str) -> Any:
    """Return a class of enumerations, or ``None``. Nothing is imported for a file's sake."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, enum.EnumMeta) else None


def enum_member(cls: type[enum.Enum], value: Any) -> enum.Enum:
    """Return the member of an enumeration that has a value, without running the code of its class."""
    for member in cls.__members__.values():
        own = member._value_
        if type(own) is type(value) and own == value:
            return member
    if issubclass(cls, enum.Flag) and type(value) is int and _is_plain_flag(cls):
        return cls(value)
    raise BadPickle(f"it has a value that no member of {cls.__qualname__} has")


def _is_plain_flag(cls: type[enum.Flag]) -> bool:
    """Whether combinations of members are made by the standard library's code alone."""
    own: Any = cls._missing_
    standard: Any = enum.Flag._missing_
    return own.__func__ is standard.__func__ and cls.__new__ is enum.Flag.__new__
