"""What is saved of a tree: for stored tensors, those that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.errors import UnsupportedLeaf
from statetree.files.stored import StoredTensor
from statetree.leaves.builtin import is_distributed
from statetree.tree.flatten import flatten_for, unflatten

if TYPE_CHECKING:
    from statetree.key_paths import Path


def whole_tensors(tree: Any, *, keeps_strides: bool, on_ranks: bool = False) -> Any:
    """Return a tree with the tensors that ``StoredTensor`` stands for, each object once, to be saved.

    Args:
        tree: Any tree.
        keeps_strides: Whether elements that are repeated are written once.
        on_ranks: Whether ranks may hold parts of a leaf.

    Raises:
        UnsupportedLeaf: If ranks hold parts of a leaf, which no file has the whole of, or a few bytes of a file stand
            for many.
    """
    made: dict[int, Any] = {}

    def whole(path: Path, leaf: Any) -> Any:
        if is_distributed(leaf) and not on_ranks:
            msg = f"save: the leaf at {path or '<root>'} is distributed: expected a whole tensor. Use gather first."
            raise UnsupportedLeaf(msg, path)
        if isinstance(leaf, StoredTensor) and leaf.is_repetitive and not keeps_strides:
            what = "is a view that repeats its elements: expected memory of its own. Leave it out."
            msg = f"save: the leaf at {path or '<root>'} {what}"
            raise UnsupportedLeaf(msg, path)
        if not isinstance(leaf, StoredTensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.tensor()
        return made[id(leaf)]

    leaves, spec = flatten_for("save", tree)  # and not mapped: a function would get what is read
    return unflatten(spec, list(map(whole, spec.paths(), leaves)))
