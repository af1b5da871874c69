"""What a piece of a data file is written from, and whether a file that was written before holds the same."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import in_slabs, whole_box
from statetree.files.crc32 import crc32
from statetree.files.ranges import BUCKET_BYTES
from statetree.files.strided_reading import memory_view
from statetree.files.tensor_archives import archive_of
from statetree.spans.bits import same_bytes
from statetree.spans.layout import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.dcp.file_manifest import ManifestPiece
    from statetree.files.ranges import FileRange

#: How much is written at a time: what was read for its checksum is still in the processor's cache.
_BLOCK_BYTES: Final = 1 << 20


class PieceSource:
    """A plain strided tensor, or the bytes of a plain value.

    Contiguous tensors on the CPU are written from their memory. Others are copied, a bucket at a time.

    Attributes:
        length: How many bytes are written of it.
    """

    def __init__(self, data: Any) -> None:
        self._archive = None
        if isinstance(data, torch.Tensor):
            data = data.detach().resolve_conj().resolve_neg()
            self._archive = archive_of(data.dtype, data.shape)
            if self._archive is None:
                file = io.BytesIO()
                torch.save(data.cpu().clone(memory_format=torch.contiguous_format), file)
                data = file.getbuffer()
        self._data: torch.Tensor = data if self._archive else torch.frombuffer(data, dtype=torch.uint8)
        self._in_place = self._data.device.type == "cpu" and self._data.is_contiguous()
        self.length = self._archive.length if self._archive else self._data.nbytes

    def write(self, handle: int, at: int) -> int:
        """Write it to a file as DCP does, at an offset, and return its CRC-32."""
        archive, checksum = self._archive, 0
        parts: list[Any] = [archive.head] if archive else []
        for block in self._blocks():
            parts.append(memory_view(block))
            checksum = crc32(parts[-1], checksum)
            if len(block) >= _BLOCK_BYTES or not self._in_place:  # the copy is gone with the next one
                at, parts = _write_at(handle, parts, at), []
        end = archive.end(checksum) if archive else b""
        _write_at(handle, [*parts, end], at)
        return archive.checksum(checksum, end) if archive else checksum

    def is_in(self, file: FileRange, piece: ManifestPiece) -> bool:
        """Whether a piece of a file was written from the same, and holds it still.

        Raises:
            CheckpointError: If the piece does not lie in the file.
        """
        place = file.part(piece.offset, piece.length, f"the piece of {piece.key!r}")
        stated = self._archive.stated(place) if self._archive else (0, piece.checksum)
        if place.length != self.length or stated is None or stated[1] != piece.checksum:
            return False
        begin = len(self._archive.head) if self._archive else 0
        for own in self._blocks():
            done = 0
            for block in place.blocks(begin, len(own)):
                if not same_bytes(torch.frombuffer(block, dtype=torch.uint8), own[done : done + len(block)]):
                    return False
                done += len(block)
            begin += done
        return True

    def _blocks(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of the memory."""
        if self._in_place:
            yield from _memory_of(self._data).split(_BLOCK_BYTES)
            return
        for box in in_slabs(whole_box(self._data.shape), max(1, -(-self._data.nbytes // BUCKET_BYTES))):
            yield _memory_of(self._data[(*map(slice, box.start, box.stop),)].cpu().contiguous())


def _memory_of(dense: torch.Tensor) -> torch.Tensor:
    start = int(dense.storage_offset()) * dense.dtype.itemsize
    return as_bytes(dense.untyped_storage(), start, start + dense.nbytes)


def _write_at(handle: int, parts: Sequence[Any], at: int) -> int:
    """Write bytes at an offset of a file, and return where they end."""
    views = [memoryview(part) for part in parts]
    while views:
        done = os.pwritev(handle, views, at)
        at += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]
    return at
