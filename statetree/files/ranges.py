"""Ranges of bytes of files: every read is checked against the size that the file has."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import torch

from statetree.files.untrusted import inside, refuse
from statetree.spans.layout import extent_bytes

if TYPE_CHECKING:
    from pathlib import Path

_MAX_OPEN: Final = 64


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which is valid while the tensor is.

    (NumPy, which would do this, may not be installed.)
    """
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class OpenFiles:
    """The files of one checkpoint, of which the last few used are open (a context manager).

    Args:
        follow_links: Whether names that a checkpoint lists may be symbolic links to files outside its directory.
    """

    def __init__(self, *, follow_links: bool = False) -> None:
        self.follow_links = follow_links
        self._handles: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def handle(self, path: Path) -> int:
        """Return the descriptor of a file."""
        if path in self._handles:
            self._handles.move_to_end(path)
            return self._handles[path]
        while len(self._handles) >= _MAX_OPEN:
            os.close(self._handles.popitem(last=False)[1])
        self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self._handles[path]

    def listed(self, directory: Path, name: object, listed_in: Path) -> Path:
        """Return the file that a name out of an untrusted file stands for: see ``inside``."""
        return inside(directory, name, listed_in, follow_links=self.follow_links)

    def open(self, path: Path) -> FileRange:
        """Return a whole file.

        Raises:
            CheckpointError: If it is no file that can be read.
        """
        try:
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode):
                refuse(path, "it is no regular file", "Pass a checkpoint.")
            self.handle(path)
        except FileNotFoundError:
            refuse(path, "there is no such file", "Check the name.")
        except (OSError, ValueError) as error:
            refuse(path, f"it cannot be opened: {getattr(error, 'strerror', None) or error}", "Check its permissions.")
        return FileRange(self, path, 0, about.st_size)


class FileRange:
    """Some bytes of a file that follow each other, or all of it."""

    __slots__ = ("_files", "label", "length", "path", "start")

    def __init__(self, files: OpenFiles, path: Path, start: int, length: int) -> None:
        self._files = files
        self.path = path
        self.start = start
        self.length = length
        self.label = str(path)

    def part(self, start: int, length: int, entry: str) -> FileRange:
        """Return a part of these bytes.

        Raises:
            CheckpointError: If it does not lie inside. ``entry`` says what it is.
        """
        if start < 0 or length < 0 or start + length > self.length:
            what = f"{entry} lies at {start} to {start + length} of {self.length} bytes: expected inside"
            refuse(self.label, what)
        return FileRange(self._files, self.path, self.start + start, length)

    def named(self, entry: str) -> FileRange:
        """Return the same bytes with a name, for messages."""
        self.label = f"{self.path}: {entry}"
        return self

    def read(self, start: int, length: int, entry: str) -> bytes:
        """Return bytes. Little enough of them: memory is taken for all."""
        place = self.part(start, length, entry)
        found = bytearray(length)
        self._fill(memoryview(found), place.start, entry)
        return bytes(found)

    def read_into(self, target: torch.Tensor, start: int, entry: str) -> None:
        """Fill a tensor of bytes."""
        view = memory_of(target)
        self._fill(view, self.part(start, len(view), entry).start, entry)

    def _fill(self, view: memoryview, start: int, entry: str) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._files.handle(self.path), [view[done:]], start + done)
            except OSError as error:
                remedy = "Check its permissions, and the disk."
                refuse(self.label, f"{entry} cannot be read: {error.strerror or error}", remedy)
            if not count:
                self._refuse_cut_off(f"{entry} ends after {done} of {len(view)} bytes")
            done += count

    def _refuse_cut_off(self, what: str) -> None:
        refuse(self.path, f"{what}: the file was cut off while it was read")

    def copy_strided(self, target: torch.Tensor, stride: tuple[int, ...], offset: int, entry: str) -> None:
        """Fill a tensor with the elements that lie at strides from an offset, both counted in elements.

        The file is mapped into memory, so that the system reads the pages that hold them and no others. That it still
        has all its bytes is checked first: the process would end if it were cut off during the copy.
        """
        size = target.dtype.itemsize
        shape = tuple(target.shape)
        place = self.part(offset * size, extent_bytes(shape, stride, size), entry)
        if not place.length:
            return
        handle = self._files.handle(self.path)
        if os.fstat(handle).st_size < place.start + place.length:
            self._refuse_cut_off(f"{entry} ends early")
        lead = place.start % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(handle, lead + place.length, access=mmap.ACCESS_READ, offset=place.start - lead) as data:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it must not be written to
                found = torch.frombuffer(data, dtype=torch.uint8, count=place.length, offset=lead)
            target.copy_(found.view(target.dtype).as_strided(shape, stride))
            del found  # it would keep the mapping from being closed

    def mapped(self) -> mmap.mmap:
        """Return all bytes of the file without reading them."""
        return mmap.mmap(self._files.handle(self.path), 0, access=mmap.ACCESS_READ)
