"""``select``: the part of a tree whose leaves match."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.tree.flatten import flatten_for
from statetree.tree.pruning import pruned
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from statetree.tree.selection import Where

T = TypeVar("T")


def select(tree: T, where: Where, *, missing_ok: bool = False) -> T:
    """Return the leaves of a tree that match, and the containers above them.

    Mappings keep some of their keys; lists, tuples and deques become shorter, and their items are renumbered.
    Containers in which nothing matches are left out, except the root; empty ones stay where all that is beside them
    does. Use ``partition`` where positions in lists matter, as they do when the result is copied back into the whole.

    Args:
        tree: Any tree.
        where: A glob over whole paths as ``str`` renders them (``*`` within one component, ``**`` any number of
            components; ``!`` at the start for all that the rest does not match; leaves whose paths read the same are
            all meant), a ``Path`` of a leaf or container, several of these, or a predicate ``(path, leaf) -> bool``.
            For a stored tensor a predicate gets a tensor that is read if it looks at the elements, and not if it asks
            for dtype, shape, size or ``requires_grad``.
        missing_ok: Whether a glob or path may match nothing.

    Returns:
        A tree with fresh containers of the same classes. Where the tree is a single leaf that does not match: ``HOLE``.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        TreeMismatch: If a glob or path matches nothing, or if some of the children of a namedtuple, a dataclass or
            another container match that cannot lack the others.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st
        >>> st.select({"model": {"w": 1, "lora_a": 2}, "step": 3}, "**.lora_*")
        {'model': {'lora_a': 2}}
    """
    leaves, spec = flatten_for("select", tree)
    return pruned("select", spec, leaves, selected(where, spec, leaves, verb="select", missing_ok=missing_ok))
