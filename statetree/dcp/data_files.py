"""The data files of a checkpoint: compared with the manifest as they are opened, and what pieces lie where in them.

DCP writes each piece of a tensor, and each plain value, by ``torch.save``: as a zip archive with a CRC-32 of every
member, which ``torch.load`` does not look at. Almost all pieces are archives as torch writes them of contiguous
tensors: where the elements lie is known then. Other archives are parsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import common, is_covered, whole_box
from statetree.dcp.file_manifest import Index, check_file
from statetree.dcp.metadata import read_described
from statetree.errors import CheckpointError
from statetree.files.ranges import OpenFiles
from statetree.files.stored import StoredPiece, StoredTensor
from statetree.files.tensor_archives import archive_finder
from statetree.files.torch_format import TorchArchive
from statetree.files.torch_members import read_members
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from statetree.chunks.boxes import Box
    from statetree.files.ranges import FileRange

#: Entries of at most so many bytes are read at once to be verified: an archive is some thirty reads.
_SMALL_BYTES: Final = 1 << 20


class DataFiles:
    """The data files of one checkpoint, and what it holds: ``described``."""

    def __init__(self, directory: Path, files: OpenFiles | None = None, *, verify: bool = True) -> None:
        self.files = OpenFiles() if files is None else files
        self.described = read_described(directory, verify=verify)
        self._directory = directory
        self._opened: dict[str, FileRange] = {}
        self._pieces: dict[Index, StoredPiece] = {}
        self._held: Any = None
        self._archive_of = archive_finder()

    def open(self, name: str) -> FileRange:
        """Return a data file, of the size and of the save that the manifest says."""
        if name not in self._opened:
            file = self.files.open(self._directory / name)
            if self.described.files is not None:
                check_file(file, self.described.files[name])
            self._opened[name] = file
        return self._opened[name]

    def check(self) -> None:
        """Raise ``CheckpointError`` unless all files are there, whole and of one save. Entries are not read."""
        for name in sorted({piece.name for piece in self.described.pieces.values()} | set(self.described.files or ())):
            self.open(name)

    def value(self, key: str, *, verify: bool) -> bytes:
        """Return what was written of a plain value."""
        entry = self._entry(Index(key, None), verify=verify, at_once=True)
        return entry.read(0, entry.length, "its bytes")

    def tensor(self, key: str, *, verify: bool = False) -> StoredTensor:
        """Return a tensor. Where its pieces lie in their entries is read, and verified, when its elements are."""
        dtype, shape, boxes = self.described.entries[key]
        whole = whole_box(shape)
        if not is_covered(whole, list(boxes)):  # elements would keep what they were
            held, need = sum(box.volume for box in boxes), whole.volume
            what = f"{held} of the {need} elements" if held < need else "pieces that overlap, but not all elements,"
            raise CheckpointError(
                f"load: the checkpoint holds {what} of {key!r} that are needed: expected all. It was saved without "
                "some of its ranks, or is damaged. Load another one."
            )
        outline = torch.empty(shape, dtype=dtype, device="meta")
        ordered = [] if 0 in shape else [*boxes]
        if len(boxes) > 1:
            ordered.sort(key=lambda box: self.described.pieces[Index(key, box.start)])

        def find(wanted: Box) -> Iterator[StoredPiece]:
            for box in ordered:
                if box == wanted or common(box, wanted) is not None:  # it mostly is: comparing is faster
                    yield self._piece(Index(key, box.start), outline.dtype, box, verify=verify)

        return StoredTensor(outline, lambda: None, find)

    def verify(self) -> int:
        """Compare all entries with their checksums, and return how many there are."""
        for index in self.described.pieces:
            self._entry(index, verify=True)
        return len(self.described.pieces)

    def _entry(self, index: Index, *, verify: bool, at_once: bool = False) -> FileRange:
        """Return the bytes of a piece, or of a plain value. What is small is read at once to be verified."""
        stored = self.described.pieces[index]
        entry = self.open(stored.name).part(stored.offset, stored.length, f"the entry {index.key!r}")
        if not verify:
            return entry
        if at_once or entry.length <= _SMALL_BYTES:
            entry = entry.in_memory()
        if self.described.files is None:
            check_entry(entry)
        elif (found := entry.checksum(0, entry.length)) != stored.checksum:
            check_entry(entry)  # this may say more exactly where
            refuse(entry.label, f"it is damaged: expected the checksum {stored.checksum or 0:08x}, got {found:08x}")
        return entry

    def _piece(self, index: Index, dtype: torch.dtype, box: Box, *, verify: bool) -> StoredPiece:
        piece = self._pieces.get(index)  # other threads may be here
        if piece is not None:
            self.files.check(piece.file.path)
            return piece
        piece = self._like_torch(index, dtype, box, verify=verify) or self._parsed(index, dtype, box, verify=verify)
        self._pieces[index] = piece
        if piece.file.is_held:  # only the last one stays in memory: the next box may lie in it, too
            self._pieces.pop(self._held, None)
            self._held = index
        return piece

    def _like_torch(self, index: Index, dtype: torch.dtype, box: Box, *, verify: bool) -> StoredPiece | None:
        """Return the piece if its entry is, around the elements, what torch writes, and what the manifest says."""
        archive, stored = self._archive_of(dtype, box.sizes), self.described.pieces[index]
        if archive is None or archive.length != stored.length:
            return None
        whole = self._entry(index, verify=False)
        if verify and whole.length <= _SMALL_BYTES:
            whole = whole.in_memory()
        place = whole.part(len(archive.head), archive.nbytes, whole.entry)
        if verify and not (whole.is_held and stored.checksum is not None):
            found = archive.stated(whole)
            if found is None or (self.described.files is not None and found[1] != stored.checksum):
                return None
            place = place.checked("the member 'archive/data/0'", found[0], stored.marks)
        elif whole.read(0, len(archive.head), "its beginning") != archive.head or (
            verify and whole.checksum(0, whole.length) != stored.checksum
        ):
            return None
        return StoredPiece(box, place, archive.stride)

    def _parsed(self, index: Index, dtype: torch.dtype, box: Box, *, verify: bool) -> StoredPiece:
        archive = TorchArchive(self._entry(index, verify=verify))
        tensor = archive.read("meta")
        piece = archive.piece(tensor)
        if piece is None or tensor.dtype != dtype or piece.box.sizes != box.sizes:
            got = "none" if piece is None else f"{tensor.dtype} {piece.box.sizes}"
            archive.refuse(f"it holds something else: expected a tensor of {dtype} {box.sizes}, got {got}")
        return piece._replace(box=box)


def check_entry(entry: FileRange) -> None:
    """Compare all that ``torch.load`` reads of an entry with the entry's own checksums, which it must have.

    What the archive says of its members has none, but is there twice, or leads to other bytes if it is changed.
    """
    members = read_members(entry).values()
    if not any(member.crc for member in members):
        what = (
            "it has no checksums: expected those that torch.save writes unless "
            "torch.serialization.set_crc32_options(False) is set"
        )
        refuse(entry.label, what, "Pass verify=False to read it all the same.")
    for member in members:
        member.verify(entry)
