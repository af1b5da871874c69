"""Pickles of files that are not trusted: nothing that they name is imported, called or returned.

A name stands for what is known of it: a value, or a function that checks what it is given. A name that is not known
stands for a ``StoredObject``, and so does all that is made of one, or of what was. No instruction sets items or
attributes of anything but containers that are known, and no key is hashed before it is known to be shallow, since C
code hashes tuples by calling itself without a check of the stack.

Time and memory are not bounded: a pickle that is made for it can cost any amount of both.
"""

from __future__ import annotations

import argparse
import io
import pickle
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from statetree.errors import CheckpointError, unsignalled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_DEEPEST_KEY: Final = 100
#: Python frees a defaultdict in another one by calling itself.
_MAX_DEFAULTDICTS: Final = 10_000
#: Instructions that call or find what a pickle says in another way than those below.
_LEFT_OUT: Final = (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.DICT)


#: What holds other values, of all that is made.
_HOLDERS: Final = (dict, list, tuple, set, frozenset, deque)
_WITH_ATTRIBUTES: Final = (types.SimpleNamespace, argparse.Namespace)


class BadPickle(Exception):
    """A pickle is damaged, or holds what cannot be made."""


class ForeignValue(Exception):
    """A value is well-formed, but of a kind that is not made. The text names it, as a class that is not known."""


class StoredObject:
    """An object of a class that is not loaded from files: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"


class _NotMade(StoredObject):
    """What a call would have made that is not known, or failed."""


class _Unfinished(StoredObject):
    """An object that is made once its state is known."""

    def __init__(self, name: str, known: Known, args: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.known, self.args = known, args


class Known(NamedTuple):
    """What a name stands for: makes the result of a call (of state and arguments), or is a value if not called."""

    make: Callable[..., Any] | None = None
    value: Any = None
    takes_state: bool = False


# The one in C has no methods for instructions: it would set attributes and items of anything.
_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # of a class that type checkers know too little of
    dispatch: Final = {code: load for code, load in _PythonUnpickler.dispatch.items() if bytes([code]) not in _LEFT_OUT}

    def __init__(
        self, file: IO[bytes], find: Callable[[str], Known | None], storage: Callable[..., Any] | None
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self.foreign: dict[str, None] = {}
        self.failures: list[Exception] = []
        self._find, self._storage = find, storage
        self._values: dict[str, Any] = {}
        self._known: dict[int, tuple[str, Known | None]] = {}  # by the ids of these values
        self._num_defaultdicts = 0

    def read(self) -> Any:
        found = self.load()
        if self.failures and not self.foreign:
            raise self.failures[0]
        return found

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self._values:
            known = self._find(full)
            if known is None:
                self.foreign[full] = None
            self._values[full] = value = StoredObject(full) if known is None or known.value is None else known.value
            self._known[id(value)] = full, known
        return self._values[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise BadPickle("it refers to what is outside of it")
        return self._storage(*(pid if type(pid) is tuple else (pid,)))

    def load_call(self) -> None:
        self._call(self.stack.pop())

    def load_newobj_ex(self) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self._call(args, takes_names=bool(named))

    def _call(self, args: Any, *, takes_names: bool = False) -> None:
        called = self.stack[-1]
        if isinstance(called, _NotMade):  # a method of a class that is not known, say
            self.stack[-1] = _NotMade(called.name)
            return
        if id(called) not in self._known:
            raise BadPickle(f"it calls what is no name, but a {type(called).__name__}")
        name, known = self._known[id(called)]
        if known is not None and takes_names:
            raise BadPickle(f"it makes a {name} in an unknown way")
        if known is not None and known.takes_state:
            self.stack[-1] = _Unfinished(name, known, args)
        else:
            self.stack[-1] = self._made(name, known, args)

    def _made(self, name: str, known: Known | None, args: Sequence[Any]) -> Any:
        if known is None or any(map(self._is_foreign, args)):
            return _NotMade(name)
        if known.make is None:
            raise BadPickle(f"it makes a {name} in an unknown way")
        try:
            made = known.make(*args)
        except CheckpointError:  # a file that changed meanwhile
            raise
        except ForeignValue as foreign:
            self.foreign[str(foreign)] = None
            return _NotMade(name)
        except unsignalled(Exception) as error:  # what only an object that is not loaded holds is not needed
            self.failures.append(error)
            return _NotMade(name)
        self._num_defaultdicts += type(made) is defaultdict
        if self._num_defaultdicts > _MAX_DEFAULTDICTS:
            raise BadPickle(f"it has more than {_MAX_DEFAULTDICTS} mappings of the class defaultdict")
        return made

    def _is_foreign(self, value: Any) -> bool:
        return isinstance(value, _NotMade) or (isinstance(value, StoredObject) and value.name in self.foreign)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Unfinished):
            made = self._made(target.name, target.known, (state, *target.args))
            self.stack[-1] = made
            # Its number was given before what its state consists of got theirs.
            number = next((number for number in reversed(self.memo) if self.memo[number] is target), None)
            if number is not None:
                self.memo[number] = made
        elif type(target) is OrderedDict:
            set_attributes(target, state)
        elif not isinstance(target, StoredObject):
            raise BadPickle(f"it sets the state of a {type(target).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StoredObject):
            return
        if type(target) not in _MAPPINGS:
            raise BadPickle(f"it sets items of a {type(target).__name__}")
        for key, value in zip(shallow(items[::2]), items[1::2], strict=True):
            target[key] = value

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) in (list, deque):
            target.extend(items)
        elif not isinstance(target, StoredObject):
            raise BadPickle(f"it appends to a {type(target).__name__}")

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise BadPickle(f"it adds to a {type(target).__name__}")
        target.update(shallow(items))

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # which gives the stack back that was there before
        self.stack.append(frozenset(shallow(items)))

    dispatch.update(
        {
            pickle.REDUCE[0]: load_call,
            pickle.NEWOBJ[0]: load_call,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
        }
    )


def read_pickle(
    data: bytes | IO[bytes], find: Callable[[str], Known | None], storage: Callable[..., Any] | None = None
) -> tuple[Any, list[str]]:
    """Return what a pickle holds, and the names in it of which objects are not loaded.

    ``find`` says what a name stands for, ``storage`` what the parts of a persistent id do: without it, there are none.
    """
    unpickler = _Unpickler(io.BytesIO(data) if isinstance(data, bytes) else data, find, storage)
    try:
        return unpickler.read(), list(unpickler.foreign)
    except (BadPickle, CheckpointError):
        raise
    except unsignalled(Exception) as error:  # functions are given anything
        raise damage_of(error) from None


def damage_of(error: Exception) -> BadPickle:
    """Return what is wrong with a pickle, by what unpickling it raised."""
    if isinstance(error, (IndexError, KeyError, EOFError, pickle.UnpicklingError)):
        return BadPickle("it is cut off, or refers to what it does not hold")
    return BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})")


def shallow(keys: Iterable[Any]) -> Iterable[Any]:
    """Return keys, none of which is nested so deeply that its hash would need much of the stack."""
    inside = keys = list(keys)
    for _ in range(_DEEPEST_KEY):
        nested = {id(key): key for key in inside if type(key) in (tuple, frozenset)}
        if not nested:
            return keys
        inside = [part for key in nested.values() for part in key]
    raise BadPickle("it has a key that is nested too deeply")


def all_within(value: Any) -> list[Any]:
    """Return a value that a pickle made, and all that lies in it, at any depth, in whatever is made."""
    pending, found, seen = [value], [], set[int]()
    while pending:
        held = pending.pop()
        found.append(held)
        if id(held) in seen or not (isinstance(held, _HOLDERS) or type(held) in _WITH_ATTRIBUTES):
            continue
        seen.add(id(held))
        if isinstance(held, dict):
            pending += held.keys()
        if type(held) not in _WITH_ATTRIBUTES:
            pending += held.values() if isinstance(held, dict) else held
        pending += getattr(held, "__dict__", {}).values()
    return found


def set_attributes(target: Any, state: Any) -> Any:
    """Set attributes of an object, none of which means anything to Python, and return it."""
    cls = type(target)
    for name in state or ():
        is_plain = type(name) is str and name.isidentifier() and not name.startswith("__")
        if not is_plain or callable(getattr(cls, name, None)):
            raise BadPickle("it sets attributes that are no plain ones")
    target.__dict__.update(state or {})
    return target
