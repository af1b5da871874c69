"""Pickles of files that nobody vouches for: nothing in them is imported or executed, and little memory is taken.

A first pass goes over the instructions without carrying them out. It admits those of torch's ``weights_only`` loader,
and bounds what they would allocate. ``pickle.Unpickler`` then carries them out, with stand-ins for all names.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Bytes of memory that a pickle may take: so many, and some for each byte of its own, up to a bound.
_BUDGET_BYTES: Final = (64 << 20, 32, 2 << 30)
#: By how many entries a tree may outnumber the bytes of its pickle, in which containers may be shared.
_MIN_ENTRIES: Final = 100_000
#: Hashing a tuple calls itself for every tuple inside, on a stack that nobody checks.
_MAX_KEY_DEPTH: Final = 20
_MAX_KEY_PARTS: Final = 1000

_NAMES: Final = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING EMPTY_DICT "
    "EMPTY_LIST EMPTY_SET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS GLOBAL REDUCE NEWOBJ "
    "BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET"
)
_MODERN_NAMES: Final = "FRAME MEMOIZE SHORT_BINUNICODE SHORT_BINBYTES BINBYTES STACK_GLOBAL ADDITEMS"
_MODERN: Final = frozenset(_MODERN_NAMES.split())
_ADMITTED: Final = _MODERN | frozenset(_NAMES.split())
#: Bytes that instructions allocate, beside a reference or two.
_COSTS: Final = {"EMPTY_DICT": 64, "EMPTY_LIST": 56, "EMPTY_SET": 216, "REDUCE": 216, "NEWOBJ": 216, "MEMOIZE": 40}
#: How ``pickle.Unpickler`` is kept from what it would do by itself. NEWOBJ takes real classes only; REDUCE does the
#: same with any stand-in. BUILD sets the attributes of any object, and the others hash any key: what they would work on
#: goes to ``persistent_load`` instead, as a tuple of three. This changes the length of frames, which nobody needs.
_HAND_OVER: Final = pickle.NONE + pickle.TUPLE3 + pickle.BINPERSID
_REWRITTEN: Final = {
    "NEWOBJ": pickle.REDUCE,
    "FRAME": b"",
    "BUILD": _HAND_OVER,
    "SETITEM": pickle.TUPLE2 + _HAND_OVER,
    "SETITEMS": pickle.TUPLE + _HAND_OVER,
    "ADDITEMS": pickle.TUPLE + _HAND_OVER,
}


class BadPickle(Exception):
    """A pickle is damaged, or not of the kind that holds tensors."""


class StoredObject:
    """An object of a class that is not loaded from files: all that is known is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"

    def __call__(self, *_args: Any) -> StoredObject:  # noqa: D102
        return self

    def append(self, item: Any) -> None:
        """Pass over an item."""


class Named:
    """A function or class that a pickle refers to: its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call: Callable[[str, tuple[Any, ...]], Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __call__(self, *args: Any) -> Any:  # noqa: D102
        assert self.call is not None
        return self.call(self.name, args)


class Record:
    """What a pickle says of an object: the name of its class, and its state. It may be the result of a call."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


class Reader:
    """Reads a pickle.

    Args:
        data: Its bytes.
        call: Given the name of a function or class and its arguments, returns what stands for the result.
        names: Given a module and a name in it, returns what stands for it: ``Named`` for what ``call`` knows,
            ``StoredObject`` for what is of no concern.
        storage: Given a persistent id, returns what stands for the storage. Without it, none is admitted.
        build: Given an object that ``call`` returned and its state (for a mapping: its keys and values in turn), sets
            it, and returns whether it knows how. Without it, only what this module makes has a state.
        is_modern: Whether the instructions of protocol 4 are admitted, too. The result is then taken to be records,
            which nobody walks as a tree: how often containers are shared in it does not matter.
    """

    def __init__(
        self,
        data: bytes,
        call: Callable[[str, tuple[Any, ...]], Any],
        names: Callable[[str, str], Any],
        storage: Callable[[Any], Any] | None = None,
        *,
        build: Callable[[Any, Any], bool] | None = None,
        is_modern: bool = False,
    ) -> None:
        self._data = data
        self._call = call
        self._names = names
        self._storage = storage
        self._build = build
        self._is_modern = is_modern
        base, rate, most = _BUDGET_BYTES
        self._budget_bytes = max(min(most, base + len(data) * rate), 2 * len(data))

    def load(self) -> Any:
        """Read it.

        Raises:
            BadPickle: If it is damaged, or has instructions that are not admitted.
        """
        try:
            with collection_paused():
                instructions, cost = _checked(self._data, is_modern=self._is_modern)
                self._spend(cost)
                tree = _Unpickler(instructions, self).load()
                if not self._is_modern:
                    _check_size(tree, max(_MIN_ENTRIES, len(self._data)))
                return tree
        except BadPickle:
            raise
        except (IndexError, KeyError, EOFError, pickle.UnpicklingError):
            raise BadPickle("it is cut off, or refers to what it does not hold") from None
        except Exception as error:  # noqa: BLE001 - stand-ins are given arguments of any kind
            raise BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from None

    def _spend(self, nbytes: int) -> None:
        self._budget_bytes -= nbytes
        if self._budget_bytes < 0:
            raise BadPickle("it makes more objects than its length accounts for")

    def named(self, module: str, name: str) -> Any:
        """Return what stands for a name in a module."""
        found = self._names(module, name)
        if type(found) is Named:
            found.call = self._called
        return found

    def stored(self, pid: Any) -> Any:
        """Return what stands for a storage."""
        if self._storage is None:
            raise BadPickle("it refers to what is outside of it")
        return self._storage(pid)

    def _called(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call."""
        make = _BUILTIN.get(name)
        if make is None:
            parts = [part for arg in args for part in (arg if type(arg) is tuple else (arg,))]
            self._spend(100 * sum(len(part) for part in parts if type(part) in (dict, list)))  # may be given many times
            return self._call(name, args)
        if make is complex:
            return complex(*args)
        items = args[0] if args else ()
        if type(items) not in (str, bytes, dict, list, tuple, set):
            raise BadPickle(f"it makes a {name} of a {type(items).__name__}")
        self._spend((1 if type(items) in (str, bytes) else 100) * len(items))  # one list may be given many times
        if make is set:
            return self.changed(set(), tuple(items))
        if make not in _DICTS:
            return make(*args)
        pairs = items.items() if type(items) is dict else items
        return self.changed(make(), tuple([part for pair in pairs for part in pair]))

    def changed(self, target: Any, state: Any) -> Any:
        """Return an object with items put in, or with its state set."""
        cls = type(target)
        if cls is Record:
            target.state = state
        elif cls in _DICTS and type(state) is tuple:
            check_keys(state[::2])
            # Counter's own update would add up; dict's would go past the order of an OrderedDict.
            update = OrderedDict.update if cls is OrderedDict else dict.update
            update(target, zip(state[::2], state[1::2], strict=True))
        elif cls is set and type(state) is tuple:
            check_keys(state)
            target.update(state)
        elif cls is OrderedDict and type(state) is dict:
            self._spend(100 * len(state))
            set_state_attributes(target, state)
        elif cls is not StoredObject and not (self._build is not None and self._build(target, state)):
            raise BadPickle(f"it sets items of a {cls.__name__}, or its state")
        return target


def set_state_attributes(target: Any, state: Any) -> None:
    """Set the attributes of an object, none of which means anything to Python.

    Raises:
        BadPickle: If one may.
    """
    are_names = type(state) is dict and set(map(type, state)) <= {str}
    cls = type(target)
    if not are_names or not all(
        name.isidentifier() and not name.startswith("__") and not callable(getattr(cls, name, None)) for name in state
    ):
        raise BadPickle("it sets attributes that are no plain ones")
    target.__dict__.update(state)


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


_INSTRUCTIONS: Final = {ord(info.code): info for info in pickletools.opcodes if info.name in _ADMITTED}


def _steps(names: frozenset[str]) -> list[int]:
    """Return for each byte how long the instruction is: 0 for those to be looked at, -1 for what is not admitted."""
    steps = [-1] * 256
    for code, info in _INSTRUCTIONS.items():
        if info.name in names:
            arg_bytes = 0 if info.arg is None else info.arg.n
            is_plain = arg_bytes >= 0 and info.name not in {"STOP", "LONG_BINPUT", *_REWRITTEN}
            steps[code] = 1 + arg_bytes if is_plain else 0
    return steps


_STEPS: Final = {True: _steps(_ADMITTED), False: _steps(_ADMITTED - _MODERN)}
_COST_OF: Final = [8 + _COSTS.get(_INSTRUCTIONS[code].name, 0) if code in _INSTRUCTIONS else 0 for code in range(256)]


def _checked(data: bytes, *, is_modern: bool) -> tuple[bytes, int]:
    """Return the instructions of a pickle, as ``_Unpickler`` takes them, and what they cost."""
    steps, cost_of = _STEPS[is_modern], _COST_OF
    at = done = cost = 0
    pieces: list[bytes] = []
    while True:
        code = data[at]
        step = steps[code]
        cost += cost_of[code]
        if step > 0:
            at += step
            continue
        if step < 0:
            raise BadPickle(f"it has the instruction {code:#04x} at {at}, which torch's safe loader does not admit")
        info = _INSTRUCTIONS[code]
        arg_bytes = 0 if info.arg is None else info.arg.n
        begin, at = at, at + 1
        if info.name == "STOP":
            return b"".join([*pieces, data[done:at]]), cost
        if info.name == "GLOBAL":
            for _ in range(2):
                at = data.find(b"\n", at, at + 1000) + 1
                if not at:
                    raise BadPickle("it is cut off in a name")
        elif arg_bytes < 0:
            width = 1 if arg_bytes == pickletools.TAKEN_FROM_ARGUMENT1 else 4
            at += width + int.from_bytes(data[at : at + width], "little")
        else:
            at += arg_bytes
        if info.name in _REWRITTEN:
            pieces += [data[done:begin], _REWRITTEN[info.name]]
            done = at
        elif info.name == "LONG_BINPUT":
            index = int.from_bytes(data[begin + 1 : at], "little")
            if index > len(data):  # pickle would take memory for all smaller ones
                raise BadPickle(f"it numbers an object {index}: expected a number below its length")


class _Unpickler(pickle.Unpickler):
    """Carries out instructions that were checked."""

    def __init__(self, instructions: bytes, reader: Reader) -> None:
        super().__init__(io.BytesIO(instructions), encoding="utf-8")
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        return self._reader.named("builtins" if module == "__builtin__" else module, name)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is tuple and len(pid) == 3:
            return self._reader.changed(*pid[:2])
        return self._reader.stored(pid)


def _encoded(text: Any = b"", codec: Any = "latin1") -> bytes:
    if codec not in ("latin1", "latin-1") or not isinstance(text, (str, bytes)):
        raise BadPickle("it makes bytes in an unknown way")
    return text.encode("latin1") if isinstance(text, str) else text


_DICTS: Final = (dict, OrderedDict, Counter)
_CONTAINERS: Final = frozenset({*_DICTS, list, tuple, set, Record})
_BUILTIN: Final[dict[str, Callable[..., Any]]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "builtins.bytearray": lambda *args: bytearray(_encoded(*args)),
    "builtins.complex": complex,
    "_codecs.encode": _encoded,
}
#: Functions and classes that are called here, and not by ``call``.
MADE_BY_READER: Final = frozenset(_BUILTIN)
_KEYS: Final = frozenset(
    {str, bytes, int, bool, float, complex, type(None), torch.dtype, torch.device, StoredObject, Record}
)


def check_keys(keys: Sequence[Any]) -> None:
    """Raise ``BadPickle`` unless keys can be hashed, and in little stack."""
    for key in keys:
        if type(key) in _KEYS:
            continue
        count = 0
        pending = [(key, 0)]
        while pending:
            part, depth = pending.pop()
            count += 1
            if type(part) in (tuple, torch.Size) and depth < _MAX_KEY_DEPTH:
                if count + len(pending) + len(part) > _MAX_KEY_PARTS:
                    raise BadPickle(f"it has a key of more than {_MAX_KEY_PARTS} parts")
                pending += [(inner, depth + 1) for inner in part]
            elif type(part) not in _KEYS:
                raise BadPickle(f"it has a {type(part).__name__} as a key")


def _check_size(root: Any, limit: int) -> None:
    """Raise if a tree holds itself, or, since containers may be shared, is much larger than its pickle."""
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        value, is_done = pending.pop()
        if not is_done and id(value) in sizes:
            continue
        children = _children(value)
        if is_done:
            open_.discard(id(value))
            size = 1 + sum(sizes.get(id(child), 1) for child in children)
            if size > limit:
                raise BadPickle("its containers are shared so often that it stands for more than its length")
            sizes[id(value)] = size
        elif id(value) in open_:
            raise BadPickle("it has a container that holds itself")
        elif children:
            open_.add(id(value))
            pending.append((value, True))
            pending += [(child, False) for child in children if type(child) in _CONTAINERS]


def _children(value: Any) -> Any:
    cls = type(value)
    if cls is Record:
        return (value.state,)
    if cls in _DICTS:
        return [*value.values(), *value.__dict__.values()] if cls is OrderedDict else value.values()
    return value if cls in _CONTAINERS else ()
