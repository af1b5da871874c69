"""The data files of a checkpoint: compared with the manifest as they are opened, and what pieces lie where in them.

DCP writes each piece of a tensor, and each plain value, by ``torch.save``: as a zip archive with a CRC-32 of every
member, which ``torch.load`` does not look at. Here pieces are found by what their archives say, and read from the file.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

from statetree.chunks.boxes import Box
from statetree.dcp.file_manifest import check_file
from statetree.dcp.metadata import read_described
from statetree.files.ranges import OpenFiles
from statetree.files.torch_format import TorchArchive
from statetree.files.untrusted import refuse
from statetree.files.zip_archive import read_members

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    from statetree.dcp.file_manifest import FileManifest
    from statetree.dcp.metadata import Stored
    from statetree.files.ranges import FileRange
    from statetree.files.stored import StoredPiece


class DataFiles:
    """The data files of one checkpoint.

    Args:
        directory: Where the checkpoint lies.
        metadata: Its metadata.
        manifest: Its manifest, or ``None`` if DCP alone wrote it.
        files: Opens files.
    """

    def __init__(
        self, directory: Path, metadata: Metadata, manifest: FileManifest | None, files: OpenFiles | None = None
    ) -> None:
        self.files = OpenFiles() if files is None else files
        self._directory = directory
        self._stored: dict[MetadataIndex, Stored] = metadata.storage_data
        self._listed = None if manifest is None else manifest.files
        self._checksums = {
            (name, piece.offset): piece.checksum for name, file in (self._listed or {}).items() for piece in file.pieces
        }
        self._opened: dict[str, FileRange] = {}

    def open(self, name: str) -> FileRange:
        """Return a data file.

        Raises:
            CheckpointError: If it is not of the size, or not of the save, that the manifest says.
        """
        if name not in self._opened:
            place = self.files.open(self._directory / name)
            if self._listed is not None:
                check_file(place, self._listed[name])
            self._opened[name] = place
        return self._opened[name]

    def entry(self, index: MetadataIndex) -> FileRange:
        """Return the bytes of a piece of a tensor, or of a plain value."""
        stored = self._stored[index]
        return self.open(stored.name).part(stored.offset, stored.length, f"the entry {index.fqn!r}")

    def verify(self, index: MetadataIndex, place: FileRange) -> None:
        """Compare an entry's bytes with its checksum: that of the manifest, or, without one, those in itself.

        Raises:
            CheckpointError: If a byte of it is not what was written, or if it has no checksums.
        """
        stored = self._stored[index]
        if self._listed is None:
            check_entry(place)
            return
        expected, found = self._checksums.get((stored.name, stored.offset)), place.checksum(0, place.length)
        if found != expected:
            check_entry(place)  # this may say more exactly where
            told = "none" if expected is None else f"{expected:08x}"
            refuse(place.label, f"it is damaged: expected the checksum {told}, got {found:08x}")

    @staticmethod
    def piece(place: FileRange, dtype: torch.dtype, box: Box) -> StoredPiece:
        """Return where the elements of a piece of a tensor lie in its entry.

        Raises:
            CheckpointError: If it is no tensor of this dtype and of the shape of the box.
        """
        archive = TorchArchive(place)
        tensor = archive.read("meta")
        piece = archive.piece(tensor)
        if piece is None or tensor.dtype != dtype or piece.box.sizes != box.sizes:
            got = "none" if piece is None else f"{tensor.dtype} {piece.box.sizes}"
            archive.refuse(f"it holds something else: expected a tensor of {dtype} {box.sizes}, got {got}")
        return piece._replace(box=box)


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return where a piece lies in its tensor."""
    return Box(tuple(chunk.offsets), (*map(add, chunk.offsets, chunk.sizes),))


def check_entry(place: FileRange) -> None:
    """Compare all that ``torch.load`` reads of an entry with the entry's own checksums.

    What the archive says of its members has none, but is there twice, or leads to other bytes if it is changed.

    Raises:
        CheckpointError: If a byte of it is not what was written, or if it has no checksums.
    """
    members = read_members(place).values()
    if not any(member.crc for member in members):
        what = (
            "it has no checksums: expected those that torch.save writes unless "
            "torch.serialization.set_crc32_options(False) is set"
        )
        refuse(place.label, what, "Pass verify=False to read it all the same.")
    for member in members:
        member.verify(place)


def check_files(directory: Path) -> None:
    """Check that a checkpoint has all its files, whole and of one save, without reading what is in them.

    Raises:
        CheckpointError: If it has not.
    """
    metadata, manifest = read_described(directory, verify=True)
    data = DataFiles(directory, metadata, manifest)
    for name in () if manifest is None else manifest.files:
        data.open(name)
