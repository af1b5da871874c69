"""Processes in a gloo group, started once and called often."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from statetree.testing.rank_line import Line, framed, wait_for_any
from statetree.testing.rank_worker import Answer, Surroundings, is_in_step, pickled_call, serve

#: How long the collective takes at most with which the ranks find out whether they are in step.
IN_STEP_TIMEOUT_S = 5.0
#: How long a process may take to write down where it hangs.
STACK_S = 0.5
#: How long a process may take to end by itself: those that are measured write down what they did.
ENDING_S = 10.0
#: What is said of a process that has ended before it was one of the ranks: most likely by importing the main module.
NOT_BEGUN = (
    "It had not begun. Ranks import the main module: in a script, keep what calls run_ranks under "
    '`if __name__ == "__main__":`, and do not read the script from standard input.'
)
#: Below its frames nothing is the user's.
WORKER_FILE = str(Path(serve.__code__.co_filename))


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

    ``sound`` says whether they can take another call: all ranks returned, and made the same collectives.

    Args:
        world_size: How many.
        collective_timeout: Seconds that their collectives wait.
    """

    def __init__(self, world_size: int, collective_timeout: float) -> None:
        self.sound = True
        self._owner = os.getpid()
        self._idle: set[int] = set()  # the ranks that wait for a call, and end when none can come any more
        self._worn = False
        self._folder = tempfile.TemporaryDirectory(prefix="statetree-ranks-", ignore_cleanup_errors=True)
        self._lines: list[Line] = []
        context = _context()
        try:
            for rank in range(world_size):
                self._start(context, rank, world_size, collective_timeout)
        except BaseException:
            self.sound = False
            self.close()
            raise

    def _start(self, context: Any, rank: int, world_size: int, collective_timeout: float) -> None:
        mine, its = socket.socketpair()
        with its:  # closed here, so that only the process has it
            process = context.Process(
                target=serve,
                args=(rank, world_size, self._folder.name, collective_timeout, its, Surroundings.here()),
                daemon=True,
            )
            self._lines.append(Line(mine, process))
            process.start()

    @property
    def lives(self) -> bool:
        """Whether none of the processes has ended."""
        return all(line.process.is_alive() for line in self._lines)

    def call(self, call: bytes, *, deadline: float, grace_s: float) -> list[Outcome]:
        """Run a pickled call on all ranks.

        Args:
            call: The function and its arguments, as ``pickled_call`` returns them.
            deadline: When to kill those that still run, by the monotonic clock. Nothing here waits longer, but for the
                moment in which they say where they hang.
            grace_s: How long the others may go on once one has failed.
        """
        self.sound = False  # until it has ended well
        outcomes = self._exchange(call, deadline, grace_s)
        if any(outcome.status != "returned" for outcome in outcomes):
            return outcomes
        outcomes = self._checked(outcomes, deadline)
        self.sound = not self._worn and all(outcome.status == "returned" for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """End the processes, those that do not end by themselves too, and remove what they left."""
        if os.getpid() != self._owner:
            return
        for line in self._lines:
            line.close()
        started = [(rank, line.process) for rank, line in enumerate(self._lines) if line.process.pid is not None]
        until = time.monotonic() + ENDING_S
        for rank, process in started:
            if rank in self._idle:
                process.join(max(0.0, until - time.monotonic()))
            process.kill()
        for _, process in started:
            process.join(ENDING_S)  # a process that was killed ends, but for one that waits for a broken disk
        self._folder.cleanup()

    def _exchange(self, call: bytes, deadline: float, grace_s: float) -> list[Outcome]:
        self._idle.clear()
        message = framed(call)
        for line in self._lines:
            line.tell(message)
        pending = dict(enumerate(self._lines))
        outcomes: dict[int, Outcome] = {}
        while pending:
            left = max(0.0, deadline - time.monotonic())
            wait_for_any(pending.values(), left)
            done = [rank for rank, line in pending.items() if line.advance()]
            if not done and not left:
                break
            for rank in done:
                outcomes[rank] = self._outcome(rank, pending.pop(rank))
                if outcomes[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        for rank in pending:
            outcomes[rank] = Outcome(rank, "hung", None, f"It did not end in time, and was killed. {self._stack(rank)}")
        return [outcomes[rank] for rank in range(len(self._lines))]

    def _outcome(self, rank: int, line: Line) -> Outcome:
        pickled = line.answer()
        if pickled is None:
            report = f"Its process ended with exit code {line.process.exitcode}."
            return Outcome(rank, "died", None, report if self._has_begun(rank) else f"{report} {NOT_BEGUN}")
        self._idle.add(rank)
        answer = pickle.loads(pickled)
        assert isinstance(answer, Answer)
        self._worn = self._worn or answer.worn
        try:
            value = pickle.loads(answer.value)
        except Exception as error:
            if answer.status == "raised":
                return Outcome(rank, "raised", None, answer.traceback)
            report = "".join(traceback.format_exception(error))
            return Outcome(rank, "raised", error, f"What it returned cannot be unpickled.\n{report}")
        return Outcome(rank, answer.status, value, answer.traceback)

    def _checked(self, outcomes: list[Outcome], deadline: float) -> list[Outcome]:
        """Have the ranks make one more collective; return what is to be said of them if it does not come out right."""
        left = max(0.0, deadline - time.monotonic())
        # At most half of the time, so that those which only wait for another one are not taken for hung themselves.
        steps = self._exchange(pickled_call(is_in_step, (min(IN_STEP_TIMEOUT_S, left / 2),), left), deadline, left)
        if any(step.status in ("hung", "died") for step in steps):
            return [_lost(step) if step.status in ("hung", "died") else outcomes[step.rank] for step in steps]
        if not all(step.value is True for step in steps):
            text = "It returned, but the ranks did not make the same collectives: the next one did not come out right."
            return [
                Outcome(rank, "strayed", outcome.value, f"{text}\n{step.report}".rstrip())
                for rank, (outcome, step) in enumerate(zip(outcomes, steps, strict=True))
            ]
        return outcomes

    def _has_begun(self, rank: int) -> bool:
        return self._stack_file(rank).exists()

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}"

    def _stack(self, rank: int) -> str:
        """Have a process that hangs write down where, and return that."""
        pid = self._lines[rank].process.pid
        assert pid is not None
        file = self._stack_file(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_S
        while time.monotonic() < until and not (self._has_begun(rank) and file.stat().st_size):
            time.sleep(0.01)
        lines = file.read_text().splitlines() if self._has_begun(rank) else []
        if not lines:
            return "It does not say where: it may be stopped, or not have begun."
        own = next((index for index, line in enumerate(lines) if WORKER_FILE in line), len(lines))
        return "\n".join(lines[:own])


def _lost(step: Outcome) -> Outcome:
    """Return what is to be said of a rank that hung or died in the collective after a call."""
    text = "It had returned, and was to make one more collective, to see whether the ranks had made the same ones."
    return dataclasses.replace(step, report=f"{text} {step.report}")


def _context() -> Any:
    """Return how processes are started: forked from a server that has torch imported already, where there are such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")  # pragma: no cover - on systems without fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])  # without effect if the server runs
    return context


_kept: dict[tuple[int, int, float], RankPool] = {}


def kept_pools() -> dict[tuple[int, int, float], RankPool]:
    """Return the pools that are kept for the next call."""
    return _kept


@atexit.register
def close_kept_pools() -> None:
    """Close the pools that are kept."""
    while _kept:
        _, pool = _kept.popitem()
        pool.close()
