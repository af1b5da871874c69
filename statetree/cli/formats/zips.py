"""Zip archives as torch writes them: stored members, side by side, listed at the end."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from statetree.cli.names import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_LISTED: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_ZIP64: Final = 0xFFFFFFFF
_IS_DIRECTORY: Final = 0x10
_MAX_LIST_BYTES: Final = 512 << 20
REWRITE: Final = "If you trust its source, load it and save it again with torch.save."


class Region(Protocol):
    """What archives are read from: a piece of a file (``statetree.cli.files.Region``, for one)."""

    @property
    def label(self) -> str:
        """What it is called in messages."""

    @property
    def length(self) -> int:
        """How many bytes it has."""

    def read(self, start: int, length: int, entry: str) -> bytes:
        """Return bytes; raise ``CheckpointError`` if they do not lie inside. ``entry`` says what they are."""


class Member(NamedTuple):
    """A file in the archive. ``start`` is where its bytes begin in the archive."""

    name: str
    start: int
    nbytes: int
    crc: int


def is_zip(region: Region) -> bool:
    """Whether a file begins like a zip archive."""
    return region.length >= _END.size and region.read(0, 4, "its beginning") in (b"PK\x03\x04", b"PK\x05\x06")


def read_members(region: Region) -> dict[str, Member]:
    """Return the members by name.

    Raises:
        CheckpointError: If the archive is truncated or damaged, or if members are compressed, encrypted, listed twice,
            overlap each other, are marked as directories, or lie outside of it.
    """
    count, start, size = _find_list(region)
    if size > _MAX_LIST_BYTES:
        refuse(region.label, f"its list of members takes {size} bytes: expected at most {_MAX_LIST_BYTES}", REWRITE)
    listed = region.read(start, size, "the list of members")
    members: dict[str, Member] = {}
    taken: list[tuple[int, int, str]] = []
    at = 0
    while at < size:
        name, begin, nbytes, crc, at = _read_listed(region, listed, at)
        if name in members:
            refuse(region.label, f"the member {name!r} is listed twice")
        data = _data_start(region, name, begin)
        members[name] = Member(name, data, nbytes, crc)
        taken.append((begin, data + nbytes, name))
    if len(members) != count:
        refuse(region.label, f"it lists {len(members)} members: expected {count}")
    taken.sort()
    end = 0
    for begin, stop, name in [*taken, (start, start, "the list of members")]:
        if begin < end:
            refuse(region.label, f"the member {name!r} overlaps another one")
        end = stop
    return members


def _find_list(region: Region) -> tuple[int, int, int]:
    """Return how many members there are, and where the list of them begins and how long it is."""
    last = region.length - _END.size
    if last < 0:
        refuse(region.label, f"it ends after {region.length} bytes: expected a zip archive")
    fields = _END.unpack(region.read(last, _END.size, "the end of the archive"))
    if fields[0] != b"PK\x05\x06" or fields[7]:
        refuse(region.label, "it does not end as a zip archive: it was cut off, or something was added")
    _, disk, list_disk, here, count, size, start, _ = fields
    limit = last
    if last >= _LOCATOR.size:
        signature, _, place, _ = _LOCATOR.unpack(
            region.read(last - _LOCATOR.size, _LOCATOR.size, "the end of the archive")
        )
        if signature == b"PK\x06\x07":
            limit = place
            wide = _END64.unpack(region.read(place, _END64.size, "the end of the archive"))
            narrow = ((count, 0xFFFF, wide[7]), (size, _ZIP64, wide[8]), (start, _ZIP64, wide[9]))
            if wide[0] != b"PK\x06\x06" or any(short not in (most, long) for short, most, long in narrow):
                refuse(region.label, "the end of the archive contradicts itself")
            _, _, _, _, disk, list_disk, here, count, size, start = wide
    if disk or list_disk or here not in (count, 0xFFFF) or start + size != limit:
        refuse(region.label, "the end of the archive does not say where the list of members lies")
    return count, start, size


def _read_listed(region: Region, listed: bytes, at: int) -> tuple[str, int, int, int, int]:
    if len(listed) - at < _LISTED.size:
        refuse(region.label, "the list of members is cut off")
    row = _LISTED.unpack_from(listed, at)
    (
        signature,
        _,
        _,
        flags,
        method,
        _,
        _,
        crc,
        packed,
        nbytes,
        name_size,
        extra_size,
        comment_size,
        disk,
        _,
        attributes,
        start,
    ) = row
    at += _LISTED.size
    stop = at + name_size + extra_size + comment_size
    if signature != b"PK\x01\x02" or stop > len(listed):
        refuse(region.label, "the list of members is damaged")
    try:
        name = listed[at : at + name_size].decode()
    except UnicodeDecodeError:
        refuse(region.label, "a member has a name that is no text")
    wide = _wide(listed[at + name_size : at + name_size + extra_size])
    nbytes, packed, start = (next(wide, -1) if value == _ZIP64 else value for value in (nbytes, packed, start))
    if min(nbytes, packed, start) < 0:
        refuse(region.label, f"the member {name!r} does not say how long it is")
    if method:
        refuse(region.label, f"the member {name!r} is compressed: torch writes none, and it may be a zip bomb", REWRITE)
    if attributes & _IS_DIRECTORY:  # torch would not read it, and return memory as it finds it
        refuse(region.label, f"the member {name!r} is marked as a directory")
    if flags & 0x2041 or packed != nbytes or disk not in (0, 0xFFFF):
        refuse(region.label, f"the member {name!r} is encrypted, or lies about its size ({packed} and {nbytes} bytes)")
    return name, start, nbytes, crc, stop


def _wide(extra: bytes) -> Iterator[int]:
    """Return the numbers of the field that holds what does not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            for place in range(at + 4, min(at + 4 + size, len(extra)) - 7, 8):
                yield struct.unpack_from("<Q", extra, place)[0]
            return
        at += 4 + size


def _data_start(region: Region, name: str, begin: int) -> int:
    raw = name.encode()
    head = region.read(begin, _LOCAL.size + len(raw), f"the member {name!r}")
    fields = _LOCAL.unpack_from(head)
    if fields[0] != b"PK\x03\x04" or head[_LOCAL.size :] != raw or fields[3]:
        refuse(region.label, f"the member {name!r} is not where the list of members says")
    return int(begin + _LOCAL.size + fields[9] + fields[10])
