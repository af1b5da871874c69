"""Appearance and place: tensors that look and lie like ones seen before need not be asked again.

The same states come back: staged every hundred steps, compared, copied into. What tensors look like (all but their
memory) is remembered for a few lists of tensors, and compared in one call in C++ at a tenth of the cost of asking for
each attribute. What follows from their addresses is remembered for a few lists of addresses. Nothing of the tensors
themselves is kept.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from statetree.columns import addresses, storage_sizes
from statetree.torch_internals import geometry_guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.columns import Columns

#: The columns that are known of tensors that look the same.
_KNOWN: Final = (
    "dtypes",
    "shapes",
    "strides",
    "conj",
    "neg",
    "devices",
    "on_cpu",
    "contiguous",
    "nbytes",
    "requires_grad",
    "nested",
    "inference",
    "bare",
)
#: Fewer tensors are asked as quickly as they are recognised. More than this, in all lists together, would take too much
#: memory to remember (about half a kilobyte each).
_FEWEST: Final = 64
_MOST: Final = 200_000
#: How many appearances are remembered at most, and how many places for each.
_REMEMBERED: Final = 8
_PLACES: Final = 4
#: How many tensors are asked everything at a time.
_PIECE: Final = 500


class Place:
    """Where tensors of one appearance lie, and what follows from that.

    Attributes:
        distinct: Whether the addresses tell that no tensor is given twice.
        storage_bytes: How large their storages were when they were found to reach as far as the tensors do; ``None``
            before.
    """

    __slots__ = ("__weakref__", "_apart", "_partner", "distinct", "pointers", "storage_bytes")

    def __init__(self, columns: Columns) -> None:
        self.pointers = columns.pointers
        self.distinct = 0 not in self.pointers and len(set(self.pointers)) == len(self.pointers)
        self.storage_bytes: list[int] | None = None
        self._apart: bool | None = None
        self._partner: tuple[weakref.ref[Place], bool] | None = None

    def apart(self, columns: Columns) -> bool:
        """Whether no two of these tensors lie over each other (see ``Columns.apart``)."""
        if self._apart is None:
            self._apart = columns.apart
        return self._apart

    def apart_from(self, other: Place, judge: Callable[[], bool]) -> bool:
        """Return what ``judge`` says about the tensors here and those at another place. The last answer is kept."""
        known = self._partner
        if known is None or known[0]() is not other:
            known = self._partner = (weakref.ref(other), judge())
        return known[1]


class Appearance:
    """What a list of plain tensors looks like."""

    __slots__ = ("_facts", "_guards", "_places", "count")

    def __init__(self, columns: Columns) -> None:
        self.count = len(columns.tensors)
        self._facts: dict[str, Any] = {name: getattr(columns, name) for name in _KNOWN}
        self._guards = [
            geometry_guard(columns.tensors[piece], columns.shapes[piece], columns.strides[piece])
            for piece in _pieces(self.count)
        ]
        self._places: tuple[Place, ...] = ()

    def is_of(self, columns: Columns, *, memory: bool) -> bool:
        """Whether tensors look like these; then their columns are known. It may say no where they do."""
        if len(columns.tensors) != self.count:
            return False
        pointers: list[int] = []
        sizes: list[int] = []
        for piece, guard in zip(_pieces(self.count), self._guards, strict=True):
            tensors = columns.tensors[piece]
            if guard is None or not guard(tensors):
                return False
            pointers += addresses(tensors)
            if memory:
                sizes += storage_sizes(tensors)
        columns.adopt(self._facts)
        columns.adopt({"pointers": pointers, "storage_bytes": sizes} if memory else {"pointers": pointers})
        columns.appearance = self
        columns.place = next((place for place in self._places if place.pointers == pointers), None)
        return True

    def remember_place(self, columns: Columns) -> Place:
        """Remember where tensors lie that were recognised."""
        place = columns.place = Place(columns)
        self._places = (place, *self._places[: _PLACES - 1])
        return place


def place_of(columns: Columns) -> Place | None:
    """Return where tensors lie, or ``None`` if they were not recognised."""
    if columns.place is None and columns.appearance is not None:
        return columns.appearance.remember_place(columns)
    return columns.place


def _pieces(count: int) -> list[slice]:
    """Cut a list: what was just looked at is still in the processor's cache for the next question."""
    return [slice(start, start + _PIECE) for start in range(0, count, _PIECE)]


_remembered: tuple[Appearance, ...] = ()
_glimpsed: dict[int, Any] = {}  # by the number of tensors, what a few of them looked like


def recognise(columns: Columns, *, memory: bool) -> bool:
    """Whether tensors look like a list seen before, all of whose tensors were plain. Then their columns are known.

    Args:
        columns: The tensors.
        memory: Whether to ask for the sizes of their storages as well, which is cheapest here.
    """
    if not _FEWEST <= len(columns.tensors) <= _MOST:
        return False
    return any(appearance.is_of(columns, memory=memory) for appearance in _remembered)


def remember(columns: Columns) -> None:
    """Remember what plain tensors look like, if a list like theirs was seen before: once is not worth its cost."""
    global _remembered
    count = len(columns.tensors)
    if not _FEWEST <= count <= _MOST:
        return
    sample = [(columns.dtypes[index], columns.shapes[index]) for index in range(0, count, count // 8)]
    if _glimpsed.get(count) != sample:
        if len(_glimpsed) >= _REMEMBERED:
            _glimpsed.clear()
        _glimpsed[count] = sample
        return
    _glimpsed.pop(count, None)  # another thread may have been quicker
    latest = (Appearance(columns), *_remembered[: _REMEMBERED - 1])
    totals = accumulate(appearance.count for appearance in latest)
    _remembered = tuple(appearance for appearance, total in zip(latest, totals, strict=True) if total <= _MOST)


def forget() -> None:
    """Forget everything, for tests that must see both ways."""
    global _remembered
    _remembered = ()
    _glimpsed.clear()
