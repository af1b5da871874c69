"""Matching the structures of two trees: mappings by their keys, sequences by position."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.errors import Difference
from statetree.key_paths import Path, key_identity
from statetree.tree.atoms import HOLE, same_value
from statetree.tree.selection import selected_in
from statetree.tree.spec import TreeSpec, described, node_difference

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
    order = [-1] * left.num_leaves
    differences: list[Difference] = []
    pending: list[tuple[tuple[Any, ...], int, int]] = [((), left.root(), right.root())]
    while pending:
        path, a, b = pending.pop()
        if a >= 0 and b >= 0:
            order[a] = b
            continue
        kind = node_difference(left.nodes[~a], right.nodes[~b]) if a < 0 and b < 0 else "structure"
        if kind is not None:
            texts = _describe(left, left_leaves, a), _describe(right, right_leaves, b)
            differences.append(Difference(Path(path), kind, *texts))
            continue
        pairs = []
        others = _by_key(right, b)
        for identity, (key, ref) in _by_key(left, a).items():
            _, other = others.pop(identity, (None, None))
            if other is None:
                what = _describe(left, left_leaves, ref)
                differences.append(Difference(Path((*path, key)), "missing", what, ABSENT))
            else:
                pairs.append(((*path, key), ref, other))
        for key, ref in others.values():
            what = _describe(right, right_leaves, ref)
            differences.append(Difference(Path((*path, key)), "missing", ABSENT, what))
        pending += reversed(pairs)
    return order, differences


class CommonLeaves(NamedTuple):
    """What two trees have both, as ``matched_where`` finds it."""

    order: list[int]  # for every leaf of the left tree the index of its partner in the right one, or -1
    differences: list[Difference]
    missing: list[Difference]  # leaves that one side lacks, where that is allowed


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
    """Match those leaves of two trees that are meant; what differs elsewhere does not count.

    A predicate is asked about the leaf of the right tree, and about the other one where there is none; with ``either``,
    about both. Without ``strict`` leaves may be missing, and a ``HOLE`` is none. ``masks`` are the leaves of both trees
    that ``where`` means, if that is known; if not, ``TreeMismatch`` is raised where it means none.
    """
    found, differences = matched(*left, *right)
    order = list(range(left[0].num_leaves)) if found is None else found
    if where is None:
        masks = [[True] * spec.num_leaves for spec, _ in (left, right)]
    elif masks is None:
        masks = selected_in(where, [left, right], verb=verb)
    unfit: list[Difference] = []
    missing: list[Difference] = []
    for difference, lacking in zip(differences, _lacking(differences, order, (left, right), masks), strict=True):
        if where is not None and not lacking:
            continue
        if difference.kind == "missing" and not strict:
            missing += lacking or [difference]
        else:
            unfit.append(difference)
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


def _lacking(
    differences: Sequence[Difference],
    order: Sequence[int],
    sides: tuple[tuple[TreeSpec, Sequence[Any]], tuple[TreeSpec, Sequence[Any]]],
    masks: Sequence[Sequence[bool]],
) -> list[list[Difference]]:
    """Return, for each difference, the leaves that are meant and have no partner because of it."""
    found: list[list[Difference]] = [[] for _ in differences]
    if not differences:
        return found
    places = {_identity(difference.path): index for index, difference in enumerate(differences)}
    partners = {index for index, partner in enumerate(order) if partner >= 0}, set(order)
    for side, (spec, leaves) in enumerate(sides):
        for index, path in enumerate(spec.paths()):
            if index in partners[side] or not masks[side][index]:
                continue
            identity = _identity(path)
            at = next(places[above] for length in range(len(path) + 1) if (above := identity[:length]) in places)
            what = _describe(spec, leaves, index)
            found[at].append(Difference(path, "missing", *((what, ABSENT) if side == 0 else (ABSENT, what))))
    return found


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
    return not compared or all(same_value(a[2], b[2]) for a, b in zip(*both, strict=True) if a[0] in compared)


def _equal(fact: Callable[[Any], Any], left: Iterable[Any], right: Iterable[Any]) -> bool:
    return list(map(fact, left)) == list(map(fact, right))


def _same_keys(left: Sequence[tuple[Any, ...]], right: Sequence[tuple[Any, ...]]) -> bool:
    """Whether keys are the same one by one, if they are the same objects or of the usual kinds."""
    if all(map(is_, chain.from_iterable(left), chain.from_iterable(right))):  # as in trees made of one structure
        return True
    types = list(map(type, chain.from_iterable(left)))
    return _SIMPLE_KEYS.issuperset(types) and types == list(map(type, chain.from_iterable(right))) and left == right


def _by_key(spec: TreeSpec, ref: int) -> dict[Any, tuple[Any, int]]:
    """Return the children of a container by what their keys are matched by: each with its key."""
    result: dict[Any, tuple[Any, int]] = {}
    for key, child in zip(spec.nodes[~ref][1], spec.links()[~ref], strict=True):
        identity = key_identity(key)
        while identity in result:  # several NaNs in one dict: they match in their order
            identity = ("again", identity)
        result[identity] = (key, child)
    return result


def _describe(spec: TreeSpec, leaves: Sequence[Any], ref: int) -> str:
    if ref < 0:
        return described(spec, ref)
    cls = type(leaves[ref])
    return getattr(cls, "_statetree_text", f"a leaf ({cls.__qualname__})")
