"""Memory maps: files that lie at several addresses, and memory that cannot be written.

A file that is mapped twice has two addresses for one byte: storages that seem to lie apart overlap. The system knows
which file lies where (on Linux it says so in ``/proc/self/maps``). It is asked only about memory that torch did not
allocate.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from statetree.spans.columns import Columns
from statetree.spans.layout import extents
from statetree.torch_internals import STORAGE_BASE

#: Files are set apart by this: no address and no offset in a file is as large.
_FILE_BYTES = 1 << 64


class _Mapping(NamedTuple):
    """A stretch of addresses: what may be done there, which file lies there, and from which of its bytes on."""

    start: int
    stop: int
    rights: str
    file: str
    offset: int


class MemoryMap:
    """What lies at which addresses, as it was when this was made. It knows nothing where the system does not say."""

    def __init__(self) -> None:
        try:
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        except OSError:  # not on this system
            lines = []
        self._mappings = [_parsed(line) for line in lines]
        self._starts = [mapping.start for mapping in self._mappings]
        self._files: dict[str, int] = {}

    def _at(self, address: int) -> _Mapping | None:
        index = bisect_right(self._starts, address) - 1
        return self._mappings[index] if index >= 0 and address < self._mappings[index].stop else None

    def place(self, address: int, *, private: bool) -> int:
        """Return a number for a byte that is the same at all addresses of it: of the file, if one is mapped there.

        Args:
            address: Where the byte lies.
            private: Whether private mappings count, too. What is written to them does not reach the file, but what is
                written to the file may show in them.
        """
        mapping = self._at(address)
        if mapping is None or not mapping.file or not (private or mapping.rights[3] == "s"):
            return address
        number = self._files.setdefault(mapping.file, len(self._files) + 1)
        return number * _FILE_BYTES + mapping.offset + address - mapping.start

    def is_writable(self, address: int) -> bool:
        """Whether the memory at an address may be written."""
        mapping = self._at(address)
        return mapping is None or mapping.rights[1] == "w"


def _parsed(line: str) -> _Mapping:
    addresses, rights, offset, device, inode, *_ = line.split(maxsplit=5)
    start, stop = (int(address, 16) for address in addresses.split("-"))
    return _Mapping(start, stop, rights, "" if inode == "0" else f"{device} {inode}", int(offset, 16))


def foreign(columns: Columns) -> list[int]:
    """Return which tensors lie in memory that torch did not allocate."""
    if columns.resizable:
        return []
    return [index for index, storage in enumerate(columns.storages) if not STORAGE_BASE.resizable(storage)]


def placed(columns: Columns, found: MemoryMap, *, private: bool) -> Columns:
    """Return columns of the same tensors whose addresses are places: those of two maps of one file are the same."""
    pointers, storage_pointers = list(columns.pointers), list(columns.storage_pointers)
    for index in foreign(columns):
        if pointers[index]:
            moved = found.place(pointers[index], private=private) - pointers[index]
            pointers[index] += moved
            storage_pointers[index] += moved
    result = Columns(columns.tensors)
    result.adopt({"pointers": pointers, "storage_pointers": storage_pointers, "resizable": False})
    return result


def read_only(columns: Columns, found: MemoryMap) -> list[int]:
    """Return which tensors lie in memory that cannot be written."""
    reach = extents(columns)
    return [
        index
        for index in foreign(columns)
        if reach[index]
        and not all(map(found.is_writable, (columns.pointers[index], columns.pointers[index] + reach[index] - 1)))
    ]
