"""Bytes of a file that are compared with their checksum as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statetree.files.crc32 import crc32
from statetree.files.ranges import CHUNK_BYTES, FileRange
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    import torch


class CheckedRange(FileRange):
    """A part of a range that has a CRC-32.

    If all of it is read in one go, that is what is compared. Otherwise it is read first to be compared, once.

    Args:
        place: What it is a part of.
        start: Where it begins there.
        length: How many bytes it has.
        entry: What messages call the whole.
        name: What messages call the part.
        checksum: Its CRC-32.
    """

    __slots__ = ("_checksum", "_name")

    def __init__(self, place: FileRange, start: int, length: int, entry: str, name: str, checksum: int) -> None:
        super().__init__(place.files, place.path, place.start + start, length, entry)
        self._name = name
        self._checksum: int | None = checksum

    def fill(self, view: memoryview, start: int) -> None:
        """Fill memory with bytes. Raises ``CheckpointError`` if any of the range is wrong."""
        if self._checksum is None or len(view) < self.length:
            self._verify()
            super().fill(view, start)
            return
        found = 0
        # Blocks are in the processor's cache when they are summed up. What is fetched comes in few requests.
        step = max(1, self.length) if self.files.is_remote else CHUNK_BYTES
        for at in range(0, self.length, step):
            block = view[at : at + step]
            super().fill(block, at)
            found = crc32(block, found)
        self._compare(found)

    def mapped(self) -> torch.UntypedStorage:
        """Return these bytes as a storage."""
        self._verify()
        return super().mapped()

    def _verify(self) -> None:
        if self._checksum is not None:
            self._compare(self.checksum(0, self.length))

    def _compare(self, found: int) -> None:
        if found != self._checksum:
            refuse(self.label, f"{self._name} has the checksum {found:08x}: expected {self._checksum:08x}")
        self._checksum = None  # the next read may be of a part
