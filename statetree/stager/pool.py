"""A pool of blocks of host memory, from which a stager's snapshots take their buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statetree.errors import unsignalled
from statetree.spans.layout import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.spans.memory import Buffer, Memory

#: A block is used for less than it holds only if at least this part of it is filled.
_MIN_FILL = 0.75


class Pool:
    """Blocks that no snapshot uses, as ``uint8`` tensors; and how many the system gave so far, with how many bytes."""

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
        found: dict[int, Buffer] = {}
        blocks: list[torch.Tensor] = []
        for block in self._memory.arrange(sizes):
            blocks.append(self._block(block.nbytes))
            storage = blocks[-1].untyped_storage()
            found.update((index, self._memory.piece(storage, start, sizes[index])) for index, start in block.offsets)
        return [found[index] for index in range(len(sizes))], blocks

    def cut(self, buffer: Buffer, size: int, count: int) -> list[Buffer]:
        """Cut a buffer into smaller ones of one size."""
        starts = (buffer.start + number * size for number in range(count))
        return [self._memory.piece(buffer.storage, start, size) for start in starts]

    def _block(self, size: int) -> torch.Tensor:
        """Take the smallest block that fits from the pool, or allocate one."""
        limit = size if self._memory.share_memory else size / _MIN_FILL
        fitting = [block for block in self._blocks if size <= block.nbytes <= limit]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            self._blocks = [block for block in self._blocks if block is not best]
            return best
        try:
            storage = self._memory.block(size)
        except unsignalled(OSError, RuntimeError, MemoryError):
            if not self._blocks:
                raise
            self._blocks.clear()  # what does not fit is in the way
            storage = self._memory.block(size)
        self.allocations += 1
        self.allocated_bytes += size
        return as_bytes(storage, 0, size)
