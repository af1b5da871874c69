"""Replicas: a tree taken apart, its parts replicated in other memory, and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import unpack
from statetree.leaves.ties import tied_leaves
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, copy_bytes, extents, replicate
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    import torch

    from statetree.spans.memory import Memory


@quietly
def replicated(verb: str, tree: Any, memory: Memory, *, copy: bool) -> Any:
    """Return a tree whose tensors are replicas in other memory, with or without the same elements."""
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb)
    unpacked = unpack(verb, leaves, spec.paths, memory=copy, together=True)
    columns = unpacked.columns
    if copy:
        check_memory(verb, columns, lambda index: spec.paths()[unpacked.owners[index]])
    parts = replicate(columns, extents(columns), memory, copy=copy)
    described = [] if copy else [index for index in unpacked.metadata_parts() if not columns.tensors[index].is_meta]
    if described:
        chosen = Columns([columns.tensors[index] for index in described])
        check_memory(verb, chosen, lambda index: spec.paths()[unpacked.owners[described[index]]])
        copy_bytes(chosen, Columns([parts[index] for index in described]))
    return unflatten(spec, unpacked.pack(parts))


@quietly
def moved(verb: str, tree: Any, memory: Memory) -> Any:
    """Return a tree whose tensors lie in some memory: those that do already as they are, copies of the others."""
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb)
    unpacked = unpack(verb, leaves, spec.paths)
    stays = [_lies_in(part, memory) for part in unpacked.parts]
    moving = [leaf for leaf in range(len(leaves)) if not all(stays[part] for part in unpacked.parts_of(leaf))]
    if moving:  # and what is tied to it
        tied = tied_leaves(unpacked)
        moving = sorted({companion for leaf in moving for companion in tied[leaf]})
    part = unpack(
        verb, [leaves[index] for index in moving], lambda: [spec.paths()[index] for index in moving], together=True
    )
    reach = extents(part.columns)
    check_memory(verb, part.columns, lambda index: spec.paths()[moving[part.owners[index]]])
    for index, leaf in zip(moving, part.pack(replicate(part.columns, reach, memory, copy=True)), strict=True):
        leaves[index] = leaf
    return unflatten(spec, leaves)


def _lies_in(part: torch.Tensor, memory: Memory) -> bool:
    if part.is_meta:
        return True
    if memory.pin_memory and not part.is_pinned():
        return False
    if memory.share_memory and not part.is_shared():
        return False
    wanted = memory.device
    return part.device.type == wanted.type and (wanted.type == "cpu" or wanted.index in (None, part.device.index))
