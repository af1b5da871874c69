"""Threads of our own: each takes whole pieces of work, and they are waited for once.

torch divides each operation on a larger tensor among its threads, which wait for each other at the end of it. A copy of
3 MB takes three times as long so, and ten times where another process keeps one of them waiting.
"""

from __future__ import annotations

import _thread
from collections import deque
from contextlib import suppress
from functools import partial
from operator import call
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.spans.layout import is_dense
from statetree.torch_internals import copy_all, is_zero_tensor, quietly, uninterrupted_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: torch divides no operation on so many elements (``GRAIN_SIZE``).
SERIAL_ELEMENTS: Final = 32_768
#: How many bytes are worth a thread: to start one takes as long as to copy a tenth of them.
_WORTH_BYTES: Final = 4 << 20
#: More threads than this have no more memory bandwidth.
_MOST_THREADS: Final = 8
#: How many pieces of work there are for each thread, so that one that has to wait for a core leaves work to the others.
_TURNS: Final = 4


def num_threads(nbytes: int) -> int:
    """Return how many threads work on so many bytes: never more than torch would use."""
    return max(1, min(torch.get_num_threads(), _MOST_THREADS, nbytes // _WORTH_BYTES))


# Signal handlers run in the main thread, between two instructions of Python. What is written in part when one raises
# would be a torn copy, and a thread that went on would write behind the caller's back. So the main thread starts one
# thread and waits for it in a single call of C, which no handler interrupts, and all else is left to that thread.
# Threads are not kept: there is nothing to renew after a fork, and nothing that a fork could find held.
def call_together(jobs: Sequence[Callable[[], Any]], count: int, last: Sequence[Callable[[], Any]] = ()) -> None:
    """Make calls in threads, as if all of them were one call of C. What one of them raises is raised.

    Args:
        jobs: What is called: in any order, without autograd and modes.
        count: In how many threads. With one, it is this thread.
        last: What is called in this thread when these are over.
    """
    if count <= 1:
        _call_all(*jobs, *last)
        return
    errors: list[BaseException] = []
    waiting = iter(jobs)
    done = uninterrupted_event()

    @quietly
    def work() -> None:
        try:
            deque(map(call, waiting), maxlen=0)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            errors.append(error)

    def lead() -> None:
        others: list[Thread] = []
        with suppress(RuntimeError):  # there can be no more of them
            for _ in range(count - 1):
                other = Thread(target=work)
                other.start()
                others.append(other)
        work()
        for other in others:
            other.join()

    def begin() -> None:
        try:
            lead()
        except BaseException as error:  # noqa: BLE001 - as above
            errors.append(error)
        finally:
            done.set_result(None)

    try:
        _call_all(partial(_thread.start_new_thread, begin, ()), done.wait, *last)
    except RuntimeError:  # no thread can be started; or what comes last fails, as it does again
        _call_all(*jobs, *last)
    if errors:
        del errors[1:]
        raise errors.pop()  # and keep none: their tracebacks hold what was copied


def _call_all(*functions: Callable[[], Any]) -> None:
    """Call functions of C one after the other, without an instruction of Python in between."""
    deque(map(call, functions), maxlen=0)


def copy_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], nbytes: Sequence[int]) -> None:
    """Do as ``copy_all`` for tensors in host memory, in threads of our own where there are enough bytes.

    Args:
        targets: Where to.
        sources: Tensors of the same shapes.
        nbytes: How many bytes the elements of each target take.
    """
    if torch.get_num_threads() == 1 or not targets:  # torch divides nothing
        copy_all(targets, sources)
        return
    undivided, into, of = list[tuple[torch.Tensor, torch.Tensor]](), list(targets), list(sources)
    if max(nbytes) > SERIAL_ELEMENTS:
        into, of = [], []
        for target, source, size in zip(targets, sources, nbytes, strict=True):
            if size <= SERIAL_ELEMENTS or target.numel() <= SERIAL_ELEMENTS:
                into.append(target)
                of.append(source)
            elif _lie_alike(target, source) and not is_zero_tensor(source):
                for pieces, flat in zip((into, of), _flat_pair(target, source), strict=True):
                    pieces += flat.split(SERIAL_ELEMENTS)
            else:
                undivided.append((target, source))
    count = num_threads(sum(nbytes))
    step = max(1, -(-len(into) // (_TURNS * count if count > 1 else 1)))
    jobs = [_copying(into[at : at + step], of[at : at + step]) for at in range(0, len(into), step)]
    last = [_copying([target for target, _ in undivided], [source for _, source in undivided])] if undivided else []
    call_together(jobs, count, last)


def _lie_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the elements of two tensors lie in the same order, and without gaps."""
    if target.is_contiguous() and source.is_contiguous():
        return True
    return target.stride() == source.stride() and is_dense(False, target.shape, target.stride())  # noqa: FBT003


def _copying(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], Any]:
    return partial(torch._foreach_copy_, list(targets), list(sources))


def _flat_pair(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense tensors as flat ones: integers of eight bytes where that copies the same, in fewer pieces."""
    target, source = (each.as_strided((each.numel(),), (1,)) for each in (target, source))
    per = 8 // target.dtype.itemsize
    whole = per > 1 and target.dtype == source.dtype and target.numel() % per == 0
    if not whole or any(each.storage_offset() % per or each.is_conj() or each.is_neg() for each in (target, source)):
        return target, source
    return target.view(torch.int64), source.view(torch.int64)
