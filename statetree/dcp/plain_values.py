"""Plain values out of a checkpoint, which nobody vouches for: read as data, and made by ``reconstructors`` alone.

What names other classes is left to ``torch.load(weights_only=True)``, which admits those that the user named with
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import argparse
import io
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Final

import torch

from statetree.dcp import numpy_values, reconstructors
from statetree.dcp.numpy_values import PendingSeed
from statetree.errors import CheckpointError
from statetree.files.safe_pickle import MADE_BY_READER, BadPickle, Named, Reader, StoredObject
from statetree.files.torch_pickles import (
    PLAIN_CALLS,
    StorageClass,
    rebuilt_tensor,
    storage_dtypes,
    storage_id,
    typed_storage,
)
from statetree.files.zip_archive import is_zip, read_members

#: Never left to torch, which admits it: making one starts a process group.
_REFUSED: Final = frozenset({"torch.distributed.device_mesh.DeviceMesh"})
_NAMED: Final = {name: value for name, value in vars(torch).items() if isinstance(value, (torch.dtype, torch.qscheme))}
_TENSOR: Final = "torch._utils._rebuild_tensor_v2"
_MAPPINGS: Final = (dict, OrderedDict, Counter, defaultdict)
_COLLECTIONS: Final = (list, tuple, set, frozenset, deque)
_STAND_INS: Final = (Named, StoredObject, StorageClass, PendingSeed)


def read_value(data: bytes) -> Any:
    """Return the value that ``torch.save`` wrote.

    Raises:
        Exception: If it is damaged, or of a class that is not admitted.
    """
    place = _Bytes(data)
    if not is_zip(place):
        return torch.load(io.BytesIO(data), weights_only=True)
    reading = _ValueReading(place)
    try:
        value = reading.load()
    except BadPickle:
        if not reading.unknown:
            raise
    refused = _REFUSED & reading.unknown
    if refused:
        raise BadPickle(f"Unsupported class {min(refused)}")
    return torch.load(io.BytesIO(data), weights_only=True) if reading.unknown else value


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


class _Bytes:
    """An archive in memory."""

    label = "the value"

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def read(self, start: int, length: int, entry: str) -> bytes:
        if not 0 <= start <= start + length <= self.length:
            msg = f"it is damaged: expected {entry} at {start} to {start + length} of {self.length} bytes"
            raise CheckpointError(msg)
        return self._data[start : start + length]


class _ValueReading:
    """Reads one value.

    Attributes:
        unknown: The names in its pickle that stand for nothing here.
    """

    def __init__(self, place: _Bytes) -> None:
        self.unknown: set[str] = set()
        self._place = place
        self._members = read_members(place)
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise BadPickle("it holds no data.pkl, or several")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._enums: dict[str, Any] = {}

    def load(self) -> Any:
        order = self._members.get(f"{self._prefix}byteorder")
        if order is not None and self._content(order.name) != sys.byteorder.encode():
            raise BadPickle("it was saved on a machine with another byte order")
        data = self._content(f"{self._prefix}data.pkl")
        value = Reader(data, self._call, self._name, self._storage, build=reconstructors.build).load()
        if type(value) is Named and value.name in reconstructors.CLASSES:
            return reconstructors.CLASSES[value.name]
        if type(value) is PendingSeed:
            return value.made
        if not self.unknown:
            _check_complete(value)
        return value

    def _content(self, name: str) -> bytes:
        member = self._members[name]
        return self._place.read(member.start, member.nbytes, name)

    def _name(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and name in _NAMED:
            return _NAMED[name]
        if full in storage_dtypes():
            return StorageClass(full)
        known = (reconstructors.CALLS, reconstructors.CLASSES, numpy_values.CALLS, numpy_values.CLASSES)
        if full in MADE_BY_READER or full in PLAIN_CALLS or full == _TENSOR or any(full in names for names in known):
            return Named(full)
        if full == "builtins.Ellipsis":
            return ...
        found = reconstructors.enum_class(module, name)
        if found is not None:
            self._enums[full] = found
            return Named(full)
        self.unknown.add(full)
        return StoredObject(full)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == _TENSOR:
            return rebuilt_tensor(*args)
        if name in self._enums:
            (value,) = args
            return reconstructors.enum_member(self._enums[name], value)
        for known in (PLAIN_CALLS, reconstructors.CALLS, numpy_values.CALLS):
            if name in known:
                return known[name](*args)
        raise BadPickle(f"it calls {name}")

    def _storage(self, pid: Any) -> Any:
        kind, key, numel = storage_id(pid)
        if key not in self._storages:
            content = bytearray(self._content(f"{self._prefix}data/{key}"))
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            whole = torch.frombuffer(content, dtype=torch.uint8) if content else empty
            self._storages[key] = whole.untyped_storage()
        storage = self._storages[key]
        dtype = torch.uint8 if kind.dtype is None else kind.dtype
        if numel * dtype.itemsize != storage.nbytes():
            raise BadPickle("it has a storage of another size than it says")
        return typed_storage(storage, dtype)


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
