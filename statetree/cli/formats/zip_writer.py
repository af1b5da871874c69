"""Writes zip archives as torch does: stored members, their bytes aligned, streamed."""

from __future__ import annotations

import struct
import zlib
from typing import IO, TYPE_CHECKING, Final

from statetree.cli.digests import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LISTED: Final = struct.Struct("<4s6H3L5H2L")
_CRC_AT: Final = 14
_ALIGNMENT: Final = 64
_MOST: Final = 0xFFFFFFFF
_WIDE_VERSION: Final = 45
_UTF8: Final = 0x800
_PADDING_ID: Final = 0x4246  # what torch calls its padding


class ZipWriter:
    """Writes an archive to a file, from its beginning.

    Attributes:
        parts: What was written, and where.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.parts: list[Part] = []
        self._file = file
        self._listed: list[bytes] = []

    def add(self, name: str, nbytes: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a member."""
        raw = name.encode()
        begin = self._file.tell()
        wide = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _MOST else b""
        pad = -(begin + _LOCAL.size + len(raw) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<2H", _PADDING_ID, pad) + b"Z" * pad
        short = min(nbytes, _MOST)
        self._file.write(
            _LOCAL.pack(b"PK\x03\x04", _WIDE_VERSION, _UTF8, 0, 0, 0, 0, short, short, len(raw), len(extra))
            + raw
            + extra
        )
        start = self._file.tell()
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            self._file.write(piece)
        end = self._file.tell()
        assert end - start == nbytes, (name, end - start, nbytes)
        self._file.seek(begin + _CRC_AT)
        self._file.write(struct.pack("<L", crc))
        self._file.seek(end)
        self.parts.append(Part(name, start, end))
        self._list(raw, crc, nbytes, begin)

    def _list(self, raw: bytes, crc: int, nbytes: int, begin: int) -> None:
        numbers = [*([nbytes, nbytes] if nbytes >= _MOST else []), *([begin] if begin >= _MOST else [])]
        wide = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        short = min(nbytes, _MOST)
        version = _WIDE_VERSION
        head = _LISTED.pack(
            b"PK\x01\x02", version, version, _UTF8, 0, 0, 0, crc, short, short, len(raw), len(wide), 0, 0, 0, 0,
            min(begin, _MOST),
        )  # fmt: skip
        self._listed.append(head + raw + wide)

    def finish(self) -> None:
        """Write the list of members."""
        start = self._file.tell()
        for row in self._listed:
            self._file.write(row)
        end = self._file.tell()
        count, size = len(self._listed), end - start
        version = _WIDE_VERSION
        self._file.write(
            struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, version, version, 0, 0, count, count, size, start)
        )
        self._file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1))
        few = min(count, 0xFFFF)
        self._file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, min(size, _MOST), min(start, _MOST), 0))
