"""``partition``: a tree divided into the leaves that match and the others."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from statetree.tree.selection import Where

T = TypeVar("T")


def partition(tree: T, where: Where, *, missing_ok: bool = False) -> tuple[T, T]:
    """Divide a tree into two of its structure: one with the leaves that match, one with the others.

    Each has ``HOLE`` where the other has a leaf; ``merge`` combines them again. Leaves of the two parts that are tied
    still share memory.

    Args:
        tree: Any tree.
        where: Which leaves, as for ``select``.
        missing_ok: Whether a glob or path may match nothing.

    Returns:
        Two trees with fresh containers.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        TreeMismatch: If a glob or path matches nothing.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st
        >>> adapters, base = st.partition({"w": 1, "lora_a": 2}, "lora_*")
        >>> adapters, base
        ({'w': HOLE, 'lora_a': 2}, {'w': 1, 'lora_a': HOLE})
        >>> st.merge(adapters, base)
        {'w': 1, 'lora_a': 2}
    """
    leaves, spec = flatten_for("partition", tree)
    mask = selected(where, spec, leaves, verb="partition", missing_ok=missing_ok)
    left: list[Any] = [HOLE] * len(leaves)
    for index in compress(range(len(leaves)), mask):
        left[index], leaves[index] = leaves[index], HOLE
    return unflatten(spec, left), unflatten(spec, leaves)
