"""Processes in a gloo group, started once and called often."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statetree.testing.rank_worker import ARE_YOU_IN_STEP, Answer, serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: How long a process may take to write down where it hangs.
STACK_S = 0.5
#: How long a process may take to end by itself: those that are measured write down what they did.
ENDING_S = 10.0
#: Below its frames nothing is the user's.
WORKER_FILE = str(Path(serve.__code__.co_filename))


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank.

    Attributes:
        rank: Which one it is.
        status: ``returned``, ``raised``, ``died`` (its process ended), ``hung`` (its process was killed) or ``strayed``
            (it returned, but the ranks have not made the same collectives).
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
        self._folder = tempfile.TemporaryDirectory(prefix="statetree-ranks-", ignore_cleanup_errors=True)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = _context()
        try:
            for rank in range(world_size):
                self._start(context, rank, world_size, collective_timeout)
        except BaseException:
            self.sound = False
            self.close()
            raise

    def _start(self, context: Any, rank: int, world_size: int, collective_timeout: float) -> None:
        mine, its = context.Pipe()
        self._pipes.append(mine)
        with its:  # closed, so that the end of the process is the end of the pipe
            process = context.Process(
                target=serve, args=(rank, world_size, self._folder.name, collective_timeout, its), daemon=True
            )
            process.start()
        self._processes.append(process)

    def call(self, call: bytes, *, deadline: float, grace_s: float) -> list[Outcome]:
        """Run a pickled call on all ranks.

        Args:
            call: The path of modules, and the pickled function with its arguments.
            deadline: When to kill those that still run, by the monotonic clock.
            grace_s: How long the others may go on once one has failed.
        """
        self.sound = False  # until it has ended well
        self._idle.clear()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen below: it has died
                pipe.send_bytes(call)
        answers: dict[int, Answer | None] = {}
        while len(answers) < len(self._pipes):
            ready = self._ready(answers, deadline - time.monotonic())
            if not ready:
                break
            for rank in ready:
                answers[rank] = answer = self._receive(rank)
                if answer is not None:
                    self._idle.add(rank)
                if answer is None or answer.status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        outcomes = [self._outcome(rank, answers) for rank in range(len(self._pipes))]
        return self._checked(outcomes, [answer for answer in answers.values() if answer is not None])

    def close(self) -> None:
        """End the processes, those that do not end by themselves too, and remove what they left."""
        if os.getpid() != self._owner:
            return
        for pipe in self._pipes:
            pipe.close()
        for rank, process in enumerate(self._processes):
            if rank in self._idle:
                process.join(ENDING_S)
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _ready(self, answers: dict[int, Answer | None], timeout: float) -> list[int]:
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
        ready = wait(list(pending), timeout=max(0.0, timeout))
        return [rank for pipe, rank in pending.items() if pipe in ready]

    def _receive(self, rank: int) -> Answer | None:
        try:
            answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        assert isinstance(answer, Answer)
        return answer

    def _are_in_step(self) -> bool:
        """Have the ranks make one more collective, and return whether it comes out right."""
        try:
            for pipe in self._pipes:
                pipe.send_bytes(ARE_YOU_IN_STEP)
            return all([pickle.loads(pipe.recv_bytes()) for pipe in self._pipes])  # noqa: C419 - all must answer
        except (EOFError, ConnectionResetError, BrokenPipeError):  # one died after it had returned
            return False

    def _outcome(self, rank: int, answers: dict[int, Answer | None]) -> Outcome:
        if rank not in answers:
            return Outcome(rank, "hung", None, f"It did not end in time, and was killed. {self._stack(rank)}")
        answer = answers[rank]
        if answer is None:
            self._processes[rank].join()
            return Outcome(rank, "died", None, f"Its process ended with exit code {self._processes[rank].exitcode}.")
        return Outcome(rank, answer.status, answer.value, answer.traceback)

    def _stack(self, rank: int) -> str:
        """Have a process that hangs write down where, and return that."""
        pid = self._processes[rank].pid
        assert pid is not None
        file = Path(self._folder.name) / f"stack{rank}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_S
        while time.monotonic() < until and not file.stat().st_size:
            time.sleep(0.01)
        lines = file.read_text().splitlines()
        if not lines:
            return "It does not say where: it may be stopped."
        own = next((index for index, line in enumerate(lines) if WORKER_FILE in line), len(lines))
        return "\n".join(lines[:own])

    def _checked(self, outcomes: list[Outcome], answers: list[Answer]) -> list[Outcome]:
        if any(outcome.status != "returned" for outcome in outcomes):
            return outcomes
        if not self._are_in_step():
            text = "It returned, but the ranks did not make the same collectives: the next one did not come out right."
            return [Outcome(outcome.rank, "strayed", outcome.value, text) for outcome in outcomes]
        self.sound = not any(answer.worn for answer in answers)
        return outcomes


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
