"""What lies between the leaves: which share storages, and how those that do lie to each other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.judge.regions import View

#: Tensors on one storage that lie further apart than this may come out closer together, or on two storages.
FAR_BYTES = 1 << 20


class Met(NamedTuple):
    """A place where something that has an identity was met on both sides."""

    path: str
    left: int
    right: int


def changed_ties(views: Sequence[View], *, storages: bool, distances: bool) -> Iterator[str]:
    """Compare which views share storages, and how those that do lie to each other.

    Either side may be a copy of the other: what a copy may do is accepted both ways.

    Args:
        views: What was met.
        storages: Whether views that do not overlap must share a storage object, if they did.
        distances: Whether views on one storage must be as many bytes apart as they were, whose strides are the same.
    """
    if not storages:
        views = [view.in_memory() for view in views]
    # With other strides, it takes more than the bytes from the first to the last to tell whether views overlap that
    # leave some of these out.
    solid = [view for view in views if distances or (view.left.solid and view.right.solid)]
    runs = {side: _clusters(solid, side, 0) for side in ("left", "right")}
    run_of = {side: {view: at for at, run in enumerate(runs[side]) for view in run} for side in runs}
    found: dict[str, None] = {}
    for one, other in (("left", "right"), ("right", "left")):
        for left, right in _overlapping(runs[one], one):
            if run_of[other][left] != run_of[other][right] and _apart(left, right, other) is not None:
                both = f"{left.path} and {right.path} overlap on the {one}, not on the {other}"
                found[f"overlap differs: {both}"] = None
        clusters = _clusters(views, one, FAR_BYTES if storages else 0)
        for first, *others in clusters:
            for view in others:
                near, far = _apart(first, view, one), _apart(first, view, other)
                if far is None:
                    found[f"storage of {first.path} and {view.path} is one on the {one}, two on the {other}"] = None
                elif (
                    distances and near != far and len({run_of[side][first] == run_of[side][view] for side in runs}) == 1
                ):
                    before, now = (near, far) if one == "left" else (far, near)
                    found[f"overlap differs: {view.path} lay {before} bytes from {first.path}, now {now}"] = None
        if storages:
            # Where a storage was cut at its gaps, nobody can say on which part a tensor without elements belongs.
            parts = Counter(getattr(first, one).storage for first, *_ in clusters)
            whole = [view for view in views if parts[getattr(view, one).storage] <= 1]
            met = [Met(view.path, view.left.storage, view.right.storage) for view in whole]
            found.update(dict.fromkeys(_torn(met, "storage", one, other)))
    yield from found


def _apart(first: View, view: View, side: str) -> int | None:
    """Return how many bytes lie between where two views begin; ``None`` if they are on two storages."""
    one, other = getattr(first, side), getattr(view, side)
    return int(other.start - one.start) if one.storage == other.storage else None


def _overlapping(runs: Sequence[Sequence[View]], side: str) -> Iterator[tuple[View, View]]:
    """Yield each view of a run but the first, after one of those before it that it overlaps with."""
    for first, *others in runs:
        reaching = first  # the one that ends last
        for view in others:
            yield reaching, view
            reaching = max(reaching, view, key=lambda met: getattr(met, side).start + getattr(met, side).length)


def _clusters(views: Sequence[View], side: str, gap_bytes: int) -> list[list[View]]:
    """Group views that lie on one storage with no wider gap between them."""

    def place(view: View) -> tuple[int, int, int]:
        region = getattr(view, side)
        return region.storage, region.start, region.length

    clusters: list[list[View]] = []
    last, end = None, 0
    for view in sorted((view for view in views if getattr(view, side).length), key=place):
        storage, start, length = place(view)
        if storage != last or start >= end + gap_bytes:
            clusters.append([])
            last, end = storage, 0
        clusters[-1].append(view)
        end = max(end, start + length)
    return clusters


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
