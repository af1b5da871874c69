"""The steps of a run, to look at: which there are, which is the best, where each lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from statetree.dcp.file_manifest import read_manifest
from statetree.dcp.series import Series
from statetree.dcp.step_numbers import as_int

if TYPE_CHECKING:
    import os


class RunSteps:
    """The complete checkpoints in a directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._series = Series(self.directory)

    def latest_step(self) -> int | None:
        """Return the highest step of a complete checkpoint; ``None`` if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the step of the complete checkpoint with the lowest ``metric``; ``None`` if none has one."""
        return next((checkpoint.step for checkpoint in self._series.best()), None)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, rising. Whatever else is in the directory is ignored."""
        return [checkpoint.step for checkpoint in self._series.complete()]

    def path(self, step: SupportsIndex | None = None) -> Path:
        """Return the directory of a complete checkpoint, by default the latest.

        Raises:
            CheckpointError: If there is none.
        """
        return self._series.path(self._series.find("path", None if step is None else as_int(step)))

    def metadata(self, step: SupportsIndex | None = None) -> dict[str, Any]:
        """Return the metadata that a complete checkpoint was saved with, by default the latest.

        Raises:
            CheckpointError: If there is none, or its manifest is damaged.
        """
        manifest = read_manifest(self.path(step))
        return {} if manifest is None else dict(manifest.about)
