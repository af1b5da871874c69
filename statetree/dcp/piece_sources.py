"""What a piece of a data file is written from, and whether a file that was written before holds the same."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import in_slabs, whole_box
from statetree.files.crc32 import crc32, joined
from statetree.files.ranges import BUCKET_BYTES
from statetree.files.strided_reading import memory_view
from statetree.files.tensor_archives import archive_of
from statetree.files.torch_writing import Stream, save_to
from statetree.spans.bits import same_bytes
from statetree.spans.layout import as_bytes, is_dense

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.dcp.file_manifest import ManifestPiece
    from statetree.files.ranges import FileRange

#: How much is written at a time: what was read for its checksum is still in the processor's cache.
_BLOCK_BYTES: Final = 1 << 20


class PieceSource:
    """A plain strided tensor, or the bytes of a plain value.

    Tensors on the CPU are written from their memory if that is all of their elements, in any order. Others are copied,
    a bucket at a time.

    Attributes:
        length: How many bytes are written of it.
    """

    def __init__(self, data: Any) -> None:
        self._archive = None
        if isinstance(data, torch.Tensor):
            data = data.detach().resolve_conj().resolve_neg()
            self._in_place = data.device.type == "cpu" and is_dense(data.is_contiguous(), data.shape, data.stride())
            stride = data.stride() if self._in_place else torch.empty(data.shape, device="meta").stride()
            self._archive = archive_of(data.dtype, data.shape, stride)
            if self._archive is None:
                file = io.BytesIO()
                save_to(data.cpu().clone(), Stream(file))
                data = file.getbuffer()
        self._data: Any = data
        self.length = len(data) if self._archive is None else self._archive.length

    def write(self, handle: int, at: int) -> int:
        """Write it to a file as DCP does, at an offset, and return its CRC-32."""
        if self._archive is None:
            _write_at(handle, [self._data], at)
            return crc32(self._data)
        parts: list[Any] = [self._archive.head]
        checksum = 0
        for block in self._blocks():
            parts.append(memory_view(block))
            checksum = crc32(parts[-1], checksum)
            if len(block) >= _BLOCK_BYTES or not self._in_place:  # the copy is gone with the next one
                at, parts = _write_at(handle, parts, at), []
        end = self._archive.end(checksum)
        _write_at(handle, [*parts, end], at)
        return self._whole(checksum, end)

    def is_in(self, file: FileRange, piece: ManifestPiece) -> bool:
        """Whether a piece of a file was written from the same, and holds it still.

        Raises:
            CheckpointError: If the piece does not lie in the file.
        """
        place = file.part(piece.offset, piece.length, f"the piece of {piece.key!r}")
        if self.length != place.length:
            return False
        if self._archive is None:
            return bool(place.read(0, place.length, "its bytes") == self._data)
        begin, stop = len(self._archive.head), len(self._archive.head) + self._archive.nbytes
        end = place.read(stop, place.length - stop, "its end")
        checksum = self._archive.stated(place.read(0, begin, "its beginning"), end)
        if checksum is None or self._whole(checksum, end) != piece.checksum:
            return False
        for own in self._blocks():
            done = 0
            for block in place.blocks(begin, len(own)):
                if not same_bytes(torch.frombuffer(block, dtype=torch.uint8), own[done : done + len(block)]):
                    return False
                done += len(block)
            begin += done
        return True

    def _whole(self, checksum: int, end: bytes) -> int:
        """Return the CRC-32 of the archive, from that of the memory."""
        assert self._archive is not None
        return crc32(end, joined(crc32(self._archive.head), checksum, self._archive.nbytes))

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
