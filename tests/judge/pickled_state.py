"""What pickle would take of an object, and whether its attributes are all that it holds."""

from __future__ import annotations

import copyreg
import types
from typing import TYPE_CHECKING, Any

from tests.judge.objects import caches_of, stands_on_c

if TYPE_CHECKING:
    from collections.abc import Callable

#: The methods with which a class tells pickle what its instances hold.
_TELLERS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
#: What pickle refuses, but can be told apart all the same.
_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.MappingProxyType: lambda view: (types.MappingProxyType, (dict(view),)),
    memoryview: lambda view: (memoryview, (view.tobytes(), view.format, view.shape, view.readonly)),
}


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
    if type(padded[2]) is dict:
        cls: Any = type(value)
        caches = caches_of(cls)
        kept = {name: held for name, held in padded[2].items() if not (caches and str(name).startswith(caches))}
        padded[2] = kept or None  # an exception has an empty ``__dict__`` once somebody has looked for one
    for position in (3, 4):
        if padded[position] is not None:
            padded[position] = list(padded[position])
    return padded


def holds_attributes_only(cls: type) -> bool:
    """Whether the attributes of an instance are all that it holds: nothing is in C, and pickle is told nothing else."""
    return not (stands_on_c(cls) or cls in copyreg.dispatch_table or _own_tellers(cls))


def refuses_pickle(cls: type) -> bool:
    """Whether a class written in Python says itself that its instances cannot be pickled, if they cannot."""
    return not stands_on_c(cls) and any(isinstance(teller, types.FunctionType) for teller in _own_tellers(cls))


def _own_tellers(cls: type) -> list[Any]:
    tellers = ((getattr(cls, name, None), getattr(object, name, None)) for name in _TELLERS)
    return [own for own, inherited in tellers if own is not inherited]
