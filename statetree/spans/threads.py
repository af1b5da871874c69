"""Threads for work on tensors in host memory, in which each call of torch is too small for torch to divide it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
R = TypeVar("R")

#: From how many bytes of tensors on it pays to start threads.
_WORTH_THREADS: Final = 8 << 20
#: More threads would wait for the interpreter, which each takes between two calls of torch.
_MOST_THREADS: Final = 4


def in_threads(function: Callable[[T], R], items: Sequence[T], tensors: Iterable[torch.Tensor]) -> list[R]:
    """Call a function with each of some items, in up to as many threads as torch would take. Return what it returns.

    torch lets other threads run while it computes. A block that stays in a processor's cache is so little that torch
    takes one thread for it, and where it takes several for slightly more, they wait for each other at every call.

    Args:
        function: What is called. It knows nothing of modes of the calling thread (gradients, inference).
        items: What it is called with.
        tensors: What it reads. No threads are started for few bytes, nor for a device's: which of its streams is in use
            is another such mode.

    Raises:
        Exception: The first one that the function raises.
    """
    threads = min(torch.get_num_threads(), len(items), _MOST_THREADS)
    read = [tensor for tensor in tensors if not tensor.is_meta] if threads > 1 else []
    if sum(tensor.nbytes for tensor in read) < _WORTH_THREADS or not all(tensor.is_cpu for tensor in read):
        return list(map(function, items))
    with ThreadPoolExecutor(threads, "statetree-blocks") as pool:
        return list(pool.map(function, items))
