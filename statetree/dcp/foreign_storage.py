"""A checkpoint that a ``StorageReader`` of DCP reads, entry by entry: what ``DataFiles`` is for a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from statetree.dcp.data_files import outline_of
from statetree.files.stored import StoredTensor, convert_into

if TYPE_CHECKING:
    import io
    from collections.abc import Sequence

    from torch.distributed.checkpoint.storage import StorageReader


class ForeignStorage:
    """A checkpoint that a reader reads.

    Args:
        reader: Reads it.
        is_coordinator: Whether this is the rank that DCP lets decide for all.
    """

    def __init__(self, reader: StorageReader, *, is_coordinator: bool) -> None:
        self.reader = reader
        self.metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, is_coordinator)

    def value(self, key: str, *, verify: bool) -> bytes:  # noqa: ARG002 - as ``DataFiles`` has it
        """Return what was written of a plain value."""
        index, none = MetadataIndex(key), torch.Size([0])
        return self.read([ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)])

    def tensor(self, key: str, *, verify: bool = False) -> StoredTensor:  # noqa: ARG002 - as ``DataFiles`` has it
        """Return a tensor."""
        return _ForeignTensor(self, key)

    def read(self, items: Sequence[ReadItem], target: Any = None) -> bytes:
        """Read boxes into a tensor, or return the bytes of a plain value."""
        planner = _OneEntry(target)
        plan = self.reader.prepare_global_plan([self.reader.prepare_local_plan(LoadPlan(list(items)))])[0]
        self.reader.read_data(plan, planner).wait()
        return planner.found


class _OneEntry(DefaultLoadPlanner):
    """Takes what is read of one entry."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.found = b""
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:  # noqa: ARG002 - DCP's signature
        """Return what is to be read into."""
        return self._target  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002 - DCP's signature
        """Keep the bytes of a plain value."""
        self.found = value.getvalue()


class _ForeignTensor(StoredTensor):
    def __init__(self, storage: ForeignStorage, key: str) -> None:
        super().__init__(outline_of(storage.metadata, key)[0], lambda: None, None)
        self._storage = storage
        self._key = key

    def read_into(self, start: Sequence[int], target: torch.Tensor) -> None:
        wanted = ChunkStorageMetadata(torch.Size(start), target.shape)
        entry: Any = self._storage.metadata.state_dict_metadata[self._key]
        read = target if target.dtype == self.dtype else torch.empty(target.shape, dtype=self.dtype)
        self._storage.read(create_read_items_for_chunk_list(self._key, entry, [wanted]), read)
        if read is not target:
            convert_into(read, target, f"the entry {self._key!r}")
