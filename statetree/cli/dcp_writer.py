"""Writes directories of ``torch.distributed.checkpoint`` without having the tensors in memory."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from statetree.chunks.boxes import Box, in_slabs
from statetree.dcp.flat_state import STRUCTURE_KEY, flat_state, free_key
from statetree.dcp.saved_structure import SavedEntry, written
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY, content_of, to_save
from statetree.files.checkpoint import is_value, strided
from statetree.files.stored import BUCKET_BYTES, StoredTensor
from statetree.files.torch_writer import loaded
from statetree.torch_internals import WITHOUT_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from statetree.files.checkpoint import Progress

_METADATA: Final = ".metadata"


def write_directory(folder: Path, tree: Any, shard_bytes: int | None, progress: Progress) -> list[str]:
    """Write a checkpoint into a folder. Returns the names of its files; the one that speaks of the others comes last.

    Large tensors are written in pieces, as if ranks had held them.

    Args:
        folder: Where.
        tree: What.
        shard_bytes: Up to how many bytes go into one file; ``None`` for one file.
        progress: Is told what was written.
    """
    spec, entries = flat_state(tree, verb="convert")
    writer = _PieceWriter(folder, shard_bytes, progress)
    taken = {entry.key for entry in entries}
    saved: list[SavedEntry] = []
    dcp_paths: dict[str, tuple[str | int, ...]] = {}
    for entry in entries:
        leaf = entry.value
        view = strided(leaf)
        if is_value(leaf):
            writer.add_value(entry.key, leaf)
            saved.append(SavedEntry(VALUE_ENTRY, (entry.key,)))
        elif view is not None and view.dtype not in WITHOUT_KERNELS:
            writer.add_tensor(entry.key, view)
            saved.append(SavedEntry(TENSOR_ENTRY, (entry.key,)))
        else:
            content = content_of("convert", loaded(leaf), entry.path)
            keys = []
            for number, part in enumerate(content.tensors):
                keys.append(free_key(f"{entry.key}.<part {number}>", taken))
                taken.add(keys[-1])
                writer.add_small(keys[-1], to_save(part))
            saved.append(SavedEntry(PARTS_ENTRY, tuple(keys), content.facts))
        dcp_paths.update((key, entry.dcp_path_of(key)) for key in saved[-1].keys)
    writer.add_value(STRUCTURE_KEY, written(spec, saved))
    dcp_paths[STRUCTURE_KEY] = (STRUCTURE_KEY,)
    return writer.finish(dcp_paths)


class _PieceWriter:
    def __init__(self, folder: Path, shard_bytes: int | None, progress: Progress) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._progress = progress
        self._entries: dict[str, Any] = {}
        self._stored: dict[MetadataIndex, Any] = {}
        self._names: list[str] = []
        self._size = 0

    def add_value(self, key: str, value: Any) -> None:
        self._entries[key] = BytesStorageMetadata()
        self._stored[MetadataIndex(key)] = self._append(value)

    def add_small(self, key: str, tensor: torch.Tensor) -> None:
        whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
        piece = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._add_pieces(key, tensor.dtype, tensor.shape, [(whole, piece)])

    def add_tensor(self, key: str, view: StoredTensor) -> None:
        whole = Box((0,) * len(view.shape), view.shape)
        boxes = in_slabs(whole, max(1, -(-view.nbytes // BUCKET_BYTES)))
        ends = accumulate(box.volume for box in boxes)
        pieces = ((box, view.read(end - box.volume, end).view(box.sizes)) for box, end in zip(boxes, ends, strict=True))
        self._add_pieces(key, view.dtype, view.shape, pieces)

    def _add_pieces(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[tuple[Box, torch.Tensor]]
    ) -> None:
        chunks = []
        for box, piece in pieces:
            chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.sizes)))
            self._stored[MetadataIndex(key, torch.Size(box.start))] = self._append(piece)
            self._progress(piece.numel() * dtype.itemsize)
        self._entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)

    def _append(self, value: Any) -> _StorageInfo:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        size = buffer.tell()
        is_full = self._shard_bytes is not None and self._size + size > self._shard_bytes and self._size > 0
        if is_full or not self._names:
            self._names.append(f"__0_{len(self._names)}.distcp")
            self._size = 0
        with (self._folder / self._names[-1]).open("ab") as file:
            file.write(buffer.getbuffer())
        self._size += size
        return _StorageInfo(self._names[-1], self._size - size, size)

    def finish(self, dcp_paths: dict[str, tuple[str | int, ...]]) -> list[str]:
        metadata = Metadata(
            self._entries, planner_data=dcp_paths, storage_data=self._stored, storage_meta=StorageMeta()
        )
        with (self._folder / _METADATA).open("xb") as file:
            pickle.dump(metadata, file)
        return [*self._names, _METADATA]
