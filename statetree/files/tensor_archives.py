"""What ``torch.save`` writes of a contiguous tensor, around its memory: found once for each dtype and shape.

Archives of a dtype and shape differ in the memory alone, its CRC-32, and an id that torch computes from all checksums.
So they can be written without a copy of the memory, and read without being parsed.
"""

from __future__ import annotations

import io
import struct
from functools import lru_cache, reduce
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import suppress
from statetree.files.crc32 import crc32, joined
from statetree.torch_internals import quietly, storage_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.files.ranges import FileRange

    ArchiveFinder = Callable[[torch.dtype, Sequence[int]], "TensorArchive | None"]

_MEMORY: Final = b"archive/data/0"
_ID: Final = b"archive/.data/serialization_id"
_ID_BYTES: Final = 40
#: A line of the list of members, before the name: a signature, the CRC-32, and the lengths of three texts.
_SIGNATURE: Final = b"PK\x01\x02"
_LINE: Final = struct.Struct("<16xI8x3H12x")


class TensorArchive:
    """An archive without the memory of its tensor: the bytes before it, and after it, where its checksum is 0.

    Raises ``ValueError`` if torch computes what lies there in another way.
    """

    def __init__(self, head: bytes, nbytes: int, end: bytes, stride: tuple[int, ...]) -> None:
        self.head, self.nbytes, self._end, self.stride = head, nbytes, end, stride
        self.length = len(head) + nbytes + len(end)
        self._before = joined(crc32(head), 0, nbytes)  # what the head adds to the CRC-32 of all
        begin = _after_name(end, _ID)
        self._id = slice(begin, begin + _ID_BYTES)
        crcs, places, at = {}, {}, end.index(_SIGNATURE, begin)
        while end.startswith(_SIGNATURE, at):
            crc, *lengths = _LINE.unpack_from(end, at)
            name = end[at + _LINE.size :][: lengths[0]]
            crcs[name], places[name] = crc, at + 16
            at += _LINE.size + sum(lengths)
        crcs.pop(_ID, None)
        number, values = [*crcs].index(_MEMORY), [*crcs.values()]
        self._combined, self._crcs_behind = reduce(_combined, values[:number], 0), values[number + 1 :]
        self._crc_places = [(_MEMORY, 4), (_MEMORY, places[_MEMORY]), (_ID, self._id.stop + 4), (_ID, places[_ID])]
        if self.end(0) != end:
            raise ValueError

    def end(self, checksum: int) -> bytes:
        """Return the bytes after the memory, which has this CRC-32."""
        if not self.nbytes:  # no checksum stands behind a member without bytes
            return self._end
        end, crcs = bytearray(self._end), {_MEMORY: checksum}
        combined = reduce(_combined, [checksum, *self._crcs_behind], self._combined)
        end[self._id.start + 20 : self._id.stop] = b"%020d" % combined
        crcs[_ID] = crc32(end[self._id])
        for name, at in self._crc_places:
            end[at : at + 4] = crcs[name].to_bytes(4, "little")
        return bytes(end)

    def checksum(self, of_memory: int, end: bytes) -> int:
        """Return the CRC-32 of an archive, from that of its memory."""
        return crc32(end, self._before ^ of_memory)

    def stated(self, place: FileRange) -> tuple[int, int] | None:
        """Return the CRC-32 that a file says the memory has, and its own then; ``None`` if it is no such archive."""
        stop = len(self.head) + self.nbytes
        if place.length != self.length or place.read(0, len(self.head), "its beginning") != self.head:
            return None
        end = place.read(stop, self.length - stop, "its end")
        crc = int.from_bytes(end[4:8], "little") if self.nbytes else 0
        return (crc, self.checksum(crc, end)) if end == self.end(crc) else None


def _combined(before: int, crc: int) -> int:
    # As hash_combine of c10 (inline_container.cc), tried with torch 2.11 and 2.13: where it is another, ends differ.
    return (before ^ (crc + 0x9E3779B9 + (before << 6) + (before >> 2))) & 0xFFFFFFFFFFFFFFFF


def _after_name(data: bytes, name: bytes) -> int:
    """Return where the bytes of a member begin: behind its name, and padding."""
    at = data.index(name)
    return at + len(name) + int.from_bytes(data[at - 2 : at], "little")


class _WithoutMemory(io.BytesIO):
    def seek(self, *_: Any) -> int:  # torch skips memory, which takes none here
        return self.tell()


_BYTE: Final = torch.empty(1, dtype=torch.uint8, device="cpu")


def archive_finder() -> ArchiveFinder:
    """Return ``archive_of`` for many tensors: whether torch writes checksums is asked once."""
    return _archive_of if torch.serialization.get_crc32_options() else _no_archive


def archive_of(dtype: torch.dtype, shape: Sequence[int]) -> TensorArchive | None:
    """Return the archive of contiguous tensors that fill their storages; ``None`` if torch writes it differently."""
    return archive_finder()(dtype, tuple(shape))


def _no_archive(dtype: torch.dtype, shape: Sequence[int]) -> TensorArchive | None:  # noqa: ARG001 - as the other one
    return None


@lru_cache(1024)
@quietly
def _archive_of(dtype: torch.dtype, shape: Sequence[int]) -> TensorArchive | None:
    probe, file = torch.empty(0, dtype=dtype, device="cpu"), _WithoutMemory()
    storage: torch.UntypedStorage = storage_at(_BYTE.data_ptr(), _BYTE.device, prod(shape) * dtype.itemsize)
    probe.set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]  # strides are made; nothing reads elements
    with torch.serialization.skip_data():
        torch.save(probe, file)
    data = file.getvalue()
    with suppress(ValueError, KeyError):
        begin = _after_name(data, _MEMORY)
        return TensorArchive(data[:begin], probe.nbytes, data[begin:], probe.stride())
    return None
