"""Runs a function on every rank of a gloo group: fast enough for properties, and never for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from multiprocessing import forkserver
from multiprocessing.util import Finalize
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from statetree.testing.pace import unit_measured, units
from statetree.testing.rank_worker import STACK, answer, is_in_step, pickled_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from statetree.testing.rank_worker import Answer

R = TypeVar("R")

#: How many units the other ranks may go on once one has failed, how many the ranks may take to find out whether they
#: are in step, to write down where they hang, and to end by themselves.
GRACE_UNITS, IN_STEP_UNITS, STACK_UNITS, ENDING_UNITS = 2.5, 2.5, 0.5, 5
#: What the server has imported from which the processes of ranks are forked: they need not import it again.
PRELOADED = [answer.__module__]
#: Below its frames nothing is the user's.
WORKER_FILE = answer.__code__.co_filename
NOT_BEGUN = (
    " It had not begun. Ranks import the main module: in a script, keep what calls run_ranks under "
    '`if __name__ == "__main__":`, and do not read the script from standard input.'
)
STRAYED = "It returned, but the ranks did not make the same collectives: the next one did not come out right.\n"

_lock: threading.RLock
#: The pools that are kept for the next call, by their size and their timeout.
_kept: dict[tuple[int, float], RankPool]
#: Those of the parents of a forked process. They are not let go of: that would wait for threads which are not here.
_inherited: list[dict[tuple[int, float], RankPool]] = []


def _start_empty() -> None:
    """Own nothing: a forked child neither has its parent's ranks, nor the thread that held the lock."""
    global _lock, _kept
    _lock, _kept = threading.RLock(), {}


def _leave_to_the_parent() -> None:
    _inherited.append(_kept)
    _start_empty()
    # The server from which ranks are forked is the parent's: only its own parent may wait for it.
    forkserver._forkserver.__init__()  # type: ignore[misc]


_start_empty()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def run_ranks(
    world_size: int,
    fn: Callable[..., R],
    *args: Any,
    timeout: float = 60.0,
    collective_timeout: float = 30.0,
    fresh: bool = False,
) -> list[R]:
    """Run ``fn(*args)`` on every rank of a gloo group, and return what the ranks returned.

    The ranks are processes that are kept for the next call, so that a property may call this for each of its examples.
    They are replaced after any failure, and end with this process, also if it is killed. The default process group is
    ``world_size`` ranks on the CPU. Each rank has one thread for torch's operations. What ``fn`` leaves behind in a
    process (a default dtype, groups, meshes) is there in the next call: cache groups rather than making them for each
    example. But each call begins with this process's ``sys.path`` and environment variables. The ranks listen on the
    loopback interface, unless ``GLOO_SOCKET_IFNAME`` is set to others. Ranks import the main module: a script has to
    keep its calls under ``if __name__ == "__main__":``.

    Args:
        world_size: How many ranks there are.
        fn: A function that can be pickled: from the top level of a module, or a ``functools.partial`` of one.
        args: What it is given, pickled as well: tensors that share a storage share one on the rank too.
        timeout: Seconds until the ranks are killed, whatever they do.
        collective_timeout: Seconds that a collective waits for the other ranks before it raises.
        fresh: Whether to use new processes, and to end them afterwards.

    Returns:
        The results, pickled and unpickled, in the order of the ranks. Tensors keep elements and ties, but no autograd
        history and no shared memory.

    Raises:
        AssertionError: If ``fn`` raised on any rank, did not end in time (the report then says where it hung), its
            process died, the ranks did not make the same collectives, or what it returned cannot be unpickled. It
            describes every rank that failed, and its cause is the first exception that a rank raised.
        ValueError: If there would be no rank, or a time limit is no positive number.
        TypeError: If ``fn`` cannot be called.

    Example:
        >>> import torch.distributed as dist
        >>> from statetree.testing import run_ranks
        >>> run_ranks(2, dist.get_rank)
        [0, 1]
    """
    if not callable(fn):
        raise TypeError(f"run_ranks: fn: expected a function, got {fn!r}.")
    timeout = _seconds("timeout", timeout)
    collective_timeout = _seconds("collective_timeout", collective_timeout)
    call = _pickled(fn, args)
    with rank_pool(world_size, collective_timeout, fresh=fresh) as pool:
        outcomes = pool.call(call, deadline=time.monotonic() + timeout)
    failures = [outcome for outcome in outcomes if outcome.status != "returned"]
    if failures:
        name = getattr(fn, "__qualname__", None) or repr(fn)
        lines = [f"run_ranks: {name} failed on {len(failures)} of {world_size} ranks.", *map(str, failures)]
        cause = next((each.value for each in failures if isinstance(each.value, BaseException)), None)
        raise AssertionError("\n".join(lines)) from cause
    return [outcome.value for outcome in outcomes]


def _seconds(name: str, given: Any) -> float:
    """Return a time limit as what can be waited for."""
    if not (isinstance(given, Real) and float(given) > 0):  # not a number is not greater
        raise ValueError(f"run_ranks: {name}: expected a positive number of seconds, got {given!r}.")
    return min(float(given), threading.TIMEOUT_MAX / 2)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickled_call(fn, args)
    except Exception as error:
        error.add_note("run_ranks: expected a function from the top level of a module, or a functools.partial of one.")
        raise


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank."""

    rank: int
    status: str  # returned, raised, died (its process ended), hung (it was killed), strayed (from others' collectives)
    value: Any = None  # what was returned, or the exception that was raised, if it can be pickled
    report: str = ""  # the traceback of what was raised, where it hung, or how its process ended
    is_worn: bool = False  # whether its process should not be called again

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.status}\n{self.report}".rstrip()


class RankPool:
    """The processes of one gloo group: of each rank an executor with one process.

    ``is_sound`` says whether they can take another call: all ranks returned, and made the same collectives.
    """

    def __init__(self, world_size: int, collective_timeout: float) -> None:
        self.is_sound = True
        # No TemporaryDirectory: a forked child would remove it at its end.
        self._folder = tempfile.mkdtemp(prefix="statetree-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # without effect if the server runs
        self._ranks = [ProcessPoolExecutor(1, context) for _ in range(world_size)]
        self._joining = [(rank, world_size, self._folder, collective_timeout) for rank in range(world_size)]
        self._processes: list[Any] = []
        # Not atexit: a child of multiprocessing waits for these processes before it. First, for queues end at 10.
        self._at_exit = Finalize(None, self.close, exitpriority=100)

    @property
    def is_alive(self) -> bool:
        """Whether none of the processes has ended."""
        return all(process.is_alive() for process in self._processes)

    def call(self, call: bytes, *, deadline: float, grace_s: float | None = None) -> list[Outcome]:
        """Run a pickled call on all ranks, until a deadline; once one has failed, the others may go on for a while."""
        self.is_sound = False  # until it has ended well
        outcomes = self._run(call, deadline, grace_s)
        if all(outcome.status == "returned" for outcome in outcomes):
            is_worn = any(outcome.is_worn for outcome in outcomes)
            outcomes = self._in_step(outcomes, deadline)
            self.is_sound = not is_worn and all(outcome.status == "returned" for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """End the processes, even if they do not end by themselves, and remove what they left."""
        self._at_exit.cancel()
        until = time.monotonic() + (units(ENDING_UNITS) if self.is_sound else 0.0)
        for rank in self._ranks:
            rank.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))  # one that is measured writes down what it did
            process.kill()
            process.join(units(ENDING_UNITS))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, call: bytes, deadline: float, grace_s: float | None) -> list[Outcome]:
        futures: dict[Future[Answer], int] = {}
        for number, rank in enumerate(self._ranks):
            with unit_measured():  # the first call starts the processes
                futures[rank.submit(answer, *self._joining[number], call)] = number
            if len(self._processes) == number:  # kept here: an executor forgets those that have ended
                self._processes += rank._processes.values()
        outcomes: dict[int, Outcome] = {}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                number = futures[future]
                outcomes[number] = self._outcome(number, future)
                if outcomes[number].status != "returned":
                    left = units(GRACE_UNITS) if grace_s is None else grace_s
                    deadline = min(deadline, time.monotonic() + left)
        outcomes |= {futures[future]: self._hung(futures[future]) for future in pending}
        return [outcomes[number] for number in range(len(self._ranks))]

    def _outcome(self, rank: int, future: Future[Answer]) -> Outcome:
        """Return how a call ended that has finished."""
        try:
            status, pickled, report, is_worn = future.result()
        except BrokenExecutor:
            # The exit code may come later than the end, and only one thread gets it: the executor's asks for it, too.
            self._ranks[rank]._executor_manager_thread.join(units(STACK_UNITS))  # type: ignore[attr-defined]
            self._processes[rank].join(units(STACK_UNITS))
            report = f"Its process ended with exit code {self._processes[rank].exitcode}."
            return Outcome(rank, "died", None, report + ("" if self._stack(rank).exists() else NOT_BEGUN))
        try:
            return Outcome(rank, status, pickle.loads(pickled), report, is_worn)
        except Exception as error:
            if status == "raised":
                return Outcome(rank, "raised", None, report)
            text = "".join(traceback.format_exception(error))
            return Outcome(rank, "raised", error, f"What it returned cannot be unpickled.\n{text}")

    def _hung(self, rank: int) -> Outcome:
        """Have a process that hangs write down where, and return that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        until = time.monotonic() + units(STACK_UNITS)
        lines: list[str] = []
        own = 0
        while own == len(lines) and time.monotonic() < until:  # it writes piece by piece, the worker's frames last
            time.sleep(0.01)
            lines = self._stack(rank).read_text().splitlines() if self._stack(rank).exists() else []
            own = next((index for index, line in enumerate(lines) if WORKER_FILE in line), len(lines))
        where = "\n".join(lines[:own]) or "It does not say where: it may be stopped, or not have begun."
        return Outcome(rank, "hung", None, f"It did not end in time, and was killed. {where}")

    def _stack(self, rank: int) -> Path:
        return Path(self._folder, STACK.format(rank))

    def _in_step(self, outcomes: list[Outcome], deadline: float) -> list[Outcome]:
        """Have the ranks make one more collective; return what is to be said of them if it does not come out right."""
        left = max(0.0, deadline - time.monotonic())
        # At most half of the time, so that those which only wait for another one are not taken for hung themselves.
        steps = self._run(pickled_call(is_in_step, (min(units(IN_STEP_UNITS), left / 2),)), deadline, left)
        if any(step.status in ("hung", "died") for step in steps):
            return [step if step.status in ("hung", "died") else outcomes[step.rank] for step in steps]
        if all(step.value is True for step in steps):
            return outcomes
        return [Outcome(step.rank, "strayed", None, STRAYED + step.report) for step in steps]


@contextlib.contextmanager
def rank_pool(world_size: int, collective_timeout: float, *, fresh: bool) -> Iterator[RankPool]:
    """Lend a pool; keep it afterwards only if it is known to be sound."""
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"run_ranks: world_size: expected a number of ranks, at least 1, got {world_size!r}.")
    key = (world_size, collective_timeout)
    with contextlib.nullcontext() if fresh else _lock:
        if key in _kept and not _kept[key].is_alive:  # killed since the last call, so not the fault of this one
            _kept.pop(key).close()
        pool = RankPool(*key) if fresh or key not in _kept else _kept.pop(key)
        try:
            yield pool
        finally:
            if pool.is_sound and not fresh:
                _kept[key] = pool
            else:
                pool.close()
