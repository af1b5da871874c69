"""Pickles read as data: nothing in them is imported, called or executed.

The instructions are those that torch's ``weights_only`` loader admits. Where pickle would call a function, another
function is asked for what stands for the result. What a pickle may make is bounded by how long it is.
"""

from __future__ import annotations

import gc
import struct
from collections import Counter, OrderedDict
from contextlib import contextmanager
from pickle import decode_long
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator

#: Bytes of memory that a pickle's instructions may take, and its calls as many: some for each byte, up to a bound.
_CONTAINER_BYTES: Final = (64 << 20, 32, 2 << 30)
#: How many keys may be compared as all odd keys are put in: those whose hashes whoever wrote the file can choose.
_MAX_COLLISIONS: Final = 1_000_000_000
#: Numbers below the size of their mapping do not collide, and little comes of it if they are larger by this.
_SMALL_KEY: Final = 1024
_MAX_KEY_DEPTH: Final = 20
_MAX_KEY_PARTS: Final = 1000
_TOO_MUCH: Final = "it makes more objects than its length accounts for"
_MAX_ARGS: Final = 16
_DICTS: Final = (dict, OrderedDict, Counter)
#: By how many entries a tree may outnumber the bytes of its pickle, in which containers may be shared.
_MIN_ENTRIES: Final = 100_000


class BadPickle(Exception):
    """A pickle is damaged, or not of the kind that holds tensors."""


class Named:
    """A function or class that a pickle refers to: its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Foreign:
    """An object of a class that is not loaded from files: all that is known is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not loaded>"


class Recorded:
    """A class that a pickle refers to, whose objects are to be kept as ``Record``."""

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """What a pickle says of an object: the name of its class, and its state."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


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


class Reader:
    """Reads pickles that lie one after the other.

    Args:
        data: Bytes.
        call: Given the name of a function or class and its arguments, returns what stands for the result.
        names: Given a module and a name in it, returns what stands for it: ``Named`` for what ``call`` knows,
            ``Recorded`` for a class whose objects are kept as ``Record``, ``Foreign`` for what is of no concern.
        storage: Given a persistent id, returns what stands for the storage. Without it, none is admitted.
        is_modern: Whether the instructions of protocol 4 are admitted, too.

    Attributes:
        position: Where the next pickle begins.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap,
        call: Callable[[str, tuple[Any, ...]], Any],
        names: Callable[[str, str], Any],
        storage: Callable[[Any], Any] | None = None,
        *,
        is_modern: bool = False,
    ) -> None:
        self.position = 0
        self._data = data
        self._call = call
        self._names = names
        self._storage = storage
        self._is_modern = is_modern
        base, rate, most = _CONTAINER_BYTES
        self._budget = min(most, base + len(data) * rate)
        self._collisions = 0

    def load(self) -> Any:
        """Read one pickle.

        Raises:
            BadPickle: If it is damaged, or has instructions that are not admitted.
        """
        try:
            with collection_paused():
                return self._load()
        except BadPickle:
            raise
        except (IndexError, KeyError, struct.error):
            raise BadPickle("it is cut off, or refers to what it does not hold") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from None

    def _take(self, position: int, length: int) -> bytes:
        found = self._data[position : position + length]
        if len(found) != length:
            raise BadPickle("it is cut off")
        return found

    def _spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise BadPickle(_TOO_MUCH)

    def _load(self) -> Any:
        """Carry out one instruction after the other, the frequent ones first."""
        data, at, is_modern = self._data, self.position, self._is_modern
        memo: dict[int, Any] = {}
        stack: list[Any] = []
        marks: list[list[Any]] = []
        unpack = struct.unpack_from
        take, reduce = self._take, self._reduce
        spare = self._budget  # a number of its own: calls for each instruction would take most of the time
        is_shared = False
        while True:
            if spare < 0:
                raise BadPickle(_TOO_MUCH)
            op = data[at]
            at += 1
            if op == 0x94 and is_modern:  # MEMOIZE
                spare -= 100
                memo[len(memo)] = stack[-1]
            elif op == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif op == 0x68:  # BINGET
                found = memo[data[at]]
                is_shared = is_shared or type(found) in _CONTAINERS
                stack.append(found)
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                found = memo[unpack("<I", data, at)[0]]
                is_shared = is_shared or type(found) in _CONTAINERS
                stack.append(found)
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x8C and is_modern:  # SHORT_BINUNICODE
                size = data[at]
                stack.append(str(take(at + 1, size), "utf-8", "surrogatepass"))
                at += 1 + size
            elif op == 0x72:  # LONG_BINPUT
                index = unpack("<I", data, at)[0]
                if index > len(data):  # pickle itself would take memory for all smaller ones
                    raise BadPickle(f"it numbers an object {index}: expected a number below its length")
                memo[index] = stack[-1]
                at += 4
            elif op == 0x28:  # MARK
                spare -= 64
                marks.append(stack)
                stack = []
            elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
                args = stack.pop()
                stack[-1] = reduce(stack[-1], args)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                self._build(stack[-1], state)
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                spare -= 64 + 8 * len(items)
                stack.append(tuple(items))
            elif op == 0x85:  # TUPLE1
                spare -= 64
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                spare -= 64
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                self._set(stack[-1], items)
            elif op == 0x7D:  # EMPTY_DICT
                spare -= 64
                stack.append({})
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x58:  # BINUNICODE
                size = unpack("<I", data, at)[0]
                stack.append(str(take(at + 4, size), "utf-8", "surrogatepass"))
                at += 4 + size
            elif op == 0x4D:  # BININT2
                stack.append(unpack("<H", data, at)[0])
                at += 2
            elif op == 0x4A:  # BININT
                stack.append(unpack("<i", data, at)[0])
                at += 4
            elif op == 0x51:  # BINPERSID
                if self._storage is None:
                    raise BadPickle("it refers to what is outside of it")
                stack.append(self._storage(stack.pop()))
            elif op == 0x87:  # TUPLE3
                spare -= 64
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == 0x63:  # GLOBAL
                module, at = self._line(at)
                name, at = self._line(at)
                stack.append(self._names("builtins" if module == "__builtin__" else module, name))
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._set(stack[-1], [key, value])
            elif op == 0x47:  # BINFLOAT
                stack.append(unpack(">d", data, at)[0])
                at += 8
            elif op == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                self._append(stack[-1], items)
            elif op == 0x61:  # APPEND
                item = stack.pop()
                self._append(stack[-1], [item])
            elif op == 0x5D:  # EMPTY_LIST
                spare -= 56
                stack.append([])
            elif op == 0x8F:  # EMPTY_SET
                spare -= 216
                stack.append(set())
            elif op == 0x8A:  # LONG1
                size = data[at]
                stack.append(decode_long(take(at + 1, size)))
                at += 1 + size
            elif op == 0x55:  # SHORT_BINSTRING
                size = data[at]
                stack.append(take(at + 1, size).decode())
                at += 1 + size
            elif op == 0x80:  # PROTO
                if data[at] > 5:
                    raise BadPickle(f"it is of protocol {data[at]}: expected 2")
                at += 1
            elif op == 0x2E:  # STOP
                self.position = at
                self._budget = min(self._budget, spare)
                if is_shared:  # otherwise everything is in one place alone
                    self._check_size(stack[-1])
                return stack.pop()
            elif is_modern and op == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                self._add(stack[-1], items)
            elif is_modern:
                at = self._modern(op, at, stack)
            else:
                raise BadPickle(
                    f"it has the instruction {op:#04x} at {at - 1}, which torch's safe loader does not admit"
                )

    def _modern(self, op: int, at: int, stack: list[Any]) -> int:
        """Carry out a rare instruction of protocol 4. Returns where the next one is."""
        if op == 0x95:  # FRAME
            return at + 8
        if op in (0x43, 0x42):  # SHORT_BINBYTES, BINBYTES
            width = 1 if op == 0x43 else 4
            size = int.from_bytes(self._take(at, width), "little")
            stack.append(self._take(at + width, size))
            return at + width + size
        if op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise BadPickle("it refers to something by no name")
            stack.append(self._names(module, name))
            return at
        raise BadPickle(f"it has the instruction {op:#04x} at {at - 1}, which is not admitted")

    def _line(self, at: int) -> tuple[str, int]:
        end = self._data.find(b"\n", at, at + 1000)
        if end < 0:
            raise BadPickle("it is cut off in a name")
        return self._data[at:end].decode(), end + 1

    def _reduce(self, function: Any, args: Any) -> Any:
        if type(function) is Foreign:
            return function
        if type(args) is not tuple or len(args) > _MAX_ARGS:
            raise BadPickle("it is damaged: it calls something with arguments that are none")
        self._spend(216)
        if type(function) is Recorded:
            return Record(function.name)
        if type(function) is not Named:
            raise BadPickle(f"it calls a {type(function).__name__}")
        name = function.name
        if name == "collections.OrderedDict":
            return self._mapping(OrderedDict(), args)
        if name == "collections.Counter":
            return self._mapping(Counter(), args)
        if name == "builtins.set":
            return self._new_set(*args)
        if name in ("_codecs.encode", "builtins.bytearray"):
            return self._new_bytes(name, *args)
        if name == "builtins.complex":
            return _complex(*args)
        return self._call(name, args)

    def _mapping(self, made: Any, args: tuple[Any, ...]) -> Any:
        if args:
            (pairs,) = args
            items = pairs.items() if type(pairs) is dict else pairs
            self._spend(100 * len(items))
            self._set(made, [part for key, value in items for part in (key, value)])
        return made

    def _new_set(self, items: Any = ()) -> set[Any]:
        if type(items) not in (list, tuple, set):
            raise BadPickle("it makes a set of something else than a list")
        made: set[Any] = set()
        self._add(made, items)
        return made

    def _add(self, target: Any, items: Any) -> None:
        if type(target) is not set:
            raise BadPickle(f"it adds items to a {type(target).__name__}")
        self._spend(72 * len(items))
        self._check_keys(items, len(target))
        target.update(items)

    def _new_bytes(self, name: str, text: Any = b"", codec: Any = "latin1") -> bytes | bytearray:
        if codec not in ("latin1", "latin-1") or not isinstance(text, (str, bytes)):
            raise BadPickle("it makes bytes in an unknown way")
        self._spend(4 * len(text))  # one text may be given many times
        data = text.encode("latin1") if isinstance(text, str) else text
        return data if name == "_codecs.encode" else bytearray(data)

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) not in _DICTS:
            if isinstance(target, Foreign):
                return
            raise BadPickle(f"it sets items of a {type(target).__name__}")
        keys = items[::2]
        self._check_keys(keys, len(target))
        # Counter's own update would add up; dict's would go past the order of an OrderedDict.
        update = OrderedDict.update if type(target) is OrderedDict else dict.update
        update(target, zip(keys, items[1::2], strict=True))

    def _append(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target += items
        elif not isinstance(target, Foreign):
            raise BadPickle(f"it appends to a {type(target).__name__}")

    def _build(self, target: Any, state: Any) -> None:
        if type(target) is Record:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict and all(type(name) is str for name in state):
            if not all(name.isidentifier() and not name.startswith("__") for name in state):
                raise BadPickle("it sets attributes that are no plain ones")
            self._spend(100 * len(state))
            target.__dict__.update(state)
        elif not isinstance(target, Foreign):
            raise BadPickle(f"it sets the state of a {type(target).__name__}")

    def _check_keys(self, keys: Any, before: int) -> None:
        """Raise unless keys can be hashed, and put in where some are before, in little time and stack."""
        highest, limit = before - 1, before + _SMALL_KEY
        for key in keys:
            cls = type(key)
            if cls in _EVEN_KEYS:
                continue
            if cls is int and 0 <= key < limit:
                if key > highest:  # another one than all before
                    highest = key
                    limit += 1
                continue
            # At worst, it is compared with all others.
            self._collisions += (before + len(keys)) * _parts_of_key(key)
            if self._collisions > _MAX_COLLISIONS:
                raise BadPickle("it has too many keys that are no texts or small numbers, whose hashes may be equal")

    def _check_size(self, root: Any) -> None:
        """Raise if a tree holds itself, or, since containers may be shared, is much larger than its pickle."""
        limit = max(_MIN_ENTRIES, len(self._data))
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


_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple, set, Record})
#: What is hashed by its address, by a secret, or into one of very few values.
_EVEN_KEYS: Final = frozenset({str, bytes, bool, type(None), Foreign, Record})
_ODD_KEYS: Final = frozenset({int, float, complex, torch.dtype, torch.device})


def _parts_of_key(key: Any) -> int:
    """Return of how many parts a key consists, tuples in it included. Raises if it has too many, or cannot be one."""
    count = 0
    pending = [(key, 0)]
    while pending:
        part, depth = pending.pop()
        cls = type(part)
        count += 1
        if cls in (tuple, torch.Size) and depth < _MAX_KEY_DEPTH:
            if count + len(pending) + len(part) > _MAX_KEY_PARTS:
                raise BadPickle(f"it has a key of more than {_MAX_KEY_PARTS} parts")
            pending += [(inner, depth + 1) for inner in part]
        elif cls not in _EVEN_KEYS and cls not in _ODD_KEYS:
            raise BadPickle(f"it has a {cls.__name__} as a key")
    return count


def _complex(real: Any, imag: Any) -> complex:
    if not all(type(part) in (int, float) for part in (real, imag)):
        raise BadPickle("it makes a number in an unknown way")
    return complex(real, imag)


def _children(value: Any) -> Any:
    cls = type(value)
    if cls is Record:
        return (value.state,)
    if cls in _DICTS:
        return [*value.values(), *value.__dict__.values()] if cls is OrderedDict else value.values()
    return value if cls in _CONTAINERS else ()
