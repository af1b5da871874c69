"""Atoms: plain values that can hold no tensor, are passed by identity and compared by value."""

from __future__ import annotations

import datetime
import enum
import pathlib
import re
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import USERS_OWN, unsignalled

if TYPE_CHECKING:
    from collections.abc import Set


class Hole(enum.Enum):
    """The class of ``HOLE``."""

    HOLE = "HOLE"

    def __repr__(self) -> str:
        return "HOLE"


#: Stands, as a leaf, for one that is not there: ``partition`` leaves it where the other tree has a leaf, and ``merge``
#: fills it. It is an atom, which every transform passes on, and there is one of it in a process.
HOLE: Final = Hole.HOLE

_ATOMS: set[type] = {type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)}
_ATOMS |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size}
_ATOMS |= {torch.finfo, torch.iinfo, property, weakref.ref}
_ATOMS |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType}
_ATOMS |= {types.GetSetDescriptorType, types.MemberDescriptorType}
_ATOMS |= {types.FunctionType, types.CodeType, types.ModuleType, types.GenericAlias, types.UnionType}
_ATOMS |= {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, re.Pattern}
_ATOMS |= {pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath}
#: Atoms that nothing is loaded for: numbers, and what processes have in common.
_BY_NAME = {"decimal.Decimal", "fractions.Fraction", "uuid.UUID", "torch.ProcessGroup"}
_BY_NAME |= {"torch.distributed.device_mesh.DeviceMesh", "torch._C._distributed_c10d.ProcessGroup"}


def is_atom_type(cls: type) -> bool:
    """Whether every instance of exactly this class is an atom.

    Subclasses of the immutable builtins are not (an ``int`` with attributes may hold anything); enums and classes
    themselves (instances of a metaclass) are.
    """
    return cls in _ATOMS or issubclass(cls, (enum.Enum, type)) or f"{cls.__module__}.{cls.__qualname__}" in _BY_NAME


def is_constant_type(cls: type) -> bool:
    """Whether instances of exactly this class are atoms that belong to the structure where they are in attributes.

    A ``HOLE`` does not: it stands for a leaf, and a tree with it has the same structure as one with the leaf.
    """
    return cls is not Hole and is_atom_type(cls)


def add_atom_type(cls: type) -> None:
    """Declare instances of exactly this class to be atoms."""
    _ATOMS.add(cls)


def same_value(a: object, b: object) -> bool:
    """Whether two plain values are of one type and equal, all the way down.

    ``1``, ``1.0`` and ``True`` differ, and so do ``0.0`` and ``-0.0``; NaN equals NaN. A comparison that raises or
    answers with something that is no truth value is a no.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    x: Any = a
    y: Any = b
    try:
        if isinstance(x, float):
            return bool(x.hex() == y.hex())
        if type(x).__module__ == "decimal":  # as in 1.0 and 1.00, and NaN
            return repr(x) == repr(y)
        if type(x) in (datetime.datetime, datetime.time):  # whose hour may come twice, or be that of another zone
            return bool(x == y and x.fold == y.fold and x.replace(tzinfo=None) == y.replace(tzinfo=None))
        if isinstance(x, complex):
            return same_value(x.real, y.real) and same_value(x.imag, y.imag)
        if isinstance(x, (tuple, list)):
            return len(x) == len(y) and all(map(same_value, x, y))
        if isinstance(x, dict):
            return _same_members(x.keys(), y.keys()) and all(same_value(value, y[key]) for key, value in x.items())
        if isinstance(x, (set, frozenset)):
            return _same_members(x, y)
        return bool(x == y)
    except unsignalled(*USERS_OWN):  # total: whatever a user's __eq__ does, there is an answer
        return False


def _same_members(x: Set[Any], y: Set[Any]) -> bool:
    """Whether sets are equal, and each member is the same value in both."""
    partners = {member: member for member in y}
    return x == y and all(same_value(member, partners[member]) for member in x)
