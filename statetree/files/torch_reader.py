"""Reads what ``torch.save`` wrote: its pickle as data, and no storage before its elements are asked for."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

from statetree.files.checkpoint import TORCH, Checkpoint, Checksum
from statetree.files.safe_pickle import BadPickle, Reader
from statetree.files.stored import BUCKET_BYTES, FileStorage, Storage, StoredStorage
from statetree.files.torch_legacy import BEGINNING, read_legacy
from statetree.files.torch_objects import TorchObjects, storage_id
from statetree.files.untrusted import refuse
from statetree.files.zip_archive import REWRITE, ZipMember, is_zip, read_members

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.checkpoint import Progress
    from statetree.files.ranges import FileRange, OpenFiles

_MAX_PICKLE_BYTES: Final = 1 << 30


def read_torch(path: Path, files: OpenFiles) -> Checkpoint:
    """Open a file that ``torch.save`` wrote.

    Its pickle is read as data; no storage is read.

    Raises:
        CheckpointError: If it is something else, or damaged.
    """
    place = files.open(path)
    if not is_zip(place):
        return _read_legacy(place)
    archive = Archive(place)
    return Checkpoint(
        path,
        TORCH,
        archive.tree,
        place.length,
        [path],
        checksums=archive.checksums,
        foreign=list(archive.foreign),
        storages=archive.storages(),
    )


def _read_legacy(place: FileRange) -> Checkpoint:
    path = place.path
    if not place.length:
        refuse(path, "it is empty")
    if place.read(0, min(place.length, len(BEGINNING)), "its beginning") != BEGINNING:
        what = "it is neither a zip archive of torch.save nor one of its older files"
        refuse(path, what, "Pass what torch.save wrote.")
    objects = TorchObjects()
    tree, storages = read_legacy(place, objects)
    return Checkpoint(path, TORCH, tree, place.length, [path], foreign=list(objects.foreign), storages=storages)


class Archive:
    """A zip archive of ``torch.save``.

    Attributes:
        tree: What it holds, with what stands for tensors.
        foreign: The names of classes that were not loaded.
    """

    def __init__(self, place: FileRange) -> None:
        self._place = place
        self._members = read_members(place)
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
        refuse(self._place.label, what, *args)

    def _check_byteorder(self) -> None:
        if f"{self._prefix}byteorder" in self._members:
            order = self._content("byteorder", 16)
            if order != sys.byteorder.encode():
                self._refuse(f"its byte order is {order!r}: expected {sys.byteorder}", REWRITE)

    def _content(self, name: str, limit: int = _MAX_PICKLE_BYTES) -> bytes:
        member = self._members[f"{self._prefix}{name}"]
        if member.nbytes > limit:
            self._refuse(f"the member {member.name!r} has {member.nbytes} bytes: expected at most {limit}")
        return self._place.read(member.start, member.nbytes, f"the member {member.name!r}")

    def _storage(self, pid: Any) -> StoredStorage:
        kind, key, numel = storage_id(pid, 5)
        member = self._members.get(f"{self._prefix}data/{key}")
        if member is None:
            raise BadPickle(f"it has a tensor on the storage {key[:40]!r}, which the archive does not hold")
        need = numel * (kind.dtype.itemsize if kind.dtype else 1)
        if need != member.nbytes:
            raise BadPickle(f"it says that the storage {member.name!r} has {need} bytes: it has {member.nbytes}")
        if key not in self._storages:  # of several references, torch goes by the first one's dtype
            place = self._place.part(member.start, member.nbytes, member.name)
            self._storages[key] = StoredStorage(FileStorage(member.name, place), kind.dtype)
        return self._storages[key]

    def storages(self) -> list[Storage]:
        """Return the storages that the pickle speaks of."""
        return [stored.storage for stored in self._storages.values()]

    def checksums(self) -> list[Checksum]:
        """Return the checksums of all members."""
        return [
            Checksum(member.name, member.nbytes, lambda progress, member=member: self._check(member, progress))  # type: ignore[misc]
            for member in self._members.values()
        ]

    def _check(self, member: ZipMember, progress: Progress) -> None:
        found = 0
        for start in range(0, member.nbytes, BUCKET_BYTES):
            count = min(BUCKET_BYTES, member.nbytes - start)
            found = zlib.crc32(self._place.read(member.start + start, count, f"the member {member.name!r}"), found)
            progress(count)
        if found != member.crc:
            self._refuse(f"the member {member.name!r} has the checksum {found:08x}: expected {member.crc:08x}")
