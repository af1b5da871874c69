"""What it costs a trainer to have its state saved: staging, against saving at once and against ``copy.deepcopy``."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import statetree as st
from statetree.dcp import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """How long the trainer stands still, in seconds: medians of ``rounds``, but for the first staging."""

    first_stage_s: float
    stage_s: float
    deepcopy_s: float
    save_s: float
    rounds: int


def measure(state: Any, directory: Path, *, rounds: int = 9) -> Costs:
    """Measure in turns, on one state, so that what slows the machine down for a while slows all of them down.

    Every rank calls it, and all of them do the same at the same time.
    """
    saved = directory / "measured"
    times: dict[str, list[float]] = {"stage": [], "deepcopy": [], "save": []}
    with st.Stager() as stager, Checkpointer(saved) as checkpointer:
        first = _seconds(partial(stager.stage, state))
        for number in range(rounds):
            times["stage"].append(_seconds(partial(stager.stage, state)))
            times["deepcopy"].append(_seconds(partial(copy.deepcopy, state)))
            times["save"].append(_seconds(partial(checkpointer.save, number, state)))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved)
    return Costs(first, median(times["stage"]), median(times["deepcopy"]), median(times["save"]), rounds)


def _seconds(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    del result  # freeing it is not part of the work
    return elapsed
