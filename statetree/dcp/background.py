"""``async_save``: a state staged at once, and saved by a thread while training goes on.

The thread communicates over a process group of its own, so that it never meets training's collectives.
"""

from __future__ import annotations

import os
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from statetree.dcp.groups import from_all, group_for, raise_together
from statetree.dcp.internals import count_groups, is_alive
from statetree.dcp.saving import warn_of_values, write
from statetree.errors import StateTreeError, chain_of
from statetree.files.remote import refuse_url
from statetree.stager.stager import Stager
from statetree.stager.workers import submit

if TYPE_CHECKING:
    from collections.abc import Callable

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
        StagerBusy, StagerClosed, UnsupportedLeaf: What staging raises on this rank. The others raise a
            ``CheckpointError`` that names it.
        RankMismatch: If this process is not in the group. Only this one raises.

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
    warn_of_values("async_save", state)
    background = background_of("async_save", process_group, "async_save")
    agreeing = background_of("async_save", process_group, "async_save.staging").group
    return start(
        background,
        agreeing,
        lambda: stage(state, stager),
        lambda staged: write(staged, directory, background.group),
    )


class Background:
    """One thread that runs jobs in order, and the gloo group that they communicate over (``None`` without ranks)."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="statetree-save")

    def let_go_of_destroyed(self) -> None:
        """Close the connections of a group that was destroyed, so that ranks that wait for this one hear of it."""
        if self.group is not None and not is_alive(self.group):
            self.group = _DESTROYED


#: Stands for a group that was destroyed.
_DESTROYED: Final[Any] = object()

_lock: threading.Lock
_by_parent: WeakKeyDictionary[Any, dict[str, Background]]
_without_ranks: dict[str, Background]


def _start_empty() -> None:
    """Begin without threads. In a forked process the parent's are gone, and nobody would release the lock."""
    global _lock, _by_parent, _without_ranks
    _lock, _by_parent, _without_ranks = threading.Lock(), WeakKeyDictionary(), {}


_start_empty()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_empty)


def background_of(verb: str, parent: ProcessGroup | None, purpose: str) -> Background:
    """Return the thread and the group for a purpose: made on the first call, and the same ones ever after.

    Args:
        verb: On whose behalf, for messages.
        parent: The group whose ranks take part; by default all.
        purpose: Tells several for one parent apart.

    Collective:
        The first call for a parent and purpose: every rank of the parent makes it.
    """
    with _lock:
        parent = group_for(verb, parent)
        found = _without_ranks if parent is None else _by_parent.setdefault(parent, {})
        if purpose not in found:
            found[purpose] = Background(None if parent is None else _group_like(parent))
        return found[purpose]


def _group_like(parent: ProcessGroup) -> Any:
    # Ranks only find each other if they are in equally many groups.
    own = count_groups()
    fillers = [_new_group([dist.get_rank()]) for _ in range(max(from_all(own, parent)) - own)]
    group = _new_group(dist.get_process_group_ranks(parent))
    for filler in fillers:
        dist.destroy_process_group(filler)
    return group


def _new_group(ranks: list[int]) -> Any:
    # With local synchronization, other ranks need not take part.
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class SaveFuture(Future[None]):
    """The future of a save, which knows whether ``result`` has raised what went wrong."""

    _is_delivered = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise what went wrong."""
        try:
            super().result(timeout)
        except BaseException:
            self._is_delivered = self.done()  # else it was the waiting that failed
            raise

    def undelivered(self) -> BaseException | None:
        """Return what went wrong, unless ``result`` has raised it. The save is done."""
        return None if self._is_delivered else self.exception()


def start(
    background: Background,
    agreeing: ProcessGroup | None,
    stage: Callable[[], Any],
    save: Callable[[Callable[[], Any]], None],
) -> SaveFuture:
    """Stage a state, and run a save of it on the background's thread.

    Args:
        background: The thread and the group.
        agreeing: The same ranks, over which they tell each other at once whether staging failed. Then all raise.
        stage: Returns the staged state.
        save: Given a function that returns the staged state, saves it.
    """
    error: BaseException | None = None
    held: list[Any] = []
    try:
        held.append(stage())
    except BaseException as raised:  # noqa: BLE001 - it is raised below, when the others know
        error = raised
    raise_together("async_save", error, "staging failed", "Nothing was begun.", agreeing)
    future = SaveFuture()
    future.set_running_or_notify_cancel()  # a save that one rank cancels would leave the others waiting
    submit(background.executor, _run, background, future, held, save)
    return future


def stage(state: Any, stager: Any) -> Any:
    """Return a state staged by a stager, or by one that is made for this where there is none."""
    if stager is not None:
        return stager.stage(state)
    with Stager() as own:
        return own.stage(state)


def _run(
    background: Background, future: Future[None], held: list[Any], save: Callable[[Callable[[], Any]], None]
) -> None:
    # The list is all that holds the staged state once the save has it: it is free again before the future is done.
    try:
        save(lambda: _taken(held))
    except BaseException as error:  # noqa: BLE001 - it is the future's
        held.clear()
        _release(error)
        background.let_go_of_destroyed()
        future.set_exception(error)
    else:
        held.clear()
        future.set_result(None)


def _taken(held: list[Any]) -> Any:
    tree = held.pop()
    return tree.result() if isinstance(tree, Future) else tree


def _release(error: BaseException) -> None:
    """Let go of what an error's tracebacks hold: the staged state is somewhere in there.

    Where its causes were raised is kept as a note.
    """
    traceback.clear_frames(error.__traceback__)
    for found in list(chain_of(error))[1:]:
        if found.__traceback__ is not None and found is error.__cause__:
            error.add_note("statetree: raised at\n" + traceback.format_tb(found.__traceback__)[-1].rstrip())
        # DCP's functions hold all there is in their closures, which clearing their frames leaves alone.
        found.__traceback__ = None


class RunningSave:
    """The save in the background of a series, of which there is one at a time.

    Attributes:
        future: Its future; ``None`` without one.
    """

    def __init__(self) -> None:
        self.future: SaveFuture | None = None

    def settle(self, verb: str, group: Callable[[], ProcessGroup | None]) -> None:
        """Wait for the save, and raise what it raised on any rank, unless its future has."""
        if self.future is None:
            return
        error = self.error()
        try:
            ranks = group()
        except StateTreeError:
            if error is not None:
                raise error from None
            raise
        remedy = "This call began nothing. Make it again, once the cause is mended."
        raise_together(verb, error, "the last save in the background failed", remedy, ranks)

    def error(self) -> BaseException | None:
        """Wait for the save, and return what it raised and nobody was told."""
        if self.future is None:
            return None
        wait([self.future])  # an interrupt while waiting leaves it to the next call
        running, self.future = self.future, None
        return running.undelivered()
