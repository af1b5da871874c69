"""Processes in a gloo group, started once and called often."""

from __future__ import annotations

import dataclasses
import os
import pickle
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from statetree.testing.pace import unit_measured, units
from statetree.testing.rank_process import RankConnection, wait_for_any
from statetree.testing.rank_worker import CALL, Answer, is_in_step, pickled_call

#: How many units the collective takes at most with which the ranks find out whether they are in step.
IN_STEP_UNITS = 2.5
#: How many units a process may take to end by itself: those that are measured write down what they did.
ENDING_UNITS = 5
#: What is said of a process that has ended before it was one of the ranks: most likely by importing the main module.
NOT_BEGUN = (
    "It had not begun. Ranks import the main module: in a script, keep what calls run_ranks under "
    '`if __name__ == "__main__":`, and do not read the script from standard input.'
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank.

    Attributes:
        rank: Which one it is.
        status: ``returned``, ``raised`` (also if what it returned cannot be unpickled), ``died`` (its process ended),
            ``hung`` (its process was killed) or ``strayed`` (it returned, but the ranks have not made the same
            collectives).
        value: What was returned, or the exception that was raised, if it can be pickled.
        report: The traceback of what was raised, where it hung, or how its process ended.
    """

    rank: int
    status: str
    value: Any = None
    report: str = ""

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.status}\n{self.report}".rstrip()


class RankPool:
    """The processes of one gloo group.

    ``is_sound`` says whether they can take another call: all ranks returned, and made the same collectives.

    Args:
        world_size: How many.
        collective_timeout: Seconds that their collectives wait.
    """

    def __init__(self, world_size: int, collective_timeout: float) -> None:
        self.is_sound = True
        self._owner = os.getpid()
        self._is_worn = False
        self._folder = tempfile.TemporaryDirectory(prefix="statetree-ranks-", ignore_cleanup_errors=True)
        self._ranks: list[RankConnection] = []
        try:
            for rank in range(world_size):
                self._ranks.append(RankConnection(rank, world_size, Path(self._folder.name), collective_timeout))
                with unit_measured():
                    self._ranks[-1].start()
        except BaseException:
            self.is_sound = False
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether none of the processes has ended."""
        return all(rank.process.is_alive() for rank in self._ranks)

    def call(self, call: bytes, *, deadline: float, grace_s: float) -> list[Outcome]:
        """Run a pickled call on all ranks.

        Args:
            call: The function and its arguments, as ``pickled_call`` returns them.
            deadline: When to kill those that still run, by the monotonic clock. Nothing here waits longer, but for the
                moment in which they say where they hang.
            grace_s: How long the others may go on once one has failed.
        """
        self.is_sound = False  # until it has ended well
        outcomes = self._run(call, deadline, grace_s)
        if all(outcome.status == "returned" for outcome in outcomes):
            outcomes = self._in_step(outcomes, deadline)
            self.is_sound = not self._is_worn and all(outcome.status == "returned" for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """End the processes, those that do not end by themselves too, and remove what they left."""
        if os.getpid() != self._owner:  # a forked child does not own its parent's processes
            return
        for rank in self._ranks:
            rank.close()
        started = [rank for rank in self._ranks if rank.process.pid is not None]
        until = time.monotonic() + units(ENDING_UNITS)
        for rank in started:
            if rank.is_idle:
                rank.process.join(max(0.0, until - time.monotonic()))
            rank.process.kill()
        for rank in started:
            rank.process.join(
                units(ENDING_UNITS)
            )  # a process that was killed ends, but for one that waits for a broken disk
        self._folder.cleanup()

    def _run(self, call: bytes, deadline: float, grace_s: float) -> list[Outcome]:
        (Path(self._folder.name) / CALL).write_bytes(call)
        for connection in self._ranks:
            connection.notify()
        pending = dict(enumerate(self._ranks))
        outcomes: dict[int, Outcome] = {}
        while pending:
            left = max(0.0, deadline - time.monotonic())
            wait_for_any(pending.values(), left)
            done = [rank for rank, connection in pending.items() if connection.has_finished()]
            if not done and not left:
                break
            for rank in done:
                outcomes[rank] = self._outcome(rank, pending.pop(rank))
                if outcomes[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        for rank, connection in pending.items():
            report = f"It did not end in time, and was killed. {connection.stack()}"
            outcomes[rank] = Outcome(rank, "hung", None, report)
        return [outcomes[rank] for rank in range(len(self._ranks))]

    def _outcome(self, rank: int, connection: RankConnection) -> Outcome:
        pickled = connection.answer()
        if pickled is None:
            report = f"Its process ended with exit code {connection.process.exitcode}."
            return Outcome(rank, "died", None, report if connection.has_begun() else f"{report} {NOT_BEGUN}")
        answer = pickle.loads(pickled)
        assert isinstance(answer, Answer)
        self._is_worn = self._is_worn or answer.is_worn
        try:
            value = pickle.loads(answer.value)
        except Exception as error:
            if answer.status == "raised":
                return Outcome(rank, "raised", None, answer.traceback)
            report = "".join(traceback.format_exception(error))
            return Outcome(rank, "raised", error, f"What it returned cannot be unpickled.\n{report}")
        return Outcome(rank, answer.status, value, answer.traceback)

    def _in_step(self, outcomes: list[Outcome], deadline: float) -> list[Outcome]:
        """Have the ranks make one more collective; return what is to be said of them if it does not come out right."""
        left = max(0.0, deadline - time.monotonic())
        # At most half of the time, so that those which only wait for another one are not taken for hung themselves.
        steps = self._run(pickled_call(is_in_step, (min(units(IN_STEP_UNITS), left / 2),), left), deadline, left)
        if any(step.status in ("hung", "died") for step in steps):
            return [_lost(step) if step.status in ("hung", "died") else outcomes[step.rank] for step in steps]
        if all(step.value is True for step in steps):
            return outcomes
        text = "It returned, but the ranks did not make the same collectives: the next one did not come out right."
        return [
            Outcome(step.rank, "strayed", outcome.value, f"{text}\n{step.report}".rstrip())
            for outcome, step in zip(outcomes, steps, strict=True)
        ]


def _lost(step: Outcome) -> Outcome:
    """Return what is to be said of a rank that hung or died in the collective after a call."""
    text = "It had returned, and was to make one more collective, to see whether the ranks had made the same ones."
    return dataclasses.replace(step, report=f"{text} {step.report}")
