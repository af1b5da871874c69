"""``update``: a tree with other leaves at some paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from statetree.errors import note_leaf
from statetree.leaves.ties import view_key
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.selection import selected
from statetree.tree.stand_ins import read_leaf

if TYPE_CHECKING:
    from statetree.tree.selection import Where

T = TypeVar("T")


def update(tree: T, where: Where, value_or_fn: Any, *, missing_ok: bool = False) -> T:
    """Return a tree in which the leaves that match are replaced.

    Args:
        tree: Any tree. It does not change.
        where: Which leaves, as for ``select``. A ``HOLE`` stays one.
        value_or_fn: The new leaf, or a function from the old leaf to the new one. It is called once for tensors
            that are the same view on one memory (as the tied entries of a ``state_dict()`` are): its result takes the
            place of all of them; where it returns what it was given, perhaps written to, each stays. A stored tensor
            is read before.
        missing_ok: Whether a glob or path may match nothing.

    Returns:
        A tree with fresh containers.

    Aliasing:
        The other leaves are the tree's own, and the new ones are put in as they are.

    Raises:
        TreeMismatch: If a glob or path matches nothing.
        CyclicTree: If a container holds itself.
        Exception: What the function raises, with a note of the leaf's path.

    Example:
        >>> import statetree as st
        >>> st.update({"lr": 0.1, "groups": [{"lr": 0.2}]}, ["lr", "groups.*.lr"], lambda lr: lr / 2)
        {'lr': 0.05, 'groups': [{'lr': 0.1}]}
    """
    leaves, spec = flatten_for("update", tree)
    mask = selected(where, spec, leaves, verb="update", missing_ok=missing_ok)
    result = list(leaves)
    made: dict[Any, tuple[Any, Any]] = {}  # what the function was given first, and what it returned
    for index, leaf in enumerate(leaves):
        if not mask[index] or leaf is HOLE:
            continue
        if not callable(value_or_fn):
            result[index] = value_or_fn
            continue
        key = view_key(leaf) if isinstance(leaf, torch.Tensor) else None
        if key is None or key not in made:
            try:
                given = read_leaf(leaf)
                made[key] = leaf, value_or_fn(given)
            except Exception as error:
                note_leaf(error, spec.paths()[index], leaf)
                raise
        given, returned = made[key]
        result[index] = leaf if returned is given else returned
    return cast("T", unflatten(spec, result))
