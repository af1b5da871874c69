"""Lightning's checkpoints through a ``Checkpointer``: ``CheckpointIO`` writes them, ``Callback`` asks for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning import pytorch

from statetree.dcp.checkpointer import Checkpointer
from statetree.dcp.groups import has_process_group, new_gloo_group
from statetree.declare import cached_property
from statetree.errors import CheckpointError, warn
from statetree.integrations import RandomStates


class CheckpointIO(pytorch.plugins.CheckpointIO):
    """Saves what Lightning saves as ``step-…`` in ``directory``, in the background: a plugin for one device, or DDP."""

    def __init__(self, directory: Any, **options: Any) -> None:
        self._new = partial(Checkpointer, directory, **options)

    @cached_property
    def checkpointer(self) -> Checkpointer:  # of this process alone: made when the process groups are
        self._paths: dict[str, int] = {}  # under which the step that was saved last was saved
        return self._new(process_group=new_gloo_group(None) if has_process_group() else None)

    def latest(self) -> Path | None:
        """Return the latest checkpoint, if there is one, for ``trainer.fit(ckpt_path=...)``."""
        return found.path() if (found := self._new()).steps() else None  # another one: there may be no groups yet

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        made, step = self.checkpointer, checkpoint["global_step"]
        self._paths = {**{one: at for one, at in self._paths.items() if at == step}, str(path): step}
        made.async_save(step, checkpoint, metadata={"paths": [*self._paths]})  # in place of what the step had

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        made, path, name = self.checkpointer, str(path), Path(path).name.removeprefix("step-")
        found = [int(name)] if name.isdigit() else [at for one, at in self._paths.items() if one == path]
        if not found and not (found := [at for at in made.steps() if path in made.metadata(at).get("paths", ())]):
            raise CheckpointError(f"load: no step that is kept was saved as {path}. Pass io.latest(), or keep more.")
        return made.restore(step=found[-1], weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Any) -> None:
        """Leave it to the checkpointer."""

    def teardown(self) -> None:
        if "checkpointer" in self.__dict__:
            self.__dict__.pop("checkpointer").close()  # the trainer's next call makes another one


class Callback(RandomStates, pytorch.Callback):
    """Has a trainer with a ``CheckpointIO`` save when that is due, behind all other callbacks; and random states."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if type(trainer.strategy).load_checkpoint is not pytorch.strategies.Strategy.load_checkpoint:  # nor saves
            raise CheckpointError(f"Callback: {type(trainer.strategy).__name__} has files of its own: expected DDP.")
        self._loaded, trainer.callbacks = None, sorted(trainer.callbacks, key=lambda callback: callback is self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_training_batches <= trainer.accumulate_grad_batches and not trainer.fast_dev_run:
            warn("save: nothing is saved before the run ends: an epoch is one step, and only within one can it resume.")
        self._is_due, self._seen, self._made = False, trainer.global_step, trainer.strategy.checkpoint_io.checkpointer

    def on_train_batch_start(self, *_: Any) -> None:
        self.go_on()  # what was drawn since, when the loader was begun once more, was drawn before

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (step := trainer.global_step) != self._seen:  # else gradients are accumulated, which no checkpoint has
            due = (self._made.due(step) and trainer.is_global_zero) or self._made.signalled is not None  # on some rank
            self._is_due, self._seen = trainer.strategy.reduce_boolean_decision(due, all=False) or self._is_due, step
            if not trainer.is_last_batch:  # else after the next: Lightning does not resume exactly between two epochs
                self.on_train_end(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if self._is_due:
            self._is_due, signalled = False, self._made.signalled is not None
            trainer.save_checkpoint(self._made.directory / f"step-{trainer.global_step:08}")
            trainer.should_stop |= trainer.strategy.reduce_boolean_decision(signalled, all=False)
