"""Leaf types alone, without spans and buffers: a tree taken apart into plain tensors, and put together from copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import Unpacked, unpack
from statetree.tree.flatten import flatten_for_copy, unflatten
from tests.trees import quiet


def unpacked(tree: Any) -> Unpacked:
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    return unpack("test", leaves, spec.paths)


def repacked(tree: Any) -> Any:
    """Return a tree put together from copies of the plain tensors that it is made of."""
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    apart = unpack("test", leaves, spec.paths)
    return unflatten(spec, apart.pack(copies(apart.parts)))


def copies(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy whole storages, each once, and look at the copies as the parts looked at the originals."""
    with quiet():  # torch says once of some dtypes that they are experimental
        return _copies(parts)


def _copies(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    storages: dict[int, torch.UntypedStorage] = {}
    result = []
    for part in parts:
        storage = part.untyped_storage()
        if storage._cdata not in storages:
            fresh = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            storages[storage._cdata] = fresh if part.is_meta else fresh.copy_(storage)
        copied = torch.empty(0, dtype=part.dtype, device=part.device)
        copied.set_(storages[storage._cdata], part.storage_offset(), part.shape, part.stride())
        copied = copied.conj() if part.is_conj() else copied
        result.append(torch._neg_view(copied) if part.is_neg() else copied)
    return result
