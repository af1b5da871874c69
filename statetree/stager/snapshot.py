"""Snapshots: memory laid out for one geometry, filled again and again, and leased while anything refers to it.

A *geometry* is what decides where tensors lie in a snapshot: dtypes, shapes, strides, bits, and which of them share
a storage and where.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch

from statetree.spans.layout import SpanLayout, as_bytes, extents, lay_out, make_views
from statetree.spans.threads import copy_together
from statetree.stager.batches import Batch, batched
from statetree.stager.streams import devices_of, synchronize
from statetree.torch_internals import (
    STORAGE_BASE,
    copy_all,
    count_references,
    own_references,
    storage_key,
    storages_sent,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.spans.columns import Columns
    from statetree.spans.memory import Buffer
    from statetree.stager.pool import Pool

#: The columns that make up the geometry of single tensors.
_GEOMETRY: Final = ("dtypes", "shapes", "strides", "conj", "neg")

# What is handed out must be new every time, or the snapshot could not tell whether anybody still holds it. `.data`
# gives a new tensor on the same memory that has a version counter of its own. `detach` and views share the counter of
# what they are made of: filling the template for the next stage would then show on a tensor of this one that autograd
# has saved, and what a user writes to a staged tensor on the template.
fresh_view: Final = attrgetter("data")


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


def _partition(columns: Columns) -> list[int]:
    """Return for each tensor the first one on the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(key, index) for index, key in enumerate(columns.storage_keys)]


class Snapshot:
    """Buffers laid out for one geometry, and the templates on them."""

    def __init__(self, geometry: Geometry, columns: Columns, pool: Pool) -> None:
        self.geometry = geometry
        layout = geometry.layout
        buffers = self._take_buffers(columns, layout, pool)
        self.templates = make_views(columns, layout, buffers, torch.device("cpu"))
        self._is_fresh = True
        self._plan_copies(layout, buffers)
        storages = {storage_key(buffer.storage): buffer.storage for buffer in buffers}
        self._storage_keys, self._storages = list(storages), list(storages.values())
        self._unleased = self._own_references(buffers)
        self._addresses = self._places()

    def _take_buffers(self, columns: Columns, layout: SpanLayout, pool: Pool) -> list[Buffer]:
        """Return a buffer for each span. Those of a batch lie side by side."""
        sizes = [span.stop - span.start for span in layout.spans]
        groups = batched(columns, layout)
        rest = sorted(set(range(len(sizes))).difference(*groups))
        wanted = [*(len(group) * sizes[group[0]] for group in groups), *map(sizes.__getitem__, rest)]
        taken, self._blocks = pool.take(wanted)
        found = dict(zip(rest, taken[len(groups) :], strict=True))
        self._batches: list[Batch] = []
        for group, whole in zip(groups, taken, strict=False):
            found.update(zip(group, pool.cut(whole, sizes[group[0]], len(group)), strict=True))
            members = [layout.spans[number].source for number in group]
            self._batches.append(Batch(members, whole, columns))
        return [found[number] for number in range(len(sizes))]

    def _plan_copies(self, layout: SpanLayout, buffers: Sequence[Buffer]) -> None:
        self._alone: list[int] = []  # tensors copied as such
        self._rough: list[tuple[torch.Tensor, int]] = []  # spans copied as bytes: the target, and which span
        self._nbytes: list[int] = []  # of both
        batched_tensors = set(chain.from_iterable(batch.members for batch in self._batches))
        for index, (span, buffer, dense) in enumerate(zip(layout.spans, buffers, layout.dense, strict=True)):
            if span.start == span.stop or span.source in batched_tensors:
                continue
            if dense:
                self._alone.append(span.source)
            else:
                target = as_bytes(buffer.storage, buffer.start, buffer.start + span.stop - span.start)
                self._rough.append((target, index))
        self._nbytes = [self.templates[index].nbytes for index in self._alone]
        self._nbytes += [target.nbytes for target, _ in self._rough]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        return sum(block.nbytes for block in self._blocks)

    def _own_references(self, buffers: Sequence[Buffer]) -> list[int]:
        """Return the references that the snapshot itself holds, as ``count_references`` has them."""
        keys = [storage_key(buffer.storage) for buffer in buffers]
        tensors = Counter(map(keys.__getitem__, self.geometry.layout.span_of))
        tensors.update(keys[index] for _, index in self._rough)
        tensors.update(storage_key(batch.target.untyped_storage()) for batch in self._batches)
        tensors.update(storage_key(block.untyped_storage()) for block in self._blocks)  # buffers may be these
        return own_references([tensors[key] for key in self._storage_keys])

    # A lease needs no handle that users would have to give back. Every tensor on a storage, and every view of one,
    # counts as a reference to the storage in C++, whoever holds it: a variable, a saving thread, autograd, a numpy
    # array. What the snapshot itself holds is known (templates, and `_storages`); while there is more, it is leased. It
    # fails for whoever holds a bare address (`data_ptr()`), and for other processes, which `was_sent` answers for. A
    # version of torch that counts otherwise would show as a lease that never ends, or as one that is never seen:
    # `own_references` therefore asks this torch what one reference counts.
    def is_leased(self) -> bool:
        """Whether anything refers to the memory but the snapshot itself."""
        return count_references(self._storages, self._storage_keys) != self._unleased

    def _places(self) -> array[int]:
        return array("Q", list(map(STORAGE_BASE.data_ptr, self._storages)))

    def is_intact(self) -> bool:
        """Whether the storages lie where they lay. ``share_memory_`` moves one: then forked processes may read it."""
        return self._places() == self._addresses

    def was_sent(self) -> bool:
        """Whether another process may have mapped the memory. What it does with it cannot be known here."""
        return not storages_sent().isdisjoint(self._storage_keys)

    def touch(self) -> None:
        """Make the system provide the memory now, page by page."""
        for block in self._blocks:
            block.zero_()
        self._is_fresh = False

    def dissolve(self) -> list[torch.Tensor]:
        """Give up the templates, and return the blocks of memory below them."""
        blocks = self._blocks
        self.templates, self._batches, self._rough, self._blocks, self._storages = [], [], [], [], []
        return blocks

    def fill(self, columns: Columns) -> list[torch.Tensor]:
        """Copy tensors of this geometry in, and return fresh tensors on the copies."""
        tensors, alone = columns.tensors, self._alone
        if columns.on_cpu:
            for batch in self._batches:
                batch.fill(tensors)
        else:
            alone = [*alone, *chain.from_iterable(batch.members for batch in self._batches)]
        sources = [tensors[index] for index in alone]
        targets = [self.templates[index] for index in alone]
        if self._rough:
            spans = lay_out(columns, extents(columns)).spans
            for target, index in self._rough:
                span = spans[index]
                targets.append(target)
                sources.append(as_bytes(columns.storages[span.source], span.start, span.stop))
        if columns.on_cpu:
            copy_together(targets, sources, self._nbytes, fresh=self._is_fresh)
            self._is_fresh = False
        else:
            accelerators = devices_of(columns.devices)
            copy_all(targets, sources, non_blocking=bool(accelerators))
            synchronize(accelerators)
        return list(map(fresh_view, self.templates))
