"""Which checkpoint of a series is restored: the one that is asked for, or an older one where it is damaged."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from statetree.dcp.groups import by_first, from_all, ranks_of
from statetree.dcp.stateful import StatefulTree
from statetree.declare import phase
from statetree.errors import CheckpointError, StateTreeError, unsignalled, warn
from statetree.exchange.call import on_all_ranks
from statetree.files.formats import opened
from statetree.files.loading import load_tree
from statetree.files.remote import RemotePath, is_outage
from statetree.key_paths import printable

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from statetree.dcp.series import Series, StepDirectory
    from statetree.files.loading import LoadOptions


_log: Final = logging.getLogger("statetree")


class Restoration:
    """One restore: of a step, or the latest, into a template, whose stateful objects get what was saved of them."""

    def __init__(
        self, series: Series, group: ProcessGroup | None, step: int | None, state: Any, options: LoadOptions
    ) -> None:
        self._series = series
        self._step = step
        self._options = options
        self._left: set[str] = set()  # what the checkpoint has beside the template
        self._copy: StepDirectory | None = None  # what is read in the place of a damaged one
        self._group = group
        self._ranks = ranks_of("restore", group)
        self._by_first = partial(by_first, "restore", group)
        self._tree = on_all_ranks("restore", self._ranks, lambda: StatefulTree("restore", state, to_fill=True))
        #: Which checkpoint is taken.
        self.found: StepDirectory = self._by_first(partial(series.find, "restore", step))

    def run(self, *, fallback: bool) -> Any:
        """Load the checkpoint; if it is damaged, its copy, or with ``fallback`` the newest older one that is whole."""
        damaged: list[CheckpointError] = []
        latest = self.found.step
        while True:
            before = sys.exception()
            try:
                loaded = self._load()
            except CheckpointError as error:
                if error.failed_elsewhere:  # which is no damage
                    raise
                damaged.append(error)
                copy = self._by_first(lambda: self._series.copy_of(self.found))
                if copy is not None:
                    self.found = self._copy = copy
                    continue
                out_of_reach = any(from_all("restore", self._is_outage(error, before, self.found), self._group))
                if out_of_reach and not self._by_first(self._is_here):  # nobody knows that it is damaged
                    raise damaged[0] from damaged[0].__cause__
                try:
                    older = self._by_first(self._older)
                except CheckpointError as outage:  # nobody knows which is the newest older one
                    raise damaged[0] from outage
                if older is None:
                    raise damaged[0] from damaged[0].__cause__
                if not fallback:
                    remedy = f"the newest older checkpoint that looks whole is of step {older.step}"
                    raise CheckpointError(f"{error} ({remedy}: pass step={older.step}, or fallback=True.)") from error
                self.found = older
            else:
                if damaged:
                    what = "mirror's copy" if self.found == self._copy else "checkpoint"
                    which = "the local" if self.found.step >= latest else "a later"
                    why = f"since {which} one is damaged: {damaged[0]}"
                    warn(f"restore: took the {what} of step {self.found.step}, {why}")
                self._tell_left()
                return on_all_ranks("restore", self._ranks, partial(self._tree.loaded, loaded))

    def _tell_left(self) -> None:
        """Log what the checkpoint has and no rank's template: an optimizer, say, that somebody forgot."""
        told = self._ranks.told_once(json.dumps(sorted(self._left)).encode() if self._left else None)
        if sum(len(ranks) for _, ranks in told) < self._ranks.size:
            return
        common = sorted(set[str].intersection(*[set(json.loads(text)) for text, _ in told]))
        if common and self._ranks.rank == 0:
            names = ", ".join(common[:5]) + (f" and {len(common) - 5} more" if len(common) > 5 else "")
            what = printable(names)  # they are what a file says
            _log.warning("restore: step %d has what the template lacks: %s. It is left.", self.found.step, what)

    def _load(self) -> Any:
        """Load a checkpoint, or the one that took its place while it was read."""
        while True:
            path = self._series.path(self.found)
            with phase("checkpointer.restore"):
                try:
                    make = partial(self._tree.template, path, self._options.where, strict=self._options.strict)
                    template = on_all_ranks("restore", self._ranks, make)
                    self._left = set()
                    options = self._options._replace(partly=self._left)
                    return load_tree(path, template, self._ranks, options, together=True)
                except StateTreeError as error:  # on every rank alike, unless some have left
                    another = None if error.failed_elsewhere else self._by_first(self._find_instead)
                    if another is None:
                        raise
                    self.found = another

    def _find_instead(self) -> StepDirectory | None:
        """Return what to restore where a checkpoint was removed while it was read. ``None`` if it is still there."""
        if self._is_here():
            return None
        try:
            complete = self._series.complete()
        except CheckpointError:  # the mirror cannot be asked: what went wrong is told
            return None
        if self.found in complete:
            return None
        if self._step is None or any(found.step == self._step for found in complete):
            return self._series.find("restore", self._step)
        raise CheckpointError(
            f"restore: the checkpoint of step {self._step} in {self._series.directory} was removed while it was read: "
            "expected it to stay. Another process saves there: restore another step, or let it keep more. Tensors of "
            "the template may be filled in part."
        )

    def _older(self) -> StepDirectory | None:
        """Return the newest older checkpoint that has all its files, each of the save that it should be of."""
        is_here = self._is_here()
        complete = self._series.at_hand() if is_here else self._series.complete()
        for older in [each for each in reversed(complete) if each.step < self.found.step]:
            before = sys.exception()
            try:
                opened(self._series.path(older)).check()
            except unsignalled(CheckpointError, OSError) as error:
                if self._is_outage(error, before, older) and not is_here:
                    raise
                if self._series.copy_of(older) is not None:
                    return older  # and then the copy, once it is found damaged
            else:
                return older
        return None

    def _is_outage(self, error: Exception, before: BaseException | None, found: StepDirectory) -> bool:
        """Whether a checkpoint in the mirror could not be read: it need not be damaged."""
        place: Path | RemotePath = self._series.path(found)
        return isinstance(place, RemotePath) and is_outage(error, before)

    def _is_here(self) -> bool:
        """Whether what is taken lies in the directory, or is a copy of what does."""
        return self.found in [*self._series.all(), self._copy]
