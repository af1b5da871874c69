"""Which checkpoint of a series is restored: the one that is asked for, or an older one where it is damaged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from statetree.dcp.groups import by_first, checkpoint_errors, ranks_of
from statetree.dcp.stateful import StatefulTree
from statetree.errors import CheckpointError, StateTreeError, warn
from statetree.exchange.call import on_all_ranks
from statetree.exchange.phases import phase
from statetree.files.formats import opened
from statetree.files.loading import load_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from statetree.dcp.series import Series, StepDirectory
    from statetree.files.loading import LoadOptions


class Restoration:
    """One restore.

    Args:
        series: Where the checkpoints lie.
        group: The ranks that restore.
        step: The step that is asked for; ``None`` for the latest.

    Attributes:
        found: Which one was taken.
    """

    def __init__(self, series: Series, group: ProcessGroup | None, step: int | None) -> None:
        self.found: StepDirectory
        self._series = series
        self._group = group
        self._step = step

    def run(self, state: Any, options: LoadOptions, *, fallback: bool) -> Any:
        """Load the checkpoint; if it is damaged and ``fallback`` is set, the newest older one that can be read.

        Args:
            state: The template, or ``None``. Objects in it with ``load_state_dict`` get what was saved of them.
            options: How it is loaded.
            fallback: Whether an older one is taken.
        """
        ranks = ranks_of("restore", self._group)
        tree = on_all_ranks("restore", ranks, lambda: StatefulTree("restore", state))

        def load(path: Path) -> Any:
            template = tree.state
            if options.where is None:
                template = on_all_ranks("restore", ranks, lambda: tree.template(path))
            return load_tree(path, template, ranks, options, together=True)

        return tree.loaded(self._run(load, fallback=fallback))

    def _run(self, load: Callable[[Path], Any], *, fallback: bool) -> Any:
        found = self._by_first(partial(self._series.find, "restore", self._step))
        damaged: list[CheckpointError] = []
        while True:
            try:
                loaded = self._load(found, load)
            except CheckpointError as error:
                damaged.append(error)
                older = self._by_first(partial(self._older, found))
                if older is None:
                    raise damaged[0] from damaged[0].__cause__
                if not fallback:
                    remedy = f"the newest older checkpoint that looks whole is of step {older.step}"
                    msg = f"{error} ({remedy}: pass step={older.step}, or fallback=True.)"
                    raise CheckpointError(msg) from error
                found = older
            else:
                if damaged:
                    what = f"took the checkpoint of step {found.step}, since a later one is damaged: {damaged[0]}"
                    warn(f"restore: {what}")
                return loaded

    def _by_first(self, action: Callable[[], Any]) -> Any:
        return by_first("restore", self._group, action)

    def _load(self, found: StepDirectory, load: Callable[[Path], Any]) -> Any:
        """Load a checkpoint, or the one that took its place while it was read."""
        while True:
            self.found, path = found, self._series.path(found)
            with checkpoint_errors("load", path), phase("checkpointer.restore"):
                try:
                    return load(path)
                except StateTreeError:  # on every rank alike
                    another = self._by_first(partial(self._find_instead, found))
                    if another is None:
                        raise
                    found = another

    def _find_instead(self, gone: StepDirectory) -> StepDirectory | None:
        """Return what to restore where a checkpoint was removed while it was read. ``None`` if it is still there."""
        if gone in [*self._series.all(), *self._series.complete()]:
            return None
        if self._step is None or any(found.step == self._step for found in self._series.complete()):
            return self._series.find("restore", self._step)
        msg = (
            f"restore: the checkpoint of step {self._step} in {self._series.directory} was removed while it was read: "
            "expected it to stay. Another process saves there: restore another step, or let it keep more. Tensors of "
            "the template may be filled in part."
        )
        raise CheckpointError(msg)

    def _older(self, damaged: StepDirectory) -> StepDirectory | None:
        """Return the newest older checkpoint that has all its files, each of the save that it should be of."""
        for found in reversed(self._series.complete()):
            if found.step < damaged.step:
                try:
                    opened(self._series.path(found)).check()
                except (CheckpointError, OSError):
                    continue
                return found
        return None
