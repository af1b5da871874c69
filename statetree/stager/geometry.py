"""Geometry: what decides where tensors lie in a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from statetree.spans.layout import Span, SpanLayout, extents, lay_out

if TYPE_CHECKING:
    from statetree.spans.columns import Columns

#: The columns that make up the geometry of single tensors.
_GEOMETRY: Final = ("dtypes", "shapes", "strides", "conj", "neg")


class Geometry:
    """Dtypes, shapes, strides and bits of a list of tensors, and how they lie on storages.

    It holds no reference to the tensors.
    """

    def __init__(self, columns: Columns) -> None:
        self.layout: SpanLayout = lay_out(columns, extents(columns))
        self._count = len(columns.tensors)
        self._facts = {name: getattr(columns, name) for name in _GEOMETRY}
        self._own_storages = columns.own_storages
        self._offsets = None if self._own_storages else columns.offsets
        self._partition = None if self._own_storages else _partition(columns)

    def fits(self, columns: Columns) -> bool:
        """Whether tensors have this geometry, so that copies of them lie exactly as those laid out here."""
        if len(columns.tensors) != self._count or columns.own_storages != self._own_storages:
            return False
        for name in _GEOMETRY:
            own, other = self._facts[name], getattr(columns, name)
            if own is not other and own != other:
                return False
        if self._own_storages:
            return True
        if _partition(columns) != self._partition:
            return False
        return columns.offsets == self._offsets or self._same_places(lay_out(columns, extents(columns)))

    def _same_places(self, layout: SpanLayout) -> bool:
        own = self.layout
        return (
            layout.span_of == own.span_of
            and layout.offsets == own.offsets
            and layout.dense == own.dense
            and all(a.stop - a.start == b.stop - b.start for a, b in zip(layout.spans, own.spans, strict=True))
        )

    def spans_of(self, columns: Columns) -> list[Span]:
        """Return the spans of fitting tensors, on their own storages."""
        return lay_out(columns, extents(columns)).spans


def _partition(columns: Columns) -> list[int]:
    """Return for each tensor the first one on the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(key, index) for index, key in enumerate(columns.storage_keys)]
