"""A checkpoint manager for torchtitan's trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, ModelWrapper

from statetree.dcp.checkpointer import Checkpointer

if TYPE_CHECKING:
    from concurrent.futures import Future


class CheckpointManager(BaseCheckpointManager):
    """Saves the trainer's states in the background: set ``checkpoint=CheckpointManager.Config(enable=True)`` there."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """As torchtitan's own."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        if config.initial_load_path or config.last_save_in_hf or config.create_seed_checkpoint:
            msg = "CheckpointManager: initial_load_path, last_save_in_hf and create_seed_checkpoint are not supported."
            raise ValueError(msg)
        self._config = config
        parts = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers}
        self._states = {**states, **parts, **({} if dataloader is None else {DATALOADER: dataloader})}
        folder = os.path.join(base_folder, config.folder)
        self.checkpointer = Checkpointer(folder, keep=config.keep_latest_k or None, every=config.interval)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_due = self.checkpointer.due(curr_step) or (curr_step == 1 and self._config.enable_first_step_checkpoint)
        if self._config.load_only or not (is_due or last_step):
            return False
        is_model_only = last_step and self._config.last_save_model_only
        states = {MODEL: self._states[MODEL]} if is_model_only else self._states
        self.save_future = self.checkpointer.async_save(curr_step, states)
        if last_step:
            self._wait_for_saving()
        return True

    def _load(self, step: int = -1) -> bool:
        if not self.checkpointer.steps():
            return False
        left_out = self._config.exclude_from_loading
        states = {name: value for name, value in self._states.items() if name not in left_out}
        self.checkpointer.restore(states, step=None if step == -1 else step)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: what a save has begun with is staged."""

    def _wait_for_saving(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
            self.save_future = None

    def _close(self) -> None:
        self.checkpointer.close()
