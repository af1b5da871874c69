"""``merge``: trees of one structure made one, each filling the holes of the others."""

from __future__ import annotations

from typing import TypeVar, cast

from statetree.errors import Difference, TreeMismatch, describe_leaf
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.mapping import aligned

T = TypeVar("T")


def merge(first: T, *rest: T) -> T:
    """Make one tree of several that ``partition`` divided: for each place the leaf that is no ``HOLE``.

    Args:
        first: A tree. It gives the structure and the order.
        rest: Trees of the same structure. Mappings are matched by their keys.

    Returns:
        A tree with fresh containers. Where all trees have ``HOLE``, it has it too.

    Aliasing:
        The leaves are those of the trees.

    Raises:
        TreeMismatch: If the structures do not match, or two trees have different leaves in one place.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st
        >>> st.merge({"w": 1, "b": st.HOLE}, {"w": st.HOLE, "b": 2})
        {'w': 1, 'b': 2}
    """
    result, spec = flatten_for("merge", first)
    twice: list[tuple[int, str, str]] = []
    for tree in rest:
        others = aligned("merge", spec, result, tree)
        twice += [
            (index, describe_leaf(b), describe_leaf(a))
            for index, (a, b) in enumerate(zip(result, others, strict=True))
            if a is not HOLE and b is not HOLE and a is not b
        ]
        result = [b if a is HOLE else a for a, b in zip(result, others, strict=True)]
    if twice:
        paths = spec.paths()
        found = [Difference(paths[index], "leaf", f"another ({given})", f"one ({had})") for index, given, had in twice]
        raise TreeMismatch.between("merge", found, "Leave HOLE in all trees but one.")
    return cast("T", unflatten(spec, result))
