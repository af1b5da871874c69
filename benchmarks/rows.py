"""A row of the table: one kind of work on one kind of state, its contenders, and what it aims at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from benchmarks.machine import Bystanders
from benchmarks.measure import OURS, Budget, Contender, Timing, measure, peak

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.states import State


#: How many cores other processes may take before a row counts as disturbed.
DISTURBED: Final = 0.1


@dataclass(frozen=True)
class Result:
    """What was measured for a row."""

    row: Row
    title: str
    num_leaves: int
    nbytes: int
    timings: list[Timing]
    bystanders: float  # how many cores other processes took meanwhile

    @property
    def ours(self) -> float:
        """Statetree's median, in seconds."""
        return self.of_ours.median

    @property
    def of_ours(self) -> Timing:
        """What was measured of statetree."""
        return next(timing for timing in self.timings if timing.role == "ours")

    def of(self, name: str) -> Timing:
        """Return what was measured of a contender."""
        return next(timing for timing in self.timings if timing.name == name)

    def times_ours(self, name: str) -> float:
        """Return how many times statetree's median a contender's is."""
        return self.of(name).median / self.ours


@dataclass(frozen=True)
class Aim:
    """A figure to reach.

    Attributes:
        text: What it says in the table.
        value: What was measured for it, or ``None`` where the system does not tell.
        holds: Whether a measured value reaches it.
        timed: The contender whose time it is about; empty if it is about memory, or about what is sent.
    """

    text: str
    value: Callable[[Result], float | None]
    holds: Callable[[float], bool]
    timed: str = ""


def faster(than: str, times: float, timed: str = OURS) -> Aim:
    """Aim at being so many times faster than a peer, in a variant if one is named."""

    def value(result: Result) -> float:
        return result.of(than).median / result.of(timed).median

    return _timed(f"≥ {times:g} times faster than {than}", value, lambda value: value >= times, timed)


def share(fraction: float, of: str) -> Aim:
    """Aim at this part of the floor's speed."""
    return Aim(f"≥ {fraction:g} of {of}", lambda result: result.times_ours(of), lambda value: value >= fraction, OURS)


def within(times: float, of: str, timed: str = OURS) -> Aim:
    """Aim at taking at most so many times what the floor takes, in a variant if one is named."""

    def value(result: Result) -> float:
        return result.of(timed).median / result.of(of).median

    return _timed(f"≤ {times:g} times {of}", value, lambda value: value <= times, timed)


def _timed(text: str, value: Callable[[Result], float], reached: Callable[[float], bool], timed: str) -> Aim:
    """Return an aim whose text names the variant that it is about, if it is about one."""
    return Aim(text if timed == OURS else f"{text} ({variant_of(timed)})", value, reached, timed)


def variant_of(contender: str) -> str:
    """Return in which way statetree does the work, by the contender's name."""
    return contender.removeprefix(f"{OURS}, ")


def memory_per_leaf(most: int) -> Aim:
    """Aim at taking at most so many bytes of memory a leaf."""
    return Aim(
        f"≤ {most:,} bytes of memory a leaf",
        lambda result: result.of_ours.peaks[0] / result.num_leaves if result.of_ours.peaks else None,
        lambda value: value <= most,
    )


def memory_within(times: float, of: str) -> Aim:
    """Aim at taking at most so many times the memory of a contender."""

    def value(result: Result) -> float | None:
        more, less = result.of_ours.peaks, result.of(of).peaks
        return more[0] / max(less[0], 1) if more and less else None

    return Aim(f"≤ {times:g} times the memory of {of}", value, lambda value: value <= times)


@dataclass(frozen=True)
class Row:
    """One kind of work on one kind of state.

    Attributes:
        group: What `--only` calls it and its like.
        work: What is done.
        state: Makes the state, at a scale (1 is the size in the title).
        contenders: Returns the ways of doing it on that state.
        aims: What statetree is to reach.
        moves_bytes: Whether bytes per second mean something.
        rounds: At most so many rounds, where each takes seconds.
        memory: Whether the memory that each contender takes is measured as well.
    """

    group: str
    work: str
    state: Callable[[float], State]
    contenders: Callable[[Any], Sequence[Contender]]
    aims: tuple[Aim, ...] = ()
    moves_bytes: bool = True
    rounds: int | None = None
    memory: bool = False

    def measure(self, scale: float, budget: Budget) -> Result:
        """Make the state, time the contenders, and let go of both.

        Where other processes took part of the machine it is done again, and the least disturbed attempt counts.
        """
        state = self.state(scale)
        contenders = self.contenders(state)
        budget = self.limited(budget)
        attempts: list[tuple[float, list[Timing]]] = []
        while may_try_again([cores for cores, _ in attempts], budget):
            bystanders = Bystanders()
            timings = measure(contenders, state.change, budget)
            attempts.append((bystanders.cores(), timings))
        cores, timings = min(attempts, key=itemgetter(0))
        for contender, timing in zip(contenders, timings, strict=True):
            nbytes = peak(contender) if self.memory else None
            timing.peaks.extend([] if nbytes is None else [nbytes])
        return Result(self, f"{self.work}, {state.title}", state.num_leaves, state.nbytes, timings, cores)

    def limited(self, budget: Budget) -> Budget:
        """Return a budget of no more rounds than this row may have."""
        most = budget.most if self.rounds is None else min(budget.most, self.rounds)
        return replace(budget, rounds=min(budget.rounds, most), most=most)


def may_try_again(disturbances: Sequence[float], budget: Budget) -> bool:
    """Whether to measure once more: not yet measured, or always disturbed."""
    return not disturbances or (len(disturbances) < budget.attempts and disturbances[-1] > DISTURBED)
