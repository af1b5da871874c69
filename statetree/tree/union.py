"""The union of structures: one that has every key of several."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.errors import Difference
from statetree.key_paths import Attr, Path, key_identity
from statetree.tree.flatten import flatten
from statetree.tree.spec import TreeSpec, described, node_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.tree.traversal import Node


class United(NamedTuple):
    """The union of structures."""

    #: The union. Mappings have the keys of all, in the order of the paths if these differ.
    spec: TreeSpec
    leaves: list[Mapping[int, int]]  # for each leaf, by the number of each structure that has it, its index there
    #: Where containers differ in more than keys. Then the others mean nothing.
    differences: list[Difference]


def united(specs: Sequence[TreeSpec]) -> United:
    """Return the union of structures."""
    differences: list[Difference] = []
    # What is in one place: its path, and what it is in each structure. Children come after their parents, side by side.
    places: list[tuple[tuple[Any, ...], dict[int, int]]] = [((), {at: spec.root() for at, spec in enumerate(specs)})]
    values: list[Any] = []
    for path, refs in places:
        if all(ref >= 0 for ref in refs.values()):
            values.append(MappingProxyType(refs))  # which is a leaf
            continue
        difference = _difference(specs, Path(path), refs)
        if difference is not None:
            differences.append(difference)
            values.append(None)
            continue
        number, ref = next(iter(refs.items()))
        kind, _, aux, *_ = specs[number].nodes[~ref]
        children = _children(specs, refs)
        values.append((kind, tuple([key for key, _ in children]), aux, len(places)))
        places += [((*path, key), found) for key, found in children]
    if differences:
        return United(specs[0], [], differences)
    for index in reversed(range(len(values))):
        if type(values[index]) is tuple:
            kind, keys, aux, first = values[index]
            values[index] = kind.unflatten(aux, keys, values[first : first + len(keys)])
    leaves, spec = flatten(values[0])
    return United(spec, leaves, [])


def _children(specs: Sequence[TreeSpec], refs: Mapping[int, int]) -> list[tuple[Any, dict[int, int]]]:
    """Return the children of containers in one place: their keys, and what each is in the structures that have it."""
    found: dict[Any, tuple[Any, dict[int, int]]] = {}
    for number, ref in refs.items():
        for key, child in zip(specs[number].nodes[~ref][1], specs[number].links()[~ref], strict=True):
            found.setdefault(key_identity(key), (key, {}))[1][number] = child
    children = list(found.values())
    if any(len(holders) < len(refs) for _, holders in children):
        # Attributes stay behind the items, in the order that the auxiliary data has them in.
        children.sort(key=lambda child: (1,) if type(child[0]) is Attr else (0, Path((child[0],)).sort_key()))
    return children


def _difference(specs: Sequence[TreeSpec], path: Path, refs: Mapping[int, int]) -> Difference | None:
    """Return how the things in one place differ in more than the items of mappings."""
    (first, ref), *rest = refs.items()
    for number, other in rest:
        if ref >= 0 and other >= 0:
            continue
        kind: str | None = "structure"
        if ref < 0 and other < 0:
            a, b = specs[first].nodes[~ref], specs[number].nodes[~other]
            kind = node_difference(a, b) or ("structure" if _fixed_keys(a) != _fixed_keys(b) else None)
        if kind is not None:
            return Difference(path, kind, described(specs[first], ref), described(specs[number], other))
    return None


def _fixed_keys(node: Node) -> list[Any]:
    """Return what tells apart the keys that containers must have alike: of mappings only those of attributes."""
    kind, keys, *_ = node
    return [key_identity(key) for key in keys if type(key) is Attr or kind.family != "mapping"]
