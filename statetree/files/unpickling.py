"""Pickles of files that are not trusted: nothing that they name is imported, called or returned.

``pickle.Unpickler`` makes plain containers, and a ``Record`` of everything that a pickle names. It calls what REDUCE
and NEWOBJ find, sets attributes for BUILD and items for SETITEM, and hashes keys: so it must not meet anything that
does more than keep what it is given. Then values are made of the records, the innermost first, by functions that are
known by name and check their arguments.

Depth is bounded, since C code hashes tuples, and frees some objects, by calling itself without a check of the stack.
Time and memory are not: a pickle that is made for it can cost any amount of both.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from statetree.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Levels of containers and records: an OrderedDict in an OrderedDict takes three.
_MAX_DEPTH: Final = 4000
_CONTAINERS: Final = frozenset({dict, list, tuple, set, frozenset})
#: Most values in pickles: looked for first.
_ATOMS: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: A tuple in a tuple takes some 55 bytes of the stack to be hashed. A default stack has room for so many.
_HASH_BYTES: Final = 256
_FEW_TUPLES: Final = 4000


class BadPickle(Exception):
    """A pickle is damaged, or holds what cannot be made."""


class StoredObject:
    """An object of a class that is not loaded from files: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"


class Known(NamedTuple):
    """What a name stands for: makes the result of a call (of state and arguments), or is a value if not called."""

    make: Callable[..., Any] | None = None
    value: Any = None
    takes_state: bool = False


class Record:
    """What a pickle says of an object. Each name is a subclass, and each call of it an instance.

    Attributes:
        name: The name of the function or class, with its module.
        args: What it is called with; of a persistent id, its parts.
        state: What BUILD would set.
        items: What would be appended, or pairs that would be set; ``None`` if nothing.
    """

    __slots__ = ("args", "items", "state")
    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any] | None

    def __new__(cls, *args: Any) -> Record:  # noqa: D102
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def append(self, item: Any) -> None:
        """Keep an item."""
        self.items = self.items or []
        self.items.append(item)


class _PersistentId(Record):
    __slots__ = ()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        return type("Record", (Record,), {"__slots__": (), "name": full})

    def persistent_load(self, pid: Any) -> Any:
        return _PersistentId(*(pid if type(pid) is tuple else (pid,)))


def read_pickle(
    data: bytes, find: Callable[[str], Known | None], storage: Callable[..., Any] | None = None
) -> tuple[Any, list[str]]:
    """Return what a pickle holds, and the names in it of which objects are not loaded.

    Args:
        data: The pickle.
        find: Returns what a name stands for; ``None`` if it is not known.
        storage: Returns what the parts of a persistent id stand for. Without it, there may be none.

    Raises:
        BadPickle: If it is damaged, nested too deeply, or holds what cannot be made.
    """
    copyreg.clear_extension_cache()  # what pickle found for a number by itself: it would not ask again
    try:
        making = _Making(find, storage)
        return making.made(_records(data)), list(making.foreign)
    except (BadPickle, CheckpointError):  # the latter of a file that changed meanwhile
        raise
    except (IndexError, KeyError, EOFError, pickle.UnpicklingError):
        raise BadPickle("it is cut off, or refers to what it does not hold") from None
    except Exception as error:  # noqa: BLE001 - records and functions are given anything
        raise BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from None
    finally:
        copyreg.clear_extension_cache()


def _records(data: bytes) -> Any:
    """Load on a stack on which the deepest key that the pickle may have can be hashed. It takes memory when used."""
    load = _Unpickler(io.BufferedReader(io.BytesIO(data)), encoding="utf-8").load
    tuples = sum(map(data.count, (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)))
    tuples += min(data.count(pickle.TUPLE), data.count(pickle.MARK))
    if tuples <= _FEW_TUPLES:
        return load()
    with ThreadPoolExecutor(1) as executor:
        before = threading.stack_size(((tuples * _HASH_BYTES >> 20) + 8) << 20)
        try:
            running = executor.submit(load)
        finally:
            threading.stack_size(before)
        return running.result()


class _Failure(Exception):
    """Why a value cannot be made."""


class _Making:
    """Makes the values of records and containers, by their ids: what is one object stays one.

    A stack of its own stands for recursion, which Python would end at a thousand levels. What is inside of a container
    comes before it, so that a hash is only ever taken of what is finished, and is known to be shallow.
    """

    def __init__(self, find: Callable[[str], Known | None], storage: Callable[..., Any] | None) -> None:
        self.foreign: dict[str, None] = {}
        self._find, self._storage = find, storage
        self._names: dict[str, Known | None] = {}
        self._values: dict[int, Any] = {}
        self._heights: dict[int, int] = {}  # 0 for those that are entered, and not made yet

    def made(self, root: Any) -> Any:
        pending: list[tuple[Any, list[Any] | None]] = [(root, None)] if _has_parts(root) else []
        heights = self._heights
        depth = 0
        while pending:
            value, inside = pending.pop()
            if inside is None:
                if heights.get(id(value)):
                    continue
                inside = [part for part in self._inside(value) if _has_parts(part)]
                if inside:
                    heights[id(value)] = 0
                    depth += 1
                    if 0 in [heights.get(id(part)) for part in inside]:
                        raise BadPickle("it has a container that holds itself")
                    if depth > _MAX_DEPTH:
                        raise BadPickle("it is nested too deeply")
                    pending += [(value, inside), *[(part, None) for part in inside]]
                    continue
            else:  # it was made meanwhile
                depth -= 1
            heights[id(value)] = height = 1 + max([heights[id(part)] for part in inside], default=0)
            try:
                self._values[id(value)] = self._value_of(value)
            except Exception as error:  # noqa: BLE001 - what only an object that is not loaded holds is not needed
                self._values[id(value)] = _Failure(error)
            if height > _MAX_DEPTH:
                raise BadPickle("it is nested too deeply")
        return self._part(root)

    def _known(self, name: str) -> Known | None:
        if name not in self._names:
            self._names[name] = self._find(name)
            if self._names[name] is None:
                self.foreign[name] = None
        return self._names[name]

    def _inside(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Record):
            return (*value, *value.values()) if type(value) is dict else tuple(value)
        return *value.args, value.state, value.items

    def _part(self, value: Any, *, is_argument: bool = False) -> Any:
        if type(value) in _ATOMS:
            return value
        if _has_parts(value):
            made = self._values[id(value)]
            if isinstance(made, _Failure):
                raise made.args[0]
            return made
        if not (isinstance(value, type) and issubclass(value, Record)):
            return value
        known = self._known(value.name)
        if known is not None and known.value is not None:
            return known.value
        if not is_argument:  # a class as a value: not loaded, either
            self.foreign[value.name] = None
        return StoredObject(value.name)

    def _value_of(self, value: Any) -> Any:
        if not isinstance(value, Record):
            parts = [self._part(part) for part in value]
            both = zip(parts, map(self._part, value.values()), strict=True) if type(value) is dict else parts
            return type(value)(both)
        if type(value) is _PersistentId:
            if self._storage is None:
                raise BadPickle("it refers to what is outside of it")
            return self._storage(*[self._part(arg, is_argument=True) for arg in value.args])
        known = self._known(value.name)
        if known is None:
            return StoredObject(value.name)
        args = [self._part(arg, is_argument=True) for arg in value.args]
        for arg in args:  # what is made of an object that is not loaded is not loaded
            if isinstance(arg, StoredObject) and self._known(arg.name) is None:
                return arg
        if known.make is None:
            raise BadPickle(f"it makes a {value.name} in an unknown way")
        state, items = self._part(value.state), self._part(value.items)
        made = known.make(state, *args) if known.takes_state else known.make(*args)
        if items is not None:
            _fill(made, items)
        if state is not None and not known.takes_state:
            raise BadPickle(f"it sets the state of a {type(made).__name__}")
        return made


def _has_parts(value: Any) -> bool:
    """Whether a value is to be made of others. A container of atoms, as most shapes are, is what it will be."""
    cls = type(value)
    if cls in _ATOMS:
        return False
    if cls in _CONTAINERS:
        are_atoms = _ATOMS.issuperset(map(type, value))
        return not (are_atoms and (cls is not dict or _ATOMS.issuperset(map(type, value.values()))))
    return issubclass(cls, Record)


def _fill(made: Any, items: list[Any]) -> None:
    if type(made) is deque:
        made.extend(items)
    elif type(made) in (OrderedDict, Counter, defaultdict):
        made.update(items) if type(made) is not Counter else dict.update(made, items)
    else:
        raise BadPickle(f"it sets items of a {type(made).__name__}")
