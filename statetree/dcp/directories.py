"""Directories as DCP's storage, read without trust."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from statetree.dcp.checksums import check_entry
from statetree.dcp.file_manifest import FileManifest, ManifestPiece, check_file, checksum_of
from statetree.dcp.metadata import Stored, read_described
from statetree.errors import CheckpointError
from statetree.torch_internals import copy_each

if TYPE_CHECKING:
    from collections.abc import Sequence


def local_directory(verb: str, checkpoint_id: str | os.PathLike[str]) -> Path:
    """Return the directory that a checkpoint id names.

    Raises:
        CheckpointError: If it is a URL.
    """
    name = os.fspath(checkpoint_id)
    if "://" in name:
        other = "storage_writer" if verb == "save" else "storage_reader"
        msg = f"{verb}: {name} is no directory: expected a path, got a URL. Pass a {other} that takes it."
        raise CheckpointError(msg)
    return Path(name)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_files(directory: Path) -> None:
    """Check that a checkpoint has all its files, whole and of one save, without reading what is in them.

    Raises:
        CheckpointError: If it has not.
    """
    _, manifest = read_described(directory, verify=True)
    for name, listed in ({} if manifest is None else manifest.files).items():
        with (directory / name).open("rb") as file:
            check_file(file, name, listed)


class DirectoryReader(FileSystemReader):
    """Reads what DCP's ``FileSystemWriter`` wrote, without trusting it: see ``read_metadata``.

    Tensors are read by ``torch.load(weights_only=True)``, and have to be what the metadata says that they are.

    Files have to be of the save that the manifest says; that is told without reading them.

    Args:
        directory: Where the checkpoint lies.
        verify: Whether what is read is compared with its checksums first: those of the manifest, or those in the
            pieces themselves where DCP alone wrote the checkpoint.
    """

    def __init__(self, directory: Path, *, verify: bool) -> None:
        super().__init__(directory)
        self._verify = verify
        self._metadata = Metadata({})
        self._manifest: FileManifest | None = None
        self._pieces: dict[tuple[str, int], ManifestPiece] = {}
        self._sizes: dict[tuple[str, Any], Sequence[int]] = {}

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read the metadata, and the manifest.

        Raises:
            CheckpointError: If they are missing, damaged, hostile, or of two checkpoints.
        """
        metadata, self._manifest = read_described(Path(self.path), verify=self._verify)
        if self._manifest is not None:
            self._pieces = {
                (name, piece.offset): piece for name, file in self._manifest.files.items() for piece in file.pieces
            }
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Take note of the metadata."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata
        self._sizes = {
            (key, chunk.offsets): chunk.sizes
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file and from front to back."""
        by_file: dict[str, list[tuple[Stored, ReadItem]]] = {}
        for item in plan.items:
            stored: Stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.name, []).append((stored, item))
        for name, reads in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                if self._manifest is not None:
                    check_file(file, name, self._manifest.files[name])
                verified: Stored | None = None
                for stored, item in sorted(reads, key=lambda read: read[0].offset):
                    if self._verify and stored != verified:
                        self._check(file, item.storage_index.fqn, stored)
                        verified = stored
                    self._read(file, stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check(self, file: io.BufferedReader, key: str, stored: Stored) -> None:
        """Compare a piece with its checksum."""
        if self._manifest is None:
            check_entry(file, key, stored)
            return
        piece = self._pieces[stored.name, stored.offset]
        found = checksum_of(file, stored.offset, stored.length)
        if found != piece.checksum:
            check_entry(file, key, stored)  # this may say more exactly where
            what = f"expected the checksum {piece.checksum:08x}, got {found:08x}"
            msg = f"{key} in {stored.name} is damaged: {what}"
            raise CheckpointError(msg)

    def _read(self, file: io.BufferedReader, stored: Stored, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            file.seek(stored.offset)
            planner.load_bytes(item, io.BytesIO(file.read(stored.length)))
            return
        index = item.storage_index
        try:
            tensor = torch.load(io.BufferedReader(_StoredPiece(file, stored)), map_location="cpu", weights_only=True)
        except Exception as error:
            msg = f"cannot read {index.fqn} from {stored.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise CheckpointError(msg) from error
        dtype, sizes = self._expected(index)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.shape != sizes:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            msg = f"{stored.name} holds something else for {index.fqn}: expected {dtype} {tuple(sizes)}, got {got}"
            raise CheckpointError(msg)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        copy_each([target], [tensor])
        planner.commit_tensor(item, target)

    def _expected(self, index: MetadataIndex) -> tuple[torch.dtype, Sequence[int]]:
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype, self._sizes[index.fqn, index.offset]


class _StoredPiece(io.RawIOBase):
    """A piece of a file, as a file."""

    def __init__(self, file: io.BufferedReader, stored: Stored) -> None:
        super().__init__()
        self._file = file
        self._start = stored.offset
        self._length = stored.length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        read = self._file.readinto(view[:count])
        self._position += read
        return read
