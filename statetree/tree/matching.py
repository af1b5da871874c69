"""Matching the structures of two trees: mappings by their keys, sequences by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.errors import Difference
from statetree.paths import Path, key_identity
from statetree.tree.spec import TreeSpec, same_aux

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.traversal import Node

ABSENT = "absent"


def matched(
    left: TreeSpec, left_leaves: Sequence[Any], right: TreeSpec, right_leaves: Sequence[Any]
) -> tuple[list[int] | None, list[Difference]]:
    """Match the leaves of two trees.

    Any two mappings match, whatever their type and order, if their keys do; other containers must be of the same
    family (see ``Container``).

    Returns:
        For every leaf of ``left`` the index of the one of ``right`` that it matches (``None`` if that is the same
        index throughout), and every difference of structure. Leaves that have no match have the index -1.
    """
    sizes = (left.num_leaves, len(left.nodes)), (right.num_leaves, len(right.nodes))
    if sizes[0] == sizes[1] and all(map(_same_place, left.nodes, right.nodes)):
        return None, []
    return _Matching(left, left_leaves, right, right_leaves).run()


def only_missing(differences: Sequence[Difference]) -> bool:
    """Whether two trees differ in nothing but keys that one of them lacks: what both have matches then."""
    return all(found.kind == "missing" for found in differences)


def _same_place(a: Node, b: Node) -> bool:
    """Whether two nodes match with their children in the same order. May say no where they do match."""
    if a[3:] != b[3:] or a[0].family != b[0].family or not _equal_keys(a[1], b[1]):
        return False
    return not a[0].compares_aux or same_aux(a, b)


#: Keys of these types are the same if the types are and ``==`` says so.
_SIMPLE_KEYS: Final = frozenset({str, int, bool, bytes, type(None)})


def _equal_keys(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether keys are the same one by one, if they are of the usual kinds."""
    if a is b:
        return True
    types = list(map(type, a))
    return _SIMPLE_KEYS.issuperset(types) and types == list(map(type, b)) and a == b


class _Matching:
    def __init__(
        self, left: TreeSpec, left_leaves: Sequence[Any], right: TreeSpec, right_leaves: Sequence[Any]
    ) -> None:
        self.left, self.right = left, right
        self.left_leaves, self.right_leaves = left_leaves, right_leaves
        self.order = [-1] * left.num_leaves
        self.differences: list[Difference] = []
        self.pending: list[tuple[tuple[Any, ...], int, int]] = []

    def run(self) -> tuple[list[int] | None, list[Difference]]:
        self.pending.append(((), self.left.root(), self.right.root()))
        while self.pending:
            path, a, b = self.pending.pop()
            if a >= 0 and b >= 0:
                self.order[a] = b
            elif a >= 0 or b >= 0:
                self._differ(path, "structure", self._describe_left(a), self._describe_right(b))
            else:
                self._match_nodes(path, ~a, ~b)
        return self.order, self.differences

    def _match_nodes(self, path: tuple[Any, ...], a: int, b: int) -> None:
        (kind_a, keys_a, *_), (kind_b, keys_b, *_) = self.left.nodes[a], self.right.nodes[b]
        refs_a, refs_b = self.left.links()[a], self.right.links()[b]
        if kind_a.family != kind_b.family:
            self._differ(path, "structure", self._describe_left(~a), self._describe_right(~b))
            return
        if kind_a.compares_aux and not same_aux(self.left.nodes[a], self.right.nodes[b]):
            self._differ(path, "metadata", self._describe_left(~a), self._describe_right(~b))
            return
        count_a, count_b = kind_a.num_items(keys_a), kind_b.num_items(keys_b)
        if not kind_a.keyed and count_a != count_b:
            self._differ(path, "length", self._describe_left(~a), self._describe_right(~b))
            return
        by_key = _by_key(keys_b, refs_b)
        pairs = []
        for identity, (key, ref) in _by_key(keys_a, refs_a).items():
            other = by_key.pop(identity, None)
            if other is None:
                self._differ((*path, key), "missing", self._describe_left(ref), ABSENT)
            else:
                pairs.append(((*path, key), ref, other[1]))
        for key, ref in by_key.values():
            self._differ((*path, key), "missing", ABSENT, self._describe_right(ref))
        self.pending += reversed(pairs)

    def _differ(self, path: tuple[Any, ...], kind: str, left: str, right: str) -> None:
        self.differences.append(Difference(Path(path), kind, left, right))

    def _describe_left(self, ref: int) -> str:
        return _describe(self.left, self.left_leaves, ref)

    def _describe_right(self, ref: int) -> str:
        return _describe(self.right, self.right_leaves, ref)


def _by_key(keys: Sequence[Any], refs: Sequence[int]) -> dict[Any, tuple[Any, int]]:
    result: dict[Any, tuple[Any, int]] = {}
    for key, ref in zip(keys, refs, strict=True):
        identity = key_identity(key)
        while identity in result:  # several NaNs in one dict: they match in their order
            identity = ("again", identity)
        result[identity] = (key, ref)
    return result


def _describe(spec: TreeSpec, leaves: Sequence[Any], ref: int) -> str:
    if ref >= 0:
        return f"a leaf ({type(leaves[ref]).__qualname__})"
    kind, keys, *_ = spec.nodes[~ref]
    return f"{kind.cls.__qualname__} of {len(keys)}"
