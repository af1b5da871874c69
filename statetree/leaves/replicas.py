"""Replicas: a tree taken apart, its parts replicated in other memory, and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import unpack
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, copy_bytes, extents, replicate
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
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
