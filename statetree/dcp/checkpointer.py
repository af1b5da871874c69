"""``Checkpointer``: a series of checkpoints in a directory, of which every one that shows is complete."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from statetree.dcp.background import Background, background_of, start
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.groups import check_alive, from_all, from_first, is_first, size_of
from statetree.dcp.loading import load
from statetree.dcp.saving import write
from statetree.dcp.series import Checkpoint, Partial, Series
from statetree.errors import CheckpointError, StagerBusy, StateTreeError
from statetree.stager import Stager

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Checkpointer:
    """Saves the states of a run, step by step, and restores the latest.

    A checkpoint shows, as ``step-…`` in the directory, when all of it is on the disk: whenever the process dies, the
    last complete one can be restored. What a crash left behind is removed by the next save. One save runs at a time.

    Args:
        directory: Where the checkpoints go, the same one on every rank. It is made by the first save.
        stager: Stages the states of ``async_save``; by default one of its own, which ``close`` closes.
        keep: How many checkpoints stay: those with the highest steps, and always the one saved last. ``None`` keeps
            all.
        process_group: The ranks that save and restore; by default all.

    Collective:
        Every rank of the group makes the same calls of ``save``, ``async_save`` and ``restore`` in the same order,
        relative to other collectives as well: the first of them makes two gloo groups of the same ranks.

    Raises:
        ValueError: If ``keep`` is less than one.

    Example:
        >>> import tempfile, torch
        >>> from statetree.dcp import Checkpointer
        >>> weights = torch.zeros(2)
        >>> with Checkpointer(tempfile.mkdtemp(), keep=2) as checkpointer:
        ...     for step in range(3):
        ...         _ = weights.add_(1)
        ...         _ = checkpointer.async_save(step, {"w": weights, "step": step})
        ...     _ = checkpointer.restore({"w": weights, "step": 0}, step=1)
        ...     checkpointer.steps(), weights
        ([1, 2], tensor([2., 2.]))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        stager: Any = None,
        keep: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            msg = f"Checkpointer: keep must be at least 1, or None: expected a positive number, got {keep}."
            raise ValueError(msg)
        self.directory = Path(directory)
        self.keep = keep
        self._series = Series(self.directory)
        self._process_group = process_group
        self._given_stager = stager
        self._own_stager: Stager | None = None
        self._running: Future[None] | None = None
        self._closed = False

    def save(self, step: int, state: Any) -> None:
        """Save a state, and return when the checkpoint is complete and old ones are removed.

        Args:
            step: The number of the checkpoint. If there is one, it is replaced, and is there until the new one is.
            state: Any tree.

        Raises:
            CheckpointError: If it cannot be written, or if an earlier save in the background failed: then this one was
                not begun.
            UnsupportedLeaf, CyclicTree: As ``statetree.dcp.save``.
        """
        foreground = self._begin("save", step)
        with checkpoint_errors("save", self.directory):
            self._write(step, lambda: state, foreground.group)

    def async_save(self, step: int, state: Any, *, wait: bool = True) -> Future[None]:
        """Stage a state, and save it in the background.

        When this returns, the state may change. (If the stager is an ``AsyncStager(asynchronous=True)``, its tensors
        may once ``stager.synchronize()`` has returned: staging then overlaps with the next forward and backward pass.)

        Args:
            step: The number of the checkpoint.
            state: Any tree.
            wait: Whether to wait for a save that is still running, or to refuse.

        Returns:
            A future that is done when the checkpoint is complete. What goes wrong is raised by it, and by the next
            call.

        Raises:
            StagerBusy: With ``wait=False``, if a save is still running, on this rank or another. All ranks raise.
            CheckpointError: If an earlier save in the background failed. This one was not begun.
            StagerBusy, StagerClosed, UnsupportedLeaf: What staging raises on this rank. Of several ranks, all raise
                at the next call then.
        """
        if not wait:
            self._check_idle("async_save")
        self._begin("async_save", step)
        background = self._background("save")
        stager = self._stager()

        def write_staged(staged: Callable[[], Any]) -> None:
            with checkpoint_errors("save", self.directory):
                self._write(step, staged, background.group)

        future, error = start(background, state, stager, write_staged)
        if error is None or size_of(background.group) > 1:
            self._running = future
        if error is not None:
            raise error
        return future

    def restore(self, state: Any = None, step: int | None = None, *, weights_only: bool = True) -> Any:
        """Load a checkpoint. A save that is running is waited for.

        Args:
            state: The template whose tensors are filled: see ``statetree.dcp.load``. Without it, the state comes back
                as it was saved.
            step: Which one; by default the latest complete one.
            weights_only: As for ``statetree.dcp.load``.

        Returns:
            The tree.

        Raises:
            CheckpointError: If there is none, or it cannot be read, or an earlier save in the background failed.
            TreeMismatch, UnsupportedLeaf: As ``statetree.dcp.load``.
        """
        self._check_open("restore")
        self._settle()
        group = self._background("restore").group
        found = _by_first("restore", group, lambda: self._find(step))
        return load(state, checkpoint_id=self._series.path(found), process_group=group, weights_only=weights_only)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, rising. Whatever else is in the directory is ignored."""
        return [checkpoint.step for checkpoint in self._series.complete()]

    def close(self) -> None:
        """Wait for a save that is running, and release the stager's memory. Closing again does nothing.

        Raises:
            CheckpointError: If a save in the background failed, and no call has raised that yet.
        """
        self._closed = True
        try:
            self._settle()
        finally:
            if self._own_stager is not None:
                self._own_stager.close()
                self._own_stager = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StateTreeError as failure:
            if error is None:
                raise
            error.add_note(f"statetree: besides, {failure}")

    def _begin(self, verb: str, step: int) -> Background:
        self._check_open(verb)
        if type(step) is not int or step < 0:
            msg = f"{verb}: step must be a number that is not negative: expected an int, got {step!r}."
            raise ValueError(msg)
        self._settle()
        return self._background("save")

    def _background(self, purpose: str) -> Background:
        return background_of(self._process_group, f"Checkpointer.{purpose}")

    def _check_open(self, verb: str) -> None:
        if self._closed:
            msg = f"{verb}: the Checkpointer of {self.directory} is closed: expected an open one. Make a new one."
            raise CheckpointError(msg)

    def _settle(self) -> None:
        """Wait for the save in the background, and raise what it raised."""
        if self._running is not None:
            concurrent.futures.wait(
                [self._running]
            )  # apart, so that an interrupt while waiting leaves it to the next call
            running, self._running = self._running, None
            running.result()

    def _check_idle(self, verb: str) -> None:
        busy = self._running is not None and not self._running.done()
        ranks = [rank for rank, flag in enumerate(from_all(busy, self._background("restore").group)) if flag]
        if ranks:
            where = f" on rank {', '.join(map(str, ranks))}" if len(ranks) > 1 or ranks != [0] else ""
            msg = f"{verb}: a save is still running{where}: expected none. Wait for its future, or pass wait=True."
            raise StagerBusy(msg)

    def _stager(self) -> Any:
        if self._given_stager is not None:
            return self._given_stager
        if self._own_stager is None:
            self._own_stager = Stager()
        return self._own_stager

    def _find(self, step: int | None) -> Checkpoint:
        complete = self._series.complete()
        chosen = [found for found in complete if step is None or found.step == step]
        if chosen:
            return chosen[-1]
        what = "a checkpoint" if step is None else f"one of step {step}"
        there = ", ".join(str(found.step) for found in complete[-10:]) or "none"
        msg = (
            f"restore: there is no complete checkpoint in {self.directory}: expected {what}, got steps: {there}. "
            "Save one first, or pass the directory that holds them."
        )
        raise CheckpointError(msg)

    def _write(self, step: int, state: Callable[[], Any], group: ProcessGroup | None) -> None:
        """Write a checkpoint under another name, then give it its own."""
        partial: Partial | None = None

        def begin() -> Path:
            nonlocal partial
            partial = self._series.begin(step)
            return partial.path

        def publish() -> None:
            assert partial is not None
            self._series.prune(self.keep, self._series.publish(partial))

        try:
            path = _by_first("save", group, begin)
            write(state, path, group)
            _by_first("save", group, publish)
        except BaseException:
            if partial is not None:
                partial.discard()
            raise


def _by_first(verb: str, group: ProcessGroup | None, action: Callable[[], T]) -> T:
    """Let the first rank act on the directory, and return on every rank what it returned, or raise what it raised."""
    check_alive(verb, group)
    outcome: Any = None
    if is_first(group):
        try:
            outcome = action()
        except CheckpointError as error:
            outcome = error
        except OSError as error:
            outcome = CheckpointError(
                f"{verb}: the first rank could not use the directory: {type(error).__name__}: {error}. Mend the cause, "
                "and try again; complete checkpoints are untouched."
            )
    outcome = from_first(outcome, group)
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome  # type: ignore[no-any-return]
