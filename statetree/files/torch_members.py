"""Where the pickle and the storages lie in a file of ``torch.save``: a zip archive, or what torch before 1.6 wrote.

Members of archives are stored as they are, side by side. ``zipfile`` reads their list. What it takes and other programs
read differently is refused: members of one name, members that overlap, and an archive that something follows.

Older files are five pickles (a mark, a version, facts about the machine, the tree, and the keys of the storages in
order), and then the storages, each after its number of elements.
"""

from __future__ import annotations

import io
import struct
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch

from statetree.errors import unsignalled
from statetree.files.pickled_tensors import find, storages
from statetree.files.unpickling import BadPickle, read_pickle
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange

#: The end of an archive that has no comment, and what stands before the name of a member where that begins.
_END: Final = struct.Struct("<4s16xH")
_LOCAL: Final = struct.Struct("<4s22x2H")
_UTF8: Final = 0x800
_ENCRYPTED: Final = 0x2041
#: The attribute of directories. Torch does not read what has it, and returns memory as it finds it.
_IS_DIRECTORY: Final = 0x10
REWRITE: Final = "If you trust its source, load it and save it again with torch.save."
#: What older files begin with: a number, pickled in one of the protocols that ``torch.load(weights_only=True)`` reads.
LEGACY: Final = tuple([protocol + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." for protocol in (b"\x80\x02", b"\x80\x03")])
_COUNT_BYTES: Final = 8


class TorchMember(NamedTuple):
    """A file in an archive, or a storage. ``start`` is where its bytes begin, ``crc`` its checksum, if it has one."""

    name: str
    start: int
    nbytes: int
    crc: int | None

    def verify(self, file: FileRange) -> None:
        """Compare it with its checksum. Raises ``CheckpointError`` if they do not agree."""
        found = file.checksum(self.start, self.nbytes)
        if found != self.crc:
            refuse(file.label, f"the member {self.name!r} has the checksum {found:08x}: expected {self.crc or 0:08x}")


class _Reader(io.RawIOBase):
    """A range of a file, as ``zipfile`` and ``pickle`` read it."""

    def __init__(self, file: FileRange) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._file.length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        nbytes = min(len(buffer), max(0, self._file.length - self._at))
        try:
            buffer[:nbytes] = self._file.read(self._at, nbytes, "what lies in it")
        except OSError as error:  # of a signal's handler. The archive would take it for the end of the file
            raise BadZipFile(str(error)) from error
        self._at += nbytes
        return nbytes


def read_members(file: FileRange) -> dict[str, TorchMember]:
    """Return the members of an archive by name."""
    try:
        archive = ZipFile(_Reader(file))
    except unsignalled(BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        refuse(file.label, f"it is no zip archive: {error}")
    end = file.length - _END.size
    if _END.unpack(file.read(end, _END.size, "the end of the archive")) != (b"PK\x05\x06", 0):
        refuse(file.label, "it does not end as a zip archive: something was added")
    found = sorted((info.header_offset, _member(file, info)) for info in archive.infolist())
    if len({member.name.casefold() for _, member in found}) < len(found):  # torch takes any of them
        refuse(file.label, "two of its members have one name, but for small and capital letters")
    if found and found[0][0]:  # other programs take other places for the beginning
        refuse(file.label, f"{found[0][0]} bytes lie before its first member: something was put before the archive")
    stop = 0
    for begin, member in [*found, (archive.start_dir, None)]:
        if begin < stop:
            what = f"the member {member.name!r}" if member else "the list of members"
            refuse(file.label, f"{what} overlaps a member")
        stop = member.start + member.nbytes if member else begin
    # With torch.serialization.set_crc32_options(False), zeros stand where checksums would.
    has_checksums = any(member.crc for _, member in found)
    return {member.name: member if has_checksums else member._replace(crc=None) for _, member in found}


def _member(file: FileRange, info: ZipInfo) -> TorchMember:
    what = f"the member {info.filename!r}"
    if info.compress_type != ZIP_STORED:
        refuse(file.label, f"{what} is compressed: torch writes none, and it may be a zip bomb", REWRITE)
    if info.external_attr & _IS_DIRECTORY:
        refuse(file.label, f"{what} is marked as a directory")
    if info.flag_bits & _ENCRYPTED or info.compress_size != info.file_size:
        sizes = f"{info.compress_size} and {info.file_size} bytes"
        refuse(file.label, f"{what} is encrypted, or lies about its size ({sizes})")
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    head = file.read(info.header_offset, _LOCAL.size + len(name), what)
    signature, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    if signature != b"PK\x03\x04" or head[_LOCAL.size :] != name:
        refuse(file.label, f"{what} is not where the list of members says")
    start = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
    return TorchMember(info.filename, start, info.file_size, info.CRC)


def read_legacy(file: FileRange) -> tuple[bytes, dict[str, TorchMember]]:
    """Return the pickle of the tree, and the storages by key."""
    sizes: dict[str, tuple[int, int]] = {}

    def memory(key: str, count: int, itemsize: int) -> torch.UntypedStorage:
        sizes[key] = count, itemsize
        return torch.UntypedStorage(count * itemsize, device="meta")

    stream = io.BufferedReader(_Reader(file))
    values, ends = [], []
    try:
        for _ in range(5):
            values.append(read_pickle(stream, find, storages(memory))[0])
            ends.append(stream.tell())
    except BadPickle as bad:
        refuse(file.label, f"a pickle of a file of torch before 1.6: {bad}")
    _, version, machine, _, keys = values
    if version != 1001 or type(machine) is not dict:
        refuse(file.label, "it is of an unknown version")
    if machine.get("little_endian") is not (sys.byteorder == "little"):
        refuse(file.label, "it has the byte order of another machine")
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(sizes):
        refuse(file.label, "it does not list the storages that the tree has")
    members, at = {}, ends[-1]
    for key in keys:
        (count, itemsize), what = sizes[key], f"the storage {key[:40]!r}"
        stored = int.from_bytes(file.read(at, _COUNT_BYTES, f"the size of {what}"), "little")
        if stored != count:
            refuse(file.label, f"{what} has {stored} elements: the tree says {count}")
        members[key] = TorchMember(key, at + _COUNT_BYTES, count * itemsize, None)
        at += _COUNT_BYTES + count * itemsize
        if at > file.length:
            refuse(file.label, f"{what} would end at byte {at} of {file.length}")
    if at != file.length:
        refuse(file.label, f"{file.length - at} bytes lie behind the last storage")
    return file.read(ends[2], ends[3] - ends[2], "a pickle"), members
