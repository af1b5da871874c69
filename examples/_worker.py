"""A rank of a training run, in a process of its own. The first one tells the parent in lines of JSON how it goes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _measuring import measure
from _sizes import size_table
from _training import Trainer, digest, is_tied

import statetree as st
from statetree.dcp import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path


def join(rank: int, ranks: int, store: Path) -> None:
    """Become one of a run's ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)


def leave() -> None:
    """Stop being one."""
    dist.barrier()
    dist.destroy_process_group()


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
    with Checkpointer(directory, keep=2) as checkpointer:
        _train_saving(Trainer(steps), steps, every, checkpointer)


def train_resumed(steps: int, every: int, directory: Path, *, sabotage: bool = False) -> None:
    """Restore the newest complete checkpoint and train on from there, and save every few steps.

    With ``sabotage``, one of the restored tensors is off by the least that floating point knows.
    """
    trainer = Trainer(steps)
    trainer.prime_optimizer()
    with Checkpointer(directory, keep=2) as checkpointer:
        trainer.adopt(checkpointer.restore(trainer.state()))
        _report("restored", restored=trainer.step, restored_tied=is_tied(trainer.state()))
        if sabotage:
            moment = trainer.state()["optimizer"]["state"][0]["exp_avg"].to_local()
            moment.copy_(torch.nextafter(moment, torch.tensor(torch.inf)))
        _train_saving(trainer, steps, every, checkpointer)


def _train_saving(trainer: Trainer, steps: int, every: int, checkpointer: Checkpointer) -> None:
    saving = None
    while trainer.step < steps:
        _advance(trainer)
        if trainer.step % every == 0:
            waits = saving is not None and not saving.done()
            start = time.perf_counter()
            saving = checkpointer.async_save(trainer.step, trainer.state())
            _report("saving", step=trainer.step, stopped_s=time.perf_counter() - start, waited=waits)
    _report("done", digest=digest(trainer.state()))


def _advance(trainer: Trainer) -> None:
    loss = trainer.advance()
    _report("step", step=trainer.step, loss=loss.hex())


def _report(event: str, **facts: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **facts}), flush=True)
