"""Plain tensors that say of which global tensor they hold shards: torch's ``CheckpointableTensor``, of 2.14 and later.

Four attributes make a tensor one, so this works with every torch. What torch 2.15.0 refuses is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.chunks.boxes import Box, cut_out
from statetree.chunks.local import checked_chunks
from statetree.errors import UnsupportedLeaf

if TYPE_CHECKING:
    import torch

    from statetree.chunks.local import LocalChunks

#: The attributes: the global shape, and for each shard where it begins there, where it begins here, and its shape.
SHARD_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def holds_shards(value: torch.Tensor) -> bool:
    """Whether a tensor says that it holds shards of another one."""
    cls, own = type(value), value.__dict__
    if not own and not hasattr(cls, SHARD_ATTRIBUTES[0]):  # as of nearly all
        return False
    return all(name in own or hasattr(cls, name) for name in SHARD_ATTRIBUTES)


def shards_of(value: Any) -> LocalChunks:
    """Return the shards that a tensor says it holds (``UnsupportedLeaf`` if that does not fit together, or it)."""
    shape = tuple(value.global_shape)
    columns = value.global_offsets, value.local_offsets, value.local_sizes
    if len({len(column) for column in columns}) > 1:
        raise _misfit(f"as many global_offsets, local_offsets and local_sizes, got {list(map(len, columns))}")
    found = []
    rows = [[(*map(int, entry),) for entry in column] for column in columns]
    for start, first, sizes in zip(*rows, strict=True):
        if not len(start) == len(sizes) == len(shape) or not len(first) == len(sizes) == value.dim():
            raise _misfit(f"{len(shape)} dims of every shard, got offsets {start} and {first} and sizes {sizes}")
        for where, whole in ((start, shape), (first, tuple(value.shape))):
            if not _lies_in(where, sizes, whole):
                raise _misfit(f"shards inside of the shape {whole}, got sizes {sizes} at {where}")
        found.append((Box.at(start, sizes), cut_out(value.detach(), first, sizes)))
    return checked_chunks(value, shape, value.dtype, found)


def _lies_in(start: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        first >= 0 and size >= 0 and first + size <= most for first, size, most in zip(start, sizes, shape, strict=True)
    )


def _misfit(text: str) -> UnsupportedLeaf:
    msg = f"the leaf at %PATH% does not say properly of which tensor it holds shards: expected {text}. Correct it."
    return UnsupportedLeaf(msg)
