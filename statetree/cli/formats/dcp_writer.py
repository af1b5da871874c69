"""Writes directories of ``torch.distributed.checkpoint`` without having the tensors in memory."""

from __future__ import annotations

import io
import math
import pickle
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from statetree.cli.checkpoint import is_value, strided
from statetree.cli.digests import Part, Written
from statetree.cli.formats.torch_writer import loaded
from statetree.cli.internals import stored_piece
from statetree.cli.stored import BUCKET_BYTES, StoredTensor
from statetree.dcp.flat_state import STRUCTURE_KEY, free_key
from statetree.dcp.saved_structure import SavedEntry, written
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY, content_of, to_save
from statetree.torch_internals import WITHOUT_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from statetree.cli.outline import Outline
    from statetree.cli.progress import Progress

_METADATA: Final = ".metadata"


def write_directory(folder: Path, outline: Outline, shard_bytes: int | None, progress: Progress) -> list[Written]:
    """Write a checkpoint into a folder. Large tensors are written in pieces, as if ranks had held them.

    Args:
        folder: Where.
        outline: What.
        shard_bytes: Up to how many bytes go into one file; ``None`` for one file.
        progress: Is told what was written.
    """
    writer = _Writer(folder, shard_bytes, progress)
    taken = {entry.key for entry in outline.entries}
    saved: list[SavedEntry] = []
    dcp_paths: dict[str, tuple[str | int, ...]] = {}
    for entry in outline.entries:
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
    assert outline.spec is not None
    writer.add_value(STRUCTURE_KEY, written(outline.spec, saved))
    dcp_paths[STRUCTURE_KEY] = (STRUCTURE_KEY,)
    return writer.finish(dcp_paths)


class _Writer:
    def __init__(self, folder: Path, shard_bytes: int | None, progress: Progress) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._progress = progress
        self._entries: dict[str, Any] = {}
        self._stored: dict[MetadataIndex, Any] = {}
        self._parts: list[list[Part]] = []
        self._size = 0

    def add_value(self, key: str, value: Any) -> None:
        self._entries[key] = BytesStorageMetadata()
        self._stored[MetadataIndex(key)] = self._append(key, value)

    def add_small(self, key: str, tensor: torch.Tensor) -> None:
        offset = torch.Size([0] * tensor.dim())
        self._entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, [ChunkStorageMetadata(offset, tensor.shape)]
        )
        self._stored[MetadataIndex(key, offset)] = self._append(
            key, tensor.detach().clone(memory_format=torch.contiguous_format)
        )
        self._progress(tensor.numel() * tensor.dtype.itemsize)

    def add_tensor(self, key: str, view: StoredTensor) -> None:
        chunks = []
        done = 0
        for offsets, sizes in _row_boxes(view.shape, max(1, BUCKET_BYTES // view.dtype.itemsize)):
            count = math.prod(sizes)
            piece = view.read(done, done + count).view(sizes)
            done += count
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            self._stored[MetadataIndex(key, torch.Size(offsets))] = self._append(key, piece)
            self._progress(count * view.dtype.itemsize)
        self._entries[key] = TensorStorageMetadata(TensorProperties(dtype=view.dtype), torch.Size(view.shape), chunks)

    def _append(self, key: str, value: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        size = buffer.tell()
        is_full = self._shard_bytes is not None and self._size + size > self._shard_bytes and self._size > 0
        if is_full or not self._parts:
            self._parts.append([])
            self._size = 0
        name = f"__0_{len(self._parts) - 1}.distcp"
        with (self._folder / name).open("ab") as file:
            file.write(buffer.getbuffer())
        self._parts[-1].append(Part(key, self._size, self._size + size))
        self._size += size
        return stored_piece(name, self._size - size, size)

    def finish(self, dcp_paths: dict[str, tuple[str | int, ...]]) -> list[Written]:
        metadata = Metadata(
            self._entries, planner_data=dcp_paths, storage_data=self._stored, storage_meta=StorageMeta()
        )
        with (self._folder / _METADATA).open("xb") as file:
            pickle.dump(metadata, file)
        names = [f"__0_{number}.distcp" for number in range(len(self._parts))]
        return [*map(Written, names, self._parts), Written(_METADATA, ())]


def _row_boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes of at most so many elements that follow each other in row-major order and cover a tensor."""
    if math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for offsets, sizes in _row_boxes(shape[1:], limit):
                yield (index, *offsets), (1, *sizes)
        return
    step = limit // row
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        yield (start, *[0] * (len(shape) - 1)), (count, *shape[1:])
