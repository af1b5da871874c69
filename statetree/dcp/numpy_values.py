"""NumPy's scalars, arrays and random states, made from checked data as ``reconstructors`` has it.

NumPy is imported when a checkpoint has a value of it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from statetree.files.safe_pickle import BadPickle, Named

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPE: Final = re.compile(r"[?biufcmMSUV]\d{0,9}")
_MAX_DIMS: Final = 32
_UNITS: Final = frozenset(["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"])
_PICKLE: Final = "numpy.random._pickle."
_SEEDS: Final = "numpy.random.bit_generator."
_BIT_GENERATORS: Final = {
    "numpy.random._mt19937.MT19937": "MT19937",
    "numpy.random._pcg64.PCG64": "PCG64",
    "numpy.random._pcg64.PCG64DXSM": "PCG64DXSM",
    "numpy.random._philox.Philox": "Philox",
    "numpy.random._sfc64.SFC64": "SFC64",
}
#: Arrays of states: their names, dtypes and lengths. NumPy copies them without a look, and positions in them.
_STATE_ARRAYS: Final = {
    "key": {("uint32", 624), ("uint64", 2)},
    "state": {("uint64", 4)},
    "counter": {("uint64", 4)},
    "buffer": {("uint64", 4)},
}
_STATE_POSITIONS: Final = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}
#: Classes that are no functions to call, but arguments of these.
CLASSES: Final = frozenset({"numpy.ndarray", f"{_SEEDS}SeedSequence", *_BIT_GENERATORS})


class PendingSeed:
    """A ``SeedSequence`` whose entropy is not yet known: it cannot be changed once it is made."""

    def __init__(self) -> None:
        self.made: Any = None


def is_array_of_numbers(value: Any) -> bool:
    """Whether a value is an array that holds no objects: it may be large, and need not be pickled to look into it."""
    cls = type(value)
    is_array = cls.__module__ == "numpy" and cls.__qualname__ == "ndarray"
    return is_array and value.dtype.kind in "biufc" and value.ndim <= _MAX_DIMS


def expect(holds: object, what: str) -> None:
    """Raise ``BadPickle`` unless something holds."""
    if not holds:
        raise BadPickle(f"it makes {what} of something else")


def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        raise BadPickle("it has values of NumPy, which is not installed") from None
    return np


def _dtype(text: Any, *_flags: Any) -> Any:
    expect(type(text) is str and _DTYPE.fullmatch(text), "a dtype")
    return _numpy().dtype(text, False, True)  # noqa: FBT003 - a copy, which may be changed


def _scalar(dtype: Any, data: Any) -> Any:
    np = _numpy()
    expect(isinstance(dtype, np.dtype) and not dtype.hasobject, "a scalar")
    expect(type(data) is bytes and len(data) == dtype.itemsize, "a scalar")
    return np.frombuffer(data, dtype)[0] if data else dtype.type()


def _array(cls: Any, *_args: Any) -> Any:
    expect(type(cls) is Named and cls.name == "numpy.ndarray", "an array")
    return _numpy().empty(0, "b")


def _seed(*_args: Any) -> PendingSeed:
    return PendingSeed()


def _bit_generator(cls: Any) -> Any:
    name = str(_BIT_GENERATORS.get(cls.name) if type(cls) is Named else cls)  # older versions pass its name
    expect(name in _BIT_GENERATORS.values(), "a bit generator")
    return getattr(_numpy().random, name)()


def _of_bit_generator(name: str) -> Callable[..., Any]:
    def make(inner: Any, *_more: Any) -> Any:
        np = _numpy()
        expect(isinstance(inner, np.random.BitGenerator), f"a {name}")
        return getattr(np.random, name)(inner)

    return make


#: Functions by the names that pickles have for them.
CALLS: Final[dict[str, Callable[..., Any]]] = {
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    f"{_PICKLE}__generator_ctor": _of_bit_generator("Generator"),
    f"{_PICKLE}__randomstate_ctor": _of_bit_generator("RandomState"),
    f"{_PICKLE}__bit_generator_ctor": _bit_generator,
    f"{_SEEDS}__pyx_unpickle_SeedSequence": _seed,
}


def set_state(target: Any, state: Any) -> bool:
    """Set the state of an object that one of these functions made; return whether that is known."""
    if type(target) is PendingSeed:
        _set_seed(target, state)
        return True
    if not type(target).__module__.startswith("numpy"):
        return False
    np = _numpy()
    if isinstance(target, np.dtype):
        _set_dtype(target, state)
    elif type(target) is np.ndarray:
        _set_array(np, target, state)
    elif isinstance(target, np.random.BitGenerator):
        _set_bit_generator(np, target, state)
    elif type(target) is np.random.RandomState:
        _check_random_state(np, state)
        target.set_state(state)
    else:
        return state is None and type(target) is np.random.Generator
    return True


def _set_dtype(target: Any, state: Any) -> None:
    expect(type(state) is tuple and len(state) in (8, 9), "a dtype")
    version, order, *parts, size, alignment, flags = state[:8]
    expect(type(version) is int and type(order) is str and order in ("<", ">", "|", "="), "a dtype")
    expect(parts == [None, None, None], "a dtype of simple values")  # no fields, no arrays in it
    expect(size in (-1, target.itemsize) and alignment in (-1, target.alignment) and type(flags) is int, "a dtype")
    unit = state[8] if len(state) == 9 else None
    if unit is not None:
        _, (name, *counts) = unit
        name = name.decode() if type(name) is bytes else name
        expect(type(name) is str and name in _UNITS, "a dtype")
        expect(len(counts) == 3 and all(type(n) is int and n > 0 for n in counts), "a dtype")
        expect(target.kind in "mM", "a dtype")
        target.__setstate__((version, order, None, None, None, size, alignment, flags, ({}, (name.encode(), *counts))))
    elif order in "<>":
        target.__setstate__((version, order, None, None, None, size, alignment, flags))


def _set_array(np: Any, target: Any, state: Any) -> None:
    expect(type(state) is tuple and len(state) == 5, "an array")
    _version, shape, dtype, by_columns, data = state
    expect(
        type(shape) is tuple and len(shape) <= _MAX_DIMS and all(type(n) is int and n >= 0 for n in shape), "an array"
    )
    expect(isinstance(dtype, np.dtype) and not dtype.hasobject and type(data) is bytes, "an array of simple values")
    expect(math.prod(shape) * dtype.itemsize == len(data), "an array")
    target.__setstate__((1, shape, dtype, bool(by_columns), data))


def _set_seed(target: PendingSeed, state: Any) -> None:
    np = _numpy()
    fields = state[0] if type(state) is tuple and len(state) == 1 else state
    expect(type(fields) is tuple and len(fields) >= 5, "a SeedSequence")
    entropy, spawned, _pool, pool_size, spawn_key = fields[:5]
    expect(type(spawned) is int and type(pool_size) is int and 4 <= pool_size <= 1024, "a SeedSequence")
    expect(type(spawn_key) is tuple and all(type(part) is int for part in spawn_key), "a SeedSequence")
    listed = entropy if type(entropy) is list else [] if entropy is None else [entropy]
    expect(all(type(part) is int for part in listed), "a SeedSequence")
    target.made = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned)


def _set_bit_generator(np: Any, target: Any, state: Any) -> None:
    inner, seed = state if type(state) is tuple and len(state) == 2 else (state, None)
    _check_random_state(np, inner)
    if seed is None:
        target.state = inner
        return
    expect(type(seed) is PendingSeed and seed.made is not None, "a bit generator")
    target.__setstate__((inner, seed.made))


def _check_random_state(np: Any, state: Any) -> None:
    expect(type(state) is dict and type(state.get("bit_generator")) is str, "a random state")
    inner = state.get("state")
    for name, value in (*state.items(), *(inner.items() if type(inner) is dict else ())):
        if type(value) is np.ndarray:
            expect((str(value.dtype), value.size) in _STATE_ARRAYS.get(name, ()) and value.ndim == 1, "a random state")
        elif name in _STATE_POSITIONS:
            expect(type(value) is int and 0 <= value <= _STATE_POSITIONS[name], "a random state")
        else:
            expect(type(value) in (int, float, str) or value is inner, "a random state")
