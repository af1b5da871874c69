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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from statetree.buffers import Memory, memory_of
from statetree.columns import Columns
from statetree.errors import StagerBusy, StagerClosed
from statetree.geometry import Geometry
from statetree.leaves import Unpacked, holds_tensor, unpack
from statetree.pool import Pool
from statetree.snapshots import Snapshot
from statetree.spans import check_memory, extents, replicate
from statetree.streams import Moment, SideStreams, devices_of
from statetree.torch_internals import quietly
from statetree.tree import flatten_for_copy, unflatten_copy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch

    from statetree.treespec import TreeSpec


class StagerStats(NamedTuple):
    """What a stager has done so far.

    Attributes:
        stages: Trees staged.
        allocations: Blocks of memory taken from the system: so many pinnings, and in shared memory descriptors.
        allocated_bytes: Bytes in them, freed ones included.
    """

    stages: int
    allocations: int
    allocated_bytes: int


class _Look(NamedTuple):
    """A tree taken apart: everything about it but the elements of its tensors.

    Attributes:
        spec: Its structure.
        unpacked: Its leaves.
        columns: Those of its plain tensors that have memory.
        meta: The indices of the others among all plain tensors.
        moment: What the elements wait for, where they lie on an accelerator.
    """

    spec: TreeSpec
    unpacked: Unpacked
    columns: Columns
    meta: list[int]
    moment: Moment


class Stager:
    """Copies trees into cached host memory: a ``deepcopy`` whose tensors land there.

    What ``stage`` returns never changes: no later ``stage``, no change of the source and no failure writes to its
    memory for as long as anything in this process refers to one of its tensors. Memory is reused once nothing does,
    unless it was sent to another process. Containers that appear several times in a tree, and cycles, come out as
    they were. (What containers and opaque objects have in common becomes separate.)

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

    #: Whether other processes that staged trees were sent to are done with them once nothing here refers to them.
    _receivers_are_done = False

    def __init__(self, *, pin_memory: bool = False, share_memory: bool = False, max_snapshots: int = 2) -> None:
        if max_snapshots < 1:
            msg = f"Stager: max_snapshots must be at least 1: expected a positive number, got {max_snapshots}."
            raise ValueError(msg)
        self.max_snapshots = max_snapshots
        self._memory = memory_of(pin_memory=pin_memory, share_memory=share_memory)
        self._pool = Pool(self._memory)
        self._snapshots: list[Snapshot] = []
        self._lock = threading.Lock()
        self._owner = 0
        self._closed = False
        self._stages = 0
        self._worker = ThreadPoolExecutor(1, "statetree-stager")  # starts its thread when there is work
        self._under_way: set[Future[Any]] = set()
        self._side_streams = SideStreams()

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
                return self._copy(self._look_at("stage", tree))
            finally:
                self._end()

    def stage_async(self, tree: Any) -> Future[Any]:
        """Stage a tree in the background.

        The tree's structure, its plain values and its opaque objects are those at the time of the call. The elements
        of its tensors are read later: they must not change before the future is done (or ``synchronize`` returns).
        To overlap staging with a training step, call this after ``optimizer.step()``, run the next forward and
        backward pass, which change no parameter and no optimizer state, and wait before the next
        ``optimizer.step()``. Tensors on an accelerator are copied on a side stream, after all that the calling thread
        has queued on its current streams.

        Args:
            tree: Any tree.

        Returns:
            A future of what ``stage`` returns, or of the very exception that it raises. It holds the staged tree, and
            with that its memory, for as long as it is referred to.

        Raises:
            StagerClosed: After ``close``. (Stages not yet begun when the stager is closed get it in their futures.)

        Example:
            >>> import statetree as st, torch
            >>> with st.Stager() as stager:
            ...     future = stager.stage_async({"w": torch.ones(2)})
            ...     future.result()
            {'w': tensor([1., 1.])}
        """
        self._refuse_nested("stage_async")
        self._refuse_closed("stage_async")
        try:
            look = self._look_at("stage_async", tree)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the future
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        try:
            future = self._worker.submit(self._finish, look)
        except RuntimeError:
            self._refuse_closed("stage_async")  # another thread closed it meanwhile
            raise
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def synchronize(self) -> None:
        """Wait until no stage under way reads its tree any more. Errors stay in their futures."""
        wait(tuple(self._under_way))

    def _finish(self, look: _Look) -> Any:
        with self._lock:
            try:
                self._begin("stage_async")
                with self._side_streams.after(look.moment):
                    return self._copy(look)
            finally:
                self._end()

    @quietly
    def _copy(self, look: _Look) -> Any:
        staged: list[torch.Tensor] = []
        if look.columns.tensors:
            snapshot = self._idle_snapshot(look.columns)
            staged = snapshot.fill(look.columns)
            self._trim(snapshot)
        result = unflatten_copy(look.spec, look.unpacked.pack(_with_meta(look.unpacked.columns, staged, look.meta)))
        self._stages += 1
        return result

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
        columns = self._look_at("prewarm", tree).columns
        if columns.tensors:
            snapshot = self._idle_snapshot(columns)
            snapshot.touch()
            self._trim(snapshot)

    @property
    def stats(self) -> StagerStats:
        """What the stager has done so far. Staging a tree like the last ones allocates nothing."""
        return StagerStats(self._stages, self._pool.allocations, self._pool.allocated_bytes)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the stager holds, leased and idle."""
        return self._pool.nbytes + sum(snapshot.nbytes for snapshot in list(self._snapshots))

    def close(self) -> None:
        """Release all memory. Staged trees stay valid. Closing again does nothing.

        A stage under way in the background is completed; those not yet begun fail with ``StagerClosed``.
        """
        self._closed = True
        self._worker.shutdown(wait=False)
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
        self._refuse_closed(verb)

    def _refuse_closed(self, verb: str) -> None:
        if self._closed:
            msg = f"{verb}: the stager is closed: expected an open one. Make a new Stager."
            raise StagerClosed(msg)

    def _end(self) -> None:
        self._owner = 0
        if self._closed:
            self._snapshots.clear()
            self._pool.clear()

    @quietly
    def _look_at(self, verb: str, tree: Any) -> _Look:
        """Take a tree apart."""
        leaves, spec = flatten_for_copy(tree, holds_tensor, shared=True)
        unpacked = unpack(verb, leaves, spec.paths, together=True)
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
        moment = Moment(() if columns.on_cpu else devices_of(columns.devices))
        return _Look(spec, unpacked, columns, meta, moment)

    def _idle_snapshot(self, columns: Columns) -> Snapshot:
        """Return a snapshot that fits and that nothing refers to, making one if there may be another."""
        geometry: Geometry | None = None
        for attempt in ("first", "after collecting garbage"):
            idle = [snapshot for snapshot in self._snapshots if not snapshot.is_leased()]
            if not self._receivers_are_done:
                for snapshot in filter(Snapshot.was_sent, idle):
                    self._snapshots.remove(snapshot)
                idle = [snapshot for snapshot in idle if snapshot in self._snapshots]
            for snapshot in idle:
                if snapshot.geometry.fits(columns):
                    return snapshot
            if len(self._snapshots) - len(idle) < self.max_snapshots:
                geometry = geometry or Geometry(columns)
                for snapshot in idle:  # what they hold may serve the new one
                    self._snapshots.remove(snapshot)
                    self._pool.give(snapshot.dissolve())
                snapshot = Snapshot(geometry, columns, self._pool)
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

    def _trim(self, latest: Snapshot) -> None:
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
