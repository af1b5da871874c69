"""Opaque objects: whatever has no leaf type of its own, taken apart by pickle's ``persistent_id``.

Tensors anywhere inside come out as parts, what is passed by identity (functions, classes, modules, enum members) is
set aside, and the rest becomes a byte skeleton. The skeleton never leaves the process and is never read from a file.
"""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import StateTreeError, UnsupportedLeaf
from statetree.leaves.registry import LeafType
from statetree.torch_internals import torch_function_enabled
from statetree.tree.atoms import same_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    LookUp = Callable[[type], LeafType | None]

#: What pickle makes of a value beside the tensors inside: a skeleton, and what is passed by identity.
Rest = tuple[bytes, tuple[Any, ...]]

# Interned by value, so that the skeletons of equal objects are equal whichever string objects they hold.
_BY_VALUE = (str, bytes)
# Left to pickle, which copies them exactly and in place.
_SMALL = frozenset({type(None), bool, int, float, complex})


class TakeApart(pickle.Pickler):
    """Sets tensors aside, and what is passed by identity."""

    def __init__(self, file: io.BytesIO, leaf_type_of: LookUp) -> None:
        super().__init__(file, protocol=5)
        self.file = file
        self._leaf_type_of = leaf_type_of
        self.tensors: list[Any] = []
        self.kept: list[Any] = []
        self._tensor_index: dict[int, int] = {}
        self._kept_index: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return a non-negative number for a tensor, a negative one for what is kept, ``None`` for the rest."""
        cls = type(obj)
        if cls in _SMALL:
            return None
        if cls in _BY_VALUE:
            return self._keep((cls, obj), obj)
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
        """Take apart generators of random numbers in a way of our own."""
        if type(obj) is torch.Generator:
            return _generator, (obj.device, obj.get_state())
        return NotImplemented

    def _keep(self, key: Any, obj: Any) -> int:
        index = self._kept_index.setdefault(key, len(self.kept))
        if index == len(self.kept):
            self.kept.append(obj)
        return -1 - index


def _generator(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Make a generator. torch's own way crashes on a state that does not begin its storage, as in a slab."""
    generator = torch.Generator(device)
    generator.set_state(state.clone())
    return generator


class _TakeAllApart(TakeApart):
    """Notes for every tensor which of several objects it was found in."""

    def __init__(self, file: io.BytesIO, leaf_type_of: LookUp, values: Sequence[Any]) -> None:
        super().__init__(file, leaf_type_of)
        self._values = values
        self._current = -1
        self.owners: list[int] = []

    def persistent_id(self, obj: Any) -> int | None:
        following = self._current + 1
        if following < len(self._values) and obj is self._values[following]:
            self._current = following
        result = super().persistent_id(obj)
        self.owners += [max(self._current, 0)] * (len(self.tensors) - len(self.owners))
        return result


class _PutTogether(pickle.Unpickler):
    def __init__(self, skeleton: bytes, tensors: Sequence[Any], kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors
        self._kept = kept

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid] if pid >= 0 else self._kept[-1 - pid]


class OpaqueType(LeafType):
    """Any object that pickle can take apart.

    Args:
        leaf_type_of: Looks up the leaf type of a class.
    """

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
        except RecursionError as error:
            msg = (
                f"the leaf at %PATH% ({type(value).__qualname__}) cannot be taken apart: expected objects nested a few "
                "hundred deep at most, got more. Raise Python's recursion limit (sys.setrecursionlimit), or nest less."
            )
            raise UnsupportedLeaf(msg) from error
        except Exception as error:
            cls = type(value).__qualname__
            msg = (
                f"the leaf at %PATH% ({cls}) cannot be taken apart: expected an object that can be pickled, got "
                f"{type(error).__name__}: {error}. Register {cls} as an atom (register_leaf_type({cls}, None)) if it "
                "holds no tensors, or as a container (register_container)."
            )
            raise UnsupportedLeaf(msg) from error
        return pickler.tensors, (pickler.file.getvalue(), tuple(pickler.kept))

    def unpack_together(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[int]]:
        """Take several objects apart as one: also return, for each part, which of them it lies in."""
        file = io.BytesIO()
        pickler = _TakeAllApart(file, self._leaf_type_of, values)
        with torch_function_enabled():
            pickler.dump(list(values))
        return pickler.tensors, (file.getvalue(), tuple(pickler.kept)), pickler.owners

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        skeleton, kept = context
        with torch_function_enabled():
            return _PutTogether(skeleton, parts, kept).load()

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {"class": type(value)}

    def same_context(self, a: Any, b: Any) -> bool:
        """Whether two objects agree in everything but the tensors inside them."""
        return same_rest(a, b)


def same_rest(a: Rest, b: Rest) -> bool:
    """Whether pickle makes the same of two values, but for the tensors inside."""
    return a[0] == b[0] and same_value(a[1], b[1])
