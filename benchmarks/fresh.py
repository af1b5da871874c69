"""Rows of which each sample is taken in a process of its own: what ran before has left no memory behind."""

from __future__ import annotations

import gc
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.machine import Bystanders
from benchmarks.measure import Timing, WrongResult
from benchmarks.rows import Result, Row, may_try_again
from benchmarks.states import many_small

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.measure import Budget, Contender
    from benchmarks.states import State

#: Two tensors of 1 KB are worked on before, so that no sample has the import of a module in it.
_WARM_UP: Final = 1e-4


class _Sample(NamedTuple):
    timing: Timing  # of this one sample
    title: str
    num_leaves: int
    nbytes: int


@dataclass(frozen=True)
class FreshRow(Row):
    """A row that is measured in one new process for each sample, with the page faults of each.

    State and contenders are made by each process for itself, so both functions must be picklable.
    """

    def measure(self, scale: float, budget: Budget) -> Result:
        """Have the contenders take turns, each in a new process."""
        budget = self.limited(budget)
        attempts: list[tuple[float, list[list[_Sample]]]] = []
        while may_try_again([cores for cores, _ in attempts], budget):
            bystanders = Bystanders()
            rounds = [self._round(scale) for _ in range(budget.rounds)]
            attempts.append((bystanders.cores(), rounds))
        cores, rounds = min(attempts, key=lambda attempt: attempt[0])
        first = rounds[0][0]
        timings = [_together([sample.timing for sample in samples]) for samples in zip(*rounds, strict=True)]
        return Result(self, f"{self.work}, {first.title}", first.num_leaves, first.nbytes, timings, cores)

    def _round(self, scale: float) -> list[_Sample]:
        samples: list[_Sample] = []
        count = 1
        while len(samples) < count:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                sampled = process.submit(_sampled, self.state, self.contenders, len(samples), scale)
                sample, count = sampled.result()
            samples.append(sample)
        return samples


def _sampled(
    make_state: Callable[[float], State],
    make_contenders: Callable[[State], Sequence[Contender]],
    number: int,
    scale: float,
) -> tuple[_Sample, int]:
    """Run one of the contenders once, and return how many there are, too."""
    _run(make_contenders(many_small(_WARM_UP))[number])
    state = make_state(scale)
    contenders = make_contenders(state)
    gc.collect()
    return _Sample(_run(contenders[number]), state.title, state.num_leaves, state.nbytes), len(contenders)


def _run(contender: Contender) -> Timing:
    arguments: tuple[Any, ...] = () if contender.fresh is None else (contender.fresh(),)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    result = contender.run(*arguments)
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    if not contender.check(result):
        msg = f"{contender.name}: the result is wrong: expected the work to be done, got {type(result)}."
        raise WrongResult(msg)
    return Timing(contender.name, contender.role, [seconds], faults=[faults])


def _together(timings: Sequence[Timing]) -> Timing:
    first = timings[0]
    samples = [sample for timing in timings for sample in timing.samples]
    return Timing(first.name, first.role, samples, faults=[count for timing in timings for count in timing.faults])
