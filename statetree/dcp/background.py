"""``async_save``: a state staged at once, and saved by a thread while training goes on.

The thread communicates over a process group of its own, so that it never meets training's collectives.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from statetree.dcp.groups import check_same, group_for, is_alive, new_gloo_group, ranks_of
from statetree.dcp.saving import write
from statetree.errors import CheckpointError, RankMismatch, clear_frames, suppress, unsignalled
from statetree.exchange.call import on_all_ranks
from statetree.files.publishing import is_alone
from statetree.files.remote import refuse_url
from statetree.stager.stager import Stager
from statetree.stager.workers import BackgroundFuture, aside, queued

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup


def async_save(
    state: Any,
    *,
    checkpoint_id: str | os.PathLike[str],
    stager: Any = None,
    process_group: ProcessGroup | None = None,
) -> Future[None]:
    """Stage a state, and save it in the background.

    When this returns, the state may change. Saves run one after the other, in the order of the calls, each with its own
    step's values. They communicate over a gloo group of their own, never over the one that training uses.

    Args:
        state: Any tree.
        checkpoint_id: The directory, another one for every save.
        stager: A ``Stager``, whose memory is reused for every save; it must hold one snapshot for each save in flight.
            Without it, memory is allocated for this save only.
        process_group: The ranks that save; by default all.

    Returns:
        A future that is done when the checkpoint is complete. It has no result, or the exception that ``save`` would
        have raised. It cannot be cancelled. Wait for it before you destroy the process group, or the save fails.

    Collective:
        Every rank of the group calls it, in the same order relative to other collectives: the first call for a group
        makes two other groups of the same ranks. If staging fails on one rank, all raise, and nothing is begun.

    Raises:
        StagerBusy, StagerClosed, UnsupportedLeaf: What staging raises. All ranks raise it.
        RankMismatch: If the ranks pass different directories, or one does not answer. Or if this process is not in the
            group: only this one raises.

    Example:
        >>> import tempfile, torch, statetree.dcp
        >>> directory, weights = tempfile.mkdtemp(), torch.zeros(2)
        >>> future = statetree.dcp.async_save({"w": weights}, checkpoint_id=directory)
        >>> _ = weights.add_(1)
        >>> future.result()
        >>> statetree.load(directory)
        {'w': tensor([0., 0.])}
    """
    refuse_url("async_save", checkpoint_id, "Save to a local directory.")
    directory = Path(checkpoint_id)
    background = background_of("async_save", directory, process_group, "async_save")
    agreeing = background_of("async_save", directory, process_group, "async_save.staging").group
    check_same("async_save", "checkpoint_id", str(directory), agreeing)

    def stage() -> Any:
        if stager is not None:
            return stager.stage(state)
        with Stager() as own:
            return own.stage(state)

    return start(background, agreeing, stage, lambda staged: write(staged, directory, background.group))


class Background:
    """One thread that runs jobs in order, and the gloo group that they communicate over (``None`` without ranks)."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.mark = object()  # which thread it is: see ``_here``
        self.executor = ThreadPoolExecutor(
            1, "statetree-save", initializer=setattr, initargs=(_here, "mark", self.mark)
        )


#: On the thread of a ``Background``: its mark.
_here: Final = threading.local()
#: Stands for a group that was destroyed.
_DESTROYED: Final[Any] = object()
#: How long the ranks wait for each other while they make groups: all have begun to, so that one that is late has died.
_MAKING: Final = timedelta(minutes=5)

_lock: threading.RLock
_by_parent: WeakKeyDictionary[Any, dict[str, Background]]
_without_ranks: dict[str, Background]


#: In a forked process, what its parent had. Freeing a group ends threads, which are not there: the process would crash.
_of_parents: Final[list[Any]] = []


def _start_empty() -> None:
    """Begin without threads."""
    global _lock, _by_parent, _without_ranks
    _lock, _by_parent, _without_ranks = threading.RLock(), WeakKeyDictionary(), {}


def _leave_to_the_parent() -> None:
    """Begin anew in a forked process: the parent's threads are gone, and nobody would release the lock."""
    _of_parents.append([_without_ranks, *_by_parent.values()])
    _start_empty()


_start_empty()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def background_of(verb: str, directory: Path, parent: ProcessGroup | None, purpose: str) -> Background:
    """Return the thread and the group for a purpose: made on the first call, and the same ones ever after.

    The first call for a parent and purpose is made by every rank of the parent.
    """
    with _lock:  # where a signal's handler may call it, too
        parent = group_for(verb, parent)
        found = _without_ranks if parent is None else _by_parent.setdefault(parent, {})
        if purpose not in found:
            try:
                found.setdefault(purpose, Background(None if parent is None else new_gloo_group(parent, _MAKING)))
            except unsignalled(RuntimeError, RankMismatch) as error:
                raise CheckpointError(
                    f"{verb}: the ranks could not make a process group to use {directory}: expected all to take part, "
                    f"got: {str(error).splitlines()[0]}. Start the job again where a rank died; complete checkpoints "
                    "are untouched."
                ) from error
        return found[purpose]


def check_alone(verb: str) -> None:
    """Raise ``CheckpointError`` in the handler of a signal if what it would wait for may wait for this thread."""
    if is_alone():
        raise CheckpointError(
            f"{verb}: a signal's handler would wait for a save that waits for the thread which it interrupted: "
            "expected it not to wait. Have it set a flag, and save after it (Checkpointer.save_on)."
        )


class SaveFuture(BackgroundFuture[None]):
    """The future of a save, which knows whether ``result`` has raised what went wrong."""

    is_delivered = False

    def __init__(self, mark: object) -> None:
        super().__init__()
        self._mark = mark

    def check_thread(self, verb: str) -> None:
        """Raise ``CheckpointError`` on the save's thread, or one that it may wait for: waiting there would deadlock."""
        if self._is_over:
            return
        check_alone(verb)
        if getattr(_here, "mark", None) is self._mark:
            raise CheckpointError(
                f"{verb}: it would wait for a save of the thread that it is called on: expected another, got that in "
                "the background, which calls on_event. Note there what to do, and do it in the training loop."
            )

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise what went wrong."""
        self.check_thread("result")
        try:
            super().result(timeout)
        except BaseException:
            self.is_delivered = self._is_over  # else it was the waiting that failed
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return what went wrong."""
        self.check_thread("exception")
        return super().exception(timeout)


def start(
    background: Background,
    agreeing: ProcessGroup | None,
    stage: Callable[[], Any],
    save: Callable[[Callable[[], Any]], None],
    running: list[SaveFuture] | None = None,
) -> SaveFuture:
    """Stage a state, and run a save of it on the background's thread: ``save`` is given what returns it.

    Over the group ``agreeing``, the ranks tell each other at once whether staging failed. Then all raise. The save is
    ``running`` before it is queued: an interrupt between the two leaves none that nobody waits for.
    """
    held = [on_all_ranks("async_save", ranks_of("async_save", agreeing), stage)]
    future = SaveFuture(background.mark)
    future.set_running_or_notify_cancel()  # a save that one rank cancels would leave the others waiting

    def queue() -> Future[None] | None:
        if running is not None:
            running.append(future)
        return queued(background.executor, _run, background, future, held, save)

    try:
        if aside(queue) is None:
            _run(background, future, held, save)
    except BaseException as error:
        with suppress(IndexError):  # it has begun
            held.pop()
            future.is_delivered = True
            future.set_exception(error)
        raise
    return future


def _run(
    background: Background, future: Future[None], held: list[Any], save: Callable[[Callable[[], Any]], None]
) -> None:
    try:
        staged = [held.pop()]
    except IndexError:  # its caller was interrupted, and has taken it back
        return

    # The list is all that holds the staged state once the save has it: it is free again before the future is done.
    def taken() -> Any:
        tree = staged.pop()
        return tree.result() if isinstance(tree, Future) else tree

    try:
        save(taken)
    except BaseException as error:  # noqa: BLE001 - it is the future's
        staged.clear()
        clear_frames(error)  # the staged state is somewhere in there
        if background.group is not None and not is_alive(background.group):
            background.group = _DESTROYED  # closes its connections, so that ranks that wait for this one hear of it
        future.set_exception(error)
    else:
        staged.clear()
        future.set_result(None)


class RunningSave:
    """The save in the background of a series, and the lock of calls that may wait.

    There is one at a time, unless a signal's handler saves, too, while the main thread begins one.
    """

    def __init__(self) -> None:
        self.futures: list[SaveFuture] = []
        self._calling = threading.RLock()

    def turn(self, verb: str) -> AbstractContextManager[Any]:
        """Return the lock of calls; raise ``CheckpointError`` on a thread that its holder may wait for.

        It is asked once more before a call waits: the save may have begun while the lock was waited for.
        """
        check_alone(verb)
        self._check_thread(verb)
        return self._calling

    def settle(self, verb: str, group: ProcessGroup | None) -> None:
        """Wait for the save, and raise what it raised on any rank, unless its future has.

        Every rank calls it, also where there is none: after a call that failed, another rank may have one.
        """
        on_all_ranks(verb, ranks_of(verb, group), partial(self.raise_error, verb))

    def raise_error(self, verb: str) -> None:
        """Wait for the save, and raise what it raised and nobody was told."""
        self._check_thread(verb)
        while running := next(iter(self.futures), None):
            error = running.exception()  # an interrupt while waiting leaves it to the next call
            with suppress(ValueError):  # another call has seen it meanwhile
                self.futures.remove(running)
            if error is not None and not running.is_delivered:
                error.add_note("statetree: that was the last save in the background; this call began nothing")
                raise error

    def _check_thread(self, verb: str) -> None:
        for running in list(self.futures):  # which another thread may take away
            running.check_thread(verb)
