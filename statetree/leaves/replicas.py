"""Replicas: a tree taken apart into its plain tensors, and put together again with others in other memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statetree.declare import phase
from statetree.errors import StateTreeError, place_in_tree
from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.ties import tied_leaves
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents
from statetree.spans.replicate import copy_bytes, replicate_columns
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.key_paths import Path
    from statetree.spans.memory import Memory
    from statetree.tree.spec import TreeSpec


@dataclass(slots=True, eq=False)
class TreeParts:
    """A tree taken apart, from ``take_apart``."""

    verb: str  # on whose behalf, for messages
    spec: TreeSpec  # the tree's structure
    unpacked: Unpacked  # its leaves

    @property
    @quietly
    def tensors(self) -> list[torch.Tensor]:
        """The plain tensors inside the leaves, on their memory: strided, of no subclass, without gradients.

        Each is given once, however many leaves consist of it; tensors that are tied share a storage.
        """
        return [
            tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
            for tensor in self.unpacked.parts
        ]

    def path_of(self, index: int) -> Path:
        """Return the path of the leaf that a tensor was found in."""
        return self.spec.paths()[self.unpacked.owners[index]]

    def check_memory(self) -> None:
        """Raise ``UnsupportedLeaf`` if the storage of a tensor was freed."""
        check_memory(self.verb, self.unpacked.columns, self.path_of)

    @quietly
    def put_together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree again, in fresh containers, with other tensors in the places of ``tensors``.

        Classes, attributes and ``requires_grad`` of the leaves are as they were.

        Args:
            tensors: One for each of ``tensors``. They may differ in everything that the leaves allow.

        Aliasing:
            The tensors are put in as they are.

        Raises:
            ValueError: If their number is another.
            UnsupportedLeaf: If a leaf cannot be put together of them.
        """
        expected = len(self.unpacked.parts)
        if len(tensors) != expected:
            msg = f"{self.verb}: cannot put the tree together: expected {expected} tensors, got {len(tensors)}."
            raise ValueError(msg)
        return unflatten(self.spec, self.unpacked.pack(tensors))


@quietly
def take_apart(verb: str, tree: Any, *, memory: bool = True) -> TreeParts:
    """Take a tree apart into plain tensors: those inside distributed, sparse and opaque leaves included.

    Args:
        verb: The name of the transform, for messages.
        tree: Any tree.
        memory: Whether the memory of the tensors will be read or written.

    Raises:
        UnsupportedLeaf: If a leaf cannot be taken apart.
        CyclicTree: If a container holds itself.

    Example:
        A transform that makes every tensor contiguous:

        >>> import statetree as st, torch
        >>> from statetree.leaves import take_apart
        >>> def contiguous(tree):
        ...     parts = take_apart("contiguous", tree)
        ...     return parts.put_together([tensor.contiguous() for tensor in parts.tensors])
        >>> state = {"w": torch.nn.Parameter(torch.zeros(2, 3).T), "step": 1}
        >>> contiguous(state)["w"].stride()
        (2, 1)
    """
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb)
    return TreeParts(verb, spec, unpack(verb, leaves, spec.paths, memory=memory, together=True))


@quietly
def replicated(verb: str, tree: Any, memory: Memory, *, copy: bool, attributes: bool = False) -> Any:
    """Return a tree whose tensors are replicas in other memory, with or without the same elements.

    Tensors in attributes of others have them with ``attributes``, too.
    """
    with phase(f"{verb}.describe"):
        parts = take_apart(verb, tree, memory=copy)
        columns = parts.unpacked.columns
        if copy:
            parts.check_memory()
    with phase(f"{verb}.move" if copy else f"{verb}.allocate"):
        fresh = replicate_columns(columns, extents(columns), memory, copy=copy)
    # Indices, offsets and what else leaves are put together by: undefined ones would not make a leaf.
    needed = [] if copy else parts.unpacked.metadata_parts(attributes=attributes)
    needed = [index for index in needed if not columns.tensors[index].is_meta]
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
    for index, leaf in with_leaves(spec, leaves, moving, partial(replicated, verb, memory=memory, copy=True)).items():
        leaves[index] = leaf
    return unflatten(spec, leaves)


def with_leaves(
    spec: TreeSpec, leaves: Sequence[Any], indices: Sequence[int], transform: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[int, Any]:
    """Return what a transform makes of some leaves of a tree, by their indices: it gets them in a flat dict."""
    keys, paths = spec.flat_keys(), spec.paths()
    try:
        found = transform({keys[index]: leaves[index] for index in indices})
    except StateTreeError as error:
        place_in_tree(error, {keys[index]: paths[index] for index in indices})
        raise
    return dict(zip(indices, found.values(), strict=True))


def _lies_in(part: torch.Tensor, memory: Memory) -> bool:
    if part.is_meta:
        return True
    if (memory.pin_memory and not part.is_pinned()) or (memory.share_memory and not part.is_shared()):
        return False
    wanted = memory.device
    return part.device.type == wanted.type and (wanted.type == "cpu" or wanted.index in (None, part.device.index))
