"""Fresh leaves like others: of the same layouts, on the same devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statetree.key_paths import Path
from statetree.leaves.builtin import is_distributed, is_registered, leaf_type_of
from statetree.leaves.parts import unpack
from statetree.leaves.replicas import replicated, with_leaves
from statetree.spans.memory import Memory
from statetree.spans.overlaps import once
from statetree.torch_internals import copy_each

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
        if isinstance(leaf, torch.Tensor) or is_distributed(leaf) or is_registered(leaf):
            by_device.setdefault(_device_of(leaf, keep_meta=keep_meta), []).append(index)
    for device, indices in by_device.items():
        allocate = partial(replicated, verb, memory=Memory(device), copy=False)
        fresh = with_leaves(spec, leaves, indices, allocate)
        for index, leaf in fresh.items():
            result[index] = leaf
            if _has_tensors_beside(verb, leaves[index]):
                _fill(verb, leaf, leaves[index])
    return result


def _has_tensors_beside(verb: str, leaf: Any) -> bool:
    """Whether a leaf has Python attributes with tensors: elements arrive for its own tensors alone."""
    leaf_type = leaf_type_of(type(leaf)) if getattr(leaf, "__dict__", None) else None
    carried = leaf_type.contents(leaf)[2] if leaf_type is not None else None
    values = list(carried.values()) if type(carried) is dict else [carried]
    return bool(carried and unpack(verb, values, list, memory=False).parts)


def _fill(verb: str, fresh: Any, leaf: Any) -> None:
    """Copy all that is there of a leaf, with its attributes: what arrives is written over it."""
    made, given = (unpack(verb, [each], lambda: [Path()]).parts for each in (fresh, leaf))
    both = [(a, b) for a, b in zip(made, given, strict=True) if not b.is_meta]
    pairs = [pair for a, b in both if (pair := once(a, b)) is not None]  # always: they overlap themselves alike
    copy_each([target for target, _ in pairs], [source for _, source in pairs])


def _device_of(leaf: Any, *, keep_meta: bool) -> torch.device:
    """Return where a leaf's elements lie, or are to lie if it has none."""
    parts = [leaf] if isinstance(leaf, torch.Tensor) else unpack("", [leaf], lambda: [Path()], memory=False).parts
    if parts and (keep_meta or not parts[0].is_meta):
        return parts[0].device
    mesh = getattr(leaf, "device_mesh", None)
    return torch.device("cpu" if mesh is None or mesh.device_type == "meta" else mesh.device_type)
