"""What names in pickles stand for: values of the standard library and of NumPy, made from checked arguments.

Where a class checks what it is given, it is called as it is. None of these runs code, opens anything, or takes memory
beyond what it is given. NumPy is imported when a pickle has a value of it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import re
import sys
import types
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from statetree.files.unpickling import BadPickle, ForeignValue, Known, StoredObject, shallow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Classes that a value may be, or that a ``defaultdict`` may call.
CLASSES: Final[Mapping[str, type]] = {
    f"builtins.{cls.__name__}": cls
    for cls in (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple, type(None))
} | {"builtins.long": int, "builtins.unicode": str, "collections.OrderedDict": collections.OrderedDict}


def require(holds: object, what: str) -> None:
    """Raise ``BadPickle`` unless something holds."""
    if not holds:
        raise BadPickle(f"it makes {what} of something else")


def find(name: str) -> Known | None:
    """Return what a name stands for. Enumerations are known if their module is imported already."""
    if name in KNOWN:
        return KNOWN[name]
    module, _, own = name.rpartition(".")
    cls = vars(sys.modules[module]).get(own) if module in sys.modules else None
    return Known(partial(_member, cls)) if isinstance(cls, type) and issubclass(cls, enum.Enum) else None


def _member(cls: type[enum.Enum], value: Any) -> enum.Enum:
    """Return the member of an enumeration that has a value, without running the code of its class."""
    for member in cls.__members__.values():
        own = member._value_
        if type(own) is type(value) and own == value:
            return member
    if issubclass(cls, enum.Flag) and type(value) is int:
        own, standard = (getattr(each._missing_, "__func__", None) for each in (cls, enum.Flag))
        if own is standard and cls.__new__ is enum.Flag.__new__:  # combinations are made by Python's own code
            return cls(value)
    # One of a later version of the class, or one that its own code makes.
    raise ForeignValue(f"{cls.__module__}.{cls.__qualname__}")


def _encoded(text: Any = b"", codec: Any = "latin1") -> bytes:
    require(codec in ("latin1", "latin-1") and isinstance(text, (str, bytes)), "bytes")
    return text.encode("latin1") if isinstance(text, str) else text


def _set_of(cls: type) -> Callable[..., Any]:
    return lambda items=(): cls(shallow(items))


def _counter(counts: Any = None) -> collections.Counter[Any]:
    require(counts is None or type(counts) is dict, "a Counter")
    return collections.Counter(counts)


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    pairs = items.items() if type(items) is dict else items  # lists in pickles of Python 2
    require(all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs), "an OrderedDict")
    return collections.OrderedDict(zip(shallow(pair[0] for pair in pairs), [pair[1] for pair in pairs], strict=True))


def _slice(*bounds: Any) -> slice:
    require(all(type(bound) in (int, type(None)) for bound in bounds), "a slice")  # which is hashed with its bounds
    return slice(*bounds)


def _moment(cls: Any) -> Callable[..., Any]:
    # The class takes what it pickled as it is, days and hours that do not exist included. ``replace`` looks at them.
    return lambda *args: cls(*args).replace()


def _namespace(cls: type) -> Known:
    def make(state: Any) -> Any:
        made = cls()
        vars(made).update(**state)
        return made

    return Known(make, takes_state=True)


def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        raise ForeignValue("numpy, which is not installed") from None
    return np


_DTYPE: Final = re.compile(r"[?biufcSUVOMm]\d{0,9}")


def _dtype(state: Any, text: Any, *_flags: Any) -> Any:
    _version, order, *parts = state[:5]
    require(_DTYPE.fullmatch(text) and order in ("<", ">", "|", "="), "a dtype")
    if text[0] in "OMm" or parts != [None, None, None] or len(state) != 8:  # addresses, units of time, fields
        raise ForeignValue(f"numpy.dtype({text!r})")
    return _numpy().dtype(f"{order}{text}")


def _scalar(dtype: Any, data: Any) -> Any:
    return _numpy().frombuffer(data, dtype)[0] if data else dtype.type()


def _array(state: Any, cls: StoredObject, *_args: Any) -> Any:
    np = _numpy()
    require(cls.name == "numpy.ndarray", "an array")
    _version, shape, dtype, by_columns, data = state
    # NumPy's own ``__setstate__`` takes any shape, and addresses of objects.
    flat = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if by_columns else "C").copy(order="K")


KNOWN: Final[dict[str, Known]] = {
    **{name: Known(value=cls) for name, cls in CLASSES.items()},
    "builtins.complex": Known(complex, complex),
    **{f"builtins.{cls.__name__}": Known(_set_of(cls), cls) for cls in (frozenset, set)},
    "builtins.Ellipsis": Known(value=...),
    "builtins.bytes": Known(lambda: b"", bytes),  # pickle makes empty ones by calling the class
    "builtins.bytearray": Known(lambda *args: bytearray(_encoded(*args))),
    "builtins.range": Known(range),
    "builtins.slice": Known(_slice),
    "builtins.xrange": Known(range),
    "_codecs.encode": Known(_encoded),
    "collections.Counter": Known(_counter),
    "collections.OrderedDict": Known(_ordered, collections.OrderedDict),
    "collections.defaultdict": Known(collections.defaultdict),
    "collections.deque": Known(collections.deque),
    **{f"datetime.{cls.__name__}": Known(_moment(cls)) for cls in (datetime.date, datetime.datetime, datetime.time)},
    **{f"datetime.{cls.__name__}": Known(cls) for cls in (datetime.timedelta, datetime.timezone)},
    **{
        f"{module}.{cls.__name__}": Known(cls)
        for module in ("pathlib", "pathlib._local")
        for cls in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    },
    "argparse.Namespace": _namespace(argparse.Namespace),
    "types.SimpleNamespace": _namespace(types.SimpleNamespace),
    "uuid.UUID": Known(lambda state: uuid.UUID(int=state["int"]), takes_state=True),
    "numpy.dtype": Known(_dtype, takes_state=True),
    "numpy.ndarray": Known(),
    **{f"numpy.{core}.multiarray.scalar": Known(_scalar) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": Known(_array, takes_state=True) for core in ("core", "_core")},
}
