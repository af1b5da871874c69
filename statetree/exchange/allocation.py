"""Fresh leaves like others: of the same layouts, on the same devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statetree.key_paths import Path
from statetree.leaves.builtin import is_value
from statetree.leaves.parts import unpack
from statetree.leaves.replicas import replicated, with_leaves
from statetree.spans.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.spec import TreeSpec


def allocated(verb: str, leaves: Sequence[Any], spec: TreeSpec, *, keep_meta: bool = False) -> list[Any]:
    """Return fresh tensors like those of leaves, on the same devices; real ones for those on ``meta``.

    With ``keep_meta`` those on ``meta`` stay there: they are what is sent, and nothing arrives.
    """
    result = list(leaves)
    by_device: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if not is_value(leaf):
            by_device.setdefault(_device_of(leaf, keep_meta=keep_meta), []).append(index)
    for device, indices in by_device.items():
        # Elements arrive for the leaves' own tensors alone.
        allocate = partial(replicated, verb, memory=Memory(device), copy=False, attributes=True)
        for index, leaf in with_leaves(spec, leaves, indices, allocate).items():
            result[index] = leaf
    return result


def _device_of(leaf: Any, *, keep_meta: bool) -> torch.device:
    """Return where a leaf's elements lie, or are to lie if it has none."""
    parts = [leaf] if isinstance(leaf, torch.Tensor) else unpack("", [leaf], lambda: [Path()], memory=False).parts
    if parts and (keep_meta or not parts[0].is_meta):
        return parts[0].device
    mesh = getattr(leaf, "device_mesh", None)
    return torch.device("cpu" if mesh is None or mesh.device_type == "meta" else mesh.device_type)
