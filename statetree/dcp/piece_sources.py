"""What a piece of a data file is written from, and whether a file that was written before holds the same.

A file is told to hold a tensor by its bytes: those of the tensor's memory are compared with it, and the rest (what
``torch.save`` puts around them) has a checksum. That is faster than a digest of both, and leaves nothing to chance.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.dcp.file_manifest import ManifestPiece
from statetree.files.strided_reading import memory_view
from statetree.files.torch_writing import Stream, save_to
from statetree.spans.bits import same_bytes

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange

#: Where the memory lies in a piece, the checksum of the rest, and how the memory is to be read.
_SOURCE: Final = re.compile(r"(\d{1,18}) ([0-9a-f]{8}) (.*)")
_SHORT_BYTES: Final = 4096


class PieceSource:
    """A tensor on the CPU that fills its storage, or the bytes of a plain value."""

    def __init__(self, data: Any) -> None:
        self._data = data
        if isinstance(data, torch.Tensor):
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = empty.set_(data.untyped_storage())
            bits = f"{data.is_conj():d}{data.is_neg():d}"
            self._reading = f"{data.dtype} {tuple(data.shape)} {data.stride()} {data.storage_offset()} {bits}"
        else:
            self._memory = torch.frombuffer(data, dtype=torch.uint8)
            self._reading = "value"

    def write(self, file: Any, key: str, chunk: tuple[int, ...] | None) -> ManifestPiece:
        """Write it to a file as DCP does, and return what the manifest says of it."""
        begin = file.tell()
        stream = _Noting(file, self._memory)
        if isinstance(self._data, torch.Tensor):
            save_to(self._data, stream)
        else:
            stream.write(self._data)
        source = "" if stream.place is None else f"{stream.place} {stream.rest:08x} {self._reading}"
        return ManifestPiece(key, chunk, begin, stream.length, stream.checksum, source)

    def is_in(self, file: FileRange, piece: ManifestPiece) -> bool:
        """Whether a piece of a file was written from the same, and holds it still.

        Raises:
            CheckpointError: If the piece does not lie in the file.
        """
        found = _SOURCE.fullmatch(piece.source)
        if found is None or found[3] != self._reading:
            return False
        place = file.part(piece.offset, piece.length, f"the piece of {piece.key!r}")
        begin, end = int(found[1]), int(found[1]) + self._memory.nbytes
        rest = place.checksum(end, place.length - end, place.checksum(0, begin))
        return rest == int(found[2], 16) and self._is_at(place, begin)

    def _is_at(self, place: FileRange, begin: int) -> bool:
        at = 0
        for block in place.blocks(begin, self._memory.nbytes):
            if not same_bytes(torch.frombuffer(block, dtype=torch.uint8), self._memory[at : at + len(block)]):
                return False
            at += len(block)
        return True


class _Noting(Stream):
    """A file to write to, which takes note of what is written.

    Attributes:
        length: How many bytes.
        checksum: Their CRC-32.
        place: Where some memory lies among them, which is written in one go; ``None`` as long as it was not.
        rest: The CRC-32 of all others.
    """

    def __init__(self, file: Any, memory: torch.Tensor) -> None:
        super().__init__(file)
        self._memory = memory_view(memory)
        self.length = self.checksum = self.rest = 0
        self.place = None if len(self._memory) else 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.place is None and self._is_memory(view):
            self.place = self.length
        else:
            self.rest = zlib.crc32(view, self.rest)
        self.checksum = zlib.crc32(view, self.checksum)
        self.length += len(view)
        return super().write(view)

    def _is_memory(self, view: memoryview) -> bool:
        # What else is as long is short. If it has the same bytes, too, it does as well: both must be unchanged.
        return len(view) == len(self._memory) and bytes(view[:_SHORT_BYTES]) == bytes(self._memory[:_SHORT_BYTES])
