"""Files that are read piece by piece: every read is checked against the size that the file has."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from statetree.cli.names import inside, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

_MAX_OPEN: Final = 64
_CHECK: Final = "Check its permissions, and the disk."


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which is valid while the tensor is.

    (NumPy, which would do this, may not be installed.)
    """
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class _Handles:
    """Open files, the last few used."""

    def __init__(self) -> None:
        self._handles: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path) -> int:
        if path in self._handles:
            self._handles.move_to_end(path)
            return self._handles[path]
        while len(self._handles) >= _MAX_OPEN:
            os.close(self._handles.popitem(last=False)[1])
        self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self._handles[path]

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])


class Files:
    """The files of one checkpoint (a context manager).

    Args:
        follow_links: Whether names that a checkpoint lists may be symbolic links to files outside its directory.
    """

    def __init__(self, *, follow_links: bool = False) -> None:
        self.follow_links = follow_links
        self._handles = _Handles()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def listed(self, directory: Path, name: object, listed_in: Path) -> Path:
        """Return the file that a name out of an untrusted file stands for.

        Raises:
            CheckpointError: If there is none, or if it leads out of the directory.
        """
        return inside(directory, name, listed_in, follow_links=self.follow_links)

    def open(self, path: Path) -> Region:
        """Return a whole file.

        Raises:
            CheckpointError: If it is no file that can be read.
        """
        try:
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode):
                refuse(path, "it is no regular file", "Pass a checkpoint.")
            self._handles.get(path)
        except FileNotFoundError:
            refuse(path, "there is no such file", "Check the name.")
        except (OSError, ValueError) as error:
            refuse(path, f"it cannot be opened: {getattr(error, 'strerror', None) or error}", "Check its permissions.")
        return Region(self._handles, path, 0, about.st_size)


class Region:
    """A piece of a file, or all of it."""

    __slots__ = ("_handles", "label", "length", "path", "start")

    def __init__(self, handles: _Handles, path: Path, start: int, length: int) -> None:
        self._handles = handles
        self.path = path
        self.start = start
        self.length = length
        self.label = str(path)

    def part(self, start: int, length: int, entry: str) -> Region:
        """Return a piece of this piece.

        Raises:
            CheckpointError: If it does not lie inside. ``entry`` says what it is.
        """
        if start < 0 or length < 0 or start + length > self.length:
            what = f"{entry} lies at {start} to {start + length} of {self.length} bytes: expected inside"
            refuse(self.label, what)
        return Region(self._handles, self.path, self.start + start, length)

    def named(self, entry: str) -> Region:
        """Return the same piece with a name, for messages."""
        self.label = f"{self.path}: {entry}"
        return self

    def read(self, start: int, length: int, entry: str) -> bytes:
        """Return bytes. Little enough of them: memory is taken for all."""
        place = self.part(start, length, entry)
        try:
            found = os.pread(self._handles.get(self.path), length, place.start)
        except OSError as error:
            refuse(self.label, f"{entry} cannot be read: {error.strerror or error}", _CHECK)
        if len(found) != length:
            refuse(
                self.path, f"{entry} ends after {len(found)} of {length} bytes: the file was cut off while it was read"
            )
        return found

    def read_into(self, target: torch.Tensor, start: int, entry: str) -> None:
        """Fill a tensor of bytes."""
        view = memory_of(target)
        place = self.part(start, len(view), entry)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._handles.get(self.path), [view[done:]], place.start + done)
            except OSError as error:
                refuse(self.label, f"{entry} cannot be read: {error.strerror or error}", _CHECK)
            if not count:
                refuse(
                    self.path, f"{entry} ends after {done} of {len(view)} bytes: the file was cut off while it was read"
                )
            done += count

    def read_runs(self, target: torch.Tensor, starts: Iterable[int], length: int, entry: str) -> None:
        """Fill a contiguous tensor with runs of bytes of one length, one after the other."""
        size = target.dtype.itemsize
        handle, view = self._handles.get(self.path), memory_of(target)
        for number, start in enumerate(starts):
            done, count = number * length, 0
            if 0 <= start <= self.length - length:
                with suppress(OSError):
                    count = os.preadv(handle, [view[done : done + length]], self.start + start)
            if count != length:
                self.read_into(target[done // size : (done + length) // size], start, entry)  # or says what is wrong

    def mapped(self) -> mmap.mmap:
        """Return the bytes without reading them, with ``lead`` bytes before them. The piece must not be empty."""
        begin = self.start - self.lead
        return mmap.mmap(self._handles.get(self.path), self.lead + self.length, access=mmap.ACCESS_COPY, offset=begin)

    @property
    def lead(self) -> int:
        """How many bytes ``mapped`` has before the piece."""
        return self.start % mmap.ALLOCATIONGRANULARITY
