"""How the contenders of a row are timed: in turns, in one process, and only if what they return is right."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.memory import peak_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Role = Literal["ours", "variant", "peer", "floor"]

#: What the tables call statetree, done as usual.
OURS: Final = "statetree"
#: How many rounds a row that takes far too long must have at least.
ENOUGH_OF_SLOW: Final = 3


class WrongResult(Exception):
    """A contender returned something wrong, so its time means nothing."""


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a row.

    Attributes:
        name: What the table calls it.
        role: ``peer`` is what else a user could call, ``floor`` what the machine can do at best, ``variant`` statetree
            in another way: at another size, or for the first time.
        run: The work: what is timed. It takes what ``fresh`` returned, if that is given, and otherwise nothing.
        check: Whether a result is right. Not timed.
        fresh: Called before every run, not timed, where a run needs something new each time.
        repeats: How many runs a sample is the mean of, where one is too short to be timed.
        num_leaves: How many leaves it works on, where these are not all of the row's state.
        nbytes: How many bytes it works on, then.
    """

    name: str
    role: Role
    run: Callable[..., Any]
    check: Callable[[Any], bool]
    fresh: Callable[[], Any] | None = None
    repeats: int = 1
    num_leaves: int | None = None
    nbytes: int | None = None


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
    """What was measured of a contender.

    Attributes:
        name: As for ``Contender``. So are ``role``, ``num_leaves`` and ``nbytes``.
        role: See there.
        samples: How long it took, a sample a round, in seconds.
        num_leaves: See there.
        nbytes: See there.
        peaks: How many bytes of memory it took at most beside what was there before; one figure for each rank.
        sent: How many bytes each rank sent.
        faults: How many page faults each sample took, where these were counted.
    """

    name: str
    role: Role
    samples: list[float] = field(default_factory=list)
    num_leaves: int | None = None
    nbytes: int | None = None
    peaks: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)


class Alone:
    """Who measures: this process alone. Ranks have to wait for each other, and to agree on when to stop."""

    def ready(self) -> None:
        """Wait until all are ready to start."""

    def decide(self, *, done: bool) -> bool:
        """Return whether to stop."""
        return done


def ours(run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return statetree as a contender."""
    return Contender(OURS, "ours", run, check, fresh)


def peer(name: str, run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return what else a user could call as a contender."""
    return Contender(name, "peer", run, check, fresh)


def variant(name: str, run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return statetree in another way as a contender."""
    return Contender(name, "variant", run, check, fresh)


def floor(name: str, run: Callable[..., Any], check: Callable[[Any], bool], *, fresh: Any = None) -> Contender:
    """Return what the machine can do at best as a contender."""
    return Contender(name, "floor", run, check, fresh)


def measure(
    contenders: Sequence[Contender], change: Callable[[], None], budget: Budget, company: Alone | None = None
) -> list[Timing]:
    """Time contenders in turns: A B C, A B C, …, so that a noisy moment hits all of them alike.

    Every result is dropped before the next run, outside the timed section. The garbage collector is on, as users have
    it, and is left alone: a full collection falls into the sample in which it becomes due.

    Args:
        contenders: What is timed.
        change: Changes the state in place. Called once after the warm-up, so that the last results, which are
            checked as well, cannot be those of the first run.
        budget: How often they are run.
        company: Who else measures the same at the same time.

    Raises:
        WrongResult: If a contender's first or last result is wrong.
    """
    company = company or Alone()
    for contender in contenders:
        _check(contender, _run(contender, company)[1])
    change()
    for contender in contenders:  # a second time: caches that the first run filled are now in use
        _run(contender, company)
    timings = [Timing(one.name, one.role, num_leaves=one.num_leaves, nbytes=one.nbytes) for one in contenders]
    gc.collect()
    began = time.perf_counter()
    while not company.decide(done=_done(len(timings[0].samples), time.perf_counter() - began, budget)):
        for contender, timing in zip(contenders, timings, strict=True):
            timing.samples.append(_sample(contender, company))
    for contender in contenders:
        _check(contender, _run(contender, company)[1])
    return timings


def peak(contender: Contender, company: Alone | None = None) -> int | None:
    """Return how many bytes of memory a contender takes at most; ``None`` where the system does not tell."""
    arguments = () if contender.fresh is None else (contender.fresh(),)
    gc.collect()
    (company or Alone()).ready()
    return peak_of(lambda: contender.run(*arguments))


def _done(rounds: int, seconds: float, budget: Budget) -> bool:
    enough = rounds >= budget.rounds and seconds >= budget.seconds
    return rounds >= budget.most or enough or (rounds >= ENOUGH_OF_SLOW and seconds >= 10 * budget.seconds)


def _sample(contender: Contender, company: Alone) -> float:
    seconds = 0.0
    for _ in range(contender.repeats):
        seconds += _run(contender, company)[0]
    return seconds / contender.repeats


def _run(contender: Contender, company: Alone) -> tuple[float, Any]:
    arguments = () if contender.fresh is None else (contender.fresh(),)
    company.ready()
    start = time.perf_counter()
    result = contender.run(*arguments)
    stop = time.perf_counter()
    return stop - start, result


def _check(contender: Contender, result: Any) -> None:
    if not contender.check(result):
        msg = f"{contender.name}: the result is wrong: expected the work to be done, got {type(result)}."
        raise WrongResult(msg)
