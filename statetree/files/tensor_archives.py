"""What ``torch.save`` writes of a tensor, around its memory: found once for each dtype and shape.

An archive is the same for all tensors of a dtype, shape and strides, but for their memory, its CRC-32, and an id that
torch computes from all checksums. So it can be written without a copy of the memory, and read without being parsed.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files.crc32 import crc32
from statetree.files.torch_writing import Stream, save_to
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMORY: Final = b"archive/data/0"
_ID: Final = b"archive/.data/serialization_id"
_ID_BYTES: Final = 40
#: Behind a member, its checksum stands after a signature.
_AFTER: Final = 4
#: A line of the list of members: its signature, and where its checksum, three lengths and the name are.
_LISTED: Final = b"PK\x01\x02"
_CRC_AT: Final = 16
_LENGTHS: Final = struct.Struct("<3H")
_LENGTHS_AT: Final = 28
_NAME_AT: Final = 46


class TensorArchive:
    """An archive without the memory of its tensor.

    Args:
        head: The bytes before the memory.
        nbytes: How many bytes the memory has.
        end: The bytes after it, where its checksum is 0.

    Raises:
        ValueError: If torch computes what lies there in another way.
    """

    def __init__(self, head: bytes, nbytes: int, end: bytes) -> None:
        self.head = head
        self.nbytes = nbytes
        self.length = len(head) + nbytes + len(end)
        self._end = end
        self._id_at = _after_name(end, _ID)
        places, at = {}, end.index(_LISTED, self._id_at)
        while end.startswith(_LISTED, at):
            lengths = _LENGTHS.unpack_from(end, at + _LENGTHS_AT)
            places[end[at + _NAME_AT :][: lengths[0]]] = at + _CRC_AT
            at += _NAME_AT + sum(lengths)
        names = list(places)
        before, after = names[: names.index(MEMORY)], names[names.index(MEMORY) + 1 : names.index(_ID)]
        checksums = {name: int.from_bytes(end[place : place + 4], "little") for name, place in places.items()}
        self._hash = reduce(_combined, [checksums[name] for name in before], 0)
        self._others = [checksums[name] for name in after]
        self._memory_places = (_AFTER, places[MEMORY])
        self._id_places = (self._id_at + _ID_BYTES + _AFTER, places[_ID])
        if self.end(0) != end:
            raise ValueError

    def end(self, checksum: int) -> bytes:
        """Return the bytes after the memory, which has this CRC-32."""
        if not self.nbytes:  # no checksum stands behind a member without bytes
            return self._end
        end = bytearray(self._end)
        told = b"%020d" % reduce(_combined, self._others, _combined(self._hash, checksum))
        end[self._id_at + _ID_BYTES - len(told) : self._id_at + _ID_BYTES] = told
        own = crc32(end[self._id_at : self._id_at + _ID_BYTES])
        for places, crc in ((self._memory_places, checksum), (self._id_places, own)):
            for at in places:
                end[at : at + 4] = crc.to_bytes(4, "little")
        return bytes(end)

    def stated(self, head: bytes, end: bytes) -> int | None:
        """Return the CRC-32 that an archive says its memory has; ``None`` if it is not one of these archives."""
        crc = int.from_bytes(end[_AFTER : _AFTER + 4], "little") if self.nbytes else 0
        return crc if head == self.head and end == self.end(crc) else None


def _combined(before: int, crc: int) -> int:
    # As hash_combine of c10 (inline_container.cc), tried with torch 2.11 to 2.15: where it is another, ends differ.
    return (before ^ (crc + 0x9E3779B9 + (before << 6) + (before >> 2))) & 0xFFFFFFFFFFFFFFFF


class _WithoutMemory(Stream):
    """A file in memory that lacks what is skipped."""

    def __init__(self) -> None:
        self.data = bytearray()
        super().__init__(self)

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)

    def seek(self, nbytes: int, whence: int) -> None:
        """Skip the memory."""


def archive_of(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> TensorArchive | None:
    """Return the archive of tensors that fill their storages; ``None`` if torch writes it in another way."""
    return _archive_of(dtype, shape, stride) if torch.serialization.get_crc32_options() else None


@lru_cache(1024)
@quietly
def _archive_of(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> TensorArchive | None:
    probe, file = torch.empty_strided(shape, stride, dtype=dtype, device="cpu"), _WithoutMemory()
    with torch.serialization.skip_data():
        save_to(probe, file)
    data = bytes(file.data)
    with suppress(ValueError):
        begin = _after_name(data, MEMORY)
        return TensorArchive(data[:begin], probe.untyped_storage().nbytes(), data[begin:])
    return None


def _after_name(data: bytes, name: bytes) -> int:
    """Return where the bytes of a member begin."""
    at = data.index(name)
    return at + len(name) + int.from_bytes(data[at - 2 : at], "little")
