"""Opaque objects: whatever has no leaf type of its own, taken apart by pickle's ``persistent_id``.

Tensors anywhere inside come out as parts, what is passed by identity (functions, classes, modules, enum members) is
set aside, buffers stay where they are until they are copied, and the rest becomes a byte skeleton. That is never read
from a file.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import StateTreeError, UnsupportedLeaf, unsignalled
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.arrays import is_array, reduced_array
from statetree.torch_internals import torch_function_enabled
from statetree.tree.atoms import same_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    LookUp = Callable[[type], EngineLeafType | None]

#: How many bytes of buffers are compared at a time.
_PIECE: Final = 1 << 20


class Borrowed(NamedTuple):
    """A buffer in the memory of an object that was taken apart, to be copied whenever that is put together."""

    memory: pickle.PickleBuffer | bytes | bytearray  # the latter on other ranks

    def raw(self) -> memoryview:
        """Return its bytes as they lie."""
        # Not kept: CPython before 3.13 crashes if a cycle of garbage has a view of which there is a buffer.
        return self.memory.raw() if isinstance(self.memory, pickle.PickleBuffer) else memoryview(self.memory)

    def copied(self) -> bytes | bytearray:
        """Return a copy that can be written exactly if the buffer can."""
        view = self.raw()
        return bytes(view) if view.readonly else bytearray(view)


@dataclass(eq=False, repr=False)
class Rest:
    """What pickle makes of a value beside the tensors inside. Two are equal if it makes the same of two values."""

    skeleton: bytes
    kept: tuple[Any, ...]  # what is passed by identity
    buffers: list[Any]  # what the pickle holds out of band: ``Borrowed``, or copies, which are given away
    count: int | None = None  # how many values it is of, one after the other, if they were taken apart together

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Rest)
            and self.skeleton == other.skeleton
            and same_value(self.kept, other.kept)
            and all(map(_same_bytes, self.buffers, other.buffers))
        )

    def detach(self) -> None:
        """Let no writing to the value change any more what is put together, which is done once."""
        self.buffers[:] = [buffer.copied() for buffer in self.buffers]

    def __hash__(self) -> int:
        return hash(self.skeleton)

    def __repr__(self) -> str:
        return f"{len(self.skeleton)} bytes of pickle"


def _same_bytes(a: Borrowed, b: Borrowed) -> bool:
    x, y = a.raw(), b.raw()
    return len(x) == len(y) and all(
        bytes(x[at : at + _PIECE]) == bytes(y[at : at + _PIECE]) for at in range(0, len(x), _PIECE)
    )


# Interned by value, so that the skeletons of equal objects are equal whichever string objects they hold.
_BY_VALUE = (str, bytes)
# Left to pickle, which copies them exactly and in place.
_SMALL = frozenset({type(None), bool, int, float, complex})


class TakeApart(pickle.Pickler):
    """Sets tensors aside, and what is passed by identity."""

    def __init__(self, file: io.BytesIO, leaf_type_of: LookUp) -> None:
        self.buffers: list[Any] = []
        super().__init__(file, protocol=5, buffer_callback=partial(_set_aside, self.buffers))  # no cycle with itself
        self.file = file
        self._leaf_type_of = leaf_type_of
        self.tensors: list[Any] = []
        self.kept: list[Any] = []
        self._tensor_index: dict[int, int] = {}
        self._kept_index: dict[Any, int] = {}
        self._copies_bytes = False

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        """Return a number for a tensor, a negative one for what is kept (bytes to copy: in a tuple), else ``None``."""
        cls = type(obj)
        if cls in _SMALL:
            return None
        if cls in _BY_VALUE:
            index = self._keep((cls, obj), obj)
            return (index,) if self._copies_bytes and cls is bytes else index
        leaf_type = self._leaf_type_of(cls)
        if leaf_type is None:
            return self._keep(id(obj), obj)
        if leaf_type.opaque:
            # Functions written in C pass by identity, as others do, but bound ones hold what they are bound to.
            unbound = cls is BuiltinFunctionType and isinstance(obj.__self__, (ModuleType, type(None)))
            return self._keep(id(obj), obj) if unbound else None
        index = self._tensor_index.setdefault(id(obj), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(obj)
        return index

    def reducer_override(self, obj: Any) -> Any:
        """Take apart generators of random numbers, and arrays, in a way of our own."""
        if type(obj) is torch.Generator:
            return _generator, (obj.device, obj.get_state())
        if not is_array(obj):
            return NotImplemented
        result = reduced_array(obj)
        self._copies_bytes |= result is NotImplemented  # NumPy's own arrays lie in the bytes that they are made of
        return result

    def rest(self) -> Rest:
        """Return what was made of the value beside the tensors."""
        return Rest(self.file.getvalue(), tuple(self.kept), self.buffers)

    def _keep(self, key: Any, obj: Any) -> int:
        index = self._kept_index.setdefault(key, len(self.kept))
        if index == len(self.kept):
            self.kept.append(obj)
        return -1 - index


def _set_aside(buffers: list[Any], buffer: pickle.PickleBuffer) -> None:
    buffer.raw()  # raises if it has gaps
    buffers.append(Borrowed(buffer))


def _generator(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Make a generator. torch's own way crashes on a state that does not begin its storage, as in a slab."""
    generator = torch.Generator(device)
    generator.set_state(state.clone())
    return generator


class Members(NamedTuple):
    """What several objects that are taken apart together hold."""

    owners: list[int]  # for each tensor, which of them it was found in first
    links: list[set[int]]  # for each of them, those in which something that it holds was found first

    def held_by(self, objects: Iterable[int]) -> list[int]:
        """Return which tensors some of the objects may hold.

        pickle does not look a second time into what it has met: whoever holds a part of another may hold all of it.
        """
        pending = [*objects]
        found = {*pending}
        while pending:
            more = self.links[pending.pop()] - found
            found |= more
            pending += more
        return [tensor for tensor, owner in enumerate(self.owners) if owner in found]


class _TakeAllApart(TakeApart):
    """Notes for every tensor, and all else that is not passed by identity, which of several objects has it first.

    One pickler takes them, one after the other, so that what they share stays shared. With ``tensors``, what holds none
    links no objects.
    """

    def __init__(self, leaf_type_of: LookUp, values: Sequence[Any], *, tensors: bool) -> None:
        super().__init__(io.BytesIO(), leaf_type_of)
        self.members = Members([], [set() for _ in values])
        self._tensors_alone = tensors
        self._first: dict[int, int] = {}
        self._links: dict[int, bool] = {}
        with torch_function_enabled():
            for index, value in enumerate(values):
                self._current = index
                self.dump(value)

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        result = super().persistent_id(obj)
        owners = self.members.owners
        owners += [self._current] * (len(self.tensors) - len(owners))
        is_kept = isinstance(result, tuple) or (result is not None and result < 0)
        if not (is_kept or type(obj) in _SMALL or (type(obj) is tuple and not obj)):
            first = self._first.setdefault(id(obj), self._current)  # pickle keeps it alive
            if first != self._current and self._is_link(obj):
                self.members.links[self._current].add(first)
        return result

    def _is_link(self, obj: Any) -> bool:
        """Whether it matters that another object holds this one, too."""
        if not self._tensors_alone:
            return True
        found = self._links.get(id(obj))
        if found is None:
            try:
                _RefuseTensors(io.BytesIO(), self._leaf_type_of).dump(obj)
                found = False
            except unsignalled(Exception):  # or it cannot be taken apart by itself: it may hold any
                found = True
            self._links[id(obj)] = found
        return found


class _RefuseTensors(TakeApart):
    """Raises at the first tensor."""

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        result = super().persistent_id(obj)
        if self.tensors:
            raise ValueError("it holds a tensor")
        return result


class _PutTogether(pickle.Unpickler):
    def __init__(self, rest: Rest, tensors: Sequence[Any]) -> None:
        # A list: an interrupt inside a generator, when pickle lets go of it, would be lost.
        buffers = [buffer.copied() if isinstance(buffer, Borrowed) else buffer for buffer in rest.buffers]
        super().__init__(io.BytesIO(rest.skeleton), buffers=buffers)
        self._tensors = tensors
        self._kept = rest.kept

    def persistent_load(self, pid: int | tuple[int]) -> Any:
        if isinstance(pid, tuple):
            return bytes(memoryview(self._kept[-1 - pid[0]]))
        return self._tensors[pid] if pid >= 0 else self._kept[-1 - pid]


class OpaqueType(EngineLeafType):
    """Any object that pickle can take apart. The leaf types of classes inside are looked up."""

    opaque = True

    def __init__(self, leaf_type_of: LookUp) -> None:
        self._leaf_type_of = leaf_type_of

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        return self.taken_apart(value, TakeApart(io.BytesIO(), self._leaf_type_of))

    def taken_apart(self, value: Any, pickler: TakeApart) -> tuple[list[Any], Rest]:
        """Return the tensors that a pickler finds in a value, and what it makes of the rest."""
        try:
            with torch_function_enabled():
                pickler.dump(value)
        except StateTreeError:
            raise
        except unsignalled(Exception) as error:
            cls = type(value).__qualname__
            remedy = (
                f"Leave it out of the state, or register {cls} as a container (register_container), or, if it holds no "
                f"tensors, as an atom (register_leaf_type({cls}, None))."
            )
            # A generator, a lock, an open file: nothing to register as a container, and no name to write.
            if type(value).__module__ in sys.builtin_module_names:
                remedy = (
                    "Leave it out of the state, or register its class as an atom, passed by identity "
                    "(register_leaf_type(type(value), None))."
                )
            if isinstance(error, RecursionError):
                remedy = "Raise Python's recursion limit (sys.setrecursionlimit), or nest less."
            raise UnsupportedLeaf(
                f"the leaf at %PATH% ({cls}) cannot be taken apart: expected an object that can be pickled, got "
                f"{type(error).__name__}: {error}. {remedy}"
            ) from error
        return pickler.tensors, pickler.rest()

    def unpack_together(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, Members]:
        """Take several objects apart as one: also return which parts each of them holds."""
        pickler = _TakeAllApart(self._leaf_type_of, values, tensors=True)
        return pickler.tensors, replace(pickler.rest(), count=len(values)), pickler.members

    def shared_by(self, values: Sequence[Any]) -> list[set[int]]:
        """Return which of several objects hold some object or tensor that one of them has, which is among these."""
        links = _TakeAllApart(self._leaf_type_of, values, tensors=False).members.links
        groups = {first: {first} for found in links for first in found}
        for index, found in enumerate(links):
            for first in found:
                groups[first].add(index)
        return [*groups.values()]

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        with torch_function_enabled():
            unpickler = _PutTogether(context, parts)
            return unpickler.load() if context.count is None else [unpickler.load() for _ in range(context.count)]

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {"class": type(value)}
