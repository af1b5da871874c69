"""A callback of transformers' ``Trainer`` that saves in the background, and resumes in a plain ``train()``."""

from __future__ import annotations

import json
from typing import Any, Final, cast

from transformers import TrainerCallback, trainer_utils

from statetree.dcp.checkpointer import Checkpointer
from statetree.errors import warn
from statetree.integrations import RandomState

_KEPT: Final = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "log_history", "best_")  # prefixes


class Callback(TrainerCallback):
    """Saves model, optimizer, scheduler, progress and random state, and resumes them, and where the data were.

    Pass it to a ``Trainer`` with ``save_strategy="no"``: ``train()`` goes on from the latest checkpoint, if there is
    one. Batches that were used are read again, and dropped. The scaler of ``fp16`` is not saved.

    Args:
        directory: Where the checkpoints go.
        options: As for ``Checkpointer``: ``every=100``, ``keep=2``.

    Raises:
        ValueError: By ``train()``, unless an epoch is a known multiple of ``gradient_accumulation_steps`` batches.
    """

    def __init__(self, directory: Any, **options: Any) -> None:
        self.checkpointer = Checkpointer(directory, **options)
        self._saved, self._random = -1, cast("Any", None)  # the last save's step; the random state of a checkpoint

    def _tree(self, state: Any, objects: dict[str, Any], *, told: bool = True) -> dict[str, Any]:
        self._saved, kept = state.global_step, {name: objects[name] for name in ("model", "optimizer", "lr_scheduler")}
        kept |= {"progress": json.dumps({k: v for k, v in vars(state).items() if k.startswith(_KEPT)})} if told else {}
        return {**kept, "random": RandomState().state_dict(), "epoch": self._epoch}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        loader, self._epoch = objects["train_dataloader"], RandomState().state_dict()  # as it began: the data's order
        if not trainer_utils.has_length(loader) or len(loader) % args.gradient_accumulation_steps:
            raise ValueError("save: expected a known number of batches an epoch, n * gradient_accumulation_steps.")
        self._steps, self._unread, self._random = len(loader) // args.gradient_accumulation_steps, 0, None  # an epoch's
        if anew := sorted(state.stateful_callbacks.keys() - {"TrainerControl"}):
            warn(f"save: not saved, so that a resumed run begins it anew: the state of {', '.join(anew)}.")
        if state.global_step or not self.checkpointer.steps():
            return
        restored = self.checkpointer.restore(self._tree(state, objects))
        vars(state).update(json.loads(restored["progress"]))
        self._random, self._epoch, self._saved = restored["random"], restored["epoch"], state.global_step
        self._unread = self._saved if self._saved < state.max_steps else self._steps * state.num_train_epochs  # all

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        loader, self._is_skipped = objects["train_dataloader"], self._unread >= self._steps
        loader.skip_batches = min(self._unread, self._steps) * args.gradient_accumulation_steps
        self._unread = max(self._unread - self._steps, 0)
        if self._random is None:
            self._epoch = RandomState().state_dict()
        elif not self._is_skipped:  # the epoch of the checkpoint
            RandomState().load_state_dict(self._epoch)
            self._random = self._random if loader.skip_batches else None  # nothing was drawn by then but the order

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        control.should_training_stop &= not self._is_skipped  # a trainer that sees no batch thinks there are none
        if self._is_skipped or (self.checkpointer.signalled and state.global_step % self._steps):  # here no epoch ends
            control.should_evaluate = control.should_log = control.should_save = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._random is not None:
            RandomState().load_state_dict(self._random)
            self._random = None
        elif self._saved != (step := state.global_step) and self.checkpointer.due(step):
            self.checkpointer.async_save(step, self._tree(state, objects, told=state.is_world_process_zero))
            control.should_training_stop |= self.checkpointer.signalled is not None

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._saved != state.global_step and not (args.load_best_model_at_end and self.checkpointer.signalled):
            self._epoch = self._epoch if state.global_step % self._steps else RandomState().state_dict()
            self.checkpointer.save(state.global_step, self._tree(state, objects, told=state.is_world_process_zero))
