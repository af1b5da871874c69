"""Ranges of bytes of open files: each read is checked against the file as it was when it was opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.errors import check_later, unsignalled
from statetree.files.block_checksums import BlockChecksums, RunningChecksum, block_bytes, marks_length
from statetree.files.crc32 import crc32
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

_MAX_OPEN: Final = 64
CHUNK_BYTES: Final = 1 << 21
#: How much memory a read takes beside its target.
BUCKET_BYTES: Final = 16 << 20


class FileIdentity(NamedTuple):
    """What stays the same for a file that nobody writes or replaces.

    ``status_ns`` is the time of the last change to anything about it. A new name is such a change, and the next
    incremental save gives one to files of this checkpoint: of a file that has several names, it is left out (0).
    """

    device: int
    inode: int
    nbytes: int
    written_ns: int
    status_ns: int

    @classmethod
    def of(cls, about: os.stat_result) -> FileIdentity:
        """Return what ``os.stat`` says of it."""
        status_ns = about.st_ctime_ns if about.st_nlink == 1 else 0
        return cls(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, status_ns)

    def is_as(self, other: FileIdentity) -> bool:
        """Whether it is the same file, with the same content."""
        return self[:4] == other[:4] and (self.status_ns == other.status_ns or 0 in (self.status_ns, other.status_ns))


class _Handle:
    """A descriptor, which is closed when nothing refers to it: not while a thread reads, whatever others open."""

    number = -1  # for an interrupt that comes before the first line of ``__init__``

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # as Python ends, ``os`` may be gone
        if self.number >= 0:
            close(self.number)


class OpenFiles:
    """The files of one checkpoint, of which the last few used are open. They are closed when nothing refers to them.

    ``verify`` says whether elements are compared with the checkpoint's checksums before they are read; ``None`` for
    plain values alone.
    """

    is_remote = False  # whether bytes have to be fetched, and no memory is mapped

    def __init__(self, *, follow_links: bool = False, verify: bool | None = None, weights_only: bool = True) -> None:
        self.follow_links = follow_links
        self.verify = verify
        self.weights_only = weights_only
        self.nbytes_read = 0  # for tests that count them; mapped memory is not counted
        #: The last block that was compared, where it lies, and its bytes (a bucket at most): of rows that are cut, the
        #: next one is in it, too.
        self.last_block: tuple[Path, int, memoryview] | None = None
        self._handles: dict[Path, _Handle] = {}
        self._identities: dict[Path, FileIdentity] = {}
        self._absolute: dict[Path, str] = {}  # the current directory may be another one by then
        self._mapped: dict[Path, Any] = {}

    def open(self, path: Path) -> FileRange:
        """Return a whole file. Raises ``CheckpointError`` if it is no file that can be read."""
        return FileRange(self, path, 0, self.identity(path).nbytes)

    @property
    def paths(self) -> Sequence[Path]:
        """The files that were opened."""
        return list(self._identities)

    @property
    def nbytes(self) -> int:
        """How many bytes the files have together."""
        return sum(identity.nbytes for identity in self._identities.values())

    def identity(self, path: Path) -> FileIdentity:
        """Return what a file was when it was opened."""
        if path not in self._identities:
            self._handle(path)
        return self._identities[path]

    def _handle(self, path: Path) -> _Handle:
        """Return the descriptor of a file, which is opened again if it was closed: then it must be what it was.

        Several threads read without a lock, which a process that is forked meanwhile would inherit.
        """
        found = self._handles.get(path)
        if found is not None:
            return found
        for oldest in list(self._handles)[: 1 - _MAX_OPEN]:
            self._handles.pop(oldest, None)
        absolute = self._absolute.setdefault(path, os.path.abspath(path))
        try:
            handle = _Handle(os.open(absolute, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except unsignalled(FileNotFoundError):
            refuse(path, "there is no such file", "Check the name.")
        except unsignalled(OSError, ValueError) as error:
            refuse(path, f"it cannot be opened: {getattr(error, 'strerror', None) or error}", "Check its permissions.")
        about = _status(path, handle)
        if not stat.S_ISREG(about.st_mode):
            del handle  # which the error would keep open
            refuse(path, "it is no regular file", "Pass a checkpoint: a file, or a directory.")
        identity = FileIdentity.of(about)
        is_first = self._identities.setdefault(path, identity) is identity
        found = self._handles.setdefault(path, handle)  # another thread may have come first
        if not is_first:
            self.check(path)
        return found

    def _now(self, path: Path) -> FileIdentity:
        handle = self._handle(path)  # named, or it could be closed before it is asked
        return FileIdentity.of(_status(path, handle))

    def check(self, path: Path) -> None:
        """Raise ``CheckpointError`` if a file was cut off, written or replaced since it was opened.

        That is asked before elements are read (reading memory that is mapped from a file which was cut off would end
        the process), and after, since a file may be written while it is read. The descriptor tells of writes; what
        lies at the path, of a checkpoint that took this one's place.
        """
        known, found = self._identities[path], self._now(path)
        if found.nbytes < known.nbytes:
            refuse(path, f"it was cut off while it was read: expected {known.nbytes} bytes, got {found.nbytes}")
        try:
            there = FileIdentity.of(os.stat(self._absolute[path]))
        except unsignalled(OSError) as error:
            refuse(path, f"it was removed while it was read: {error.strerror or error}", "Open what is there now.")
        if not (found.is_as(known) and there.is_as(known)):
            refuse(path, "it was changed while it was read: expected the file that was opened", "Open it again.")

    def fill(self, file: FileRange, view: memoryview, offset: int) -> None:
        """Fill memory with the bytes of a file from an offset on, which are called as a range of it in messages."""
        handle, done = self._handle(file.path), 0
        while done < len(view):
            try:
                count = os.preadv(handle.number, [view[done:]], offset + done)
            except unsignalled(OSError) as error:
                what = f"it cannot be read: {error.strerror or error}"
                refuse(file.label, what, "Check its permissions, and the disk.")
            if not count:
                refuse(file.label, f"it ends after {done} of {len(view)} bytes: it was cut off while it was read")
            self.nbytes_read += count
            done += count

    def mapped(self, file: FileRange) -> torch.UntypedStorage:
        """Return bytes of a file as a storage. Writing to it does not change the file."""
        import torch  # headers are read without it

        path = file.path
        file.verify()
        self.check(path)
        if path not in self._mapped:
            handle = self._handle(path)
            name = f"/proc/self/fd/{handle.number}"  # what was opened, whatever lies at its path now
            name = name if os.path.exists(name) else str(path)
            self._mapped[path] = torch.UntypedStorage.from_file(name, shared=False, nbytes=self.identity(path).nbytes)
        found: torch.UntypedStorage = self._mapped[path][file.start : file.start + file.length]
        return found


def _status(path: Path, handle: _Handle) -> os.stat_result:
    try:
        return os.fstat(handle.number)
    except unsignalled(OSError) as error:  # of NFS, say, where the file was removed
        refuse(path, f"it cannot be read: {error.strerror or error}", "Check its permissions, and the disk.")


_NO_FILES: Final = OpenFiles()


class FileRange:
    """Some bytes of a file that follow each other, or all of it."""

    def __init__(
        self, files: OpenFiles, path: Path, start: int, length: int, entry: str = "", held: memoryview | None = None
    ) -> None:
        self.files = files
        self.path = path
        self.start = start
        self.length = length
        self.entry = entry
        self._held = held
        self._checksums: BlockChecksums | None = None  # ``None`` once all of it was compared

    @property
    def label(self) -> str:
        """What these bytes are called in messages."""
        return f"{self.path}: {self.entry}" if self.entry else str(self.path)

    @classmethod
    def of(cls, data: bytes, label: str) -> FileRange:
        """Return bytes that are in memory."""
        return cls(_NO_FILES, Path(label), 0, len(data), held=memoryview(data))

    @property
    def is_held(self) -> bool:
        """Whether they were read, and are in memory."""
        return self._held is not None

    def in_memory(self) -> FileRange:
        """Return the same bytes, read once, for many small reads."""
        held = memoryview(self.read(0, self.length, "its bytes"))
        return FileRange(self.files, self.path, self.start, self.length, self.entry, held)

    def part(self, start: int, length: int, entry: str) -> FileRange:
        """Return a part of these bytes, under a name for messages. Raises unless it lies inside."""
        if start < 0 or length < 0 or start + length > self.length:
            what = f"{entry} lies at {start} to {start + length} of {self.length} bytes: expected inside"
            refuse(self.label, what)
        held = None if self._held is None else self._held[start : start + length]
        return FileRange(self.files, self.path, self.start + start, length, entry, held)

    def checked(self, what: str, checksum: int, marks: str = "") -> FileRange:
        """Return the same bytes, which ``fill`` and ``mapped`` compare with checksums, once: ``BlockChecksums``."""
        found = FileRange(self.files, self.path, self.start, self.length, self.entry, self._held)
        if marks and len(marks) != marks_length(self.length):
            refuse(self.label, f"{what} has {len(marks)} digits of checksums: expected {marks_length(self.length)}")
        found._checksums = BlockChecksums(what, checksum, self.length, marks)
        return found

    def read(self, start: int, length: int, entry: str) -> bytes:
        """Return bytes. Little enough of them: memory is taken for all."""
        if self._held is not None and 0 <= start <= start + length <= self.length:
            return bytes(self._held[start : start + length])
        part = self.part(start, length, entry)
        found = bytearray(length)
        part.fill(memoryview(found), 0)
        check_later(self.files.check, self.path)
        return bytes(found)

    def fill(self, view: memoryview, start: int) -> None:
        """Fill memory with the bytes from ``start`` on, which must lie inside.

        A wrong byte raises, also one that was not asked for in the same block, which is all if there are no blocks.
        """
        checksums, stop = self._checksums, start + len(view)
        if checksums is None:
            self._fill(view, start)
            return
        for low, high in checksums.around(start, stop):
            first, last = max(low, start), min(high, stop)
            wanted = view[first - start : last - start]
            if not checksums.is_compared(low, high) and high - low == len(wanted):
                self._fill_compared(wanted, low, checksums)
            elif (block := self._block(checksums, low, high)) is not None:
                wanted[:] = block[first - low : last - low]
            elif checksums.is_compared(low, high):
                self._fill(wanted, first)
            else:
                self._compare(checksums, low, high, wanted, first)

    def _block(self, checksums: BlockChecksums, start: int, stop: int) -> memoryview | None:
        """Return a block of which a part is needed, unless it is large, in memory, or was compared and let go."""
        if self._held is not None:
            return None
        place, last = (self.path, self.start + start), self.files.last_block
        if last is not None and last[:2] == place and len(last[2]) == stop - start:
            return last[2]
        most = max(BUCKET_BYTES, block_bytes(self.length)) if self.files.is_remote else BUCKET_BYTES
        if checksums.is_compared(start, stop) or stop - start > most:
            return None
        block = memoryview(bytearray(stop - start))
        self._fill_compared(block, start, checksums)
        self.files.last_block = (*place, block)
        return block

    def _fill(self, view: memoryview, start: int) -> None:
        if self._held is not None:
            view[:] = self._held[start : start + len(view)]
        else:
            self.files.fill(self, view, self.start + start)

    def _fill_compared(self, view: memoryview, start: int, checksums: BlockChecksums) -> None:
        """Fill memory with whole blocks."""
        found, stop = checksums.upto(start), start + len(view)
        # Pieces are in the processor's cache when they are summed up. What is fetched comes in few requests.
        step = max(1, len(view)) if self.files.is_remote else CHUNK_BYTES
        for at in range(0, len(view), step):
            piece = view[at : at + step]
            self._fill(piece, start + at)
            found = crc32(piece, found)
        self._check(checksums, start, stop, found)

    def verify(self) -> None:
        """Compare the bytes with their checksum, unless that was done, or is done whenever they are fetched.

        Raises ``CheckpointError`` if they differ.
        """
        checksums = self._checksums  # which another thread may take away
        if checksums is not None and not self.files.is_remote and not checksums.is_compared(0, self.length):
            self._compare(checksums, 0, self.length)

    def _compare(
        self, checksums: BlockChecksums, start: int, stop: int, wanted: memoryview | None = None, first: int = 0
    ) -> None:
        """Read whole blocks to compare them, and fill memory with those bytes of them that begin at ``first``."""
        running, at = RunningChecksum(self.length, checksums.upto(start)), start
        for view in self.blocks(start, stop - start):
            running.add(view)
            if wanted is not None:
                low, high = max(at, first), min(at + len(view), first + len(wanted))
                wanted[max(low - first, 0) : max(high - first, 0)] = view[low - at : max(high, low) - at]
            at += len(view)
        self._check(checksums, start, stop, running.value)
        if self.files.is_remote and (start, stop) == (0, self.length):
            self._checksums = BlockChecksums(checksums.what, running.value, self.length, running.marks)

    def _check(self, checksums: BlockChecksums, start: int, stop: int, found: int) -> None:
        """Compare blocks. Those of a local file stay as they are; a server may send other bytes the next time."""
        expected = checksums.upto(stop)
        if found != expected:
            refuse(self.label, f"{checksums.what} has the checksum {found:08x}: expected {expected:08x}")
        if not self.files.is_remote and checksums.set_compared(start, stop):
            self._checksums = None

    def blocks(self, start: int, length: int) -> Iterator[memoryview]:
        """Yield bytes block by block, in memory that the next block takes again."""
        part = self.part(start, length, "what is verified")
        block = memoryview(bytearray(min(length, CHUNK_BYTES)))
        for at in range(0, length, CHUNK_BYTES):
            view = block[: length - at]
            part.fill(view, at)
            yield view
        if self._held is None:
            self.files.check(self.path)

    def checksum(self, start: int, length: int, before: int = 0) -> int:
        """Return the CRC-32 of bytes, which are read block by block. ``before`` is that of what lies before them."""
        if self._held is not None:
            return crc32(self._held[start : start + length], before)
        found = before
        for view in self.blocks(start, length):
            found = crc32(view, found)
        return found

    def mapped(self) -> torch.UntypedStorage:
        """Return these bytes as a storage. What is in memory is copied, and what is far away is fetched."""
        import torch  # headers are read without it

        if not self.length:
            return torch.UntypedStorage(0)
        if self._held is None:
            return self.files.mapped(self)
        self.verify()
        return torch.frombuffer(bytearray(self._held), dtype=torch.uint8).untyped_storage()
