"""Whole states that ``accelerator.save_state`` saves and ``load_state`` restores through a ``Checkpointer``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from statetree.dcp.checkpointer import Checkpointer


class Registered:
    """A state for ``accelerator.register_for_checkpointing``: accelerate's own files hold the number of its step.

    Every rank saves its shards; what was saved is complete on the disk before accelerate writes that number. With
    ``RandomState`` and a loader of torchdata in the state, a run goes on bit for bit in the middle of an epoch; on
    several ranks with a loader of each rank's own (one that accelerate has prepared and that shuffles: see limits).

    accelerate writes its files one by one over those that a folder holds: killed in between, the folder has the model
    of one step and the number of another. So save to a new folder each time, and load the ``latest`` one. What is
    registered last is written last: register this after all else.

    Args:
        directory: Where the checkpoints go.
        state: Any tree of tensors, values, and objects with ``state_dict`` and ``load_state_dict``.
        options: As for ``Checkpointer``. A folder of accelerate whose step is not kept any more cannot be loaded.

    Attributes:
        state: The tree, after ``load_state`` the restored one.
    """

    def __init__(self, directory: Any, state: Any, **options: Any) -> None:
        self.checkpointer = Checkpointer(directory, **options)
        self.state = state
        self._step: int | None = None  # the last one

    def state_dict(self) -> dict[str, Any]:
        """Save the state as the next step, and return its number."""
        if self._step is None:  # later a mirror need not answer
            latest = self.checkpointer.latest_step()
            self._step = -1 if latest is None else latest
        self._step += 1
        self.checkpointer.save(self._step, self.state)
        return {"statetree": self.checkpointer.directory.name, "step": self._step}

    def latest(self, directory: Any) -> Path | None:
        """Return the newest folder in a directory that ``save_state`` wrote to the end, if there is one."""
        found: dict[int, Path] = {}
        for folder in Path(directory).glob("*"):
            with suppress(Exception):  # there is none, or it was being written
                files = folder.glob("custom_checkpoint_*.pkl")
                last = max(files, key=lambda file: int(file.stem.rpartition("_")[2]))
                saved = torch.load(last, map_location="cpu", mmap=True)
                found |= {saved["step"]: folder} if saved["statetree"] == self.checkpointer.directory.name else {}
        steps = [step for step in self.checkpointer.steps() if step in found]
        return found[steps[-1]] if steps else None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the step of that number."""
        self.state = self.checkpointer.restore(self.state, step=saved["step"])
