"""One checkpoint of a series written: under another name, until all ranks have written their parts of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statetree.dcp.events import Event
from statetree.dcp.groups import by_first, check_same, is_first, save_errors
from statetree.dcp.mirror import MirroredSeries
from statetree.dcp.saving import WriteOptions, write
from statetree.dcp.series import bytes_in
from statetree.dcp.step_numbers import as_metadata, as_metric, check_step
from statetree.declare import phase
from statetree.errors import CheckpointError, unsignalled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from statetree.dcp.series import Kept, Series, UnfinishedStep


def step_options(verb: str, metric: float | None, metadata: Mapping[str, Any] | None) -> WriteOptions:
    """Return what the manifest of a step says. It raises ``TypeError``, of which all ranks are to hear."""
    return WriteOptions(metric=as_metric(verb, metric), about=as_metadata(verb, metadata))


@dataclass(frozen=True)
class StepWriter:
    """Writes the checkpoints of a series, and tells of what was saved and removed."""

    series: Series
    kept: Kept
    tell: Callable[[Event, ProcessGroup | None], None]
    incremental: bool

    def write(
        self,
        verb: str,
        step: int,
        state: Callable[[], Any],
        group: ProcessGroup | None,
        options: WriteOptions,
        waited: Callable[[], float],
    ) -> None:
        """Write a checkpoint under another name, then give it its own."""
        since = time.monotonic()
        made: list[UnfinishedStep] = []

        def begin() -> tuple[Path, Path | None]:
            """Return where to write, and the checkpoint whose files may be linked to."""
            self.series.begin(step, made)
            complete = self.series.local() if self.incremental else []
            return made[0].path, self.series.path(complete[-1]) if complete else None

        with save_errors(self.series.directory):
            check_same(verb, "step", repr(step), group)
        check_step(verb, step)
        try:
            with save_errors(self.series.directory), phase("checkpointer.save"):
                path, base = by_first("save", group, begin)
                write(state, path, group, options._replace(incremental=self.incremental, base=base))
            nbytes, removed = self._publish(step, made, group)
        except BaseException:
            for unpublished in made:
                unpublished.discard()
            raise
        if isinstance(self.series, MirroredSeries) and is_first(group):
            self.series.upload_later(step)
        self.tell(Event("save", step, time.monotonic() - since, nbytes, waited()), group)
        for event in removed:
            self.tell(event, group)

    def _publish(
        self, step: int, made: Sequence[UnfinishedStep], group: ProcessGroup | None
    ) -> tuple[int, list[Event]]:
        """Let the first rank, which made the directory, give it its name. Returns its bytes, and what was removed."""

        def publish() -> tuple[int, list[Event]]:
            published = self.series.publish(made[0])
            try:
                return bytes_in(self.series.path(published)), self.series.prune(self.kept, published)
            except unsignalled(OSError) as error:
                raise CheckpointError(
                    f"save: the checkpoint {self.series.path(published)} is complete, but older ones could not be "
                    f"removed: {type(error).__name__}: {error}. Mend the cause: the next save tries again."
                ) from error

        try:
            return by_first("save", group, publish)
        except CheckpointError:
            raise
        except unsignalled(Exception) as error:
            raise CheckpointError(
                f"save: this rank could not be told that the checkpoint of step {step} is complete: "
                f"{type(error).__name__}: {error}. It is if Checkpointer.steps lists it."
            ) from error
