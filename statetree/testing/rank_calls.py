"""Runs a function on every rank of a gloo group: fast enough for properties, and never for ever."""

from __future__ import annotations

import atexit
import contextlib
import numbers
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from statetree.testing.arguments import check_at_least, refuse
from statetree.testing.pace import units
from statetree.testing.rank_pool import RankPool
from statetree.testing.rank_worker import pickled_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

R = TypeVar("R")

#: How many units the other ranks may go on once one has failed.
GRACE_UNITS = 2.5
#: How long a collective waits for the other ranks before it raises.
COLLECTIVE_TIMEOUT_S = 30.0
#: What is no limit: three years, and what all clocks can count.
NO_LIMIT_S = 1e8

_lock = threading.RLock()
#: The pools that are kept for the next call, by the process that owns them, their size and their timeout.
_kept: dict[tuple[int, int, float], RankPool] = {}


def run_ranks(
    world_size: int,
    fn: Callable[..., R],
    *args: Any,
    timeout: float = 60.0,
    collective_timeout: float = COLLECTIVE_TIMEOUT_S,
    fresh: bool = False,
) -> list[R]:
    """Run ``fn(*args)`` on every rank of a gloo group, and return what the ranks returned.

    The ranks are processes that are kept for the next call, so that a property may call this for each of its examples.
    They are replaced after any failure, and end with this process, also if it is killed. The default process group is
    ``world_size`` ranks on the CPU; ``torch.distributed.get_rank()`` tells which one it is. Each rank has one thread
    for torch's operations. What ``fn`` leaves behind in a process (a default dtype, groups, meshes) is there in the
    next call: cache groups rather than making them for each example. But each call begins with this process's
    ``sys.path``, environment variables and working directory. (What is read when torch is imported, as
    ``OMP_NUM_THREADS`` is, has to be set before the first call, ``fresh`` or not.) The ranks listen on the loopback
    interface, unless ``GLOO_SOCKET_IFNAME`` is set to others. Ranks import the main module: a script has to keep its
    calls under ``if __name__ == "__main__":``.

    Args:
        world_size: How many ranks there are.
        fn: A function that can be pickled: from the top level of a module, or a ``functools.partial`` of one.
        args: What it is given, pickled as well: tensors that share a storage share one on the rank too.
        timeout: Seconds until the ranks are killed, whatever they do: run, send much, or be stopped. ``math.inf`` for
            no limit.
        collective_timeout: Seconds that a collective waits for the other ranks before it raises, or ``math.inf``.
        fresh: Whether to use new processes, and to end them afterwards.

    Returns:
        The results, pickled and unpickled, in the order of the ranks. Tensors keep elements and ties, but no autograd
        history and no shared memory.

    Raises:
        AssertionError: If ``fn`` raised on any rank, did not end in time (the report then says where it hung), its
            process died, the ranks did not make the same collectives, or what it returned cannot be unpickled. It
            describes every rank that failed, and its cause is the first exception that a rank raised.
        ValueError: If there would be no rank, or a timeout is negative.
        TypeError: If ``world_size`` is no whole number, a timeout no number, or ``fn`` cannot be called.

    Example:
        >>> import torch.distributed as dist
        >>> from statetree.testing import run_ranks
        >>> run_ranks(2, dist.get_rank)
        [0, 1]
    """
    timeout = _seconds("timeout", timeout)
    call = _pickled(fn, args, timeout)
    with _pool(world_size, collective_timeout, fresh=fresh) as pool:
        outcomes = pool.call(call, deadline=time.monotonic() + timeout, grace_s=units(GRACE_UNITS))
    failures = [outcome for outcome in outcomes if outcome.status != "returned"]
    if failures:
        name = getattr(fn, "__qualname__", None) or repr(fn)
        lines = [f"run_ranks: {name} failed on {len(failures)} of {world_size} ranks.", *map(str, failures)]
        raised = (outcome.value for outcome in failures if outcome.status == "raised")
        cause = next((value for value in raised if isinstance(value, BaseException)), None)
        raise AssertionError("\n".join(lines)) from cause
    return [outcome.value for outcome in outcomes]


@atexit.register  # without the lock: a thread that is not waited for may hold it
def _close_kept() -> None:
    while _kept:
        _, pool = _kept.popitem()
        pool.close()


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real)
    if is_number and value >= 0:
        return min(float(value), NO_LIMIT_S)
    msg = (
        f"run_ranks: {name} cannot be used: expected a number of seconds that is not negative, got {value!r}. "
        "Pass math.inf for no limit."
    )
    raise ValueError(msg) if is_number else TypeError(msg)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> bytes:
    if not callable(fn):
        refuse("run_ranks: fn", "a function", fn, TypeError)
    try:
        return pickled_call(fn, args, timeout_s)
    except Exception as error:
        error.add_note(
            "run_ranks: the function and its arguments must be picklable: a function from the top level of a module, "
            "or a functools.partial of one."
        )
        raise


@contextlib.contextmanager
def _pool(world_size: int, collective_timeout: float, *, fresh: bool) -> Iterator[RankPool]:
    """Lend a pool; keep it afterwards only if it is known to be sound."""
    check_at_least("run_ranks: world_size", world_size, 1)
    collective_timeout = _seconds("collective_timeout", collective_timeout)
    if fresh:
        with contextlib.closing(RankPool(world_size, collective_timeout)) as pool:
            yield pool
        return
    with _lock:
        key = (os.getpid(), world_size, collective_timeout)
        if key in _kept and not _kept[key].is_alive:  # killed since the last call, so not the fault of this one
            _kept.pop(key).close()
        pool = _kept.pop(key) if key in _kept else RankPool(world_size, collective_timeout)
        try:
            yield pool
        finally:
            if pool.is_sound:
                _kept[key] = pool
            else:
                pool.close()
