"""A row of the table: one kind of work on one kind of state, its contenders, and what it aims at."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from benchmarks.machine import Bystanders
from benchmarks.measure import Budget, Contender, Timing, measure

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
        return next(timing.median for timing in self.timings if timing.contender.role == "ours")

    def times_ours(self, name: str) -> float:
        """Return how many times statetree's median a contender's is."""
        return next(timing.median for timing in self.timings if timing.contender.name == name) / self.ours


@dataclass(frozen=True)
class Aim:
    """A figure to reach.

    Attributes:
        text: What it says in the table.
        value: What was measured for it.
        holds: Whether a measured value reaches it.
    """

    text: str
    value: Callable[[Result], float]
    holds: Callable[[float], bool]


def faster(than: str, times: float) -> Aim:
    """Aim at being so many times faster than a peer."""
    return Aim(
        f"≥ {times:g} times faster than {than}", lambda result: result.times_ours(than), lambda value: value >= times
    )


def share(fraction: float, of: str) -> Aim:
    """Aim at this part of the floor's speed."""
    return Aim(f"≥ {fraction:g} of {of}", lambda result: result.times_ours(of), lambda value: value >= fraction)


def within(times: float, of: str) -> Aim:
    """Aim at taking at most so many times what the floor takes."""
    return Aim(f"≤ {times:g} times {of}", lambda result: 1 / result.times_ours(of), lambda value: value <= times)


def at_most(microseconds: float) -> Aim:
    """Aim at so many microseconds a leaf. They depend on the machine, unlike ratios."""
    return Aim(
        f"≤ {microseconds:g} µs a leaf",
        lambda result: result.ours / result.num_leaves * 1e6,
        lambda value: value <= microseconds,
    )


@dataclass(frozen=True)
class Row:
    """One kind of work on one kind of state.

    Attributes:
        group: What `--only` calls it and its like.
        work: What is done.
        state: Makes the state, at a scale (1 is the size in the title).
        contenders: Returns the ways of doing it.
        aims: What statetree is to reach.
        moves_bytes: Whether bytes per second mean something.
    """

    group: str
    work: str
    state: Callable[[float], State]
    contenders: Callable[[State], Sequence[Contender]]
    aims: tuple[Aim, ...] = ()
    moves_bytes: bool = True

    def measure(self, scale: float, budget: Budget) -> Result:
        """Make the state, time the contenders, and let go of both.

        Where other processes took part of the machine it is done again, and the least disturbed attempt counts.
        """
        state = self.state(scale)
        contenders = self.contenders(state)
        attempts: list[tuple[float, list[Timing]]] = []
        while not attempts or (len(attempts) < budget.attempts and attempts[-1][0] > DISTURBED):
            bystanders = Bystanders()
            timings = measure(contenders, state.change, budget)
            attempts.append((bystanders.cores(), timings))
        cores, timings = min(attempts, key=itemgetter(0))
        return Result(self, f"{self.work}, {state.title}", state.num_leaves, state.nbytes, timings, cores)
