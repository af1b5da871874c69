"""The outline of a tree: its containers, and the entries that a checkpoint has for what lies in them.

DCP keeps a flat dict. Its keys are those of ``to_flat``, except that a list without mappings and tensors in it, and a
tuple, are one entry (the 625 integers of Python's random state, say). An outline is the tree down to these entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.leaves.builtin import is_plain
from statetree.paths import Path, render_key, unique_keys
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.tree.containers import Container
    from statetree.tree.spec import TreeSpec

#: The key of the entry that holds the structure. No other entry gets it.
STRUCTURE_KEY: Final = "<statetree structure>"

#: What may lie in a list or tuple that is pickled whole, and how deep: pickle calls itself for every level.
WHOLE: Final = (list, tuple, dict)
_MAXWHOLE_DEPTH: Final = 50


class Entry(NamedTuple):
    """A leaf, or a list or tuple of plain values.

    Attributes:
        path: Where it lies.
        key: The key of its entry in the checkpoint.
        value: The leaf.
        dcp_path: Where tools put it that nest DCP's flat dicts again: its path as DCP would have it, or its key where
            they could not follow that.
    """

    path: Path
    key: str
    value: Any
    dcp_path: tuple[str | int, ...]

    def dcp_path_of(self, key: str) -> tuple[str | int, ...]:
        """Return the path for one of the keys under which this is saved: its own, or that of one of its parts."""
        return self.dcp_path if key == self.key else (key,)


class Node(NamedTuple):
    """A container, children before parents. ``children`` are indices of entries, or ``~index`` of nodes."""

    kind: Container
    keys: tuple[Any, ...]
    aux: Any
    children: tuple[int, ...]


class Outline(NamedTuple):
    """The containers and entries of a tree. The last node is the root, unless there is none: then the entry is."""

    nodes: Sequence[Node]
    entries: Sequence[Entry]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return a tree with fresh containers and a value for each entry."""
        if not self.nodes:
            return values[0]
        made: list[Any] = []
        for node in self.nodes:
            children = [values[ref] if ref >= 0 else made[~ref] for ref in node.children]
            made.append(node.kind.unflatten(node.aux, node.keys, children))
        return made[-1]


def outline_of(tree: Any, *, verb: str = "read") -> Outline:
    """Return the outline of a tree.

    Args:
        tree: Any tree.
        verb: On whose behalf, for messages.

    Raises:
        CyclicTree, TreeTooDeep: As ``flatten``.
    """
    leaves, spec = flatten_for(verb, tree)
    whole = _whole_nodes(leaves, spec)
    found = _Found(leaves, spec, whole)
    keys = _unique(found.plain_keys, found.paths)
    nested = _nested(keys, found.dcp_paths)
    entries = [Entry(*row) for row in zip(map(Path, found.paths), keys, found.values, nested, strict=True)]
    return Outline(found.nodes(), entries)


def _nested(keys: Sequence[str], paths: Sequence[tuple[str | int, ...]]) -> list[tuple[str | int, ...]]:
    """Return paths by which DCP's tools can nest entries: those that make their keys, and have no leaf above."""
    leaves = set(paths)
    return [
        path
        if key == ".".join(map(str, path)) and not any(path[:count] in leaves for count in range(1, len(path)))
        else (key,)
        for key, path in zip(keys, paths, strict=True)
    ]


def _whole_nodes(leaves: Sequence[Any], spec: TreeSpec) -> dict[int, Callable[[], Any]]:
    """Return the nodes that DCP would pickle whole and that hold plain values alone, with how to make their values."""
    plain: list[bool] = []
    depth: list[int] = []
    terminal: list[bool] = []  # where DCP does not go down further
    whole: dict[int, Callable[[], Any]] = {}
    links = spec.links()

    def value(ref: int) -> Any:
        if ref >= 0:
            return leaves[ref]
        kind, keys, aux, *_ = spec.nodes[~ref]
        return kind.unflatten(aux, keys, [value(child) for child in links[~ref]])

    for index, (kind, *_) in enumerate(spec.nodes):
        cls, children = kind.cls, links[index]
        inner = [~ref for ref in children if ref < 0]
        depth.append(1 + max((depth[child] for child in inner), default=0))
        plain.append(
            cls in WHOLE
            and depth[-1] <= _MAXWHOLE_DEPTH
            and all(plain[child] for child in inner)
            and all(is_plain(leaves[ref]) for ref in children if ref >= 0)
        )
        terminal.append(cls is tuple or (cls is list and all(terminal[child] for child in inner)))
        if plain[-1] and terminal[-1]:
            whole[index] = lambda ref=~index: value(ref)  # type: ignore[misc]
    return whole


class _Found:
    """A walk over a tree, in the order of its leaves."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec, whole: dict[int, Callable[[], Any]]) -> None:
        self.paths: list[tuple[Any, ...]] = []
        self.plain_keys: list[str] = []
        self.values: list[Any] = []
        self.dcp_paths: list[tuple[str | int, ...]] = []
        self._spec = spec
        self._entry_of: dict[int, int] = {}
        self._visited: list[int] = []
        links = spec.links()
        start: tuple[int, tuple[Any, ...], str, tuple[str | int, ...]] = (spec.root(), (), "", ())
        pending = [start]
        while pending:
            ref, path, key, dcp_path = pending.pop()
            if ref >= 0 or ~ref in whole:
                self._entry_of[ref] = len(self.values)
                self.paths.append(path)
                self.plain_keys.append(key)
                self.values.append(leaves[ref] if ref >= 0 else whole[~ref]())
                self.dcp_paths.append(dcp_path or ("",))
                continue
            self._visited.append(~ref)
            kind, keys, *_ = spec.nodes[~ref]
            numbered = kind.family in {"list", "tuple", "deque"}
            prefix = f"{key}." if path else ""
            below = [
                (
                    child,
                    (*path, step),
                    f"{prefix}{render_key(step)}",
                    (*dcp_path, step if numbered and type(step) is int else render_key(step)),
                )
                for step, child in zip(keys, links[~ref], strict=True)
            ]
            pending += reversed(below)

    def nodes(self) -> list[Node]:
        """Return the containers above the entries."""
        links = self._spec.links()
        order = sorted(self._visited)
        number = {index: position for position, index in enumerate(order)}
        result = []
        for index in order:
            kind, keys, aux, *_ = self._spec.nodes[index]
            children = (self._entry_of[ref] if ref in self._entry_of else ~number[~ref] for ref in links[index])
            result.append(Node(kind, keys, aux, tuple(children)))
        return result


def _unique(plain: list[str], paths: Sequence[tuple[Any, ...]]) -> list[str]:
    keys = plain if len(set(plain)) == len(plain) else unique_keys(plain, paths)
    if STRUCTURE_KEY in keys:
        keys = [free_key(key, keys) if key == STRUCTURE_KEY else key for key in keys]
    return keys


def free_key(wanted: str, taken: Sequence[str] | set[str]) -> str:
    """Return a key like the one wanted that is not taken."""
    number = 2
    key = wanted
    while key in taken or key == STRUCTURE_KEY:
        key = f"{wanted}~{number}"
        number += 1
    return key
