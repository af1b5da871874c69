"""Work on files in two threads: while one waits for the system, the other sums up what it has read or will write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


def in_two_threads(jobs: Sequence[Generator[None, None, None]]) -> None:
    """Exhaust generators, each in one of two threads, of which this one is one; with one thread for torch, in this one.

    After an error or an interrupt no further step is begun in either, and none goes on when this returns.
    """
    pending, failed = iter(jobs), False

    @quietly
    def work() -> None:
        nonlocal failed
        try:
            for job in pending:  # which both threads take from
                with closing(job):  # and with it the file that it has open
                    for _ in job:
                        if failed:
                            return
        except BaseException:
            failed = True
            raise

    if len(jobs) < 2 or torch.get_num_threads() == 1:
        work()
        return
    executor = ThreadPoolExecutor(1)
    try:
        other = executor.submit(work)
        work()
        other.result()
    except BaseException:  # an interrupt may come between any two lines
        failed = True
        raise
    finally:
        executor.shutdown()
