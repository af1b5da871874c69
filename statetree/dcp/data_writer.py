"""The data files that one rank writes, laid out as DCP's own writer does.

An incremental save compares each piece with the file of an earlier checkpoint that holds it. Files of which every piece
is as it was become hard links. The other pieces are written, those that did not change apart from those that did, so
that the next save finds files to link.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.dcp.file_manifest import TRAILER, Index, ManifestFile, Stored, check_file, read_manifest
from statetree.declare import without_collections
from statetree.errors import CheckpointError, checked_at_once, suppress
from statetree.files.block_checksums import RunningChecksum
from statetree.files.job_threads import in_threads
from statetree.files.publishing import begin_to_sync
from statetree.files.ranges import OpenFiles
from statetree.files.stored import StoredTensor
from statetree.files.strided_reading import in_buckets, memory_view
from statetree.files.tensor_archives import archive_finder, archive_of
from statetree.spans.bits import same_bytes
from statetree.torch_internals import as_copied, resolved

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from statetree.files.ranges import FileRange
    from statetree.files.tensor_archives import ArchiveFinder

_SUFFIX: Final = ".distcp"
#: An incremental save begins another file where one has so many bytes, or so much of all.
_FILE_BYTES: Final = 4 << 20
_FILE_SHARE: Final = 64
#: From so many bytes in large pieces on there are two files: to wait for the disk takes a few milliseconds for each.
_WORTH_BYTES: Final = 32 << 20
#: From how many bytes on a piece is large: most of the time is the system's.
_LARGE_BYTES: Final = 1 << 18
#: How much is written at a time: what was read for its checksum is still in the processor's cache.
_BLOCK_BYTES: Final = 1 << 20
#: Of how many parts at most: Linux takes 1,024 in one call.
_MOST_PARTS: Final = 1000


class Piece(NamedTuple):
    """One of the tensors or pickled values that some sequence holds, which may make it when it is looked at."""

    holder: Sequence[Any]
    number: int
    nbytes: int

    @property
    def data(self) -> Any:
        """The tensor, or the bytes."""
        return self.holder[self.number]


@dataclass
class DataWriter:
    """Writes what one rank has to write: plain tensors, and plain values as they are pickled."""

    directory: Path
    rank: int
    save: str
    pieces: Mapping[Index, Piece]
    files: dict[str, ManifestFile] = field(default_factory=dict)  # what was written, by the names of files

    def write(self, groups: Iterable[Sequence[Index]], tag: str = "") -> None:
        """Write each group of pieces into a file of its own."""
        names = (f"__{self.rank}_{number}{tag}{_SUFFIX}" for number in count())
        jobs = [self._writing(name, indices) for name, indices in zip(names, groups, strict=False)]
        in_threads(jobs, min(2, torch.get_num_threads()))

    def write_all(self) -> None:
        """Write all pieces: into one file, or into two where two threads have enough to write.

        Small pieces are Python's work, in which threads only wait for each other.
        """
        indices = sorted(self.pieces, key=lambda index: index.start is not None)  # values first, as DCP
        ends = [*accumulate(self.pieces[index].nbytes for index in indices)]
        large = [piece.nbytes for piece in self.pieces.values() if piece.nbytes >= _LARGE_BYTES]
        are_small = sum(large) < _WORTH_BYTES
        is_worth = torch.get_num_threads() > 1 and not are_small
        half = bisect_left(ends, ends[-1] / 2) + 1 if is_worth else len(indices)
        write = without_collections(self.write) if are_small else self.write
        write([indices[:half], indices[half:]] if half < len(indices) else [indices])

    def _writing(self, name: str, indices: Sequence[Index]) -> Generator[None, None, None]:
        """Write a file, a piece at each step."""
        path = self.directory / name
        path.unlink(missing_ok=True)  # never written over: others may be linked to it
        values_first = sorted(indices, key=lambda index: index.start is not None)  # as DCP
        pieces: dict[Index, Stored] = {}
        find = archive_finder()
        with path.open("xb", buffering=0) as file:
            end = FileEnd(file.fileno())
            for index in values_first:
                at, source = end.at, PieceSource(self.pieces[index].data, find)
                pieces[index] = Stored(name, at, source.length, *source.write(end))
                yield
            end.add(TRAILER + self.save.encode())
            end.write()
            os.fsync(file.fileno())
        self.files[name] = ManifestFile(self.save, end.at, pieces)

    def link_or_write(self, base: Path | None) -> None:
        """Link to files of an earlier checkpoint where nothing changed, and write the rest."""
        unchanged: set[Index] = set()
        linked: set[Index] = set()
        manifest = None
        with suppress(CheckpointError):  # without a manifest that is whole, nothing is linked
            manifest = None if base is None else read_manifest(base)
        if base is not None and manifest is not None:
            known = manifest.files
            found: dict[str, set[Index]] = {}
            in_threads([self._comparing(base / name, known[name], found) for name in known], torch.get_num_threads())
            for name, file in known.items():
                same = found[name]
                unchanged |= same
                if len(same) == len(file.pieces):
                    with suppress(OSError):  # another file system, or it was removed meanwhile: it is written anew
                        os.link(base / name, self.directory / name, follow_symlinks=False)
                        linked |= same
                        self.files[name] = file
        kept = [index for index in self.pieces if index in unchanged and index not in linked]
        changed = [index for index in self.pieces if index not in unchanged]
        tag = f"_{self.save}"  # linked files keep their names
        self.write([*self._grouped(kept), *self._grouped(changed)], tag)

    def _comparing(self, path: Path, listed: ManifestFile, found: dict[str, set[Index]]) -> Generator[None, None, None]:
        """Find the pieces that a file holds as they are now. Damage is a change: else it would go on."""
        found[path.name] = set()
        if not path.is_symlink():  # what it leads to may go away
            with suppress(CheckpointError):  # another writer may remove it meanwhile
                found[path.name] = checked_at_once(self._unchanged_in, path, listed)
        yield

    def _unchanged_in(self, path: Path, listed: ManifestFile) -> set[Index]:
        file = OpenFiles().open(path)
        check_file(file, listed)
        return {
            index
            for index, stored in listed.pieces.items()
            if index in self.pieces and PieceSource(self.pieces[index].data).is_in(file, stored)
        }

    def _grouped(self, indices: Sequence[Index]) -> Iterator[Sequence[Index]]:
        """Cut pieces into groups for a file each: not many, so that few are written again when one changes."""
        sizes = [self.pieces[index].nbytes if index.start is not None else 0 for index in indices]
        limit = min(_FILE_BYTES, sum(sizes) // _FILE_SHARE)
        group: list[Index] = []
        total = 0
        for index, nbytes in zip(indices, sizes, strict=True):
            group.append(index)
            total += nbytes
            if total >= limit:
                yield group
                group, total = [], 0
        if group:
            yield group


class PieceSource:
    """A plain strided tensor, or the bytes of a plain value, to be written, or compared with what was written.

    Contiguous tensors on the CPU are written from their memory. Others are copied, and stored ones read, a bucket at a
    time.
    """

    def __init__(self, data: Any, find: ArchiveFinder = archive_of) -> None:
        self._archive = None
        if isinstance(data, StoredTensor):
            self._archive = find(data.dtype, tuple(data.shape))
            data = data if self._archive else data.tensor()
        if isinstance(data, torch.Tensor):
            data, dtype = resolved(data.detach() if data.requires_grad else data), data.dtype
            self._archive = find(dtype, data.shape)
            data = as_copied(data)  # a copy of bools would change bytes that are neither 0 nor 1
            if self._archive is None:
                file = io.BytesIO()
                torch.save(data.cpu().clone(memory_format=torch.contiguous_format).view(dtype), file)
                data = bytearray(file.getbuffer())  # see _pickled in saving.py
        self._data: torch.Tensor | StoredTensor
        self._data = data if self._archive else torch.frombuffer(data, dtype=torch.uint8)
        is_here = isinstance(self._data, torch.Tensor) and self._data.device.type == "cpu"
        self._in_place = is_here and self._data.is_contiguous()
        self.length = self._archive.length if self._archive else self._data.nbytes  # how many bytes are written

    def write(self, end: FileEnd) -> tuple[int, str]:
        """Write it as DCP does, and return its CRC-32, and those of a tensor's blocks (``RunningChecksum.marks``)."""
        archive, running = self._archive, RunningChecksum(self._data.nbytes)
        if archive:
            end.add(archive.head)
        for block in self._blocks():
            running.add(block)
            end.add(block)
        if not archive:
            return running.value, ""
        after = archive.end(running.value)
        end.add(after)
        return archive.checksum(running.value, after), running.marks

    def is_in(self, file: FileRange, piece: Stored) -> bool:
        """Whether a piece of a file was written from the same, and holds it still."""
        place = file.part(piece.offset, piece.length, "a piece")
        stated = self._archive.stated(place) if self._archive else (0, piece.checksum)
        if place.length != self.length or stated is None or stated[1] != piece.checksum:
            return False
        begin = len(self._archive.head) if self._archive else 0
        for own in self._blocks(max(self._data.nbytes, 1)):
            done = 0
            for block in place.blocks(begin, len(own)):
                both = block, own[done : done + len(block)]
                if not same_bytes(*[torch.frombuffer(bytes_, dtype=torch.uint8) for bytes_ in both]):
                    return False
                done += len(block)
            begin += done
        return True

    def _blocks(self, most: int = _BLOCK_BYTES) -> Iterator[memoryview]:
        data: Any = self._data
        if self._in_place:
            view = memory_view(data)
            yield from (view[start : start + most] for start in range(0, len(view), most))
            return
        for box in in_buckets(data.shape, data.dtype.itemsize):
            index = (*map(slice, box.start, box.stop),)
            yield memory_view(data.read(index) if isinstance(data, StoredTensor) else data[index].cpu().contiguous())


class FileEnd:
    """The end of a file that grows. Small parts are written together, by one call of the system."""

    def __init__(self, handle: int, at: int = 0) -> None:
        self.at = at  #: where the next part is to lie
        self._handle = handle
        self._begin = at
        self._parts: list[memoryview] = []

    def add(self, part: bytes | memoryview) -> None:
        """Add bytes, which must stay as they are until they are written."""
        self._parts.append(memoryview(part))
        self.at += len(part)
        if self.at - self._begin >= _BLOCK_BYTES or len(self._parts) == _MOST_PARTS:
            self.write()

    def write(self) -> None:
        """Write what was added."""
        views, at = [part for part in self._parts if part], self._begin
        while views:
            done = os.pwritev(self._handle, views, at)
            at += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views:
                views[0] = views[0][done:]
        if at - self._begin >= _BLOCK_BYTES:
            begin_to_sync(self._handle, self._begin, at)
        self._begin, self._parts = at, []
