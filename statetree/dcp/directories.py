"""Directories as DCP's storage, read without trust."""

from __future__ import annotations

import io
import os
from itertools import groupby
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from statetree.dcp.data_files import DataFiles, box_of
from statetree.dcp.metadata import read_described
from statetree.errors import CheckpointError
from statetree.files.stored import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.boxes import Box
    from statetree.dcp.file_manifest import FileManifest
    from statetree.dcp.metadata import Stored
    from statetree.files.ranges import FileRange

#: Entries of at most so many bytes are read at once: an archive is some thirty reads.
_SMALL_BYTES: Final = 1 << 20


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


class DirectoryReader(FileSystemReader):
    """Reads what DCP's ``FileSystemWriter`` wrote, without trusting it: see ``read_metadata``.

    Tensors are read from where their archives say that elements lie, and have to be what the metadata says.

    Files have to be of the save that the manifest says; that is told without reading them.

    Args:
        directory: Where the checkpoint lies.
        verify: Whether what is read is compared with its checksums first: those of the manifest, or those in the
            pieces themselves where DCP alone wrote the checkpoint.
    """

    def __init__(self, directory: Path, *, verify: bool) -> None:
        super().__init__(directory)
        self._verify = verify
        self._manifest: FileManifest | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._boxes: dict[MetadataIndex, Box] = {}

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read the metadata, and the manifest.

        Raises:
            CheckpointError: If they are missing, damaged, hostile, or of two checkpoints.
        """
        metadata, self._manifest = read_described(Path(self.path), verify=self._verify)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Take note of the metadata."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._data = DataFiles(Path(self.path), metadata, self._manifest)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._dtypes[key] = entry.properties.dtype
                self._boxes.update((MetadataIndex(key, chunk.offsets), box_of(chunk)) for chunk in entry.chunks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file and from front to back."""
        by_place = sorted(plan.items, key=self._place)
        for _, group in groupby(by_place, key=self._place):
            items = list(group)
            index = items[0].storage_index
            place = self._data.entry(index)
            if place.length <= _SMALL_BYTES:
                place = place.in_memory()
            if self._verify:
                self._data.verify(index, place)
            if items[0].type == LoadItemType.BYTE_IO:
                value = place.read(0, place.length, "its bytes")
                planner.load_bytes(items[0], io.BytesIO(value))
            else:
                self._read_piece(index, place, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> Stored:
        found: Stored = self.storage_data[item.storage_index]
        return found

    def _read_piece(
        self, index: MetadataIndex, place: FileRange, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        dtype, box = self._dtypes[index.fqn], self._boxes[index]
        piece = self._data.piece(place, dtype, box)
        stored = StoredTensor(torch.empty(box.sizes, dtype=dtype, device="meta"), lambda: None, lambda: [piece])
        for item in items:
            target = planner.resolve_tensor(item).detach()
            stored.read_into((*map(add, box.start, item.storage_offsets),), target)
            planner.commit_tensor(item, target)
