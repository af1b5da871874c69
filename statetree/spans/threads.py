"""Threads for work on tensors in host memory, in which each call of torch is too small for torch to divide it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")

#: From how many bytes of tensors on it pays to start threads.
_WORTH_THREADS: Final = 8 << 20


def in_threads(function: Callable[[T], R], items: Sequence[T], nbytes: int) -> list[R]:
    """Call a function with each of some items, in as many threads as torch would take. Return what it returns.

    torch lets other threads run while it computes. A block that stays in a processor's cache is so little that torch
    takes one thread for it, and where it takes several for slightly more, they wait for each other at every call.

    Args:
        function: What is called. It knows nothing of modes of the calling thread (gradients, inference).
        items: What it is called with.
        nbytes: How many bytes of tensors it reads in all. For few, no threads are started.

    Raises:
        Exception: The first one that the function raises.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2 or nbytes < _WORTH_THREADS:
        return list(map(function, items))
    with ThreadPoolExecutor(threads, "statetree-blocks") as pool:
        return list(pool.map(function, items))
