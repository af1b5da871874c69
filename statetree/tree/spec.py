"""``TreeSpec``: the structure of a tree without its leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.tree.atoms import same_value
from statetree.tree.containers import Container
from statetree.paths import Path, key_identity, render_key, same_key, unique_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

#: One container, in the order in which containers are finished: how it is rebuilt, its keys, its auxiliary data, which
#: children are containers, and how many leaves come between the previous node and the end of this one.
Node = tuple[Container, tuple[Any, ...], Any, tuple[int, ...], int]


class TreeSpec:
    """The structure of a tree: every container's class, keys and attributes, and where the leaves go.

    Specs are immutable, compare equal only if they rebuild equal trees (so ``{True: …}`` and ``{1: …}`` differ, as do
    two orders of the same keys), and can be pickled where the containers' classes can.

    Attributes:
        nodes: The containers, children before parents. An implementation detail of statetree.
        num_leaves: How many leaves ``unflatten`` takes.
    """

    __slots__ = ("_flat_keys", "_links", "nodes", "num_leaves")

    def __init__(self, nodes: tuple[Node, ...], num_leaves: int) -> None:
        self.nodes = nodes
        self.num_leaves = num_leaves
        self._flat_keys: list[str] | None = None
        self._links: list[Sequence[int]] | None = None

    def __len__(self) -> int:
        return self.num_leaves

    def __reduce__(self) -> tuple[type[TreeSpec], tuple[tuple[Node, ...], int]]:
        return (TreeSpec, (self.nodes, self.num_leaves))

    def __hash__(self) -> int:
        try:
            return hash((self.num_leaves, tuple((node[0], tuple(map(key_identity, node[1]))) for node in self.nodes)))
        except TypeError:  # keys that a registered flatten function made up need not be hashable
            return hash((self.num_leaves, tuple(node[0] for node in self.nodes)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeSpec):
            return NotImplemented
        if self is other:
            return True
        if self.num_leaves != other.num_leaves or len(self.nodes) != len(other.nodes):
            return False
        return all(map(_same_node, self.nodes, other.nodes))

    def __repr__(self) -> str:
        shown = self.flat_keys()[:8]
        more = f", … {self.num_leaves - len(shown)} more" if self.num_leaves > len(shown) else ""
        return f"TreeSpec({self.num_leaves} leaves: {', '.join(shown)}{more})"

    def links(self) -> list[Sequence[int]]:
        """Return, for each node, what its children are: the index of a leaf, or ``~index`` of a node."""
        if self._links is None:
            links: list[Sequence[int]] = []
            stack: list[int] = []
            position = 0
            for index, (_, keys, _, kids, take) in enumerate(self.nodes):
                arity = len(keys)
                if kids:
                    stack += range(position, position + take)
                    refs: Sequence[int] = stack[-arity:]
                    del stack[-arity:]
                else:
                    split = position + take - arity
                    stack += range(position, split)
                    refs = range(split, split + arity)
                position += take
                links.append(refs)
                stack.append(~index)
            self._links = links
        return self._links

    def root(self) -> int:
        """Return what the whole tree is, in the form of ``links``."""
        return ~(len(self.nodes) - 1) if self.nodes else 0

    def paths(self) -> list[Path]:
        """Return the path of every leaf."""
        return list(map(Path, self._key_tuples()))

    def _key_tuples(self) -> list[tuple[Any, ...]]:
        result: list[tuple[Any, ...]] = [()] * self.num_leaves
        links = self.links()
        start: tuple[Any, ...] = ()
        pending = [(self.root(), start)] if self.nodes else []
        while pending:
            ref, prefix = pending.pop()
            for key, child in zip(self.nodes[~ref][1], links[~ref], strict=True):
                if child >= 0:
                    result[child] = (*prefix, key)
                else:
                    pending.append((child, (*prefix, key)))
        return result

    def flat_keys(self) -> list[str]:
        """Return a distinct string for every leaf: its path, disambiguated where two would read the same."""
        if self._flat_keys is None:
            keys = self._plain_keys()
            self._flat_keys = keys if len(set(keys)) == len(keys) else unique_keys(keys, self._key_tuples())
        return self._flat_keys.copy()

    def _plain_keys(self) -> list[str]:
        result = [""] * self.num_leaves
        links = self.links()
        # The root has no prefix, its children have none that ends in a dot: an empty key is not lost.
        pending = [(self.root(), "")] if self.nodes else []
        while pending:
            ref, prefix = pending.pop()
            children = links[~ref]
            rendered = [f"{prefix}{key if type(key) is str else render_key(key)}" for key in self.nodes[~ref][1]]
            if type(children) is range:
                result[children.start : children.stop] = rendered
                continue
            for key, child in zip(rendered, children, strict=True):
                if child >= 0:
                    result[child] = key
                else:
                    pending.append((child, f"{key}."))
        return result


def _same_node(a: Node, b: Node) -> bool:
    if a[0] is not b[0] or a[3:] != b[3:] or len(a[1]) != len(b[1]):
        return False
    if a[1] is not b[1] and not all(map(same_key, a[1], b[1])):
        return False
    return same_aux(a, b)


def same_aux(a: Node, b: Node) -> bool:
    """Whether the auxiliary data of two nodes is equal."""
    return same_value(a[2], b[2])
