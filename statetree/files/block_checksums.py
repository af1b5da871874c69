"""CRC-32 of a range of bytes by blocks, so that a part of it is compared without the rest.

What is kept for each block is the CRC-32 of the range from its beginning to the end of that block. So the last of these
numbers is the range's own CRC-32, one pass over the bytes makes all of them, and successive blocks are compared as one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from statetree.files.crc32 import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_BYTES: Final = 128 << 10
_MOST_BLOCKS: Final = 128
_DIGITS: Final = 8


def block_bytes(nbytes: int) -> int:
    """Return how long the blocks of a range are: a power of two, so that where a tensor is cut, blocks often end."""
    return max(_LEAST_BYTES, 1 << (-(-nbytes // _MOST_BLOCKS) - 1).bit_length())


def marks_length(nbytes: int) -> int:
    """Return how many digits the numbers of all blocks of a range but the last one have."""
    return max(0, nbytes - 1) // block_bytes(nbytes) * _DIGITS


class RunningChecksum:
    """Sums up bytes that come one after the other. ``value`` is the CRC-32 so far, at first of what lies before."""

    def __init__(self, nbytes: int, value: int = 0) -> None:
        self.value = value
        self._marks: list[int] = []
        self._step = self._left = block_bytes(nbytes)

    def add(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            if not self._left:  # more bytes follow
                self._marks.append(self.value)
                self._left = self._step
            part, data = data[: self._left], data[self._left :]
            self.value = crc32(part, self.value)
            self._left -= len(part)

    @property
    def marks(self) -> str:
        """The numbers of all blocks but the last one, as hexadecimal digits."""
        return "".join(f"{mark:0{_DIGITS}x}" for mark in self._marks)


class BlockChecksums:
    """What a range of bytes is compared with: its CRC-32, and the ``marks`` of its blocks, if there are any."""

    def __init__(self, what: str, checksum: int, nbytes: int, marks: str = "") -> None:
        self.what = what
        self._checksum = checksum
        self._nbytes = nbytes
        self._marks = marks
        self._step = block_bytes(nbytes) if marks else max(1, nbytes)
        self._compared: set[int] = set()  # which blocks were compared

    def upto(self, stop: int) -> int:
        """Return what the CRC-32 is from the range's beginning to where a block ends."""
        if stop >= self._nbytes:
            return self._checksum
        at = stop // self._step * _DIGITS
        return int(self._marks[at - _DIGITS : at], 16) if at else 0

    def around(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that hold a part: together those that lie in it, and alone each that lies in it in part."""
        step, end = self._step, self._nbytes
        first, last = start // step * step, min(-(-stop // step) * step, end)
        inner = min(-(-start // step) * step, last), end if stop == end else max(stop // step * step, first)
        yield from pairwise(sorted({first, *inner, last}))

    def _blocks(self, start: int, stop: int) -> range:
        return range(start // self._step, -(-stop // self._step))

    def is_compared(self, start: int, stop: int) -> bool:
        """Whether all blocks of a range were compared."""
        return self._compared.issuperset(self._blocks(start, stop))

    def set_compared(self, start: int, stop: int) -> bool:
        """Note that blocks were compared, and return whether all are now."""
        self._compared.update(self._blocks(start, stop))
        return len(self._compared) == len(self._blocks(0, self._nbytes))
