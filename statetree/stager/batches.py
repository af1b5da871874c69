"""Batches: small tensors of one dtype and shape, whose copies lie side by side and are made by one call.

``_foreach_copy_`` sets up a loop for every pair of tensors, which takes longer than to copy a kilobyte. ``torch.stack``
into memory in which the copies follow each other does not: it takes a third to a half of the time.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.torch_internals import without_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.spans.columns import Columns
    from statetree.spans.layout import SpanLayout
    from statetree.spans.memory import Buffer

#: Fewer tensors are not worth a call of their own.
_FEWEST: Final = 8
#: From so many elements on torch no longer stacks in one pass (``GRAIN_SIZE``).
_MOST_ELEMENTS: Final = 32_768
#: Larger tensors gain nothing.
_LARGEST_BYTES: Final = 16 << 10


def batched(columns: Columns, layout: SpanLayout) -> list[list[int]]:
    """Return groups of spans that can be copied together: each is one contiguous tensor, and these look the same."""
    alike: dict[Any, list[int]] = {}
    for number, (span, dense) in enumerate(zip(layout.spans, layout.dense, strict=True)):
        index = span.source
        if dense and columns.contiguous[index] and 0 < span.stop - span.start <= _LARGEST_BYTES:
            alike.setdefault((columns.dtypes[index], columns.shapes[index]), []).append(number)
    groups = []
    for (_, shape), members in alike.items():
        most = (_MOST_ELEMENTS - 1) // shape.numel()
        groups += [members[start : start + most] for start in range(0, len(members), most)]
    return [group for group in groups if len(group) >= _FEWEST]


class Batch:
    """The copies of some of all tensors, of one dtype and shape, one behind the other in a buffer."""

    def __init__(self, members: Sequence[int], buffer: Buffer, columns: Columns) -> None:
        self.members = members
        self._of = itemgetter(*members)
        dtype, shape = columns.dtypes[members[0]], columns.shapes[members[0]]
        target = without_elements(dtype, torch.device("cpu"))
        strides = (shape.numel(), *columns.strides[members[0]])
        self.target = target.set_(buffer.storage, buffer.start // dtype.itemsize, (len(members), *shape), strides)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy those of all tensors in that belong here."""
        torch.stack(self._of(tensors), out=self.target)
