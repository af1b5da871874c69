"""Directories as DCP's storage: checkpoints written without traces of earlier ones, and read without trust."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.futures import Future

from statetree.dcp.checksums import check_entry
from statetree.dcp.metadata import Stored, read_metadata
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


class DirectoryWriter(FileSystemWriter):
    """DCP's writer, which first takes away the metadata of a checkpoint that was there.

    So that the old metadata and the new data are never taken for one checkpoint if the writing breaks off.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = directory

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take old metadata away, on the coordinating rank, before any rank writes."""
        (self._directory / ".metadata").unlink(missing_ok=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the metadata, and wait until the names of all files are on the disk."""
        super().finish(metadata, results)
        sync_directory(self._directory)


class DirectoryReader(FileSystemReader):
    """Reads what DCP's ``FileSystemWriter`` wrote, without trusting it: see ``read_metadata``.

    Tensors are read by ``torch.load(weights_only=True)``, and have to be what the metadata says that they are.

    Args:
        directory: Where the checkpoint lies.
        verify: Whether what is read is compared with its checksums first.
    """

    def __init__(self, directory: Path, *, verify: bool) -> None:
        super().__init__(directory)
        self._verify = verify
        self._metadata = Metadata({})

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read the metadata.

        Raises:
            CheckpointError: If it is missing, damaged or hostile.
        """
        return read_metadata(Path(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Take note of the metadata."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file and from front to back."""
        by_file: dict[str, list[tuple[Stored, ReadItem]]] = {}
        for item in plan.items:
            stored: Stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.name, []).append((stored, item))
        for name, reads in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                verified: Stored | None = None
                for stored, item in sorted(reads, key=lambda read: read[0].offset):
                    if self._verify and stored != verified:
                        check_entry(file, item.storage_index.fqn, stored)
                        verified = stored
                    self._read(file, stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

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
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        return entry.properties.dtype, sizes


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
