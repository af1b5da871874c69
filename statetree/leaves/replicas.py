"""Replicas: a tree whose tensors are replicated in other memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import unpack
from statetree.leaves.ties import tied_leaves
from statetree.leaves.tree_parts import take_apart
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents
from statetree.spans.replicate import copy_bytes, replicate_columns
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    import torch

    from statetree.spans.memory import Memory


@quietly
def replicated(verb: str, tree: Any, memory: Memory, *, copy: bool) -> Any:
    """Return a tree whose tensors are replicas in other memory, with or without the same elements."""
    parts = take_apart(verb, tree, memory=copy)
    columns = parts.unpacked.columns
    if copy:
        parts.check_memory()
    fresh = replicate_columns(columns, extents(columns), memory, copy=copy)
    # Indices, offsets and what else leaves are put together by: undefined ones would not make a leaf.
    needed = [] if copy else [index for index in parts.unpacked.metadata_parts() if not columns.tensors[index].is_meta]
    if needed:
        chosen = Columns([columns.tensors[index] for index in needed])
        check_memory(verb, chosen, lambda index: parts.path_of(needed[index]))
        copy_bytes(chosen, Columns([fresh[index] for index in needed]))
    return parts.put_together(fresh)


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
    for index, leaf in zip(moving, part.pack(replicate_columns(part.columns, reach, memory, copy=True)), strict=True):
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
