"""The outline of a checkpoint's tree: its containers and its entries, as links between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.dcp.flat_state import StateEntry, flat_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.containers import Container
    from statetree.tree.spec import TreeSpec

Entry = StateEntry


class Node(NamedTuple):
    """A container, children before parents. ``children`` are indices of entries, or ``~index`` of nodes."""

    kind: Container
    keys: tuple[Any, ...]
    aux: Any
    children: Sequence[int]


class Outline(NamedTuple):
    """The containers and entries of a tree. The last node is the root, unless there is none: then the entry is."""

    nodes: Sequence[Node]
    entries: Sequence[Entry]
    spec: TreeSpec | None = None


def outline_of(tree: Any) -> Outline:
    """Return the outline of a tree."""
    spec, entries = flat_state(tree, verb="read")
    nodes = [Node(*node[:3], links) for node, links in zip(spec.nodes, spec.links(), strict=True)]
    return Outline(nodes, entries, spec)
