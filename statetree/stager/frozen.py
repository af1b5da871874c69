"""Frozen storages: copied once, and shared by all trees that are staged while nobody writes to them.

That nobody does is the caller's promise: a version counter is no proof, as fused optimizers, ``.data`` and collectives
leave it alone. A storage is known by its address, and guarded by a weak reference to the storage itself, because
allocators hand the addresses of freed storages out again.
"""

from __future__ import annotations

from collections import defaultdict
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from statetree.errors import TreeMismatch, warn
from statetree.leaves.builtin import is_value
from statetree.spans.bits import same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import as_bytes, extents, lay_out, make_views
from statetree.spans.overlaps import are_disjoint, runs
from statetree.spans.replicate import copy_spans
from statetree.stager.snapshot import fresh_view
from statetree.torch_internals import storage_key
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import unshared
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.spans.layout import Span
    from statetree.spans.memory import Buffer, Memory
    from statetree.stager.capture import CapturedTree
    from statetree.tree.selection import Where

#: The columns that say which bytes tensors look at, and how. (Storages of one key are one while it is known.)
_LOOKS: Final = ("dtypes", "shapes", "strides", "offsets", "conj", "neg", "storage_keys", "pointers")
#: In how many places leaves may lie, beside twice as many as there are, before none is taken for frozen.
_MOST_PLACES: Final = 10_000


class _KnownStorage(NamedTuple):
    """A storage that was copied: where it lay, which of its bytes were copied, and where to."""

    source: StorageWeakRef
    pointer: int
    nbytes: int  # how many it has
    start: int
    stop: int
    copy: Buffer

    def serves(self, storage: torch.UntypedStorage, span: Span) -> bool:
        """Whether bytes of a storage are the first of those that were copied."""
        same = self.source.cdata == storage_key(storage) and self.pointer == storage.data_ptr()
        return same and not self.source.expired() and self.start == span.start and span.stop <= self.stop

    def bytes(self, count: int) -> torch.Tensor:
        """Return the first bytes of the copy."""
        return as_bytes(self.copy.storage, self.copy.start, self.copy.start + count)


def _still_needed(copies: Sequence[_KnownStorage], serving: set[int]) -> dict[int, _KnownStorage]:
    """Return what is kept of copies, the last one being the newest, by their addresses: ids say which serve now.

    Storages that are gone are let go of, and copies older than twice as many bytes as the storage has: windows of it
    may come and go.
    """
    kept: dict[int, _KnownStorage] = {}
    held: defaultdict[int, int] = defaultdict(int)
    for copy in reversed(copies):
        held[copy.source.cdata] += copy.stop - copy.start
        is_old = copy.source.expired() or held[copy.source.cdata] > 2 * copy.nbytes
        if id(copy) in serving or not is_old:
            kept.setdefault(copy.pointer + copy.start, copy)
    return dict(reversed(kept.items()))


class _Views(NamedTuple):
    """Tensors on copies."""

    known: dict[int, _KnownStorage]  # the copies: these, and no others
    looks: list[Any]  # what they were made for, by `_LOOKS`
    templates: list[torch.Tensor]


class FrozenStorages:
    """The storages of frozen leaves, and their copies; with ``check``, both are compared at every stage."""

    def __init__(self, where: Where | None, memory: Memory, *, check: bool) -> None:
        self._where, self._memory, self._check, self._has_warned = where, memory, check, False
        self.start_empty()

    def start_empty(self) -> None:
        """Begin without copies; in a forked process also without a lock that nobody would release."""
        self._lock = RLock()  # a signal handler may thaw, too
        self.thaw()

    @property
    def nbytes(self) -> int:
        """How many bytes the copies take."""
        return sum(known.stop - known.start for known in list(self._known.values()))

    def thaw(self) -> None:
        """Forget all copies. Trees that were staged keep them."""
        with self._lock:
            self._known: dict[int, _KnownStorage] = {}
            self._views: _Views | None = None

    def parted(self, verb: str, captured: CapturedTree) -> tuple[list[int], Columns]:
        """Return which tensors are frozen, and the columns of the others."""
        frozen = [] if self._where is None else self._chosen(verb, captured, self._where)
        if not frozen:
            return frozen, captured.columns
        known, tensors = set(frozen), captured.columns.tensors
        return frozen, Columns([tensor for index, tensor in enumerate(tensors) if index not in known])

    def _chosen(self, verb: str, captured: CapturedTree, where: Where) -> list[int]:
        """Return which tensors are frozen: those on storages that none but frozen leaves lie on."""
        found = unshared(captured.spec, captured.unpacked.leaves, _MOST_PLACES + 2 * captured.spec.num_leaves)
        if found is None:
            self.thaw()
            return []
        spec, places = found
        leaves = [captured.unpacked.leaves[place] for place in places]
        if callable(where):  # which may ask for what only tensors have
            leaves = [HOLE if is_value(leaf) else leaf for leaf in leaves]
        try:
            mask = selected(where, spec, leaves, verb=verb, missing_ok=self._has_warned or None)
        except TreeMismatch as error:  # a later state, or that of another rank, may have it
            self._has_warned = True
            warn(f"{error} (What it was meant for is copied.)")
            mask = selected(where, spec, leaves, verb=verb, missing_ok=True)
        # One leaf may lie in several places, and one tensor in several leaves: nobody may write to it in any of these.
        written_to = {place for place, flag in zip(places, mask, strict=True) if not flag}
        held = captured.unpacked.held_by([leaf for leaf in captured.unpacked.recipes if leaf in written_to])
        meta = set(captured.meta)
        parts = [part for part in range(len(captured.unpacked.parts)) if part not in meta]
        frozen = [
            owner not in written_to and part not in held for owner, part in zip(captured.owners, parts, strict=True)
        ]
        written = self._written(captured.columns, frozen)
        # Nobody promised anything of these: if they are frozen later, they hold something else by then.
        known = self._known  # another thread may thaw
        for address in [address for address, copy in list(known.items()) if copy.source.cdata in written]:
            self._views = None
            known.pop(address, None)
        keys = captured.columns.storage_keys
        return [index for index, flag in enumerate(frozen) if flag and keys[index] not in written]

    @staticmethod
    def _written(columns: Columns, frozen: Sequence[bool]) -> set[int]:
        """Return the storages that may be written to, by their keys: there may be several on one memory."""
        keys = columns.storage_keys
        written = {key for key, flag in zip(keys, frozen, strict=True) if not flag}
        if not written or are_disjoint(columns):
            return written
        for run in runs(columns, extents(columns)):
            together = {keys[index] for index in run}
            if not together.isdisjoint(written):
                written |= together
        return written

    def copies(self, verb: str, captured: CapturedTree, chosen: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of frozen tensors, made now or before; with ``check``, ``TreeMismatch`` if one was written."""
        columns = Columns([captured.columns.tensors[index] for index in chosen])
        looks = [getattr(columns, name) for name in _LOOKS]
        views = self._views
        # Usually all is as it was, and there is nothing to plan. What was thawed meanwhile is in another dict.
        if views is not None and views.known is self._known and views.looks == looks and not self._check:
            return list(map(fresh_view, views.templates))
        before = self._known
        layout = lay_out(columns, extents(columns))
        wanted = [(columns.storages[span.source], span) for span in layout.spans]
        found_there = [(before.get(storage.data_ptr() + span.start), storage, span) for storage, span in wanted]
        known = [copy if copy and copy.serves(storage, span) else None for copy, storage, span in found_there]
        if self._check:
            for found, (storage, span) in zip(known, wanted, strict=True):
                now = None if found is None else as_bytes(storage, span.start, span.stop).cpu()
                if found is not None and now is not None and not same_bytes(found.bytes(now.nbytes), now):
                    path = captured.spec.paths()[captured.owners[chosen[span.source]]]
                    raise TreeMismatch(
                        f"{verb}: the frozen leaf at {path or '<root>'} was written to: expected the bytes that were "
                        "staged first, got others. Call thaw() after writing to frozen leaves, or leave them out."
                    )
        missing = [number for number, found in enumerate(known) if found is None]
        lacking = layout._replace(
            spans=[layout.spans[number] for number in missing], dense=[layout.dense[number] for number in missing]
        )
        fresh = self._memory.carve([span.stop - span.start for span in lacking.spans])
        made = [
            _KnownStorage(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), span.start, span.stop, buffer)
            for (storage, span), buffer in zip([wanted[number] for number in missing], fresh, strict=True)
        ]
        waiting = iter(made)
        serving = [next(waiting) if found is None else found for found in known]
        templates = make_views(columns, layout, [copy.copy for copy in serving], torch.device("cpu"))
        copy_spans(columns, lacking, fresh, templates)
        # What was copied just now is noted last, so that an interrupt loses it.
        kept = _still_needed([*before.values(), *made], {*map(id, serving)})
        # While others are kept, all are looked at every time: whether their storages are gone.
        alone = len(kept) == len(serving) and all(kept.get(copy.pointer + copy.start) is copy for copy in serving)
        views = _Views(kept, looks, templates) if alone else None
        with self._lock:
            if self._known is before:  # otherwise another thread has thawed
                self._known, self._views = kept, views
        return list(map(fresh_view, templates))
