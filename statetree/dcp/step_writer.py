"""One step of a series, written, given its name, and told of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from statetree.dcp.directory_writer import DirectoryWriter
from statetree.dcp.events import Event, tell
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.groups import by_first, check_alive, check_same, is_first
from statetree.dcp.saving import write
from statetree.dcp.series import Kept, Series, UnfinishedStep, bytes_in
from statetree.dcp.step_numbers import Notes, check_step
from statetree.errors import CheckpointError, StateTreeError
from statetree.watching import phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup


class StepWriter:
    """Writes the steps of a series, and removes those that are not kept."""

    def __init__(
        self, series: Series, kept: Kept, on_event: Callable[[Event], object] | None, *, incremental: bool
    ) -> None:
        self._series = series
        self._kept = kept
        self._on_event = on_event
        self._incremental = incremental

    def write(self, verb: str, step: int, state: Callable[[], Any], group: ProcessGroup | None, notes: Notes) -> None:
        """Write a checkpoint under another name, then give it its own."""
        since = time.monotonic()
        made: list[UnfinishedStep] = []

        def begin() -> tuple[Path, Path | None]:
            """Return where to write, and the checkpoint whose files may be linked to."""
            made.append(self._series.begin(step))
            complete = self._series.complete() if self._incremental else []
            return made[0].path, self._series.path(complete[-1]) if complete else None

        check_alive("save", group)
        with checkpoint_errors("save", self._series.directory):
            check_same(verb, "step", repr(step), group)
        check_step(verb, step)
        try:
            with checkpoint_errors("save", self._series.directory), phase("checkpointer.save"):
                path, base = by_first("save", group, begin)
                writer = DirectoryWriter(path, incremental=self._incremental, base=base, notes=notes)
                write(state, path, group, writer)
            nbytes, removed = self._publish(step, made, group)
        except BaseException:
            for unpublished in made:
                unpublished.discard()
            raise
        seconds = time.monotonic() - since
        self.tell(Event("save", step, seconds, nbytes, notes.waited()), group)
        for gone, freed, took in removed:
            self.tell(Event("removal", gone, took, freed, 0.0), group)

    def tell(self, event: Event, group: ProcessGroup | None) -> None:
        """Tell of an event."""
        tell(self._on_event, event, is_first=is_first(group))

    def _publish(
        self, step: int, made: Sequence[UnfinishedStep], group: ProcessGroup | None
    ) -> tuple[int, list[tuple[int, int, float]]]:
        """Let the first rank, which made the directory, give it its name. Returns its bytes, and what was removed."""

        def publish() -> tuple[int, list[tuple[int, int, float]]]:
            published = self._series.publish(made[0])
            try:
                return bytes_in(self._series.path(published)), self._series.prune(self._kept, published)
            except OSError as error:
                msg = (
                    f"save: the checkpoint {self._series.path(published)} is complete, but older ones could not be "
                    f"removed: {type(error).__name__}: {error}. Mend the cause: the next save tries again."
                )
                raise CheckpointError(msg) from error

        try:
            return by_first("save", group, publish)
        except StateTreeError:
            raise
        except Exception as error:
            msg = (
                f"save: this rank could not be told that the checkpoint of step {step} is complete: "
                f"{type(error).__name__}: {error}. It is if Checkpointer.steps lists it."
            )
            raise CheckpointError(msg) from error
