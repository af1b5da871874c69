"""Reads what ``torch.save`` wrote: zip archives, and the files of torch before 1.6."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

from statetree.cli.checkpoint import TORCH, Check, Checkpoint
from statetree.cli.formats.torch_objects import StorageClass, TorchObjects, size_of
from statetree.cli.formats.zips import REWRITE, Member, is_zip, read_members
from statetree.cli.names import refuse
from statetree.cli.stored import BUCKET_BYTES, FileStorage, Storage, StoredStorage, StoredTensor
from statetree.files.safe_pickle import BadPickle, Foreign, Reader

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

    from statetree.cli.files import Files, Region
    from statetree.cli.progress import Progress

_MAX_PICKLE_BYTES: Final = 1 << 30
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_BEGINNING: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of this number
_VERSION: Final = 1001


def read_torch(path: Path, files: Files) -> Checkpoint:
    """Open a file that ``torch.save`` wrote.

    Its pickle is read as data; no storage is read.

    Raises:
        CheckpointError: If it is something else, or damaged.
    """
    region = files.open(path)
    if is_zip(region):
        archive = Archive(region)
        return Checkpoint(
            path,
            TORCH,
            archive.tree,
            region.length,
            [path],
            checks=archive.checks,
            foreign=list(archive.foreign),
            storages=archive.storages(),
        )
    if not region.length:
        refuse(path, "it is empty")
    if region.read(0, min(region.length, len(_BEGINNING)), "its beginning") != _BEGINNING:
        refuse(
            path, "it is neither a zip archive of torch.save nor one of its older files", "Pass what torch.save wrote."
        )
    objects = TorchObjects()
    tree, storages = _read_old(region, objects)
    return Checkpoint(path, TORCH, tree, region.length, [path], foreign=list(objects.foreign), storages=storages)


class Archive:
    """A zip archive of ``torch.save``.

    Attributes:
        tree: What it holds, with what stands for tensors.
        foreign: The names of classes that were not loaded.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._members = read_members(region)
        self._storages: dict[str, StoredStorage] = {}
        pickles = [name for name in self._members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in self._members):
            self._refuse("it holds no data.pkl, or several: it is no file of torch.save (one of TorchScript, perhaps)")
        self._prefix = pickles[0].removesuffix("data.pkl")
        outside = next((name for name in self._members if not name.startswith(self._prefix)), None)
        if outside is not None:
            self._refuse(f"the member {outside!r} does not lie in {self._prefix}")
        self._check_byteorder()
        objects = TorchObjects()
        reader = Reader(self._content("data.pkl"), objects.call, objects.names, self._storage)
        try:
            self.tree: Any = reader.load()
        except BadPickle as bad:
            self._refuse(f"the pickle in {pickles[0]}: {bad}")
        self.foreign = objects.foreign

    def _refuse(self, what: str, remedy: str | None = None) -> None:
        args = () if remedy is None else (remedy,)
        refuse(self._region.label, what, *args)

    def _check_byteorder(self) -> None:
        if f"{self._prefix}byteorder" in self._members:
            order = self._content("byteorder", 16)
            if order != sys.byteorder.encode():
                self._refuse(f"its byte order is {order!r}: expected {sys.byteorder}", REWRITE)

    def _content(self, name: str, limit: int = _MAX_PICKLE_BYTES) -> bytes:
        member = self._members[f"{self._prefix}{name}"]
        if member.nbytes > limit:
            self._refuse(f"the member {member.name!r} has {member.nbytes} bytes: expected at most {limit}")
        return self._region.read(member.start, member.nbytes, f"the member {member.name!r}")

    def _storage(self, pid: Any) -> StoredStorage:
        kind, key, numel = _storage_id(pid, 5)
        member = self._members.get(f"{self._prefix}data/{key}")
        if member is None:
            raise BadPickle(f"it has a tensor on the storage {key[:40]!r}, which the archive does not hold")
        need = numel * (kind.dtype.itemsize if kind.dtype else 1)
        if need != member.nbytes:
            raise BadPickle(f"it says that the storage {member.name!r} has {need} bytes: it has {member.nbytes}")
        if key not in self._storages:  # of several references, torch goes by the first one's dtype
            region = self._region.part(member.start, member.nbytes, member.name)
            self._storages[key] = StoredStorage(FileStorage(member.name, region), kind.dtype)
        return self._storages[key]

    def storages(self) -> list[Storage]:
        """Return the storages that the pickle speaks of."""
        return [stored.storage for stored in self._storages.values()]

    def checks(self) -> list[Check]:
        """Return the checksums of all members."""
        return [
            Check(member.name, member.nbytes, lambda progress, member=member: self._check(member, progress))  # type: ignore[misc]
            for member in self._members.values()
        ]

    def _check(self, member: Member, progress: Progress) -> None:
        found = 0
        for start in range(0, member.nbytes, BUCKET_BYTES):
            count = min(BUCKET_BYTES, member.nbytes - start)
            found = zlib.crc32(self._region.read(member.start + start, count, f"the member {member.name!r}"), found)
            progress(count)
        if found != member.crc:
            self._refuse(f"the member {member.name!r} has the checksum {found:08x}: expected {member.crc:08x}")


def _storage_id(pid: Any, length: int) -> tuple[StorageClass, str, int]:
    """Return the class, key and number of elements of a storage."""
    if type(pid) is not tuple or len(pid) < length or pid[0] != "storage":
        raise BadPickle("it refers to something else than a storage")
    kind, key, _, numel = pid[1:5]
    if not isinstance(kind, StorageClass) or type(key) is not str:
        raise BadPickle("it refers to a storage without a class or a key")
    (count,) = size_of([numel], "a number of elements")
    return kind, key, count


class _OldStorage(Storage):
    """A storage of an old file: where it lies turns out only after the pickles."""

    region: Region

    def read(self, start: int, stop: int) -> Any:
        return FileStorage(self.entry, self.region).read(start, stop)

    def elements(self, view: StoredTensor, start: int, stop: int) -> Any:
        return FileStorage(self.entry, self.region).elements(view, start, stop)


def _read_old(region: Region, objects: TorchObjects) -> tuple[Any, list[Storage]]:
    """Return the tree and the storages of a file of torch before 1.6: pickles, then storages."""
    storages: dict[str, tuple[_OldStorage, int, StoredStorage]] = {}

    def storage(pid: Any) -> Any:
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            return Foreign("a module's class")
        kind, key, numel = _storage_id(pid, 6)
        if pid[5] is not None:
            raise BadPickle("it has a storage that is a view on another one, which torch stopped writing in 2017")
        itemsize = kind.dtype.itemsize if kind.dtype else 1
        if key not in storages:
            made = _OldStorage(f"the storage {key[:40]}", numel * itemsize)
            storages[key] = made, itemsize, StoredStorage(made, kind.dtype)
        if storages[key][0].nbytes != numel * itemsize:
            raise BadPickle(f"it says that the storage {key[:40]} has {numel * itemsize} bytes, and something else")
        return storages[key][2]

    with region.mapped() as data:
        reader = Reader(data, objects.call, objects.names, storage)
        try:
            tree = _old_tree(reader)
            end = _find_storages(reader, data, region, storages)
        except BadPickle as bad:
            refuse(region.path, str(bad))
    if end != region.length:
        refuse(region.path, f"it goes on after its end at byte {end}")
    return tree, [made for made, _, _ in storages.values()]


def _old_tree(reader: Reader) -> Any:
    magic, version, system = reader.load(), reader.load(), reader.load()
    if magic != _MAGIC or version != _VERSION or type(system) is not dict:
        raise BadPickle("it is of an unknown version")
    if system.get("little_endian") is not (sys.byteorder == "little"):
        raise BadPickle(f"its byte order is not {sys.byteorder}")
    return reader.load()


def _find_storages(
    reader: Reader, data: mmap.mmap, region: Region, storages: dict[str, tuple[_OldStorage, int, StoredStorage]]
) -> int:
    """Say where the storages lie, which follow the pickles. Returns where they end."""
    keys = reader.load()
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise BadPickle("it does not list its storages")
    at = reader.position
    for key in keys:
        found, itemsize, _ = storages[key]
        count = int.from_bytes(data[at : at + 8], "little", signed=True)
        if count * itemsize != found.nbytes:
            raise BadPickle(f"{found.entry} has {count} elements: expected {found.nbytes // itemsize}")
        found.region = region.part(at + 8, found.nbytes, found.entry)
        at += 8 + found.nbytes
    return at
