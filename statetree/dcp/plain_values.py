"""Plain values out of a checkpoint, which nobody vouches for: read as data, and made by ``reconstructors`` alone.

What names other classes is left to ``torch.load(weights_only=True)``, which admits those that the user named with
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import argparse
import io
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.dcp import numpy_values, reconstructors
from statetree.dcp.numpy_values import PendingSeed
from statetree.files.pickled_values import MADE_HERE, Rules, made
from statetree.files.ranges import FileRange
from statetree.files.safe_pickle import BadPickle, Named, StoredObject, check_depth, read_records
from statetree.files.torch_format import TorchArchive
from statetree.files.torch_pickles import PLAIN_CALLS, StorageClass, rebuilt_tensor, storage_dtypes, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

#: Never left to torch, which admits it: making one starts a process group.
_REFUSED: Final = frozenset({"torch.distributed.device_mesh.DeviceMesh"})
_KINDS: Final = (torch.dtype, torch.qscheme)
_NAMED: Final = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, _KINDS)} | {
    "builtins.Ellipsis": ...
}
_CALLS: Final = {
    **PLAIN_CALLS,
    **reconstructors.CALLS,
    **numpy_values.CALLS,
    "torch._utils._rebuild_tensor_v2": rebuilt_tensor,
}
_CLASSES: Final = numpy_values.CLASSES | reconstructors.CLASSES.keys()
_MAPPINGS: Final = (dict, OrderedDict, Counter, defaultdict)
_COLLECTIONS: Final = (list, tuple, set, frozenset, deque)
_STAND_INS: Final = (Named, StoredObject, StorageClass, PendingSeed)


def read_value(data: bytes) -> Any:
    """Return the value that ``torch.save`` wrote.

    Raises:
        Exception: If it is damaged, or of a class that is not admitted.
    """
    archive = TorchArchive(FileRange.of(data, "the value"))
    records, names = read_records(archive.pickle())
    rules = _ValueRules(names, archive)
    if rules.foreign:
        refused = _REFUSED & rules.foreign
        if refused:
            raise BadPickle(f"Unsupported class {min(refused)}")
        check_depth(records)  # torch has no bound
        return torch.load(io.BytesIO(data), weights_only=True)
    value = made(records, rules)
    if type(value) is Named and value.name in reconstructors.CLASSES:
        return reconstructors.CLASSES[value.name]
    if type(value) is PendingSeed:
        return value.made
    _check_complete(value)
    return value


def why_not_restorable(data: bytes) -> str:
    """Say why a value that ``torch.save`` wrote does not come back by default; empty if it does."""
    try:
        read_value(data)
    except Exception as error:  # noqa: BLE001 - whatever it is, loading would raise it
        return gist(error)
    return ""


def gist(error: Exception) -> str:
    """Return what an error says that is of use here: torch's advice is for calls of torch.load."""
    text = " ".join(str(error)[:10_000].split())
    for mark in (
        "WeightsUnpickler error: ",
        "Unsupported global",
        "Unsupported class",
        "Unsupported operand",
        "Trying to load",
    ):
        at = text.find(mark)
        if at >= 0:
            text = text[at:].removeprefix("WeightsUnpickler error: ").split(". ")[0]
            break
    return text[:200]


class _ValueRules(Rules):
    """What is made of the pickle of a plain value."""

    def __init__(self, names: Iterable[str], archive: TorchArchive) -> None:
        self._archive = archive
        found = {name: reconstructors.enum_class(*name.rpartition(".")[::2]) for name in names if not _is_known(name)}
        self._enums = {name: cls for name, cls in found.items() if cls is not None}
        self.foreign: AbstractSet[str] = found.keys() - self._enums.keys()

    def named(self, name: str) -> Any:
        return _NAMED[name] if name in _NAMED else StorageClass(name) if name in storage_dtypes() else Named(name)

    def called(self, name: str, args: tuple[Any, ...]) -> Any:
        if name in self._enums:
            (value,) = args
            return reconstructors.enum_member(self._enums[name], value)
        if name not in _CALLS:
            raise BadPickle(f"it calls {name}")
        return _CALLS[name](*args)

    def stored(self, pid: Any) -> Any:
        return storage_of(partial(self._archive.memory, "cpu"), pid)

    def set_state(self, target: Any, state: Any) -> bool:
        return reconstructors.set_state(target, state)


def _is_known(name: str) -> bool:
    return any(name in names for names in (_NAMED, storage_dtypes(), MADE_HERE, _CALLS, _CLASSES))


def _check_complete(root: Any) -> None:
    """Raise if something that only stands for a class or function is left in a value."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, _STAND_INS):
            name = getattr(value, "name", type(value).__name__)
            raise BadPickle(f"Unsupported global {name}: it is a value here, and not called")
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _MAPPINGS:
            pending += value.keys()
            pending += value.values()
            pending += vars(value).values() if type(value) is OrderedDict else ()
        elif type(value) in _COLLECTIONS:
            pending += value
        elif type(value) in (argparse.Namespace, types.SimpleNamespace):
            pending += vars(value).values()
