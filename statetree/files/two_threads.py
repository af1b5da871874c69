"""Work on files in two threads: while one waits for the system, the other sums up what it has read or will write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import torch

from statetree.stager.workers import queued
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager


def in_two_threads(jobs: Sequence[Generator[None, None, None]]) -> None:
    """Exhaust generators, each in one of two threads, of which this one is one; with one thread for torch, in this one.

    After an error or an interrupt no further step is begun in either, and the one that was is waited for (unless a
    second interrupt comes). ``spans.threads`` is for copies, which take too little time to be interrupted.
    """
    pending, failed, over = iter(jobs), False, object()
    other_steps = threading.Lock()  # held during each step of the other thread

    @quietly
    def work(steps: AbstractContextManager[object]) -> None:
        nonlocal failed
        try:
            for job in pending:  # which both threads take from
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

    if len(jobs) < 2 or torch.get_num_threads() == 1:
        work(nullcontext())
        return
    executor = ThreadPoolExecutor(1)
    try:
        other = queued(executor, work, other_steps)
        work(nullcontext())
        if other is not None:
            other.result()
    except BaseException:
        failed = True
        # An interrupt may come while the executor starts its thread, which it does not wait for then.
        with other_steps:
            raise
    finally:
        executor.shutdown()
