"""Matching the structures of two trees: mappings by their keys, sequences by position."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.errors import Difference
from statetree.key_paths import Path, key_identity
from statetree.tree.atoms import HOLE
from statetree.tree.selection import selected_in
from statetree.tree.spec import TreeSpec, container_text, same_aux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from statetree.tree.selection import Where

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
    if _same_places(left, right):
        return None, []
    return _Matching(left, left_leaves, right, right_leaves).run()


class CommonLeaves(NamedTuple):
    """What two trees have both, as ``matched_where`` finds it.

    Attributes:
        order: For every leaf of the left tree the index of its partner in the right one, or -1.
        differences: Where the trees do not fit.
        missing: Leaves that one side lacks, where that is allowed.
    """

    order: list[int]
    differences: list[Difference]
    missing: list[Difference]


def matched_where(
    verb: str,
    left: tuple[TreeSpec, Sequence[Any]],
    right: tuple[TreeSpec, Sequence[Any]],
    *,
    where: Where | None = None,
    strict: bool = True,
    either: bool = False,
    masks: list[list[bool]] | None = None,
) -> CommonLeaves:
    """Match those leaves of two trees that are meant, and if so allowed those alone that both have.

    Args:
        verb: On whose behalf, for messages.
        left: The structure and the leaves of one tree.
        right: Those of the other.
        where: Which leaves are meant; what differs elsewhere does not count. A predicate is asked about the leaf of the
            right tree, and about the other one where there is none.
        strict: Whether both trees must have the leaves. If not, a ``HOLE`` is none.
        either: Whether a pair is meant as soon as the predicate says so of one of its leaves.
        masks: Which leaves of both trees ``where`` means, if that is known.

    Raises:
        TreeMismatch: If a glob or path matches nothing in either tree.
    """
    found, differences = matched(*left, *right)
    order = list(range(left[0].num_leaves)) if found is None else found
    if where is None:
        masks = [[True] * spec.num_leaves for spec, _ in (left, right)]
    elif masks is None:
        masks = selected_in(where, [left, right], verb=verb)
    unfit, missing = _sorted_out(differences, order, left, right, masks, strict=strict, everywhere=where is None)
    for index, partner in enumerate(order):
        if partner < 0:
            continue
        a, b = left[1][index], right[1][partner]
        if not (masks[1][partner] or (either and masks[0][index])):
            order[index] = -1
        elif not strict and (a is HOLE) is not (b is HOLE):
            sides = (
                ABSENT if a is HOLE else _describe(*left, index),
                ABSENT if b is HOLE else _describe(*right, partner),
            )
            missing.append(Difference(left[0].paths()[index], "missing", *sides))
            order[index] = -1
    return CommonLeaves(order, unfit, missing)


def _sorted_out(
    differences: Sequence[Difference],
    order: Sequence[int],
    left: tuple[TreeSpec, Sequence[Any]],
    right: tuple[TreeSpec, Sequence[Any]],
    masks: Sequence[Sequence[bool]],
    *,
    strict: bool,
    everywhere: bool,
) -> tuple[list[Difference], list[Difference]]:
    """Return the differences that concern leaves which are meant, and the leaves that are missing and may be."""
    if not differences:
        return [], []
    place = {_identity(difference.path): index for index, difference in enumerate(differences)}
    concerned: list[list[Difference]] = [[] for _ in differences]
    inhabited: set[int] = set()
    partners = set(order)
    for side, (spec, leaves) in enumerate((left, right)):
        for index, path in enumerate(spec.paths()):
            if (order[index] >= 0) if side == 0 else (index in partners):
                continue
            identity = _identity(path)
            lengths = range(len(path) + 1)
            at = next(place[identity[:length]] for length in lengths if identity[:length] in place)
            inhabited.add(at)
            if masks[side][index]:
                what = _describe(spec, leaves, index)
                concerned[at].append(Difference(path, "missing", *((what, ABSENT) if side == 0 else (ABSENT, what))))
    unfit: list[Difference] = []
    missing: list[Difference] = []
    for index, difference in enumerate(differences):
        is_meant = bool(concerned[index]) or (everywhere and index not in inhabited)
        if difference.kind == "missing" and not strict:
            missing += concerned[index] or ([difference] if is_meant else [])
        elif is_meant:
            unfit.append(difference)
    return unfit, missing


def _identity(path: Sequence[Any]) -> tuple[Any, ...]:
    return (*map(key_identity, path),)


#: Keys of these types are the same if the types are and ``==`` says so.
_SIMPLE_KEYS: Final = frozenset({str, int, bool, bytes, type(None)})
_KIND, _KEYS, _FAMILY = itemgetter(0), itemgetter(1), attrgetter("family")
#: Which of a node's children are containers, and how many leaves it takes.
_PLACE: Final = itemgetter(3, 4)


def _same_places(left: TreeSpec, right: TreeSpec) -> bool:
    """Whether all nodes match, with their children in the same order. May say no where they do match."""
    # Column by column: to compare node by node takes twice as long.
    both = left.nodes, right.nodes
    if left.num_leaves != right.num_leaves or not _equal(_PLACE, *both):
        return False
    kinds, keys = ([list(map(column, nodes)) for nodes in both] for column in (_KIND, _KEYS))
    if not all(map(is_, *kinds)) and not _equal(_FAMILY, *kinds):
        return False
    if not _equal(len, *keys) or not _same_keys(*keys):
        return False
    compared = {kind for kind in set(kinds[0]) if kind.compares_aux}
    return not compared or all(same_aux(*pair) for pair in zip(*both, strict=True) if pair[0][0] in compared)


def _equal(fact: Callable[[Any], Any], left: Iterable[Any], right: Iterable[Any]) -> bool:
    return list(map(fact, left)) == list(map(fact, right))


def _same_keys(left: Sequence[tuple[Any, ...]], right: Sequence[tuple[Any, ...]]) -> bool:
    """Whether keys are the same one by one, if they are the same objects or of the usual kinds."""
    if all(map(is_, chain.from_iterable(left), chain.from_iterable(right))):  # as in trees made of one structure
        return True
    types = list(map(type, chain.from_iterable(left)))
    return _SIMPLE_KEYS.issuperset(types) and types == list(map(type, chain.from_iterable(right))) and left == right


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
        cls = type(leaves[ref])
        return getattr(cls, "_statetree_text", f"a leaf ({cls.__qualname__})")
    return container_text(spec, ref)
