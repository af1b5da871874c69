"""Reads the files of torch before 1.6, which many published checkpoints are: pickles, and behind them the storages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.files.safe_pickle import BadPickle, Foreign, Reader
from statetree.files.stored import FileStorage, Storage, StoredStorage
from statetree.files.torch_objects import storage_id
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange
    from statetree.files.torch_objects import TorchObjects

_MAGIC: Final = 0x1950A86A20F9469CFC6C
#: The pickle of this number, with which files begin.
BEGINNING: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION: Final = 1001


class _Located(NamedTuple):
    storage: FileStorage
    itemsize: int
    leaf: StoredStorage


def read_legacy(place: FileRange, objects: TorchObjects) -> tuple[Any, list[Storage]]:
    """Return the tree and the storages of a file.

    Raises:
        CheckpointError: If it is damaged.
    """
    storages: dict[str, _Located] = {}

    def storage(pid: Any) -> Any:
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            return Foreign("a module's class")
        kind, key, numel = storage_id(pid, 6)
        if pid[5] is not None:
            raise BadPickle("it has a storage that is a view on another one, which torch stopped writing in 2017")
        itemsize = kind.dtype.itemsize if kind.dtype else 1
        if key not in storages:
            made = FileStorage(f"the storage {key[:40]}", place)
            made.nbytes = numel * itemsize  # where it lies turns out only after the pickles
            storages[key] = _Located(made, itemsize, StoredStorage(made, kind.dtype))
        if storages[key].storage.nbytes != numel * itemsize:
            raise BadPickle(f"it says that the storage {key[:40]} has {numel * itemsize} bytes, and something else")
        return storages[key].leaf

    with place.mapped() as data:
        reader = Reader(data, objects.call, objects.names, storage)
        try:
            tree = _tree(reader)
            keys = _keys(reader, storages)
            end = reader.position
            for key in keys:
                end = _locate(storages[key], place, data[end : end + 8], end + 8)
        except BadPickle as bad:
            refuse(place.path, str(bad))
    if end != place.length:
        refuse(place.path, f"it goes on after its end at byte {end}")
    return tree, [found.storage for found in storages.values()]


def _tree(reader: Reader) -> Any:
    magic, version, system = reader.load(), reader.load(), reader.load()
    if magic != _MAGIC or version != _VERSION or type(system) is not dict:
        raise BadPickle("it is of an unknown version")
    if system.get("little_endian") is not (sys.byteorder == "little"):
        raise BadPickle(f"its byte order is not {sys.byteorder}")
    return reader.load()


def _keys(reader: Reader, storages: dict[str, _Located]) -> list[str]:
    """Return the keys of all storages in the order in which they lie in the file."""
    keys = reader.load()
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise BadPickle("it does not list its storages")
    return keys


def _locate(found: _Located, place: FileRange, size: bytes, start: int) -> int:
    """Say where a storage begins. Returns where it ends."""
    storage, itemsize, _ = found
    count = int.from_bytes(size, "little", signed=True)
    if count * itemsize != storage.nbytes:
        raise BadPickle(f"{storage.entry} has {count} elements: expected {storage.nbytes // itemsize}")
    storage.place = place.part(start, storage.nbytes, storage.entry)
    return start + storage.nbytes
