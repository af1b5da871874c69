"""The chunks that a rank holds of a distributed leaf, as DCP's planner of saves takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from statetree.chunks.boxes import whole_box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.local import LocalChunks


class LocalPieces:
    """A distributed leaf by its chunks. DCP asks for them by its protocol for objects.

    Attributes:
        shape: The global shape.
        dtype: The dtype of the elements.
        boxes: Where this rank's chunks lie in it.
        pieces: Their tensors.
    """

    def __init__(self, held: LocalChunks) -> None:
        self.shape = torch.Size(held.shape)
        self.dtype = held.dtype
        self.boxes = held.boxes
        self.pieces: Sequence[torch.Tensor] = held.pieces
        if 0 in held.shape:  # no rank holds elements, but DCP is to know of it
            self.boxes, self.pieces = [whole_box(held.shape)], [torch.empty(held.shape, dtype=held.dtype, device="cpu")]
        self._chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.sizes)) for box in self.boxes]

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for number, chunk in enumerate(self._chunks)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        number = next(number for number, chunk in enumerate(self._chunks) if chunk.offsets == index.offset)
        return self.pieces[number]
