"""A callback of transformers' ``Trainer`` that saves in the background, and resumes in a plain ``train()``."""

from __future__ import annotations

import json
from typing import Any, Final

from transformers import TrainerCallback

from statetree.dcp.checkpointer import Checkpointer
from statetree.integrations import RandomState

_KEPT: Final = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "log_history", "best_metric")


class Callback(TrainerCallback):
    """Saves model, optimizer, scheduler, progress and random state, and resumes them, and where the data were.

    Pass it as one of the ``callbacks`` of a ``Trainer`` with ``save_strategy="no"``. If the directory holds a
    checkpoint, ``train()`` goes on from the latest. Batches that were used are read again, and dropped. Each checkpoint
    is made when the next step begins: with the random state that the step meets. The scaler of ``fp16`` is not saved.

    Args:
        directory: Where the checkpoints go.
        options: As for ``Checkpointer``: ``every=100``, ``keep=2``.

    Raises:
        ValueError: By ``train()``, if an epoch's batches are no multiple of ``gradient_accumulation_steps``.
    """

    def __init__(self, directory: Any, **options: Any) -> None:
        self.checkpointer = Checkpointer(directory, **options)
        self._unread = 0
        self._saved = -1
        self._random: Any = None
        self._is_skipped = False

    def _tree(self, state: Any, objects: dict[str, Any]) -> dict[str, Any]:
        progress = json.dumps({name: getattr(state, name, None) for name in _KEPT})
        kept = {name: objects[name] for name in ("model", "optimizer", "lr_scheduler")}
        return {**kept, "progress": progress, "random": RandomState().state_dict()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step or not self.checkpointer.steps():
            return
        if len(objects["train_dataloader"]) % args.gradient_accumulation_steps:
            msg = "restore: an epoch must be a multiple of gradient_accumulation_steps. Set dataloader_drop_last."
            raise ValueError(msg)
        restored = self.checkpointer.restore(self._tree(state, objects))
        for name, value in json.loads(restored["progress"]).items():
            setattr(state, name, value)
        self._random, self._saved = restored["random"], state.global_step
        self._unread = state.global_step * args.gradient_accumulation_steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        loader = objects["train_dataloader"]
        loader.skip_batches = min(self._unread, len(loader))
        self._unread -= loader.skip_batches
        self._is_skipped = loader.skip_batches == len(loader)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._is_skipped:  # a trainer that sees no batch thinks that there are none
            control.should_training_stop = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._random is not None:
            RandomState().load_state_dict(self._random)
            self._random = None
        elif self.checkpointer.due(state.global_step):
            self._saved = state.global_step
            self.checkpointer.async_save(state.global_step, self._tree(state, objects))
            control.should_training_stop |= self.checkpointer.signalled is not None

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._saved != state.global_step:
            self.checkpointer.save(state.global_step, self._tree(state, objects))
