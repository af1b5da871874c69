"""Zip archives as torch writes them: stored members, side by side, listed at the end.

They are read here and not by ``zipfile``, which takes archives that contradict themselves: it ignores the number of
members, members that overlap, and what lies before and after the archive. Another program may read these differently.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statetree.files.ranges import FileRange

_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
#: Signature, flags, method, checksum, packed and unpacked size, sizes of name, extra and comment, disk, attributes,
#: start.
_LISTED: Final = struct.Struct("<4s4x2H4x3L4H2x2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_ZIP64: Final = 0xFFFFFFFF
#: Flags that say that a member is encrypted.
_ENCRYPTED: Final = 0x2041
#: The attribute of directories.
_IS_DIRECTORY: Final = 0x10
_MAX_LIST_BYTES: Final = 512 << 20
REWRITE: Final = "If you trust its source, load it and save it again with torch.save."


class ZipMember(NamedTuple):
    """A file in the archive. ``start`` is where its bytes begin in the archive."""

    name: str
    start: int
    nbytes: int
    crc: int | None

    def verify(self, place: FileRange) -> None:
        """Compare it with its checksum. Raises ``CheckpointError`` if they do not agree."""
        found = place.checksum(self.start, self.nbytes)
        if found != self.crc:
            refuse(place.label, f"the member {self.name!r} has the checksum {found:08x}: expected {self.crc or 0:08x}")


def is_zip(place: FileRange) -> bool:
    """Whether a file begins like a zip archive."""
    return place.length >= _END.size and place.read(0, 4, "its beginning") in (b"PK\x03\x04", b"PK\x05\x06")


def read_members(place: FileRange) -> dict[str, ZipMember]:
    """Return the members by name.

    Raises:
        CheckpointError: If the archive is truncated or damaged, or if members are compressed, encrypted, listed twice,
            overlap each other, are marked as directories, or lie outside of it.
    """
    count, start, size = _find_list(place)
    if size > _MAX_LIST_BYTES:
        refuse(place.label, f"its list of members takes {size} bytes: expected at most {_MAX_LIST_BYTES}", REWRITE)
    listed = place.read(start, size, "the list of members")
    members: dict[str, ZipMember] = {}
    names: set[str] = set()
    taken: list[tuple[int, int, str]] = [(start, start, "the list of members")]
    at = 0
    while at < size:
        begin, member, at = _read_listed(place, listed, at)
        if member.name.casefold() in names:  # torch's reader does not tell small letters from large ones
            refuse(place.label, f"the member {member.name!r} is listed twice")
        names.add(member.name.casefold())
        members[member.name] = member
        taken.append((begin, member.start + member.nbytes, member.name))
    if len(members) != count:
        refuse(place.label, f"it lists {len(members)} members: expected {count}")
    end = 0
    for begin, stop, name in sorted(taken):
        if begin < end:
            refuse(place.label, f"the member {name!r} overlaps another one")
        end = stop
    return members


def _find_list(place: FileRange) -> tuple[int, int, int]:
    """Return how many members there are, and where the list of them begins and how long it is."""
    what = "the end of the archive"
    last = place.length - _END.size
    if last < 0:
        refuse(place.label, f"it ends after {place.length} bytes: expected a zip archive")
    signature, disk, list_disk, here, count, size, start, comment = _END.unpack(place.read(last, _END.size, what))
    if signature != b"PK\x05\x06" or comment:
        refuse(place.label, "it does not end as a zip archive: it was cut off, or something was added")
    limit = last
    if last >= _LOCATOR.size:
        signature, _, end, _ = _LOCATOR.unpack(place.read(last - _LOCATOR.size, _LOCATOR.size, what))
        if signature == b"PK\x06\x07":
            limit = end
            wide = _END64.unpack(place.read(end, _END64.size, what))
            narrow = ((count, 0xFFFF, wide[7]), (size, _ZIP64, wide[8]), (start, _ZIP64, wide[9]))
            if wide[0] != b"PK\x06\x06" or any(short not in (most, long) for short, most, long in narrow):
                refuse(place.label, "the end of the archive contradicts itself")
            disk, list_disk, here, count, size, start = wide[4:]
    if disk or list_disk or here not in (count, 0xFFFF) or start + size != limit:
        refuse(place.label, "the end of the archive does not say where the list of members lies")
    return count, start, size


def _read_listed(place: FileRange, listed: bytes, at: int) -> tuple[int, ZipMember, int]:
    """Return where a member begins, what is known of it, and where the next one is listed."""
    if len(listed) - at < _LISTED.size:
        refuse(place.label, "the list of members is cut off")
    row = _LISTED.unpack_from(listed, at)
    signature, flags, method, crc, packed, nbytes, name_size, extra_size, comment_size, disk, attributes, begin = row
    at += _LISTED.size
    stop = at + name_size + extra_size + comment_size
    if signature != b"PK\x01\x02" or stop > len(listed):
        refuse(place.label, "the list of members is damaged")
    try:
        name = listed[at : at + name_size].decode()
    except UnicodeDecodeError:
        refuse(place.label, "a member has a name that is no text")
    wide = _wide_numbers(listed[at + name_size : at + name_size + extra_size])
    nbytes, packed, begin = (next(wide, -1) if value == _ZIP64 else value for value in (nbytes, packed, begin))
    if min(nbytes, packed, begin) < 0:
        refuse(place.label, f"the member {name!r} does not say how long it is")
    if method:
        refuse(place.label, f"the member {name!r} is compressed: torch writes none, and it may be a zip bomb", REWRITE)
    if attributes & _IS_DIRECTORY:  # torch would not read it, and return memory as it finds it
        refuse(place.label, f"the member {name!r} is marked as a directory")
    if flags & _ENCRYPTED or packed != nbytes or disk not in (0, 0xFFFF):
        refuse(place.label, f"the member {name!r} is encrypted, or lies about its size ({packed} and {nbytes} bytes)")
    return begin, ZipMember(name, _data_start(place, name, begin), nbytes, crc), stop


def _wide_numbers(extra: bytes) -> Iterator[int]:
    """Return the numbers of the field that holds what does not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + size]
            yield from (number for (number,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8]))
            return
        at += 4 + size


def _data_start(place: FileRange, name: str, begin: int) -> int:
    raw = name.encode()
    head = place.read(begin, _LOCAL.size + len(raw), f"the member {name!r}")
    fields = _LOCAL.unpack_from(head)
    if fields[0] != b"PK\x03\x04" or head[_LOCAL.size :] != raw or fields[3]:
        refuse(place.label, f"the member {name!r} is not where the list of members says")
    return int(begin + _LOCAL.size + fields[9] + fields[10])
