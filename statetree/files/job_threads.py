"""Work on files in several threads: while one waits for the system, another sums up what it has read or will write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from statetree.stager.workers import queued
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager


def in_threads(jobs: Sequence[Generator[None, None, None]], count: int) -> None:
    """Exhaust generators, each in one of several threads, of which this one is one; if there is one, in this one.

    After an error or an interrupt no further step is begun in any, and those that were are waited for (unless a second
    interrupt comes). ``spans.threads`` is for copies, which take too little time to be interrupted.
    """
    pending, failed, over = iter(jobs), False, object()
    others = [threading.Lock() for _ in range(min(count, len(jobs)) - 1)]  # each held during a step of its thread

    @quietly
    def work(steps: AbstractContextManager[object]) -> None:
        nonlocal failed
        try:
            for job in pending:  # which all threads take from
                with closing(job):  # and with it the file that it has open
                    while True:
                        with steps:
                            if failed:
                                return
                            if next(job, over) is over:
                                break
        except BaseException:
            failed = True
            raise

    if not others:
        work(nullcontext())
        return
    executor = ThreadPoolExecutor(len(others))
    try:
        futures = [queued(executor, work, steps) for steps in others]
        work(nullcontext())
        for future in filter(None, futures):
            future.result()
    except BaseException:
        failed = True
        # An interrupt may come while the executor starts its threads, which it does not wait for then.
        for steps in others:
            with steps:
                pass
        raise
    finally:
        executor.shutdown()
