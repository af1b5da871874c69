"""A pool of blocks of host memory, from which a stager's snapshots take their buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statetree.buffers import ALIGNMENT, LARGE_BYTES, SLAB_BYTES, Buffer, Memory
from statetree.spans import raw

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A block is used for less than it holds only if at least this part of it is filled.
_MIN_FILL = 0.75


class Pool:
    """Blocks that no snapshot uses.

    Blocks are kept as ``uint8`` tensors that cover them.

    Attributes:
        allocations: How many blocks were taken from the system so far: so many pinnings, so many descriptors.
        allocated_bytes: How many bytes they hold together.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: list[torch.Tensor] = []
        self.allocations = 0
        self.allocated_bytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes that lie idle in the pool."""
        return sum(block.nbytes for block in self._blocks)

    def give(self, blocks: Sequence[torch.Tensor]) -> None:
        """Put blocks into the pool."""
        self._blocks.extend(blocks)

    def clear(self) -> None:
        """Free what is in the pool."""
        self._blocks.clear()

    def take(self, sizes: Sequence[int]) -> tuple[list[Buffer], list[torch.Tensor]]:
        """Return a buffer for each size in bytes, and the blocks that they lie in.

        Large buffers get a block each, small ones share slabs.
        """
        buffers: list[Buffer] = [Buffer(torch.UntypedStorage(0, device="cpu"), 0)] * len(sizes)
        blocks: list[torch.Tensor] = []
        batch: list[int] = []
        filled = 0
        for index, size in enumerate(sizes):
            if size >= LARGE_BYTES:
                blocks.append(self._block(size))
                buffers[index] = self._piece(blocks[-1], 0, size)
                continue
            if batch and filled + size > SLAB_BYTES:
                blocks.append(self._fill_slab(sizes, batch, filled, buffers))
                batch, filled = [], 0
            batch.append(index)
            filled += -(-size // ALIGNMENT) * ALIGNMENT
        if batch:
            blocks.append(self._fill_slab(sizes, batch, filled, buffers))
        return buffers, blocks

    def _fill_slab(self, sizes: Sequence[int], batch: list[int], filled: int, buffers: list[Buffer]) -> torch.Tensor:
        slab = self._block(filled)
        start = 0
        for index in batch:
            buffers[index] = self._piece(slab, start, sizes[index])
            start += -(-sizes[index] // ALIGNMENT) * ALIGNMENT
        return slab

    def _piece(self, block: torch.Tensor, start: int, size: int) -> Buffer:
        storage = block.untyped_storage()
        if self._memory.share_memory:
            return Buffer(storage, start)
        piece: torch.UntypedStorage = storage[start : start + size]
        return Buffer(piece, 0)

    def _block(self, size: int) -> torch.Tensor:
        """Take the smallest block that fits from the pool, or allocate one."""
        limit = size if self._memory.share_memory else size / _MIN_FILL
        fitting = [block for block in self._blocks if size <= block.nbytes <= limit]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            self._blocks = [block for block in self._blocks if block is not best]
            return best
        self.allocations += 1
        self.allocated_bytes += size
        (buffer,) = self._memory.carve([size], slabs=False)
        return raw(buffer.storage, 0, size)
