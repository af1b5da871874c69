"""Appearance: tensors that look like ones seen before need not be asked again.

The same states come back: staged every hundred steps, compared, copied into. What tensors look like (all but their
memory) is remembered for a few lists of tensors, and compared in one call in C++ at a tenth of the cost of asking for
each attribute. Nothing of the tensors themselves is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.torch_internals import geometry_guard

if TYPE_CHECKING:
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
)
#: Fewer tensors are asked as quickly as they are recognised; more would take too much memory to remember.
_FEWEST: Final = 64
_MOST: Final = 200_000
#: How many appearances are remembered.
_REMEMBERED: Final = 8


class Appearance:
    """What a list of plain tensors looks like."""

    __slots__ = ("_count", "_facts", "_guard")

    def __init__(self, columns: Columns) -> None:
        self._count = len(columns.tensors)
        self._facts: dict[str, Any] = {name: getattr(columns, name) for name in _KNOWN}
        self._guard = geometry_guard(columns.tensors, columns.shapes, columns.strides)

    def is_of(self, columns: Columns) -> bool:
        """Whether tensors look like these; then their columns are known. It may say no where they do."""
        if self._guard is None or len(columns.tensors) != self._count or not self._guard(columns.tensors):
            return False
        columns.adopt(self._facts)
        return True


_remembered: tuple[Appearance, ...] = ()
_glimpsed: dict[int, Any] = {}  # by the number of tensors, what a few of them looked like


def recognise(columns: Columns) -> bool:
    """Whether tensors look like a list seen before, all of whose tensors were plain. Then their columns are known."""
    if not _FEWEST <= len(columns.tensors) <= _MOST:
        return False
    return any(appearance.is_of(columns) for appearance in _remembered)


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
    del _glimpsed[count]
    _remembered = (Appearance(columns), *_remembered[: _REMEMBERED - 1])


def forget() -> None:
    """Forget everything, for tests that must see both ways."""
    global _remembered
    _remembered = ()
    _glimpsed.clear()
