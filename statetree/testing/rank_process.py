"""One rank, as the process that started it sees it: no wait for it is longer than asked, whatever it does.

Calls and answers are files in a folder that both know. What goes through the connection is only that there is a file:
so short a message is always sent and received at once, also if the rank is stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statetree.testing.pace import units
from statetree.testing.rank_worker import ANSWER, STACK, Surroundings, serve

if TYPE_CHECKING:
    from collections.abc import Iterable

#: How many units a process may take to write down where it hangs.
STACK_UNITS = 0.5
#: How long is waited at once: the system counts milliseconds in 32 bits.
MAX_WAIT_S = 3600.0
#: What the server has imported from which the processes of ranks are forked: they need not import it again.
PRELOADED = [serve.__module__]
#: Below its frames nothing is the user's.
WORKER_FILE = str(Path(serve.__code__.co_filename))


class RankConnection:
    """The process of a rank, and the connection to it. ``start`` is to be called once.

    Attributes:
        process: The process.
        is_idle: Whether it waits for a call, and ends when none can come any more.
    """

    def __init__(self, rank: int, world_size: int, folder: Path, collective_timeout: float) -> None:
        self.is_idle = False
        self._answer, self._stack = folder / ANSWER.format(rank), folder / STACK.format(rank)
        self._end, self._its_end = multiprocessing.Pipe()
        self._is_open = True
        self.process = _context().Process(
            target=serve,
            args=(rank, world_size, folder, collective_timeout, self._its_end, Surroundings.here()),
            daemon=True,
        )

    def start(self) -> None:
        """Start the process."""
        with self._its_end:  # closed here, so that only the process has it
            self.process.start()

    def notify(self) -> None:
        """Tell the rank that there is a call."""
        self.is_idle = False
        with contextlib.suppress(ConnectionError):  # it has ended, as will be seen
            self._end.send_bytes(b"call")

    def has_finished(self) -> bool:
        """Whether there is no more to wait for: the rank has answered, or its process has ended.

        (Whether the connection is closed does not tell: a process that lives may have closed it, and one that this
        process started may hold it open.)
        """
        has_ended = self.process.exitcode is not None  # asked first: what it has sent before is received below
        try:
            if self._is_open and self._end.poll():
                self._end.recv_bytes()
                self.is_idle = True
        except (EOFError, ConnectionError):
            self.close()
        return self.is_idle or has_ended

    def answer(self) -> bytes | None:
        """Return the answer, if there is one."""
        if not self.is_idle:
            return None
        content = self._answer.read_bytes()
        self._answer.unlink()
        return content

    def waited_for(self) -> list[Any]:
        """Return what is ready when ``has_finished`` may have changed."""
        return [self.process.sentinel, *([self._end] if self._is_open else [])]

    def close(self) -> None:
        """Close the connection."""
        self._is_open = False
        self._end.close()

    def has_begun(self) -> bool:
        """Whether the process has come so far that it can write down where it hangs."""
        return self._stack.exists()

    def stack(self) -> str:
        """Have a process that hangs write down where, and return that."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + units(STACK_UNITS)
        lines: list[str] = []
        own = 0
        while own == len(lines) and time.monotonic() < until:  # it writes piece by piece, the worker's frames last
            time.sleep(0.01)
            lines = self._stack.read_text().splitlines() if self.has_begun() else []
            own = next((index for index, line in enumerate(lines) if WORKER_FILE in line), len(lines))
        return "\n".join(lines[:own]) or "It does not say where: it may be stopped, or not have begun."


def wait_for_any(connections: Iterable[RankConnection], timeout_s: float) -> None:
    """Wait until one of several ranks may have finished, or an hour."""
    waited_for = [item for connection in connections for item in connection.waited_for()]
    multiprocessing.connection.wait(waited_for, min(timeout_s, MAX_WAIT_S))


def _context() -> Any:
    """Return how processes are started: forked from a server that has ``PRELOADED``, where there are such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")  # pragma: no cover - on systems without fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # without effect if the server runs
    return context
