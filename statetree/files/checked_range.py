"""Bytes of a file that are compared with their checksum as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statetree.files.crc32 import crc32
from statetree.files.ranges import CHUNK_BYTES, FileRange
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    import torch


class CheckedRange(FileRange):
    """A range with a CRC-32, which is compared if all is read in one go, and otherwise before, once.

    Args:
        place: The range, of a file.
        entry: What messages call it.
        part: What they call the part of that which has the checksum.
        checksum: The CRC-32.
    """

    __slots__ = ("_checksum", "_part")

    def __init__(self, place: FileRange, entry: str, part: str, checksum: int) -> None:
        super().__init__(place.files, place.path, place.start, place.length, entry)
        self._part = part
        self._checksum: int | None = checksum  # ``None`` once it was compared

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
            refuse(self.label, f"{self._part} has the checksum {found:08x}: expected {self._checksum:08x}")
        self._checksum = None
