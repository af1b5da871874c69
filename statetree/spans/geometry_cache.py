"""Known geometry and addresses: tensors that look and lie like ones seen before need not be asked again.

The same states come back: staged every hundred steps, compared, copied into. What tensors look like (all but their
memory) is remembered for a few lists of tensors, and compared in one call in C++ at a tenth of the cost of asking for
each attribute. What follows from their addresses is remembered for a few lists of addresses. Nothing of the tensors
themselves is kept.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final

from statetree.spans.columns import Columns, KnownAddresses, addresses, storages_of
from statetree.torch_internals import carry_tangents, geometry_guard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: The columns that are known of tensors that look the same: with an entry for each of them, and with one for all.
_EACH: Final = (
    "dtypes",
    "shapes",
    "strides",
    "conj",
    "neg",
    "devices",
    "contiguous",
    "nbytes",
    "requires_grad",
    "nested",
    "inference",
)
_ALL: Final = ("on_cpu", "no_subclasses")
#: Of these, the columns that tell apart what the guards tell apart, nearly: they say where to look for an equal piece.
_TELLING: Final = ("dtypes", "shapes", "requires_grad")
#: Fewer tensors are asked as quickly as they are recognised.
_FEWEST: Final = 64
#: How many bytes all that is remembered may take, about, and how many of them go to each tensor: as entries of columns
#: and addresses, and for a guard and what the columns refer to, unless these serve an equal piece of the list already.
_MOST_BYTES: Final = 256 << 20
_TENSOR_BYTES: Final = 128
_GUARD_BYTES: Final = 480
#: How many geometries are remembered at most, and how many lists of addresses for each.
_REMEMBERED: Final = 8
_LISTS: Final = 4
#: How many tensors are asked everything at a time.
_PIECE: Final = 500


# To ask 10,000 tensors for eleven attributes takes longer than to copy them. torch.compile has the same question to
# ask before it runs a compiled graph: are these inputs like those that it was compiled for? Its answer is
# TensorGuards, which compares class, dtype, device, shape, strides, bits and requires_grad of a list of tensors in
# one call in C++, and keeps no reference to any of them. We use it for that (`geometry_guard` in torch_internals, the
# only place that names it).
#
# Its answer is one-sided: a no may be wrong, and then all is asked; a yes never is. So nothing depends on the guards
# but speed: where a version of torch has none, `_guard` is None and every list is a new one. What they do not look at
# (addresses, sizes of storages) is asked every time. It would fail if a version of torch looked at less than we take
# for known from it (`_EACH`, `_ALL`); the tests change one fact at a time.
#
# A list is guarded in pieces of 500 tensors: what one question brings into the processor's cache serves the next one, a
# list that differs is given up early, and pieces that are alike, as the layers of a model are, share one guard.
class _Piece:
    """What a few tensors look like. Equal pieces of a list, as layers of a model make them, are one object."""

    __slots__ = ("_guard", "facts")

    def __init__(self, columns: Columns, known: dict[str, dict[Any, Any]]) -> None:
        self._guard = geometry_guard(columns.tensors, columns.shapes, columns.strides)
        self.facts: dict[str, Any] = {name: getattr(columns, name) for name in _ALL}
        for name in _EACH:  # equal values, of which there are few, become one object
            column = getattr(columns, name)
            self.facts[name] = list(map(known.setdefault(name, {}).setdefault, column, column))

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors look like these. It may say no where they do."""
        return self._guard is not None and self._guard(tensors)


class KnownGeometry:
    """What a list of plain tensors looks like."""

    __slots__ = ("_facts", "_known_addresses", "_pieces", "count", "nbytes")

    def __init__(self, columns: Columns) -> None:
        self.count = len(columns.tensors)
        self._pieces, distinct = _cut(columns.tensors)
        self._facts = _joined([piece.facts for piece in self._pieces])
        self._known_addresses: tuple[KnownAddresses, ...] = ()
        #: How many bytes this takes, about.
        self.nbytes = self.count * _TENSOR_BYTES + min(distinct * _PIECE, self.count) * _GUARD_BYTES

    def is_of(self, columns: Columns, *, memory: bool) -> bool:
        """Whether tensors look like these; then their columns are known. It may say no where they do."""
        if len(columns.tensors) != self.count:
            return False
        pointers, storages = array("Q"), list[Any]()
        for where, piece in zip(_slices(self.count), self._pieces, strict=True):
            tensors = columns.tensors[where]
            if not piece.is_of(tensors):
                return False
            pointers += addresses(tensors)
            if memory:
                storages += storages_of(tensors)
        columns.adopt(self._facts)
        columns.adopt({"pointers": pointers, "storages": storages} if memory else {"pointers": pointers})
        columns.known_addresses = next((known for known in self._known_addresses if known.pointers == pointers), None)
        if columns.known_addresses is None:
            columns.known_addresses = KnownAddresses(columns)
            self._known_addresses = (columns.known_addresses, *self._known_addresses[: _LISTS - 1])
        return True


def _slices(count: int) -> list[slice]:
    """Cut a list: what was just looked at is still in the processor's cache for the next question."""
    return [slice(start, start + _PIECE) for start in range(0, count, _PIECE)]


def _cut(tensors: Sequence[torch.Tensor]) -> tuple[list[_Piece], int]:
    """Return the pieces of a list, equal ones as one object, and how many of them are distinct."""
    found: dict[Any, list[_Piece]] = {}
    values: dict[str, dict[Any, Any]] = {}
    pieces: list[_Piece] = []
    for where in _slices(len(tensors)):
        columns = Columns(tensors[where])
        candidates = found.setdefault(tuple([tuple(getattr(columns, name)) for name in _TELLING]), [])
        piece = next((piece for piece in candidates if piece.is_of(columns.tensors)), None)
        if piece is None:
            piece = _Piece(columns, values)
            candidates.append(piece)
        pieces.append(piece)
    return pieces, sum(map(len, found.values()))


def _joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the columns of pieces. Columns that are equal become one list."""
    joined: dict[str, Any] = {}
    for name in _EACH:
        column = list(chain.from_iterable(facts[name] for facts in pieces))
        alike = (other for other in joined.values() if type(other[0]) is type(column[0]) and other == column)
        joined[name] = next(alike, column)
    return joined | {name: all(facts[name] for facts in pieces) for name in _ALL}


_remembered: tuple[KnownGeometry, ...] = ()
_glimpsed: dict[int, Any] = {}  # by the number of tensors, what a few of them looked like


def recognise(columns: Columns, *, memory: bool) -> bool:
    """Whether tensors look like a list seen before, all of whose tensors were plain. Then their columns are known.

    With ``memory`` the sizes of their storages are asked for as well, which is cheapest here.
    """
    if len(columns.tensors) < _FEWEST or not any(geometry.is_of(columns, memory=memory) for geometry in _remembered):
        return False
    return not carry_tangents(columns.tensors)


def remember(columns: Columns) -> None:
    """Remember what plain tensors look like, if a list like theirs was seen before."""
    # To make guards costs as much as several rounds of asking, and most lists are seen once (a gather, a template). So
    # the first time only eight tensors are noted, by which a second list of the same length is known.
    global _remembered
    count = len(columns.tensors)
    if not _FEWEST <= count <= _MOST_BYTES // _TENSOR_BYTES:
        return
    sample = [(columns.dtypes[index], columns.shapes[index]) for index in range(0, count, count // 8)]
    if _glimpsed.get(count) != sample:
        if len(_glimpsed) >= _REMEMBERED:
            _glimpsed.clear()
        _glimpsed[count] = sample
        return
    _glimpsed.pop(count, None)  # another thread may have been quicker
    latest = (KnownGeometry(columns), *_remembered[: _REMEMBERED - 1])
    totals = accumulate(geometry.nbytes for geometry in latest)
    _remembered = tuple([geometry for geometry, total in zip(latest, totals, strict=True) if total <= _MOST_BYTES])
