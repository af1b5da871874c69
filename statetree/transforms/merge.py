"""``merge``: trees of one structure made one, each filling the holes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from statetree.errors import Difference, TreeMismatch, describe_leaf
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.mapping import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.spec import TreeSpec

T = TypeVar("T")


def merge(*trees: T) -> T:
    """Merge trees that ``partition`` divided: take each leaf that is no ``HOLE``.

    Args:
        trees: One or more of the same structure. Mappings are matched by their keys; the first one gives the order.

    Returns:
        A tree with fresh containers. Where all trees have ``HOLE``, so does the result.

    Aliasing:
        The leaves are those of the trees.

    Raises:
        TreeMismatch: If the structures do not match, or two trees have different leaves in one place.
        CyclicTree: If a container holds itself.
        TypeError: If there is no tree.

    Example:
        >>> import statetree as st
        >>> st.merge({"w": 1, "b": st.HOLE}, {"w": st.HOLE, "b": 2})
        {'w': 1, 'b': 2}
    """
    if not trees:
        raise TypeError("merge: expected at least one tree, got none.")
    result, spec = flatten_for("merge", trees[0])
    for tree in trees[1:]:
        others = aligned("merge", spec, result, tree)
        result = [
            b if a is HOLE else a if b is HOLE or a is b else _refuse(spec, result, others)
            for a, b in zip(result, others, strict=True)
        ]
    return cast("T", unflatten(spec, result))


def _refuse(spec: TreeSpec, result: Sequence[Any], others: Sequence[Any]) -> NoReturn:
    found = [
        Difference(path, "leaf", f"another ({describe_leaf(b)})", f"one ({describe_leaf(a)})")
        for path, a, b in zip(spec.paths(), result, others, strict=True)
        if a is not HOLE and b is not HOLE and a is not b
    ]
    raise TreeMismatch.between("merge", found, "Leave HOLE in all trees but one.")
