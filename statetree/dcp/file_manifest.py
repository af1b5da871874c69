"""The manifest of a checkpoint: which save wrote each file, and a checksum for each piece, made while it was written.

It lies beside DCP's ``.metadata``, which names the same save. Every data file ends with the id of the save that wrote
it, so that files of two checkpoints are told apart without reading them. An incremental save lists files of earlier
saves, too, under their own ids.
"""

from __future__ import annotations

import json
import os
import re
import stat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from statetree.errors import CheckpointError, unsignalled
from statetree.files.crc32 import crc32
from statetree.files.remote import RemotePath
from statetree.files.untrusted import leads_out, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from statetree.files.ranges import FileRange

MANIFEST: Final = ".statetree_manifest"
_VERSION: Final = 1
_MAX_BYTES: Final = 2 << 30
#: What ``StorageMeta.save_id`` of DCP's metadata begins with if there is a manifest.
ID_PREFIX: Final = "statetree:"
#: What the data files of a save end with, before its id. DCP does not read it.
TRAILER: Final = b"\nstatetree save "
TRAILER_BYTES: Final = len(TRAILER) + 32
_ID: Final = re.compile(r"[0-9a-f]{32}")
_MARKS: Final = re.compile(r"[0-9a-f]*")
_NAME: Final = re.compile(r"[^/\\\0]+\.distcp")


class Index(NamedTuple):
    """Which piece of a checkpoint: the key of its entry, and where it begins in a tensor (``None``: a plain value)."""

    key: str
    start: tuple[int, ...] | None


class Stored(NamedTuple):
    """Where a piece lies: a file's name in the checkpoint's directory, an offset and a length; and its CRC-32.

    ``marks`` are those of the blocks of a tensor's memory, so that a part of it is compared alone (``BlockChecksums``).
    """

    name: str
    offset: int
    length: int
    checksum: int | None = None
    marks: str = ""


class ManifestFile(NamedTuple):
    """A data file: the id of the save that wrote it, its size, and its pieces."""

    save: str
    nbytes: int
    pieces: Mapping[Index, Stored]


class FileManifest(NamedTuple):
    """What a save wrote: its id, size and checksum of ``.metadata``, the data files by name, and what is said of it.

    ``entries`` are those of ``.metadata`` once more, as JSON, which is read many times faster: ``None`` for a plain
    value; for a tensor dtype and shape and, unless it is in one piece, where each begins and how large it is.
    """

    save: str
    metadata: tuple[int, int]
    files: Mapping[str, ManifestFile]
    metric: float | None = None
    about: Mapping[str, Any] = MappingProxyType({})
    entries: Mapping[str, Any] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Return the manifest as a file: a line of JSON, and a line with its CRC-32."""
        files = {}
        for name, file in self.files.items():
            rows = [(*index, *(found[1:] if found.marks else found[1:-1])) for index, found in file.pieces.items()]
            files[name] = [file.save, file.nbytes, rows]
        table: dict[str, Any] = {"version": _VERSION, "save": self.save, "metadata": self.metadata, "files": files}
        table |= {"entries": self.entries, "metric": self.metric, "about": dict(self.about)}
        line = json.dumps(table, separators=(",", ":")).encode()
        return line + f"\n{crc32(line):08x}\n".encode()

    def fault_of(self, data: bytes) -> str:
        """Say how bytes differ from those of ``.metadata`` that were written; empty if they do not."""
        nbytes, checksum = self.metadata
        if (len(data), crc32(data)) == (nbytes, checksum):
            return ""
        what = f"expected {nbytes} bytes with the checksum {checksum:08x}"
        return f".metadata is damaged: {what}, got {len(data)} bytes with {crc32(data):08x}"


def regular_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file, which must be a regular one (a pipe would wait for ever), and no larger."""
    if isinstance(place := cast("Any", path), RemotePath):
        return place.fetch(limit)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name} is no regular file")
        if status.st_size > limit:
            raise CheckpointError(f"{path.name} has {status.st_size} bytes: expected at most {limit}")
        return file.read(status.st_size)


def read_manifest(directory: Path) -> FileManifest | None:
    """Return the manifest of a checkpoint; ``None`` if there is none. Raises ``CheckpointError`` if it is damaged."""
    try:
        if leads_out(directory / MANIFEST, directory):
            raise CheckpointError(f"{MANIFEST} is a link that leads out of the directory")
        data = regular_bytes(directory / MANIFEST, _MAX_BYTES)
    except unsignalled(FileNotFoundError):
        return None
    except unsignalled(OSError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be opened: {error}") from error
    line, _, end = data.partition(b"\n")
    if end != f"{crc32(line):08x}\n".encode():
        raise CheckpointError(f"{MANIFEST} is damaged: its checksum differs")
    try:
        return _parsed(json.loads(line))
    except unsignalled(ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is of an unknown version, or hostile ({type(error).__name__})") from None


def _parsed(table: Any) -> FileManifest:
    if table["version"] != _VERSION or not _ID.fullmatch(table["save"]):
        raise ValueError
    nbytes, checksum = map(_number, table["metadata"])
    files = {}
    for name, (save, size, rows) in table["files"].items():
        if not _ID.fullmatch(save) or not _NAME.fullmatch(name):
            raise ValueError
        files[name] = ManifestFile(save, _number(size), dict([_piece(name, *row) for row in rows]))
    metric = table.get("metric")
    metric = None if metric is None else float(metric)
    more = dict(table.get("about", {})), dict(table.get("entries", {}))
    return FileManifest(table["save"], (nbytes, checksum), files, metric, *more)


def _piece(
    name: str, key: Any, start: Any, offset: Any, length: Any, checksum: Any, marks: Any = ""
) -> tuple[Index, Stored]:
    if type(key) is not str or not _MARKS.fullmatch(marks):
        raise TypeError
    at = None if start is None else (*map(_number, start),)
    return Index(key, at), Stored(name, _number(offset), _number(length), _number(checksum), marks)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value


def check_file(place: FileRange, listed: ManifestFile) -> None:
    """Compare a data file's size, and the save that it names, with the manifest.

    An end that names no save at all is damage, which the checksums of the pieces tell of if it goes further.
    """
    if place.length != listed.nbytes:
        refuse(place.label, f"it is damaged: expected {listed.nbytes} bytes, got {place.length}")
    end = place.read(max(0, place.length - TRAILER_BYTES), min(place.length, TRAILER_BYTES), "its end")
    told = end.removeprefix(TRAILER).decode("ascii", "replace")
    if told != listed.save and _ID.fullmatch(told):
        what = f"it is of the save {told}: expected {listed.save}. Files of two checkpoints are mixed"
        refuse(place.label, what, "Copy all files of one.")
