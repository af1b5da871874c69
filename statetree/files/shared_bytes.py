"""Which leaves of a tree share bytes, in memory or in a file."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from statetree.files.stored import StoredTensor, span_bytes
from statetree.spans.layout import holds_memory

if TYPE_CHECKING:
    from collections.abc import Sequence


def shared_bytes(leaves: Sequence[Any]) -> list[list[int]]:
    """Return which leaves share bytes: their indices, in order. Of views that interlace, this is said, too."""
    extents = sorted((*found, index) for index, leaf in enumerate(leaves) if (found := extent(leaf)) is not None)
    groups: list[list[int]] = [[index] for *_, index in extents[:1]]
    end = extents[0][2] if extents else 0
    for (storage, *_), (other, begin, stop, index) in pairwise(extents):
        if storage == other and begin < end:
            groups[-1].append(index)
            end = max(end, stop)
        else:
            groups.append([index])
            end = stop
    return sorted(sorted(group) for group in groups if len(group) > 1)


def covered_bytes(leaves: Sequence[Any]) -> int:
    """Return how many bytes leaves that share some cover together."""
    total = end = 0
    for _, begin, stop in sorted(found for leaf in leaves if (found := extent(leaf)) is not None):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def extent(leaf: Any) -> tuple[int, int, int] | None:
    """Return the storage of a tensor that may share it, and where its bytes begin and stop there."""
    is_stored = isinstance(leaf, StoredTensor)
    tensor = leaf.outline if is_stored else leaf
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or (is_stored and not leaf.is_strided):
        return None
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_meta or not tensor.numel() or not holds_memory(tensor):
        return None
    begin = tensor.storage_offset() * tensor.dtype.itemsize
    return tensor.untyped_storage().data_ptr(), begin, begin + span_bytes(tensor)


def is_loose(leaves: Sequence[Any]) -> bool:
    """Whether storages are much larger than what the tree's tensors view of them."""
    held: dict[int, tuple[int, int, int]] = {}
    for tensor in leaves:
        found = extent(tensor)
        if found is not None:
            key, begin, stop = found
            low, high, _ = held.get(key, (begin, stop, 0))
            held[key] = (min(low, begin), max(high, stop), tensor.untyped_storage().nbytes())
    return any(size - (high - low) > max(4096, size // 4) for low, high, size in held.values())
