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
from time import sleep
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from statetree.declare import phase, renew_after_fork
from statetree.errors import StagerBusy, StagerClosed, clear_frames, unsignalled
from statetree.spans.columns import interleaved
from statetree.spans.memory import memory_of
from statetree.stager.capture import CapturedTree, capture
from statetree.stager.frozen import FrozenStorages
from statetree.stager.pool import Pool
from statetree.stager.snapshot import Geometry, Snapshot
from statetree.stager.stats import StagerStats
from statetree.stager.streams import SideStreams
from statetree.stager.workers import Worker, failed
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from types import TracebackType

    import torch

    from statetree.spans.columns import Columns
    from statetree.tree.selection import Where

_PAUSES_S: Final = 20 * [0.0005]  # how long a stage waits for memory that is leased before it takes more
T = TypeVar("T")


class Stager:
    """Copies trees into cached host memory: a ``deepcopy`` whose tensors land there.

    What ``stage`` returns never changes: no later ``stage``, no change of the source and no failure writes to its
    memory for as long as anything in this process refers to one of its tensors. Memory is reused once nothing does,
    unless it was sent to another process or shared (``share_memory_``). While it is referred to, the next stage waits
    a few milliseconds, and then takes other memory. Containers that appear several times, and cycles, come out as they
    were. (What containers and opaque objects have in common becomes separate.)

    Threads may share a stager: they take turns. A process made by ``fork`` inherits it empty, with memory of its own
    (and must not read trees that the parent staged into shared memory: the parent may overwrite them).

    Args:
        pin_memory: Take page-locked memory. Without an accelerator this warns once and is ignored.
        share_memory: Take memory that other processes can map: a staged tree that is sent to one (through
            ``torch.multiprocessing``) arrives as the same memory. It takes about a hundred file descriptors at most.
        max_snapshots: How many staged trees may be alive at a time.
        frozen: Which leaves will not be written, as for ``select``; a predicate is asked about tensors only, and a glob
            that matches nothing gives a warning. Their storages, if no other leaf lies on them, are copied once.
            Freeing such memory and allocating it again (``resize_``, as some wrappers of models do) is a write that is
            not noticed: call ``thaw`` after it.
        check: Compare frozen storages with their copies at every stage, and raise if one was written.

    Aliasing:
        Staged trees share the copies of frozen storages with each other: do not write to these.

    Raises:
        TypeError, ValueError: If ``max_snapshots`` is not an integer, or less than one.

    Example:
        >>> import statetree as st, torch
        >>> weights = torch.zeros(3)
        >>> with st.Stager() as stager:
        ...     staged = stager.stage({"w": weights, "step": 1})
        ...     _ = weights.add_(1)
        >>> staged
        {'w': tensor([0., 0., 0.]), 'step': 1}
    """

    #: Whether other processes are done with staged trees that were sent to them once nothing here refers to them.
    _receivers_are_done = False

    def __init__(
        self,
        *,
        pin_memory: bool = False,
        share_memory: bool = False,
        max_snapshots: int = 2,
        frozen: Where | None = None,
        check: bool = False,
    ) -> None:
        given: object = max_snapshots
        is_int = isinstance(given, int) and not isinstance(given, bool)
        if not is_int or max_snapshots < 1:
            msg = f"Stager: max_snapshots must be a whole number of at least 1: expected an int, got {given!r}."
            raise ValueError(msg) if is_int else TypeError(msg)
        self.max_snapshots = max_snapshots
        self._memory = memory_of(pin_memory=pin_memory, share_memory=share_memory)
        self._frozen = FrozenStorages(frozen, self._memory, check=check)
        self._closed = False
        self._start_empty()
        renew_after_fork(self, Stager._start_empty)

    def _start_empty(self) -> None:
        self._pool = Pool(self._memory)
        self._snapshots: list[Snapshot] = []
        self._frozen.start_empty()
        self._lock: Any = threading.RLock()  # a signal's handler may come between it and ``_owner``
        self._owner = 0
        self._stages = 0
        self._worker = Worker()
        self._side_streams = SideStreams()

    def stage(self, tree: T) -> T:
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
            OSError: If there is no shared memory, or no file descriptor, for another snapshot.
            TreeMismatch: With ``check``, if a frozen leaf was written to.
        """
        self._refuse_nested("stage")
        with self._lock:
            try:
                self._begin("stage")
                with phase("stage.describe"):
                    captured = capture("stage", tree)
                return self._copy("stage", captured)
            finally:
                self._end()

    def stage_async(self, tree: T) -> Future[T]:
        """Stage a tree in the background.

        The tree's structure, its plain values, its opaque objects and the memory of its tensors are those at the time
        of the call; containers may be changed at once, and tensors be replaced, swapped (``.data``) or dropped. The
        *elements* are read later: the memory must not be written, resized or freed before the future is done or
        ``synchronize`` returns. Tensors on an accelerator are copied on a side stream, after all that the calling
        thread has queued on its current streams.

        To overlap staging with training, call this after ``optimizer.step()``, and wait before the next one::

            optimizer.step()
            staged = stager.stage_async({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            ...  # the next batch
            loss = compute_loss(model, batch)  # reads parameters only
            loss.backward()  # writes gradients only
            stager.synchronize()  # or staged.result()
            optimizer.step()

        What the forward pass itself writes does not wait: running statistics of batch norm, a generator's state. Pass
        copies of such buffers, or wait before the forward pass.

        Args:
            tree: Any tree.

        Returns:
            A future of what ``stage`` returns, or of the very exception that it raises. It holds the staged tree and so
            its memory. ``cancel`` works on stages not yet begun.

        Raises:
            StagerClosed: After ``close``. (Stages not yet begun when the stager is closed get it in their futures.)
            StagerBusy: In a nested call, from an object that is being staged. (Too many live trees: in the future.)

        Example:
            >>> import statetree as st, torch
            >>> weights = torch.ones(2)
            >>> with st.Stager() as stager:
            ...     future = stager.stage_async({"w": weights, "step": 1})
            ...     stager.synchronize()
            ...     _ = weights.zero_()
            ...     future.result()
            {'w': tensor([1., 1.]), 'step': 1}
        """
        self._refuse_nested("stage_async")
        self._refuse_closed("stage_async")
        try:
            with phase("stage.describe"):
                captured = capture("stage_async", tree, aside=True)
        except unsignalled(Exception) as error:  # whatever it is, it belongs into the future
            return failed(error)
        try:
            return self._worker.start(self._finish, captured)
        except RuntimeError:
            self._refuse_closed("stage_async")  # another thread closed it meanwhile
            raise

    def synchronize(self) -> None:
        """Wait until no stage in progress reads its tree. Errors stay in their futures.

        Raises:
            StagerBusy: In a nested call: from inside an object that this thread is staging.
        """
        self._refuse_nested("synchronize")
        self._worker.wait()

    def _finish(self, captured: CapturedTree) -> Any:
        with self._lock:
            try:
                self._begin("stage_async")
                captured.check_memory_again("stage_async")
                with self._side_streams.after(captured.moment):
                    return self._copy("stage_async", captured)
            finally:
                self._end()

    @quietly
    def _copy(self, verb: str, captured: CapturedTree) -> Any:
        staged: list[torch.Tensor] = []
        frozen, columns = self._frozen.parted(verb, captured)
        try:
            if columns.tensors:
                snapshot = self._idle_snapshot(verb, columns)
                with phase("stage.move"):
                    staged = snapshot.fill(columns)
                self._trim(snapshot)
            if frozen:
                copies = self._frozen.copies(verb, captured, frozen)
                staged = interleaved(len(captured.columns.tensors), frozen, copies, staged)
            result = captured.put_together(self._handed_out(staged))
        except BaseException as error:
            staged = []
            clear_frames(error)  # they hold staged tensors, but a stage that failed takes no lease
            raise
        self._stages += 1
        return result

    def _handed_out(self, staged: list[torch.Tensor]) -> list[torch.Tensor]:
        return staged

    def thaw(self) -> None:
        """Copy frozen leaves again in the next stage. Trees that were staged before do not change."""
        self._frozen.thaw()

    def prewarm(self, tree: Any) -> None:
        """Allocate, pin and fault in the memory that staging a tree like this one takes.

        Args:
            tree: A tree of the geometry that will be staged. It is not copied.

        Raises:
            StagerBusy, StagerClosed, UnsupportedLeaf, OSError: As ``stage``.
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
        _, columns = self._frozen.parted("prewarm", capture("prewarm", tree))
        if columns.tensors:
            snapshot = self._idle_snapshot("prewarm", columns)
            snapshot.touch()
            self._trim(snapshot)

    @property
    def stats(self) -> StagerStats:
        """What the stager has done so far. Staging a tree like the last ones allocates nothing."""
        return StagerStats(self._stages, self._pool.allocations, self._pool.allocated_bytes)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the stager holds: of the staged trees that are alive, and of one idle snapshot.

        Memory beyond that is let go of when this is asked for, and by the next stage.
        """
        if not self._owner:  # no call is under way
            with self._lock:
                self._owner = threading.get_ident()
                if self._snapshots:
                    self._trim(self._snapshots[-1])
                self._owner = 0
        return self._frozen.nbytes + self._pool.nbytes + sum(snapshot.nbytes for snapshot in list(self._snapshots))

    def close(self) -> None:
        """Release all memory. Staged trees stay valid. Closing again does nothing.

        A stage in progress in the background is completed; those not yet begun fail with ``StagerClosed``.
        """
        self._closed = True
        self._worker.close()
        if self._in_own_call():
            return  # from inside an object that is being staged: the memory goes when that is over
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        self._refuse_closed("Stager")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _in_own_call(self) -> bool:
        """Whether this thread is inside a call of this stager: an object's ``__reduce__`` called it, say."""
        return self._owner == threading.get_ident() and self._lock._is_owned()  # noqa: SLF001

    def _refuse_nested(self, verb: str) -> None:
        if self._in_own_call():
            raise StagerBusy(f"{verb}: the stager is staging already: expected one call at a time, got a nested one.")

    # The lock is held in with statements, and only flags that no interrupt can leave wrong are kept beside it.
    def _begin(self, verb: str) -> None:
        self._owner = threading.get_ident()
        self._refuse_closed(verb)

    def _refuse_closed(self, verb: str) -> None:
        if self._closed:
            raise StagerClosed(f"{verb}: the stager is closed: expected an open one. Make a new Stager.")

    def _end(self) -> None:
        self._owner = 0
        if self._closed:
            self._snapshots.clear()
            self._pool.clear()
            self.thaw()

    def _idle_snapshot(self, verb: str, columns: Columns) -> Snapshot:
        """Return a snapshot that fits and that nothing refers to, making one if there may be another."""
        for attempt in ("first", "after collecting garbage"):
            idle = self._idle()
            fitting = [snapshot for snapshot in self._snapshots if snapshot.geometry.fits(columns)]
            if attempt == "first" and not any(snapshot in idle for snapshot in fitting):
                leased = [snapshot for snapshot in self._snapshots if snapshot not in idle]
                idle = self._idle_soon(fitting if len(leased) < self.max_snapshots else leased)
            for snapshot in fitting:
                if snapshot in idle:
                    return snapshot
            if len(self._snapshots) - len(idle) < self.max_snapshots:
                for snapshot in idle:  # what they hold may serve the new one
                    self._snapshots.remove(snapshot)
                    self._pool.give(snapshot.dissolve())
                snapshot = Snapshot(Geometry(columns), columns, self._pool)
                self._snapshots.append(snapshot)
                return snapshot
            if attempt == "first":
                # Staged trees in reference cycles (DCP leaves some behind) are garbage, but not yet known to be.
                gc.collect()
        alive = "1 staged tree is" if self.max_snapshots == 1 else f"{self.max_snapshots} staged trees are"
        raise StagerBusy(
            f"{verb}: {alive} alive: expected at most max_snapshots={self.max_snapshots} "
            "with this one. Drop one (a saving thread may still hold it), or make the Stager with more."
        )

    def _idle(self) -> list[Snapshot]:
        """Return the snapshots that may be written. Others that nobody here refers to may be read elsewhere: drop."""
        found = []
        for snapshot in list(self._snapshots):
            if snapshot.is_leased():
                continue
            if snapshot.is_intact() and (self._receivers_are_done or not snapshot.was_sent()):
                found.append(snapshot)
            else:
                self._snapshots.remove(snapshot)
        return found

    def _idle_soon(self, wanted: Sequence[Snapshot]) -> list[Snapshot]:
        """Wait a moment for one of some snapshots: a thread that saves drops its tree just after it says it is done."""
        for pause_s in _PAUSES_S:  # not until a time: a system that is busy wakes this thread late, but that one, too
            if wanted and all(map(Snapshot.is_leased, wanted)):
                sleep(pause_s)
        return self._idle()

    def _trim(self, latest: Snapshot) -> None:
        """Keep at most one idle snapshot beside the live ones: the latest, if that is idle."""
        self._pool.clear()
        idle = [snapshot for snapshot in self._snapshots if snapshot is not latest and not snapshot.is_leased()]
        if idle and latest.is_leased():
            idle.pop()
        for snapshot in idle:
            self._snapshots.remove(snapshot)
