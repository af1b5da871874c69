"""``Stager``: snapshots of a state in cached host memory, each immutable for as long as anything refers to it.

How the cache works. The tensors of a tree have a *geometry*: dtypes, shapes, strides, and how they lie on storages.
A *snapshot* is a set of buffers laid out for one geometry, with a private tensor (a template) on them for every
tensor of the tree. Staging copies into the templates and hands out fresh tensors on the same memory. The snapshot is
*leased* until no storage of it is referred to by anything but its templates, which the storages' reference counts
tell; only then is it written again. Nothing is keyed by a source's address, so that addresses handed out twice and
tensors made afresh for every stage need no special care: what has the same geometry fits.
"""

from __future__ import annotations

import gc
import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from statetree.buffers import Buffer, Memory
from statetree.columns import Columns
from statetree.errors import StagerBusy, StagerClosed
from statetree.geometry import Geometry
from statetree.leaves import Unpacked, holds_tensor, unpack
from statetree.pool import Pool
from statetree.spans import Layout, check_memory, extents, make_views, raw, replicate
from statetree.torch_internals import copy_all, count_references, quietly, storage_key
from statetree.tree import flatten_for_copy, unflatten_copy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from statetree.treespec import TreeSpec

_fresh: Final = attrgetter("data")  # a new tensor on the same memory, with a version counter of its own


class Stager:
    """Copies trees into cached host memory: a ``deepcopy`` whose tensors land there.

    What ``stage`` returns never changes: no later ``stage``, no change of the source and no failure writes to its
    memory for as long as anything refers to one of its tensors. Memory is reused once nothing does. Containers that
    appear several times in a tree, and cycles, come out as they were.

    Args:
        pin_memory: Take page-locked memory. Without an accelerator this warns once and is ignored.
        share_memory: Take memory that other processes can map.
        max_snapshots: How many staged trees may be alive at a time.

    Raises:
        ValueError: If ``max_snapshots`` is less than one.

    Example:
        >>> import statetree as st, torch
        >>> weights = torch.zeros(3)
        >>> with st.Stager() as stager:
        ...     staged = stager.stage({"w": weights, "step": 1})
        ...     _ = weights.add_(1)
        >>> staged
        {'w': tensor([0., 0., 0.]), 'step': 1}
    """

    def __init__(self, *, pin_memory: bool = False, share_memory: bool = False, max_snapshots: int = 2) -> None:
        if max_snapshots < 1:
            msg = f"Stager: max_snapshots must be at least 1: expected a positive number, got {max_snapshots}."
            raise ValueError(msg)
        self.max_snapshots = max_snapshots
        self._memory = quietly(Memory)(pin_memory=pin_memory, share_memory=share_memory)
        self._pool = Pool(self._memory)
        self._snapshots: list[_Snapshot] = []
        self._lock = threading.Lock()
        self._owner = 0
        self._closed = False

    def stage(self, tree: Any) -> Any:
        """Return a copy of a tree whose tensors lie in the stager's host memory.

        Every tensor comes out bit-identical, with dtype, strides, ties, class, attributes and ``requires_grad``.
        Meta and fake tensors stay what they are. The second stage of an unchanged tree costs its flattening and
        its bytes. Threads take turns.

        Args:
            tree: Any tree, also one with cycles and shared containers.

        Returns:
            A tree of the same structure on the CPU.

        Raises:
            StagerBusy: If ``max_snapshots`` staged trees are alive. Drop one, or raise the limit.
            StagerClosed: After ``close``.
            UnsupportedLeaf: If a leaf cannot be copied exactly.
        """
        self._refuse_nested("stage")
        with self._lock:
            try:
                self._begin("stage")
                return self._stage(tree)
            finally:
                self._end()

    @quietly
    def _stage(self, tree: Any) -> Any:
        unpacked, spec, columns, meta = self._look_at("stage", tree)
        staged: list[torch.Tensor] = []
        if columns.tensors:
            snapshot = self._idle_snapshot(columns)
            staged = snapshot.fill(columns)
            self._trim(snapshot)
        return unflatten_copy(spec, unpacked.pack(_with_meta(unpacked.columns, staged, meta)))

    def prewarm(self, tree: Any) -> None:
        """Allocate, pin and fault in the memory that staging a tree like this one takes.

        Args:
            tree: A tree of the geometry that will be staged. It is not copied.

        Raises:
            StagerBusy, StagerClosed, UnsupportedLeaf: As ``stage``.
        """
        self._refuse_nested("prewarm")
        with self._lock:
            try:
                self._begin("prewarm")
                self._prewarm(tree)
            finally:
                self._end()

    @quietly
    def _prewarm(self, tree: Any) -> None:
        _, _, columns, _ = self._look_at("prewarm", tree)
        if columns.tensors:
            snapshot = self._idle_snapshot(columns)
            snapshot.touch()
            self._trim(snapshot)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the stager holds, leased and idle."""
        return self._pool.nbytes + sum(snapshot.nbytes for snapshot in list(self._snapshots))

    def close(self) -> None:
        """Release all memory. Staged trees stay valid. Closing again does nothing."""
        self._closed = True
        if self._in_own_call():
            return  # from inside an object that is being staged: the memory goes when that is over
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _in_own_call(self) -> bool:
        """Whether this thread is inside a call of this stager: an object's ``__reduce__`` called it, say."""
        return self._lock.locked() and self._owner == threading.get_ident()

    def _refuse_nested(self, verb: str) -> None:
        if self._in_own_call():
            msg = f"{verb}: the stager is staging already: expected one call at a time, got a nested one."
            raise StagerBusy(msg)

    # The lock is held in plain with statements, and only flags that no interrupt can leave wrong are kept beside it.
    def _begin(self, verb: str) -> None:
        self._owner = threading.get_ident()
        if self._closed:
            msg = f"{verb}: the stager is closed: expected an open one. Make a new Stager."
            raise StagerClosed(msg)

    def _end(self) -> None:
        self._owner = 0
        if self._closed:
            self._snapshots.clear()
            self._pool.clear()

    def _look_at(self, verb: str, tree: Any) -> tuple[Unpacked, TreeSpec, Columns, list[int]]:
        """Take a tree apart. Returns its parts, those among them that have memory, and the indices of the others."""
        leaves, spec = flatten_for_copy(tree, holds_tensor, shared=True)
        unpacked = unpack(verb, leaves, spec.paths)
        columns = unpacked.columns
        meta: list[int] = []
        if not columns.on_cpu:
            meta = [index for index, device in enumerate(columns.devices) if device.type == "meta"]
        if meta:
            without = set(meta)
            real = [index for index in range(len(columns.tensors)) if index not in without]
            columns = Columns([columns.tensors[index] for index in real])
            owners: Sequence[int] = [unpacked.owners[index] for index in real]
        else:
            owners = unpacked.owners
        check_memory(verb, columns, lambda index: spec.paths()[owners[index]])
        return unpacked, spec, columns, meta

    def _idle_snapshot(self, columns: Columns) -> _Snapshot:
        """Return a snapshot that fits and that nothing refers to, making one if there may be another."""
        geometry: Geometry | None = None
        for attempt in ("first", "after collecting garbage"):
            idle = [snapshot for snapshot in self._snapshots if not snapshot.is_leased()]
            for snapshot in idle:
                if snapshot.geometry.fits(columns):
                    return snapshot
            if len(self._snapshots) - len(idle) < self.max_snapshots:
                geometry = geometry or Geometry(columns)
                for snapshot in idle:  # what they hold may serve the new one
                    self._snapshots.remove(snapshot)
                    self._pool.give(snapshot.dissolve())
                snapshot = _Snapshot(geometry, columns, self._pool)
                self._snapshots.append(snapshot)
                return snapshot
            if attempt == "first":
                # Staged trees in reference cycles (DCP leaves some behind) are garbage, but not yet known to be.
                gc.collect()
        msg = (
            f"stage: {self.max_snapshots} staged trees are alive: expected at most max_snapshots={self.max_snapshots} "
            "with this one. Drop one (a saving thread may still hold it), or make the Stager with more."
        )
        raise StagerBusy(msg)

    def _trim(self, latest: _Snapshot) -> None:
        """Keep at most one idle snapshot beside the live ones."""
        self._pool.clear()
        idle = [snapshot for snapshot in self._snapshots if snapshot is not latest and not snapshot.is_leased()]
        for snapshot in idle[:-1]:
            self._snapshots.remove(snapshot)


def _with_meta(columns: Columns, staged: list[torch.Tensor], meta: list[int]) -> list[torch.Tensor]:
    """Put replicas of the meta tensors in their places among the staged ones."""
    if not meta:
        return staged
    part = Columns([columns.tensors[index] for index in meta])
    replicas = iter(replicate(part, extents(part), Memory("meta"), copy=False))
    rest, places = iter(staged), set(meta)
    return [next(replicas) if index in places else next(rest) for index in range(len(columns.tensors))]


class _Snapshot:
    """Buffers laid out for one geometry, and the templates on them."""

    def __init__(self, geometry: Geometry, columns: Columns, pool: Pool) -> None:
        self.geometry = geometry
        layout = geometry.layout
        buffers, self._blocks = pool.take([span.stop - span.start for span in layout.spans])
        self.templates = make_views(columns, layout, buffers, torch.device("cpu"))
        self._plan_copies(layout, buffers)
        storages = {storage_key(buffer.storage): buffer.storage for buffer in buffers}
        self._storage_keys, self._storages = list(storages), list(storages.values())
        del buffers, storages
        self._unleased = self._count_references()

    def _plan_copies(self, layout: Layout, buffers: Sequence[Buffer]) -> None:
        self._dense: list[int] = []
        self._dense_targets: list[torch.Tensor] = []
        self._rough: list[tuple[torch.Tensor, int]] = []  # spans copied as bytes: the target, and which span
        for index, (span, buffer, dense) in enumerate(zip(layout.spans, buffers, layout.dense, strict=True)):
            if span.start == span.stop:
                continue
            if dense:
                self._dense.append(span.source)
                self._dense_targets.append(self.templates[span.source])
            else:
                target = raw(buffer.storage, buffer.start, buffer.start + span.stop - span.start)
                self._rough.append((target, index))
        self._all_dense = self._dense == list(range(len(self.templates)))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def _count_references(self) -> int:
        return count_references(self._storages, self._storage_keys)

    def is_leased(self) -> bool:
        """Whether anything refers to the memory but the snapshot itself."""
        return self._count_references() != self._unleased

    def touch(self) -> None:
        """Make the system provide the memory now, page by page."""
        for block in self._blocks:
            block.zero_()

    def dissolve(self) -> list[torch.Tensor]:
        """Give up the templates, and return the blocks of memory below them."""
        blocks = self._blocks
        self.templates, self._dense_targets, self._rough, self._blocks, self._storages = [], [], [], [], []
        return blocks

    def fill(self, columns: Columns) -> list[torch.Tensor]:
        """Copy tensors of this geometry in, and return fresh tensors on the copies."""
        tensors = columns.tensors
        sources = list(tensors) if self._all_dense else [tensors[index] for index in self._dense]
        targets = list(self._dense_targets)
        if self._rough:
            spans = self.geometry.spans_of(columns)
            for target, index in self._rough:
                span = spans[index]
                targets.append(target)
                sources.append(raw(columns.storages[span.source], span.start, span.stop))
        on_devices = set() if columns.on_cpu else {device for device in set(columns.devices) if device.type != "cpu"}
        copy_all(targets, sources, non_blocking=bool(on_devices))
        for device in on_devices:
            torch.accelerator.current_stream(device).synchronize()
        return list(map(_fresh, self.templates))
