"""Pickles of files that nobody vouches for: nothing that they name is imported, called or returned.

``pickle.Unpickler`` makes plain containers, and records of all that a pickle names. It does much by itself: it calls
what REDUCE and NEWOBJ find, sets attributes for BUILD and items for SETITEM, and hashes keys. So it never meets
anything but containers and records, which only keep what they are given. ``pickled_values`` then goes over these, and
makes values of the records that it knows, from checked arguments. What it meets is bounded in depth: hashing a tuple,
and freeing some objects, calls itself for each level on a stack that nobody checks.

A pickle that is made for it can still cost much time or memory.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from collections.abc import Set as AbstractSet

#: Levels of containers and records: an OrderedDict in an OrderedDict takes three.
_MAX_DEPTH: Final = 4000
#: In a tree: containers may be shared, so that a few bytes stand for any number.
_MAX_CONTAINERS: Final = 1 << 24
#: Hashing a tuple in a tuple takes some 55 bytes of the stack for each. A default stack has room for so many.
_HASH_BYTES: Final = 256
_FEW_TUPLES: Final = 4000


class BadPickle(Exception):
    """A pickle is damaged, or not of the kind that holds tensors."""


class StoredObject:
    """An object of a class that is not loaded from files: all that is known is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"


class Named:
    """A function or class that is known, where it is an argument and not called: its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Record:
    """What a pickle says of an object. Each function or class that it names is a subclass, and each call an instance.

    Attributes:
        name: The name of the function or class, with its module.
        args: What it is called with.
        state: What BUILD would set.
        items: What would be appended, or pairs that would be set; ``None`` if nothing.
    """

    __slots__ = ("args", "items", "state")
    name: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Record:  # noqa: D102
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, None
        return self

    args: tuple[Any, ...]
    state: Any
    items: list[Any] | None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def append(self, item: Any) -> None:
        """Keep an item."""
        self.items = self.items or []
        self.items.append(item)


class PersistentId(Record):
    """What a pickle says of a storage, as the only one of ``args``."""

    __slots__ = ()


class _Bytes(io.BytesIO):
    """Bytes of which pickle looks at many at once, and takes no memory for more than there are."""

    def peek(self, size: int) -> bytes:
        at = self.tell()
        return self.getvalue()[at : at + size]


class _Unpickler(pickle.Unpickler):
    """Makes records of all that a pickle names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_Bytes(data), encoding="utf-8")
        self.names: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self.names:
            self.names[full] = type("Record", (Record,), {"__slots__": (), "name": full})
        return self.names[full]

    def persistent_load(self, pid: Any) -> Any:
        return PersistentId(pid)


def read_records(data: bytes) -> tuple[Any, AbstractSet[str]]:
    """Return what a pickle holds, with records for all that it names, and these names.

    Raises:
        BadPickle: If it is damaged.
    """
    unpickler = _Unpickler(data)
    copyreg.clear_extension_cache()  # what pickle found for a number by itself: it would not ask again
    try:
        with collection_paused():
            return _on_a_stack_for(data, unpickler.load), unpickler.names.keys()
    except (IndexError, KeyError, EOFError, pickle.UnpicklingError):
        raise BadPickle("it is cut off, or refers to what it does not hold") from None
    except Exception as error:  # noqa: BLE001 - containers and records are given anything
        raise BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from None
    finally:
        copyreg.clear_extension_cache()


def _on_a_stack_for(data: bytes, load: Callable[[], Any]) -> Any:
    """Load on a stack on which the deepest key that the pickle may have can be hashed. It takes memory when used."""
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


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector from looking at the many containers that are made here time and again."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def check_depth(root: Any, skipped: Collection[str] = ()) -> list[Any]:
    """Return the containers and records in what ``read_records`` returned, what is inside of others before them.

    Args:
        root: What it returned.
        skipped: Names of records that are not entered.

    Raises:
        BadPickle: If they are nested too deeply, or if one holds itself.
    """
    found: list[Any] = []
    sizes: dict[int, int] = {}
    heights: dict[int, int] = {}  # 0 for those that are entered, and not yet left
    pending = [root]
    entered = 0
    while pending:
        value = pending[-1]
        height = heights.get(id(value))
        if height:
            pending.pop()
            continue
        children = [
            child for child in _children(value, skipped) if type(child) in _ENTERED or isinstance(child, Record)
        ]
        if height is None:
            heights[id(value)] = 0
            entered += 1
            if entered > _MAX_DEPTH:
                raise BadPickle("it is nested too deeply")
            if any(heights.get(id(child)) == 0 for child in children):
                raise BadPickle("it has a container that holds itself")
            pending += children
            continue
        heights[id(value)] = height = 1 + max((heights[id(child)] for child in children), default=0)
        sizes[id(value)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(value)] > _MAX_CONTAINERS:
            raise BadPickle("its containers are shared so often that it stands for more than a tree can have")
        if height > _MAX_DEPTH:
            raise BadPickle("it is nested too deeply")
        entered -= 1
        found.append(pending.pop())
    return found


_ENTERED: Final = frozenset([dict, list, tuple, set, frozenset])


def _children(value: Any, skipped: Collection[str]) -> Iterable[Any]:
    if isinstance(value, Record):
        return () if value.name in skipped else (value.args, value.state, value.items)
    if type(value) is dict:
        return (*value, *value.values())
    return value if type(value) in _ENTERED else ()
