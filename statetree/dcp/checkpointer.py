"""``Checkpointer``: a series of checkpoints in a directory, of which every one that shows is complete."""

from __future__ import annotations

import concurrent.futures
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from statetree.dcp.background import Background, background_of, stage, start
from statetree.dcp.directories import DirectoryReader
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.groups import check_alive, from_all, from_first, is_first, size_of
from statetree.dcp.loading import read
from statetree.dcp.saving import warn_of_values, write
from statetree.dcp.series import Series, StepDirectory, UnfinishedStep
from statetree.errors import CheckpointError, RankMismatch, StagerBusy, StateTreeError, shown
from statetree.stager.stager import Stager

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Checkpointer:
    """Saves the states of a run, step by step, and restores the latest.

    A checkpoint shows, as ``step-…`` in the directory, when all of it is on the disk: whenever the process dies, the
    last complete one can be restored. What a crash left behind is removed by the next save. One save runs at a time.

    Threads of a process may share one: their calls run one after the other. Where there are several ranks, the order of
    the calls must be the same on each, so that one thread should make them. Other processes may restore from the
    directory meanwhile.

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
        TypeError, ValueError: If ``keep`` is not an integer, or less than one, or ``stager`` cannot stage.

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
        if keep is not None and type(keep) is not int:
            msg = f"Checkpointer: keep must be a whole number, or None: expected an int, got {keep!r}."
            raise TypeError(msg)
        if keep is not None and keep < 1:
            msg = f"Checkpointer: keep must be at least 1, or None: expected a positive number, got {keep}."
            raise ValueError(msg)
        if stager is not None and (isinstance(stager, type) or not callable(getattr(stager, "stage", None))):
            msg = f"Checkpointer: stager must have a stage method: expected a Stager or an AsyncStager, got {stager!r}."
            raise TypeError(msg)
        self.directory = Path(directory)
        self.keep = keep
        self._series = Series(self.directory)
        self._process_group = process_group
        self._given_stager = stager
        self._own_stager: Stager | None = None
        self._running: Future[None] | None = None
        self._closed = False
        self._calling = threading.RLock()

    def save(self, step: int, state: Any) -> None:
        """Save a state, and return when the checkpoint is complete and old ones are removed.

        Args:
            step: The number of the checkpoint. If there is one, it is replaced, and is there until the new one is.
            state: Any tree.

        Raises:
            CheckpointError: If it cannot be written, or if an earlier save in the background failed: then this one was
                not begun.
            ValueError: If the step is not an integer, or negative.
            RankMismatch: If the ranks pass different steps. All ranks raise. Or if this process is not in the group.
            UnsupportedLeaf, CyclicTree: As ``statetree.dcp.save``.
        """
        with self._calling:
            warn_of_values("save", state)
            foreground = self._begin("save")
            self._write("save", step, lambda: state, foreground.group)

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
            ValueError: If the step is not an integer, or negative.
            StagerBusy, StagerClosed, UnsupportedLeaf: What staging raises on this rank. Of several ranks, all raise
                at the next call then.
            RankMismatch: If this process is not in the group. The future raises it where ranks pass different steps.
        """

        def stage_step() -> Any:
            _check_step("async_save", step)
            return stage(state, self._stager())

        with self._calling:
            warn_of_values("async_save", state)
            if not wait:
                self._check_idle("async_save")
            background = self._begin("async_save")
            future, error = start(
                background, stage_step, lambda staged: self._write("async_save", step, staged, background.group)
            )
            if error is None or size_of(background.group) > 1:
                self._running = future
        if error is not None:
            raise error
        return future

    def restore(
        self, state: Any = None, step: int | None = None, *, weights_only: bool = True, verify: bool = True
    ) -> Any:
        """Load a checkpoint. A save that is running is waited for.

        Args:
            state: The template whose tensors are filled: see ``statetree.dcp.load``. Without it, the state comes back
                as it was saved.
            step: Which one; by default the latest complete one.
            weights_only: As for ``statetree.dcp.load``.
            verify: As for ``statetree.dcp.load``.

        Returns:
            The tree.

        Raises:
            CheckpointError: If there is none, or it cannot be read, or an earlier save in the background failed. Or if
                another process removed the given step meanwhile. (Without one, the latest is looked for again.)
            ValueError: If the step is not an integer, or negative.
            RankMismatch: If the ranks pass different steps. All ranks raise. Or if this process is not in the group.
            TreeMismatch, UnsupportedLeaf: As ``statetree.dcp.load``.
        """
        with self._calling:
            self._check_open("restore")
            self._settle()
            group = self._background("restore", "restore").group
            _check_same("restore", "step", repr(step), group)
            if step is not None:
                _check_step("restore", step)
            found = _by_first("restore", group, lambda: self._find(step))
            while True:
                path = self._series.path(found)
                with checkpoint_errors("load", path):
                    try:
                        return read(state, DirectoryReader(path, verify=verify), group, weights_only=weights_only)
                    except CheckpointException:  # the same one on every rank
                        another = _by_first("restore", group, partial(self._find_instead, found, step))
                        if another is None:
                            raise
                        found = another

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, rising. Whatever else is in the directory is ignored."""
        return [checkpoint.step for checkpoint in self._series.complete()]

    def close(self) -> None:
        """Wait for a save that is running, and release the stager's memory. Closing again does nothing.

        Raises:
            CheckpointError: If a save in the background failed, and no call has raised that yet.
        """
        with self._calling:
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

    def _begin(self, verb: str) -> Background:
        self._check_open(verb)
        self._settle()
        return self._background(verb, "save")

    def _background(self, verb: str, purpose: str) -> Background:
        return background_of(verb, self._process_group, f"Checkpointer.{purpose}")

    def _check_open(self, verb: str) -> None:
        if self._closed:
            msg = f"{verb}: the Checkpointer of {self.directory} is closed: expected an open one. Make a new one."
            raise CheckpointError(msg)

    def _settle(self) -> None:
        """Wait for the save in the background, and raise what it raised."""
        if self._running is not None:
            # Apart, so that an interrupt while waiting leaves it to the next call.
            concurrent.futures.wait([self._running])
            running, self._running = self._running, None
            running.result()

    def _check_idle(self, verb: str) -> None:
        busy = self._running is not None and not self._running.done()
        ranks = [rank for rank, flag in enumerate(from_all(busy, self._background(verb, "restore").group)) if flag]
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

    def _find(self, step: int | None) -> StepDirectory:
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

    def _find_instead(self, gone: StepDirectory, step: int | None) -> StepDirectory | None:
        """Return what to restore where a checkpoint was removed while it was read. ``None`` if it is still there."""
        if self._series.path(gone).exists():
            return None
        if step is None or any(found.step == step for found in self._series.complete()):
            return self._find(step)
        msg = (
            f"restore: the checkpoint of step {step} in {self.directory} was removed while it was read: expected it to "
            "stay. Another process saves there: restore another step, or let it keep more. Tensors of the template may "
            "be filled in part."
        )
        raise CheckpointError(msg)

    def _write(self, verb: str, step: int, state: Callable[[], Any], group: ProcessGroup | None) -> None:
        """Write a checkpoint under another name, then give it its own."""
        made: list[UnfinishedStep] = []

        def begin() -> Path:
            made.append(self._series.begin(step))
            return made[0].path

        check_alive("save", group)
        with checkpoint_errors("save", self.directory):
            _check_same(verb, "step", repr(step), group)
        _check_step(verb, step)
        try:
            with checkpoint_errors("save", self.directory):
                write(state, _by_first("save", group, begin), group)
            self._publish(step, made, group)
        except BaseException:
            for unpublished in made:
                unpublished.discard()
            raise

    def _publish(self, step: int, made: Sequence[UnfinishedStep], group: ProcessGroup | None) -> None:
        """Let the first rank, which made the directory, give it its name."""

        def publish() -> None:
            published = self._series.publish(made[0])
            try:
                self._series.prune(self.keep, published)
            except OSError as error:
                msg = (
                    f"save: the checkpoint {self._series.path(published)} is complete, but older ones could not be "
                    f"removed: {type(error).__name__}: {error}. Mend the cause: the next save tries again."
                )
                raise CheckpointError(msg) from error

        try:
            _by_first("save", group, publish)
        except StateTreeError:
            raise
        except Exception as error:
            msg = (
                f"save: this rank could not be told that the checkpoint of step {step} is complete: "
                f"{type(error).__name__}: {error}. It is if Checkpointer.steps lists it."
            )
            raise CheckpointError(msg) from error


def _by_first(verb: str, group: ProcessGroup | None, action: Callable[[], T]) -> T:
    """Let the first rank act on the directory, and return on every rank what it returned, or raise what it raised."""
    check_alive(verb, group)
    outcome: Any = None
    cause: BaseException | None = None
    if is_first(group):
        try:
            outcome = action()
        except CheckpointError as error:
            outcome = error
        except BaseException as error:  # noqa: BLE001 - also an interrupt: the others must not be left waiting
            cause = error
            outcome = CheckpointError(
                f"{verb}: the first rank could not use the directory: {type(error).__name__}: {error}. Mend the cause, "
                "and try again; complete checkpoints are untouched."
            )
    told = from_first(outcome, group)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if isinstance(told, CheckpointError):
        raise told from cause
    return told  # type: ignore[no-any-return]


def _check_same(verb: str, what: str, text: str, group: ProcessGroup | None) -> None:
    """Raise on every rank if the ranks were not given the same."""
    texts = from_all(text, group)
    if len(set(texts)) > 1:
        given = shown([f"rank {rank}: {text}" for rank, text in enumerate(texts)])
        msg = f"{verb}: {what} differs over the ranks: expected the same on all, got:\n  {given}\nPass the same {what}."
        raise RankMismatch(msg)


def _check_step(verb: str, step: int) -> None:
    if type(step) is not int or step < 0:
        msg = f"{verb}: step must be a number that is not negative: expected an int, got {step!r}."
        raise ValueError(msg)
