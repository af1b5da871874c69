"""A training run in a process of its own, which tells its parent in lines of JSON how far it has come."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from _checkpoint import BackgroundSaver, complete, load
from _measuring import measure
from _sizes import size_table
from _training import Trainer, digest, is_tied

import statetree as st

if TYPE_CHECKING:
    from pathlib import Path

# DCP says at each save and load that there is one process only, which is what no_dist=True told it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def train_uninterrupted(steps: int, directory: Path) -> None:
    """Train to the end without a checkpoint, then measure what one would have cost."""
    trainer = Trainer(steps)
    for _ in range(steps):
        _advance(trainer)
    state = trainer.state()
    with st.Stager() as stager:
        tied = is_tied(stager.stage(state))
    costs = asdict(measure(state, directory))
    _report("measured", costs=costs, staged_tied=tied, sizes=size_table(state))
    _report("done", digest=digest(state))


def train_saving(steps: int, every: int, directory: Path) -> None:
    """Train from the beginning, and save every few steps."""
    _train_saving(Trainer(steps), steps, every, directory)


def train_resumed(steps: int, every: int, directory: Path, *, sabotage: bool = False) -> None:
    """Restore the newest complete checkpoint and train on from there, and save every few steps.

    With ``sabotage``, one of the restored tensors is off by the least that floating point knows.
    """
    trainer = Trainer(steps)
    trainer.prime_optimizer()
    trainer.restore(load(complete(directory)[-1], trainer.state()))
    _report("restored", restored=trainer.step, restored_tied=is_tied(trainer.state()))
    if sabotage:
        moment = trainer.state()["optimizer"]["state"][0]["exp_avg"]
        moment.copy_(torch.nextafter(moment, torch.tensor(torch.inf)))
    _train_saving(trainer, steps, every, directory)


def _train_saving(trainer: Trainer, steps: int, every: int, directory: Path) -> None:
    with BackgroundSaver(directory) as saver:
        while trainer.step < steps:
            _advance(trainer)
            if trainer.step % every == 0:
                saver.save(trainer.step, trainer.state())
                _report("saving", step=trainer.step, staging_s=saver.last_staging_s, waits=saver.waits)
    _report("done", digest=digest(trainer.state()))


def _advance(trainer: Trainer) -> None:
    loss = trainer.advance()
    _report("step", step=trainer.step, loss=loss.hex())


def _report(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)
