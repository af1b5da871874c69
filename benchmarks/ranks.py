"""Rows that take several ranks: every rank runs each contender at the same time, and the slowest rank counts."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from benchmarks.machine import Bystanders
from benchmarks.measure import Alone, Budget, Contender, Timing, measure, peak
from benchmarks.rows import Aim, Result, Row, may_try_again
from statetree.exchange import recognition
from statetree.exchange.group import Group
from statetree.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.states import State
    from statetree.exchange.group import Message

#: When ranks that do not come to an end are killed.
TIMEOUT_S: Final = 300.0


class InStep(Alone):
    """All ranks of the default group."""

    def ready(self) -> None:
        """Wait until all are ready to start."""
        dist.barrier()

    def decide(self, *, done: bool) -> bool:
        """Return what rank 0 thinks: the ranks' clocks differ."""
        answer = torch.tensor([done])
        dist.broadcast(answer, src=0)
        return bool(answer)


@dataclass(frozen=True)
class Part:
    """What one rank measured."""

    title: str
    num_leaves: int
    nbytes: int
    timings: list[Timing]
    bystanders: float


@dataclass(frozen=True)
class RankRow(Row):
    """A row that is measured on several ranks, each a process with one thread.

    State and contenders are made by each rank for itself, so both functions must be picklable.

    Attributes:
        ranks: How many.
    """

    ranks: int = 2

    def measure(self, scale: float, budget: Budget) -> Result:
        """Start the ranks, and put together what they measured."""
        attempts: list[list[Part]] = []
        budget = self.limited(budget)
        while may_try_again([parts[0].bystanders for parts in attempts], budget):
            args = (self.state, self.contenders, scale, budget)
            attempts.append(run_ranks(self.ranks, measure_here, *args, timeout=TIMEOUT_S))
        parts = min(attempts, key=lambda parts: parts[0].bystanders)
        first = parts[0]
        timings = [_together(of_ranks) for of_ranks in zip(*map(attrgetter("timings"), parts), strict=True)]
        title = f"{self.work}, {first.title}, {self.ranks} ranks"
        return Result(self, title, first.num_leaves, first.nbytes, timings, first.bystanders)


def measure_here(
    make_state: Callable[[float], State],
    make_contenders: Callable[[State], Sequence[Contender]],
    scale: float,
    budget: Budget,
) -> Part:
    """Measure a row on this rank. All ranks call this."""
    state = make_state(scale)
    contenders = make_contenders(state)
    company = InStep()
    bystanders = Bystanders(_processor_time_of_all)
    timings = measure(contenders, state.change, budget, company)
    cores = bystanders.cores()
    for contender, timing in zip(contenders, timings, strict=True):
        nbytes = peak(contender, company)
        timing.peaks.extend([] if nbytes is None else [nbytes])
        if contender.role == "ours":
            timing.sent.append(_sent_by(contender))
    return Part(state.title, state.num_leaves, state.nbytes, timings, cores)


def _processor_time_of_all() -> float:
    seconds = torch.tensor([time.process_time()], dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds)


def _sent_by(contender: Contender) -> int:
    """Return how many bytes of elements this rank sends in one run."""
    arguments = () if contender.fresh is None else (contender.fresh(),)
    # A call that is known again moves what it recorded, which is not counted here.
    recognition._KEPT.clear()  # noqa: SLF001
    with _counted() as counts:
        contender.run(*arguments)
    return sum(counts)


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Have every exchange say how much it sends."""
    counts: list[int] = []
    exchange, broadcast = Group.exchange, Group.broadcast

    def counted_exchange(group: Group, sent: Sequence[Message], received: Sequence[Message]) -> Callable[[], None]:
        counts.extend(data.numel() for _, data in sent)
        return exchange(group, sent, received)

    def counted_broadcast(group: Group, tensors: Sequence[torch.Tensor], source: int) -> Callable[[], None]:
        counts.extend(tensor.numel() for tensor in tensors if group.rank == source)
        return broadcast(group, tensors, source)

    Group.exchange, Group.broadcast = counted_exchange, counted_broadcast  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Group.exchange, Group.broadcast = exchange, broadcast  # type: ignore[method-assign]


def _together(of_ranks: Sequence[Timing]) -> Timing:
    """Return the timing of the slowest rank in each round, and what each rank took and sent."""
    first = of_ranks[0]
    return Timing(
        first.name,
        first.role,
        [max(samples) for samples in zip(*map(attrgetter("samples"), of_ranks), strict=True)],
        first.num_leaves,
        first.nbytes,
        [count for timing in of_ranks for count in timing.peaks],
        [count for timing in of_ranks for count in timing.sent],
    )


def takes_at_most(rank: int, most_bytes: int, text: str) -> Aim:
    """Aim at a rank taking at most so many bytes beside what it held before; the value is the part of these."""

    def value(result: Result) -> float | None:
        peaks = result.of_ours.peaks
        return peaks[rank] / most_bytes if peaks else None

    return Aim(f"rank {rank} takes {text}", value, lambda value: value <= 1)


def sends_one_model() -> Aim:
    """Aim at all ranks together sending no more bytes than the model has; the value is the part of these."""
    return Aim(
        "all ranks together send ≤ one model",
        lambda result: sum(result.of_ours.sent) / result.nbytes,
        lambda value: value <= 1,
    )


def sends_alike(times: float) -> Aim:
    """Aim at the rank that sends most sending at most so many times what the one that sends least does."""
    return Aim(
        f"the busiest rank sends ≤ {times:g} times what the idlest does",
        lambda result: max(result.of_ours.sent) / max(min(result.of_ours.sent), 1),
        lambda value: value <= times,
    )
