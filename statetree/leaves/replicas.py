"""Replicas: a tree whose tensors are replicated in other memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.tree_parts import take_apart
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, copy_bytes, extents
from statetree.spans.replicate import replicate_columns
from statetree.torch_internals import quietly

if TYPE_CHECKING:
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
