"""Geometry: what decides where tensors lie in a snapshot, and a quick way to see that it has not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statetree.spans import Layout, Span, extents, lay_out
from statetree.torch_internals import geometry_guards

if TYPE_CHECKING:
    from statetree.columns import Columns


class Geometry:
    """Dtypes, shapes, strides, devices and bits of a list of tensors, and how they lie on storages.

    It holds no reference to the tensors.
    """

    def __init__(self, columns: Columns) -> None:
        self.layout: Layout = lay_out(columns, extents(columns))
        self._own_storages = columns.own_storages
        self._dtypes = columns.dtypes
        self._shapes = columns.shapes
        self._strides = columns.strides
        self._conj = columns.conj
        self._neg = columns.neg
        self._offsets = None if self._own_storages else columns.offsets
        self._partition = None if self._own_storages else _partition(columns)
        self._guards = geometry_guards(columns.tensors, columns.shapes, columns.strides)

    def fits(self, columns: Columns) -> bool:
        """Whether tensors have this geometry, so that copies of them lie exactly as those laid out here."""
        if len(columns.tensors) != len(self._shapes) or columns.own_storages != self._own_storages:
            return False
        if not self._same_tensors(columns):
            return False
        if self._own_storages:
            return True
        if _partition(columns) != self._partition:
            return False
        return columns.offsets == self._offsets or self._same_places(lay_out(columns, extents(columns)))

    def _same_tensors(self, columns: Columns) -> bool:
        if self._guards is not None and self._guards.check(*columns.tensors):
            return True
        return (
            columns.dtypes == self._dtypes
            and columns.shapes == self._shapes
            and columns.strides == self._strides
            and columns.conj == self._conj
            and columns.neg == self._neg
        )

    def _same_places(self, layout: Layout) -> bool:
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
