"""Ranks that are meant to fail, and the end of those that are kept for the next call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from statetree.testing import rank_calls, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.rank_calls import Outcome


def rank_outcomes(
    world_size: int, fn: Callable[..., Any], *args: Any, fresh: bool = True, **limits: float
) -> list[Outcome]:
    """Run ``fn(*args)`` as ``run_ranks`` does, by default on new processes, and return how it ended on each rank.

    Ranks may raise, hang, or be killed. Unlike there, one that failed does not cut the others short.
    """
    limits = {**run_ranks.__kwdefaults__, **limits}
    call = rank_calls._pickled(fn, args)
    with rank_calls.rank_pool(world_size, limits["collective_timeout"], fresh=fresh) as pool:
        return pool.call(call, deadline=time.monotonic() + limits["timeout"], grace_s=limits["timeout"])


def close_ranks() -> None:
    """End the processes that ``run_ranks`` keeps. The next call starts others."""
    with rank_calls._lock:
        while rank_calls._kept:
            rank_calls._kept.popitem()[1].close()
