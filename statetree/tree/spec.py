"""``TreeSpec``: the structure of a tree without its leaves."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.errors import TreeMismatch, TreeTooDeep, check_iterable
from statetree.key_paths import Path, key_identity, render_key, same_key, unique_keys
from statetree.tree.atoms import same_value
from statetree.tree.registry import introduce, optree_structure
from statetree.tree.traversal import Node, freeze, rebuild, traverse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optree import PyTreeSpec

#: How many lines ``str`` of a structure has at most.
_MAX_LINES: Final = 200


class _Placeholder:
    """Stands for a leaf."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Visit(NamedTuple):
    """One place of a tree, as ``TreeSpec.walk`` comes by it.

    Attributes:
        path: Where it is.
        cls: The class of the container there; ``None`` for a leaf.
        keys: The keys of the container's children.
        leaf: The index of the leaf; -1 for a container.
    """

    path: Path
    cls: type | None
    keys: tuple[Any, ...]
    leaf: int


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

    def __reduce__(self) -> Any:
        return TreeSpec, (self.nodes, self.num_leaves)

    def __hash__(self) -> int:
        return hash((self.num_leaves, tuple([(node[0], (*map(key_identity, node[1]),)) for node in self.nodes])))

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

    def __str__(self) -> str:
        lines = []
        for path, cls, keys, _ in islice(self.walk(), _MAX_LINES):
            name = f"{'  ' * len(path)}{_shown(path[-1])}: " if path else ""
            lines.append(f"{name}*" if cls is None else f"{name}{cls.__qualname__} of {len(keys)}")
        if self.num_leaves + len(self.nodes) > _MAX_LINES:
            lines.append("…")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from statetree.tree.html_fragments import cell, tree_html  # few structures are shown in a notebook

        return cell(tree_html(self, lambda _, path, name: f'<p title="{path}"><b>{name}</b></p>'))

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Put a tree together: as the function ``unflatten``.

        Raises:
            TreeMismatch: If the number of leaves is not that of the structure.
        """
        check_iterable("unflatten", "leaves", leaves)
        values = list(leaves)
        if len(values) != self.num_leaves:
            raise TreeMismatch(
                f"unflatten: the number of leaves does not fit the structure: expected {self.num_leaves}, "
                f"got {len(values)}. Pass one leaf for each of spec.paths()."
            )
        return rebuild(self.nodes, values, {})

    def children(self) -> list[TreeSpec]:
        """Return the structures of the root's children, in order. A leaf has none."""
        if not self.nodes:
            return []
        found, first = [], 0  # nodes of one child come side by side, after those of the children before it
        for ref in self.links()[-1]:
            if ref >= 0:
                found.append(TreeSpec((), 1))
                continue
            top, *rest = self.nodes[first : ~ref + 1]
            count = len(top[1]) + sum(len(node[1]) - 1 for node in rest)
            # What the first node takes may include leaves of the subtree's parents, which come before it.
            own = count - sum(node[4] for node in rest)
            found.append(TreeSpec(((*top[:4], own), *rest), count))
            first = ~ref + 1
        return found

    def walk(self) -> Iterator[Visit]:
        """Yield every container and every leaf, parents before their children, leaves in order.

        Example:
            >>> import statetree as st
            >>> spec = st.flatten({"a": [1, 2], "b": 3})[1]
            >>> [(str(visit.path), visit.cls) for visit in spec.walk() if visit.cls]
            [('', <class 'dict'>), ('a', <class 'list'>)]
        """
        links = self.links()
        pending: list[tuple[int, tuple[Any, ...]]] = [(self.root(), ())]
        while pending:
            ref, path = pending.pop()
            if ref >= 0:
                yield Visit(Path(path), None, (), ref)
                continue
            kind, keys = self.nodes[~ref][:2]
            yield Visit(Path(path), kind.cls, keys, -1)
            pending += [(child, (*path, key)) for key, child in zip(reversed(keys), reversed(links[~ref]), strict=True)]

    def to_optree(self) -> PyTreeSpec:
        """Return the same structure as an ``optree.PyTreeSpec``, for use with optree's functions.

        Containers that optree does not know by itself are registered with it under the namespace ``"statetree"``.
        It then sees the leaves of a tree in the order of ``flatten`` if it is told to keep the order of mappings::

            with optree.dict_insertion_ordered(True, namespace="statetree"):
                leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace="statetree")

        What optree drops is not part of the result: attributes of an ``OrderedDict``, such as ``_metadata``, and the
        order that its ``move_to_end`` made.

        Raises:
            ValueError: If the structure has leaves that optree does not see: in the attributes of an ``OrderedDict``,
                or in the default factory of a ``defaultdict``.
            TreeTooDeep: If optree does not follow it down to its leaves.
        """
        for container in {node[0] for node in self.nodes}:
            introduce(container, freeze)
        # Not numbers: an attribute with a tensor inside is a child, and one with a number is not.
        try:
            spec = optree_structure(self.unflatten(map(_Placeholder, range(self.num_leaves))))
        except RecursionError as error:
            msg = "to_optree: containers are nested deeper than optree follows them. Use statetree's own functions."
            raise TreeTooDeep(msg) from error
        if spec.num_leaves != self.num_leaves:
            raise ValueError(
                f"to_optree: optree sees other leaves: expected {self.num_leaves}, got {spec.num_leaves}. Take tensors "
                "out of the attributes of builtin containers, and what is no function out of their default factories."
            )
        return spec

    @classmethod
    def from_optree(cls, spec: PyTreeSpec) -> TreeSpec:
        """Return the structure that an ``optree.PyTreeSpec`` describes.

        Args:
            spec: Made with ``none_is_leaf=True``, and with mappings in the order of insertion (see ``to_optree``).

        Raises:
            ValueError: If it has other leaves, or the same in another order: ``None`` is a node of it, or mappings are
                in the order of their sorted keys.
        """
        if not hasattr(spec, "unflatten"):
            raise TypeError(f"from_optree: expected an optree.PyTreeSpec, got {type(spec).__qualname__}.")
        tree = spec.unflatten(map(_Placeholder, range(spec.num_leaves)))
        leaves, nodes = traverse(tree, verb="from_optree")
        for index, leaf in enumerate(leaves):
            if type(leaf) is not _Placeholder:
                what = f"{type(leaf).__qualname__} is a node, and to statetree a leaf"
                msg = f"from_optree: {what}: expected the same leaves. Make the structure with none_is_leaf=True."
                raise ValueError(msg)
            if leaf.index != index:
                raise ValueError(
                    "from_optree: the leaves come in another order: expected mappings in the order of insertion. Make "
                    'the structure within optree.dict_insertion_ordered(True, namespace="statetree").'
                )
        return cls(tuple(nodes), len(leaves))

    def links(self) -> list[Sequence[int]]:
        """Return, for each node, what its children are: the index of a leaf, or ``~index`` of a node."""
        # Nodes are in the order in which containers are finished, so that rebuilding takes one pass with a stack, as
        # in a calculator that takes operands first. The same pass with indices in place of values gives the links.
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
        return list(map(Path, result))

    def flat_keys(self) -> list[str]:
        """Return a distinct string for every leaf: its path, disambiguated where two would read the same."""
        if self._flat_keys is None:
            keys = self.rendered_paths()
            self._flat_keys = keys if len(set(keys)) == len(keys) else unique_keys(keys, self.paths())
        return self._flat_keys.copy()

    def rendered_paths(self) -> list[str]:
        """Return the path of every leaf as plain text, as globs are matched against it. Two may read the same."""
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


def _shown(key: Any) -> str:
    """Return a key in one line, quoted where it would read like a number."""
    text = render_key(key)
    plain = text.isprintable() and not (isinstance(key, str) and (not key or key[0].isdigit()))
    return text if plain else repr(text)


def _same_node(a: Node, b: Node) -> bool:
    if a[0] is not b[0] or a[3:] != b[3:] or len(a[1]) != len(b[1]):
        return False
    if a[1] is not b[1] and not all(map(same_key, a[1], b[1])):
        return False
    return same_value(a[2], b[2])


def described(spec: TreeSpec, ref: int) -> str:
    """Say what there is in one place of a structure, for messages. See ``TreeSpec.links``."""
    if ref >= 0:
        return "a leaf"
    kind, keys, aux, *_ = spec.nodes[~ref]
    text = getattr(kind.cls, "_statetree_text", None)
    return f"{kind.cls.__qualname__} of {len(keys)}" if text is None else text(aux)


def node_difference(a: Node, b: Node) -> str | None:
    """Return the kind of difference between two containers that are matched, their keys apart, if there is one."""
    kind, other = a[0], b[0]
    if kind.family != other.family:
        return "structure"
    if kind.compares_aux and not same_value(a[2], b[2]):
        return "metadata"
    return None if kind.keyed or kind.num_items(a[1]) == other.num_items(b[1]) else "length"
