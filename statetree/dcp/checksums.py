"""The checksums of a checkpoint's entries.

DCP writes each piece of a tensor, and each plain value, by ``torch.save``: as a zip archive with a CRC-32 of every
member. ``torch.load`` does not look at them.
"""

from __future__ import annotations

import zlib
from typing import IO, TYPE_CHECKING, Final

from statetree.errors import CheckpointError
from statetree.files.zip_archive import read_members

if TYPE_CHECKING:
    from statetree.dcp.metadata import Stored

_CHUNK_BYTES: Final = 1 << 20


def check_entry(file: IO[bytes], key: str, stored: Stored) -> None:
    """Compare all that ``torch.load`` reads of an entry with the entry's checksums.

    What the archive says of its members has none, but is there twice, or leads to other bytes if it is changed.

    Args:
        file: The file that it is stored in.
        key: Its key, for messages.
        stored: Where it lies in the file.

    Raises:
        CheckpointError: If a byte of it is not what was written, or if it has no checksums.
    """
    piece = _StoredRange(file, f"{key} in {stored.name}", stored)
    try:
        members = read_members(piece).values()
    except CheckpointError as error:
        msg = str(error).removeprefix("read: ")
        raise CheckpointError(msg) from None
    if not any(member.crc for member in members):
        msg = (
            f"{piece.label} has no checksums: expected those that torch.save writes unless "
            "torch.serialization.set_crc32_options(False) is set. Pass verify=False to read it all the same."
        )
        raise CheckpointError(msg)
    for member in members:
        found = piece.checksum(member.start, member.nbytes)
        if found != member.crc:
            what = f"expected {member.name!r} with the checksum {member.crc:08x}, got {found:08x}"
            msg = f"{piece.label} is damaged: {what}"
            raise CheckpointError(msg)


class _StoredRange:
    """A piece of a file."""

    def __init__(self, file: IO[bytes], label: str, stored: Stored) -> None:
        self.label = label
        self.length = stored.length
        self._start = stored.offset
        self._file = file

    def read(self, start: int, length: int, entry: str) -> bytes:
        """Return bytes."""
        found = b""
        if 0 <= start <= start + length <= self.length:
            self._file.seek(self._start + start)
            found = self._file.read(length)
        if len(found) < length:
            place = f"at {start} to {start + length} of {self.length} bytes"
            msg = f"{self.label} is damaged: expected {entry} {place}, got {len(found)} bytes"
            raise CheckpointError(msg)
        return found

    def checksum(self, start: int, length: int) -> int:
        """Return the CRC-32 of bytes."""
        found = 0
        self._file.seek(self._start + start)
        while length > 0:
            chunk = self._file.read(min(length, _CHUNK_BYTES))
            if not chunk:
                break  # the file was cut off meanwhile: the checksum will not agree
            found = zlib.crc32(chunk, found)
            length -= len(chunk)
        return found
