"""How the contenders of a row are timed: in turns, in one process, and only if what they return is right."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Role = Literal["ours", "peer", "floor"]

#: How many rounds a row that takes far too long must have at least.
ENOUGH_OF_SLOW: Final = 3


class WrongResult(Exception):
    """A contender returned something wrong, so its time means nothing."""


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a row.

    Attributes:
        name: What the table calls it.
        role: ``peer`` is what else a user could call, ``floor`` what the machine can do at best.
        run: The work: what is timed. It takes what ``fresh`` returned, if that is given, and otherwise nothing.
        check: Whether a result is right. Not timed.
        fresh: Called before every run, not timed, where a run needs something new each time.
    """

    name: str
    role: Role
    run: Callable[..., Any]
    check: Callable[[Any], bool]
    fresh: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Budget:
    """How often contenders are run.

    Attributes:
        rounds: At least so often each.
        most: At most so often each.
        seconds: Between the two, rounds are added until a row has taken so long. After ten times that it ends anyway.
        attempts: How often a row is measured, at most, if other processes disturb it.
    """

    rounds: int
    most: int
    seconds: float
    attempts: int = 1


@dataclass(frozen=True)
class Timing:
    """How long a contender took, a sample a round, in seconds."""

    contender: Contender
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)


def ours(run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return statetree as a contender."""
    return Contender("statetree", "ours", run, check, fresh)


def peer(name: str, run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return what else a user could call as a contender."""
    return Contender(name, "peer", run, check, fresh)


def floor(name: str, run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return what the machine can do at best as a contender."""
    return Contender(name, "floor", run, check, fresh)


def measure(contenders: Sequence[Contender], change: Callable[[], None], budget: Budget) -> list[Timing]:
    """Time contenders in turns: A B C, A B C, …, so that a noisy moment hits all of them alike.

    Every result is dropped before the next run, outside the timed section. The garbage collector is off in the timed
    section and runs before it; what existed before is frozen, so that this takes no time and leaves caches alone.

    Args:
        contenders: What is timed.
        change: Changes the state in place. Called once after the warm-up, so that the last results, which are
            checked as well, cannot be those of the first run.
        budget: How often they are run.

    Raises:
        WrongResult: If a contender's first or last result is wrong.
    """
    for contender in contenders:
        _check(contender, _run(contender)[1])
    change()
    for contender in contenders:  # a second time: caches that the first run filled are now in use
        _run(contender)
    timings = [Timing(contender) for contender in contenders]
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        began = time.perf_counter()
        while not _done(len(timings[0].samples), time.perf_counter() - began, budget):
            for timing in timings:
                gc.collect()
                timing.samples.append(_run(timing.contender)[0])
        for contender in contenders:
            _check(contender, _run(contender)[1])
    finally:
        gc.enable()
        gc.unfreeze()
    return timings


def _done(rounds: int, seconds: float, budget: Budget) -> bool:
    enough = rounds >= budget.rounds and seconds >= budget.seconds
    return rounds >= budget.most or enough or (rounds >= ENOUGH_OF_SLOW and seconds >= 10 * budget.seconds)


def _run(contender: Contender) -> tuple[float, Any]:
    arguments = () if contender.fresh is None else (contender.fresh(),)
    start = time.perf_counter()
    result = contender.run(*arguments)
    stop = time.perf_counter()
    return stop - start, result


def _check(contender: Contender, result: Any) -> None:
    if not contender.check(result):
        msg = f"{contender.name}: the result is wrong: expected the work to be done, got {type(result)}."
        raise WrongResult(msg)
