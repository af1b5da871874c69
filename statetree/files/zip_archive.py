"""Zip archives as torch writes them: the members are stored as they are, and lie side by side.

``zipfile`` reads the list of members. What it takes and other programs read differently is refused: members of one
name, members that overlap, and an archive that something follows.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Final, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange

#: The end of an archive that has no comment, and what stands before the name of a member where that begins.
_END: Final = struct.Struct("<4s16xH")
_LOCAL: Final = struct.Struct("<4s22x2H")
_UTF8: Final = 0x800
_ENCRYPTED: Final = 0x2041
#: The attribute of directories. Torch does not read what has it, and returns memory as it finds it.
_IS_DIRECTORY: Final = 0x10
REWRITE: Final = "If you trust its source, load it and save it again with torch.save."


class ZipMember(NamedTuple):
    """A file in the archive. ``start`` is where its bytes begin in the archive."""

    name: str
    start: int
    nbytes: int
    crc: int | None

    def verify(self, file: FileRange) -> None:
        """Compare it with its checksum. Raises ``CheckpointError`` if they do not agree."""
        found = file.checksum(self.start, self.nbytes)
        if found != self.crc:
            refuse(file.label, f"the member {self.name!r} has the checksum {found:08x}: expected {self.crc or 0:08x}")


class _Reader(io.RawIOBase):
    """A range of a file, as ``zipfile`` reads it."""

    def __init__(self, file: FileRange) -> None:
        self._file, self._at = file, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._file.length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.length - self._at)
        found = self._file.read(self._at, left if size < 0 else min(size, left), "the list of members")
        self._at += len(found)
        return found


def read_members(file: FileRange) -> dict[str, ZipMember]:
    """Return the members by name.

    Raises:
        CheckpointError: If the archive is truncated or damaged, or if members are compressed, encrypted, listed twice,
            overlap each other, are marked as directories, or lie outside of it.
    """
    try:
        archive = ZipFile(_Reader(file))
    except (BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        refuse(file.label, f"it is no zip archive: {error}")
    end = file.length - _END.size
    if _END.unpack(file.read(end, _END.size, "the end of the archive")) != (b"PK\x05\x06", 0):
        refuse(file.label, "it does not end as a zip archive: something was added")
    found = sorted((info.header_offset, _member(file, info)) for info in archive.infolist())
    if len({member.name.casefold() for _, member in found}) < len(found):  # torch takes any of them
        refuse(file.label, "two of its members have one name, but for small and capital letters")
    stop = 0
    for begin, member in [*found, (archive.start_dir, None)]:
        if begin < stop:
            refuse(
                file.label, f"{f'the member {member.name!r}' if member else 'the list of members'} overlaps a member"
            )
        stop = member.start + member.nbytes if member else begin
    return {member.name: member for _, member in found}


def _member(file: FileRange, info: ZipInfo) -> ZipMember:
    what = f"the member {info.filename!r}"
    if info.compress_type != ZIP_STORED:
        refuse(file.label, f"{what} is compressed: torch writes none, and it may be a zip bomb", REWRITE)
    if info.external_attr & _IS_DIRECTORY:
        refuse(file.label, f"{what} is marked as a directory")
    if info.flag_bits & _ENCRYPTED or info.compress_size != info.file_size:
        sizes = f"{info.compress_size} and {info.file_size} bytes"
        refuse(file.label, f"{what} is encrypted, or lies about its size ({sizes})")
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    head = file.read(info.header_offset, _LOCAL.size + len(name), what)
    signature, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    if signature != b"PK\x03\x04" or head[_LOCAL.size :] != name:
        refuse(file.label, f"{what} is not where the list of members says")
    start = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
    return ZipMember(info.filename, start, info.file_size, info.CRC)
