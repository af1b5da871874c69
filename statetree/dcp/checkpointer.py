"""``Checkpointer``: a series of checkpoints in a directory, of which every one that shows is complete."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from statetree.dcp.background import Background, RunningSave, background_of, start
from statetree.dcp.events import Event, is_told, local_bytes, tell
from statetree.dcp.file_manifest import read_manifest
from statetree.dcp.groups import check_same, is_first, ranks_of
from statetree.dcp.mirror import MirroredSeries
from statetree.dcp.restoring import Restoration
from statetree.dcp.saving import WriteOptions
from statetree.dcp.schedule import Schedule
from statetree.dcp.series import Kept, Series, bytes_in
from statetree.dcp.stateful import StatefulTree
from statetree.dcp.step_numbers import as_int, check_counts, check_step
from statetree.dcp.step_writer import StepWriter, step_options
from statetree.declare import phase, renew_after_fork
from statetree.errors import CheckpointError, StateTreeError, check_function, warn
from statetree.exchange.call import on_all_ranks
from statetree.files.loading import LoadOptions
from statetree.files.remote import refuse_url
from statetree.stager.stager import Stager

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from datetime import timedelta
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import TypeVar

    from statetree.tree.selection import Where

    T = TypeVar("T", default=Any)  # without a template, anything may come back


class Checkpointer(Schedule):
    """Saves the states of a run, step by step, and restores the latest.

    A checkpoint appears as ``step-…`` in the directory once it is completely on disk, so after a crash the last
    complete one can be restored. The next save removes what a crash left behind. One save runs at a time.

    Threads of a process may share one: their calls run one after the other. Where there are several ranks, the order of
    the calls must be the same on each, so that one thread should make them. Other processes may restore from the
    directory meanwhile.

    Objects in a state that have ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, loaders) stand
    for their states: what their ``state_dict()`` returns is saved, and ``restore`` passes it to ``load_state_dict``.

    Args:
        directory: Where the checkpoints go, the same one on every rank. It is made by the first save.
        stager: Stages the states of ``async_save``; by default one of its own, which ``close`` closes.
        keep: How many checkpoints to keep: those with the highest steps, and always the one saved last. ``None`` keeps
            all.
        keep_every: Also keep the checkpoints whose step is a multiple of this.
        keep_best: Also keep so many of the checkpoints that were saved with the lowest ``metric``, of equal ones the
            latest. With ``keep=1``, the latest and the best are kept. A checkpoint whose manifest cannot be read may be
            the best, and is kept.
        incremental: Whether files in which nothing changed since the latest checkpoint become hard links to that one's.
            Each checkpoint is complete, whatever is removed beside it. Files are cut so that few are written again. A
            file is read and compared with the state before it is linked, so that damage does not spread. Where the
            file system has no links, all is written.
        mirror: A URL that fsspec knows (``s3://bucket/run``; extra ``remote``), to which complete steps are uploaded in
            the background, the newest first. Retention holds there, too, and ``restore`` takes the newest complete step
            of either. An upload that fails is logged, and tried again at the next save; ``close`` waits for uploads.
            What retention removes here before its upload begins is logged; what is being uploaded is removed after it.
        every: How many steps, or which time (a ``timedelta``), ``due`` lets pass between two checkpoints.
        on_event: Called with an ``Event`` after each staging, save, upload, removal and restore; for those in the
            background on their thread, where calls of this checkpointer raise ``CheckpointError`` if they would wait
            for the save. What it raises is logged. The logger ``statetree`` has the same events.
        process_group: The ranks that save and restore; by default all.

    Collective:
        Every rank of the group makes the same calls of ``save``, ``async_save``, ``restore`` and ``due`` in the same
        order, relative to other collectives as well: the first of them makes two gloo groups of the same ranks.

    Raises:
        CheckpointError: If the directory is a URL.
        TypeError, ValueError: If ``keep``, ``keep_every`` or ``keep_best`` is no integer, or below one, ``every`` is
            neither an integer nor a time, or not positive, or ``stager`` cannot stage.

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
        keep_every: int | None = None,
        keep_best: int | None = None,
        incremental: bool = False,
        mirror: str | None = None,
        every: int | timedelta | None = None,
        on_event: Callable[[Event], object] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        refuse_url("Checkpointer", directory, "Pass a local directory, and the URL as mirror=.")
        check_counts(keep=keep, keep_every=keep_every, keep_best=keep_best)
        if stager is not None and (isinstance(stager, type) or not callable(getattr(stager, "stage", None))):
            msg = f"Checkpointer: stager must have a stage method: expected a Stager or an AsyncStager, got {stager!r}."
            raise TypeError(msg)
        if on_event is not None:
            check_function("Checkpointer", "on_event", on_event)
        self.directory = Path(directory).absolute()  # wherever the process goes
        self._kept = Kept(keep, keep_every, keep_best)
        self._on_event = on_event
        told = partial(tell, on_event, is_first=True)
        self._mirror = None if mirror is None else MirroredSeries(self.directory, mirror, self._kept, told)
        self._series = self._mirror or Series(self.directory)
        self._writer = StepWriter(self._series, self._kept, self._tell, incremental)
        super().__init__(every)
        self._process_group = process_group
        self._stager = Stager() if stager is None else stager
        self._owns_stager = stager is None
        self._start_idle()
        renew_after_fork(self, Checkpointer._start_idle)

    def _start_idle(self) -> None:
        """Begin without a save. In a forked process the parent's thread is gone, and nobody would release the lock."""
        self._running = RunningSave()

    def _group_that_agrees(self) -> ProcessGroup | None:
        with self._running.turn("due"):
            return self._background("due", "restore").group

    def save(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        metric: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state, and return when the checkpoint is complete and old ones are removed.

        Args:
            step: The number of the checkpoint. An existing one is replaced, once the new one is complete. There is a
                warning if the step is not above the latest one.
            state: Any tree.
            metric: How good the state is, lower being better (a validation loss; for an accuracy pass its negative):
                see ``keep_best``. The first rank's counts.
            metadata: What else to know (a configuration, a commit): a small dict of what JSON holds, which ``metadata``
                returns and ``statetree show`` shows. The first rank's counts.

        Raises:
            CheckpointError: If it cannot be written, or if an earlier save in the background failed: then this one was
                not begun.
            ValueError: If the step is not an integer, or negative.
            TypeError: If the metric is no number, or the metadata are more than JSON holds.
            RankMismatch: If the ranks pass different steps, one does not answer, or this process is not in the group.
            UnsupportedLeaf, CyclicTree: As ``statetree.save``.
        """
        step = as_int(step)
        with self._running.turn("save"):
            since = time.monotonic()
            group = self._begin("save").group
            self._warn_of_step("save", step)

            def given() -> tuple[WriteOptions, Any]:
                return step_options("save", metric, metadata), StatefulTree("save", state).state

            # What is refused, or a state_dict raises, is heard by all ranks. The list is all that holds the state.
            options, *held = on_all_ranks("save", ranks_of("save", group), given)
            self._writer.write("save", step, held.pop, group, options, lambda: time.monotonic() - since)

    def async_save(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        metric: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Future[None]:
        """Stage a state, and save it in the background.

        When this returns, the state may change. (If the stager is an ``AsyncStager(asynchronous=True)``, its tensors
        may once ``stager.synchronize()`` has returned: staging then overlaps with the next forward and backward pass.)

        Args:
            step: The number of the checkpoint.
            state: Any tree.
            metric: As for ``save``.
            metadata: As for ``save``.

        Returns:
            A future that is done when the checkpoint is complete. Its ``result`` raises the error of a failed save; if
            it is not called, the next call raises it.

        Raises:
            CheckpointError: If an earlier save in the background failed. This one was not begun.
            ValueError: If the step is not an integer, or negative.
            TypeError: If the metric is no number, or the metadata are more than JSON holds.
            StagerBusy, StagerClosed, UnsupportedLeaf: What staging raises. All ranks raise it; nothing was begun, and
                the next call saves.
            RankMismatch: If this process is not in the group. The future raises it where ranks pass different steps.
        """
        step = as_int(step)
        with self._running.turn("async_save"):
            since = time.monotonic()
            background = self._begin("async_save")
            self._warn_of_step("async_save", step)
            agreeing = self._background("async_save", "restore").group
            waits: list[float] = []
            options = WriteOptions()

            def stage_step() -> Any:
                nonlocal options
                check_step("async_save", step)
                options = step_options("async_save", metric, metadata)
                began = time.monotonic()
                with phase("checkpointer.stage"):
                    staged = self._stager.stage(StatefulTree("async_save", state).state)
                ended = time.monotonic()
                nbytes = local_bytes(staged) if is_told(self._on_event) else 0
                self._tell(Event("stage", step, ended - began, nbytes, ended - since), agreeing)
                return staged

            def write(staged: Callable[[], Any]) -> None:
                def waited() -> float:  # it may end before this call does
                    return waits[0] if waits else time.monotonic() - since

                self._writer.write("async_save", step, staged, background.group, options, waited)

            future = start(background, agreeing, stage_step, write, self._running.futures)
            waits.append(time.monotonic() - since)
            return future

    def restore(
        self,
        state: T | None = None,
        step: SupportsIndex | None = None,
        *,
        where: Where | None = None,
        fallback: bool = False,
        weights_only: bool = True,
        verify: bool = True,
        cast: bool = False,
        strict: bool = True,
    ) -> T:
        """Load a checkpoint, or where it is damaged the mirror's copy of it, with a warning. Waits for a running save.

        Args:
            state: The template whose tensors are filled: see ``statetree.load``. Without it, the state comes back
                as it was saved. Its objects get what was saved in the layouts of their own ``state_dict()``. Where
                that lacks a path, an optimizer gets what has a distributed parameter's shape in its layout, all else
                is whole, on the CPU, and moments that it did not have then it gives up. ``where`` chooses all that an
                object lacks, or none.
            step: Which one; by default the latest complete one.
            where: Which leaves are loaded, by default all: as for ``statetree.load``.
            fallback: Whether to load the newest older checkpoint that can be read if this one is damaged, with a
                warning. Without it, the error names the newest older one that looks complete.
            weights_only: As for ``statetree.load``.
            verify: As for ``statetree.load``.
            cast: As for ``statetree.load``.
            strict: As for ``statetree.load``; but mappings may leave out keys of the checkpoint, so that a model can be
                restored alone. What no rank's template has is named in the log, if there is no ``where``.

        Returns:
            The tree.

        Raises:
            CheckpointError: If there is none, it cannot be read, or an earlier save in the background failed; if a
                mirror cannot be reached, and no step is given that is here; or if another process removed that step
                meanwhile. (Without a step, the latest one is searched again.)
            TypeError: If the state is a number: a step is passed as ``step=``.
            ValueError: If the step is not an integer, or negative.
            RankMismatch: If the ranks pass different steps, one does not answer, or this process is not in the group.
            TreeMismatch, UnsupportedLeaf: As ``statetree.load``.
            Exception: What a function of the user's raises, or the system where memory is short. The other ranks get a
                ``CheckpointError`` that says so, and no older step is taken.
        """
        if isinstance(state, Integral):
            raise TypeError(
                f"restore: state must be a template, or None: expected a tree, got the number {state}. For the "
                f"checkpoint of step {state} pass step={state}."
            )
        step = None if step is None else as_int(step)
        with self._running.turn("restore"):
            group = self._begin("restore", "restore").group
            check_same("restore", "step", repr(step), group)
            if step is not None:
                check_step("restore", step)

            since = time.monotonic()
            options = LoadOptions(True, cast, strict, verify, weights_only, where=where)  # noqa: FBT003
            restoration = Restoration(self._series, group, step, state, options)
            loaded: T = restoration.run(fallback=fallback)
            seconds, found = time.monotonic() - since, restoration.found
            nbytes = bytes_in(self._series.path(found)) if is_first(group) or is_told(self._on_event) else 0
            self._tell(Event("restore", found.step, seconds, nbytes, seconds), group)
            return loaded

    def latest_step(self) -> int | None:
        """Return the highest step of a complete checkpoint; ``None`` if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the step of the lowest ``metric``; ``None`` if none has one. It warns if one cannot be read."""
        return self._series.best_step()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, rising; raise while a mirror cannot be reached."""
        return [checkpoint.step for checkpoint in self._series.complete()]

    def path(self, step: SupportsIndex | None = None) -> Path:
        """Return the directory of a complete checkpoint, by default the latest.

        Raises:
            CheckpointError: If there is none, or a mirror cannot be reached.
        """
        return self._series.path(self._series.find("path", None if step is None else as_int(step)))

    def metadata(self, step: SupportsIndex | None = None) -> dict[str, Any]:
        """Return the metadata that a complete checkpoint was saved with, by default the latest.

        Raises:
            CheckpointError: If there is none, its manifest is damaged, or a mirror cannot be reached.
        """
        manifest = read_manifest(self.path(step))
        return {} if manifest is None else dict(manifest.about)

    def close(self) -> None:
        """Wait for a save that is running, and release the stager's memory. Closing again does nothing.

        Raises:
            CheckpointError: If a save in the background failed, and no call has raised that yet.
        """
        with ExitStack() as afterwards, self._running.turn("close"):
            if self._mirror is not None:  # without the lock: events of its uploads may call this checkpointer
                afterwards.callback(self._mirror.wait)
            self._give_back()
            try:
                self._running.raise_error("close")  # this rank's own: not every rank need close
            finally:
                if self._owns_stager:
                    self._stager.close()

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

    def _begin(self, verb: str, purpose: str = "save") -> Background:
        if self._closed:
            msg = f"{verb}: the Checkpointer of {self.directory} is closed: expected an open one. Make a new one."
            raise CheckpointError(msg)
        background = self._background(verb, "restore")
        self._running.settle(verb, background.group)
        return self._background(verb, purpose)

    def _background(self, verb: str, purpose: str) -> Background:
        return background_of(verb, self.directory, self._process_group, f"Checkpointer.{purpose}")

    def _warn_of_step(self, verb: str, step: int) -> None:
        """Say so if the step does not become the latest one, on the first rank."""
        is_step = type(step) is int and is_first(self._background(verb, "restore").group)
        latest = self._series.latest_known() if is_step else -1
        if 0 <= latest >= step:
            msg = (
                f"{verb}: step {step} is not above that of the latest checkpoint in {self._series.place}, {latest}: "
                "expected a higher one. restore() takes the highest: after going back to an earlier step, save "
                "elsewhere, or remove the later checkpoints."
            )
            warn(msg)

    def _tell(self, event: Event, group: ProcessGroup | None) -> None:
        tell(self._on_event, event, is_first=is_first(group))
