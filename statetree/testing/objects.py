"""What objects hold besides what they contain, and short names for values."""

from __future__ import annotations

import copyreg
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HEAP_TYPE = 1 << 9  # set for classes made by a class statement, whose slots are Python's
#: What pickle refuses, but can be told apart all the same.
_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.MappingProxyType: lambda view: (types.MappingProxyType, (dict(view),)),
    memoryview: lambda view: (memoryview, (view.tobytes(), view.format, view.shape, view.readonly)),
}


def attributes_of(value: Any, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the instance attributes: those of ``__dict__`` in their order, then those in slots by name."""
    result = {name: kept for name, kept in (getattr(value, "__dict__", None) or {}).items() if name not in skip}
    slots: dict[str, Any] = {}
    for base in type(value).__mro__:
        if base.__flags__ & HEAP_TYPE:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and name not in skip:
                    try:
                        slots.setdefault(f"{name} of {base.__qualname__}", member.__get__(value))
                    except AttributeError:
                        continue
    return {**result, **dict(sorted(slots.items()))}


def stands_on_c(cls: type) -> bool:
    """Whether instances of a class may hold something besides attributes: one of its bases is written in C."""
    return any(base is not object and not base.__flags__ & HEAP_TYPE for base in cls.__mro__)


def reduced(value: Any) -> Any:
    """Return what pickle would make of an object, with its iterators spelled out; ``None`` if it cannot."""
    try:
        reducer = _REDUCERS.get(type(value)) or copyreg.dispatch_table.get(type(value))
        result = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception:
        return None
    if isinstance(result, str):
        return result
    padded = [*result, *[None] * (6 - len(result))]
    for position in (3, 4):
        if padded[position] is not None:
            padded[position] = list(padded[position])
    return padded


def brief(value: Any) -> str:
    """Return a short representation of any value."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) < 80 else f"{text[:77]}..."
