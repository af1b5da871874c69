"""Lightning's checkpoints through a ``Checkpointer``: ``CheckpointIO`` writes them, ``Callback`` asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import pytorch

from statetree.dcp.checkpointer import Checkpointer
from statetree.dcp.groups import has_process_group, new_gloo_group
from statetree.errors import CheckpointError, warn
from statetree.integrations import RandomStates


class CheckpointIO(pytorch.plugins.CheckpointIO):
    """Saves what Lightning saves as ``step-…`` in ``directory``, in the background: a plugin for one device, or DDP."""

    def __init__(self, directory: Any, **options: Any) -> None:
        self._directory, self._options = directory, options
        self._made: Checkpointer | None = None

    @property
    def checkpointer(self) -> Checkpointer:  # of this process alone: made when the process groups are
        if self._made is None:
            self._options["process_group"] = new_gloo_group(None) if has_process_group() else None
            self._made = Checkpointer(self._directory, **self._options)
        return self._made

    def latest(self) -> Path | None:
        """Return the latest checkpoint, if there is one, for ``trainer.fit(ckpt_path=...)``."""
        found = Checkpointer(self._directory, **self._options)  # another one: this is asked before there are groups
        return found.path() if found.steps() else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpointer.async_save(checkpoint["global_step"], checkpoint, metadata={"path": str(path)})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        step = int(Path(path).name.removeprefix("step-"))
        return self.checkpointer.restore(step=step, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Any) -> None:
        """Leave it to the checkpointer."""

    def teardown(self) -> None:
        if self._made is not None:
            self._made.close()


class Callback(RandomStates, pytorch.Callback):
    """Has a trainer with a ``CheckpointIO`` save when that is due, behind all other callbacks; and random states."""

    _is_due, _seen = False, -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if type(trainer.strategy).load_checkpoint is not pytorch.strategies.Strategy.load_checkpoint:  # nor saves
            raise CheckpointError(f"Callback: {type(trainer.strategy).__name__} has files of its own: expected DDP.")
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: callback is self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_training_batches <= trainer.accumulate_grad_batches and not trainer.fast_dev_run:
            warn("save: nothing is saved before the run ends: an epoch is one step, and only within one can it resume.")
        self._seen = trainer.global_step

    def on_train_batch_start(self, *_: Any) -> None:
        self.go_on()  # what was drawn since, when the loader was begun once more, was drawn before

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (step := trainer.global_step) != self._seen:  # else gradients are accumulated, which no checkpoint has
            due = trainer.strategy.broadcast(trainer.strategy.checkpoint_io.checkpointer.due(step))
            self._is_due, self._seen = due or self._is_due, step
            if not trainer.is_last_batch:  # else after the next: Lightning does not resume exactly between two epochs
                self.on_train_end(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        io = trainer.strategy.checkpoint_io
        if self._is_due:
            trainer.save_checkpoint(io.checkpointer.directory / f"step-{trainer.global_step:08}")
            trainer.should_stop |= io.checkpointer.signalled is not None
        self._is_due = False
