"""What objects hold besides what they contain, and short names for values."""

from __future__ import annotations

import copyreg
import functools
import types
from typing import TYPE_CHECKING, Any

from statetree.testing.values import bits_of_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What torch notes on its own objects when they are read, by class: the beginnings of the attributes' names.
_CACHES: dict[str, tuple[str, ...]] = {
    "torch.nested._internal.nested_tensor.NestedTensor": (
        *("_ragged_idx", "_size", "_strides", "_metadata_cache"),
        "_sym_",
    ),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": ("_hash",),
    "torch.distributed.device_mesh.DeviceMesh": ("_hash", "_flatten_mapping"),
}
#: The methods with which a class tells pickle what its instances hold.
_TELLERS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
#: How many characters of a value are shown.
SHORT = 80
HEAP_TYPE = 1 << 9  # set for classes made by a class statement, whose slots are Python's
#: What pickle refuses, but can be told apart all the same.
_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.MappingProxyType: lambda view: (types.MappingProxyType, (dict(view),)),
    memoryview: lambda view: (memoryview, (view.tobytes(), view.format, view.shape, view.readonly)),
}


def attributes_of(value: Any, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the instance attributes: those of ``__dict__`` in their order, then those in slots by name.

    Without those that torch sets when it reads one of its own objects.
    """
    cls: Any = type(value)
    caches = _caches_of(cls)
    found = getattr(value, "__dict__", None)
    named = found.items() if isinstance(found, dict) else ()  # ``list[int]`` passes on what its class has
    result = {name: kept for name, kept in named if name not in skip and not (caches and name.startswith(caches))}
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


@functools.lru_cache(maxsize=1024)
def _caches_of(cls: Any) -> tuple[str, ...]:
    return sum((_CACHES.get(f"{base.__module__}.{base.__qualname__}", ()) for base in cls.__mro__), ())


def is_made_of_attributes(cls: type) -> bool:
    """Whether the attributes of an instance that can be pickled are all that pickle takes."""
    return not stands_on_c(cls) and cls not in copyreg.dispatch_table and not list(_own_tellers(cls))


def refuses_pickle(cls: type) -> bool:
    """Whether a class written in Python says itself that its instances cannot be pickled, if they cannot."""
    return not stands_on_c(cls) and any(isinstance(teller, types.FunctionType) for teller in _own_tellers(cls))


def _own_tellers(cls: type) -> Iterator[Any]:
    tellers = ((getattr(cls, name, None), getattr(object, name, None)) for name in _TELLERS)
    return (own for own, inherited in tellers if own is not inherited)


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
    if type(padded[2]) is dict and not padded[2]:
        padded[2] = None  # an exception has an empty ``__dict__`` once somebody has looked for one
    for position in (3, 4):
        if padded[position] is not None:
            padded[position] = list(padded[position])
    return padded


def place(path: str) -> str:
    """Return a path as it is shown."""
    return path or "<root>"


def brief(value: Any) -> str:
    """Return a short representation of any value."""
    text = _shown(value)
    return text if len(text) < SHORT else f"{text[: SHORT - 3]}..."


def contrast(a: Any, b: Any) -> str:
    """Return short representations of two values that differ: of where they do, if they begin alike."""
    one, other = brief(a), brief(b)
    if one != other:
        return f"{one} against {other}"
    one, other = _shown(a), _shown(b)
    if one == other:
        if isinstance(a, (float, complex)) and isinstance(b, (float, complex)):
            return f"{one} against {other}, of bytes {bits_of_number(a).hex()} against {bits_of_number(b).hex()}"
        return f"both shown as {brief(a)}"
    first = next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    ends = slice(max(0, first - SHORT // 4), first + SHORT // 2)
    return f"...{one[ends]}... against ...{other[ends]}..."


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)
