"""What lies between the leaves: which share storages, and how those that do lie to each other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from statetree.testing.regions import overlapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.testing.regions import View

#: Tensors on one storage that lie further apart than this may come out closer together, or on two storages.
FAR_BYTES = 1 << 20


class Met(NamedTuple):
    """A place where something that has an identity was met on both sides."""

    path: str
    left: int
    right: int


def changed_ties(views: Sequence[View], *, storages: bool, distances: bool) -> Iterator[str]:
    """Compare which views share storages, and how those that do lie to each other.

    Args:
        views: What was met.
        storages: Whether views that do not overlap must share a storage object, if they did.
        distances: Whether views on one storage must be as many bytes apart as they were.
    """
    if not storages:
        views = [view.in_memory() for view in views]
    taken = sorted(
        (view for view in views if view.left.length),
        key=lambda view: (view.left.storage, view.left.start, view.left.length),
    )
    clusters = _clusters(taken, FAR_BYTES if storages else 0)
    for first, *others in clusters.values():
        for view in others:
            apart, now = view.left.start - first.left.start, view.right.start - first.right.start
            if view.right.storage != first.right.storage:
                yield f"storage of {first.path} and {view.path} is one on the left, two on the right"
            elif now != apart and distances:
                yield f"overlap differs: {view.path} lay {apart} bytes from {first.path}, now {now}"
    if storages:
        yield from _changed_storages(views, Counter(storage for storage, _ in clusters))
    if distances:
        overlaps = [set(overlapping(taken, side)) for side in ("left", "right")]
        for one, other in sorted(overlaps[0] ^ overlaps[1]):
            yield f"overlap differs: {one} and {other} overlap on one side only"


def _clusters(taken: Sequence[View], gap_bytes: int) -> dict[tuple[int, int], list[View]]:
    """Group views that lie on one storage with no wider gap between them, by the first of each group."""
    clusters: dict[tuple[int, int], list[View]] = {}
    first: View | None = None
    end = 0
    for view in taken:
        if first is None or view.left.storage != first.left.storage or view.left.start >= end + gap_bytes:
            first, end = view, 0
        clusters.setdefault((first.left.storage, first.left.start), []).append(view)
        end = max(end, view.left.start + view.left.length)
    return clusters


def _changed_storages(views: Sequence[View], parts: Counter[int]) -> Iterator[str]:
    met = [Met(view.path, view.left.storage, view.right.storage) for view in views]
    yield from _torn(met, "storage", "right", "left")
    # Where a storage was cut at its gaps, nobody can say on which part a tensor without elements belongs.
    yield from _torn([place for place in met if parts[place.left] <= 1], "storage", "left", "right")


def changed_identities(met: Sequence[Met], what: str) -> Iterator[str]:
    """Compare which places hold one and the same object."""
    yield from _torn(met, what, "left", "right")
    yield from _torn(met, what, "right", "left")


def _torn(met: Sequence[Met], what: str, one: str, other: str) -> Iterator[str]:
    partner: dict[int, Met] = {}
    for place in met:
        known = partner.setdefault(getattr(place, one), place)
        if getattr(known, other) != getattr(place, other):
            yield f"{what} of {known.path} and {place.path} is one on the {one}, two on the {other}"
