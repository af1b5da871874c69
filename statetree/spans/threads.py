"""Threads of our own: each takes whole pieces of work, and they are waited for once.

torch divides each operation on a larger tensor among its threads, which wait for each other at the end of it. A copy of
3 MB takes three times as long so, and ten times where another process keeps one of them waiting.
"""

from __future__ import annotations

import _thread
from collections import deque
from ctypes import memmove
from functools import partial
from operator import call
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import increment_version

from statetree.errors import suppress, unsignalled
from statetree.spans.layout import is_dense
from statetree.torch_internals import copy_all, is_zero_tensor, quietly, uninterrupted_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: torch divides no operation on so many elements (``GRAIN_SIZE``).
SERIAL_ELEMENTS: Final = 32_768
#: How many bytes are worth a thread: to start one takes as long as to copy a tenth of them.
_WORTH_BYTES: Final = 8 << 20
#: More threads than this have no more memory bandwidth.
_MOST_THREADS: Final = 8
#: How many bytes are moved in one call. Where a core's second cache has 1 MiB, pieces of 384 to 1,020 KiB take a tenth
#: to a seventh less time than those of 1 MiB and more: probably glibc has another way for these. Other processors were
#: not measured. In memory that the system has yet to provide, 1 MiB is quicker.
_PIECE: Final = 448 << 10
_FRESH_PIECE: Final = 1 << 20
#: How many pieces of work there are for each thread, so that one that has to wait for a core leaves work to the others.
_TURNS: Final = 16


def num_threads(nbytes: int) -> int:
    """Return how many threads work on so many bytes: never more than torch would use."""
    return max(1, min(torch.get_num_threads(), _MOST_THREADS, nbytes // _WORTH_BYTES))


# Signal handlers run in the main thread, between two instructions of Python. What is written in part when one raises
# would be a torn copy, and a thread that went on would write behind the caller's back. So the main thread starts one
# thread and waits for it in a single call of C, which no handler interrupts, and all else is left to that thread.
# Threads are not kept: there is nothing to renew after a fork, and nothing that a fork could find held. They are not
# ``threading.Thread``s either: to join one from a bare thread leaves an entry of that thread there for ever.
def call_together(jobs: Sequence[Callable[[], Any]], count: int, last: Sequence[Callable[[], Any]] = ()) -> None:
    """Make calls in threads, as if all of them were one call of C. What one of them raises is raised.

    The jobs are called in any order, without autograd and modes; ``last`` is called in this thread when they are over.
    With a ``count`` of one, all are called in this thread, as they are while the interpreter ends.
    """
    if count <= 1 or is_finalizing():  # a thread that starts while the interpreter ends never runs
        _call_all(*jobs, *last)
        return
    errors: list[BaseException] = []
    waiting = iter(jobs)
    done, gone = uninterrupted_event(), _thread.allocate_lock()
    gone.acquire()

    @quietly
    def work() -> None:
        try:
            deque(map(call, waiting), maxlen=0)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            errors.append(error)

    def work_until(over: _thread.LockType) -> None:
        try:
            work()
        finally:
            over.release()

    def lead() -> None:
        others: list[_thread.LockType] = []
        with suppress(RuntimeError):  # there can be no more of them
            for _ in range(count - 1):
                over = _thread.allocate_lock()
                over.acquire()
                _thread.start_new_thread(work_until, (over,))
                others.append(over)
        work()
        for over in others:
            over.acquire()

    def begin() -> None:
        try:
            lead()
        except BaseException as error:  # noqa: BLE001 - as above
            errors.append(error)
        finally:
            done.set_result(None)  # and waits for the GIL inside of torch: a program that ends then is aborted
            gone.release()

    try:
        _call_all(partial(_thread.start_new_thread, begin, ()), done.wait, *last)
    except unsignalled(RuntimeError):  # no thread can be started; or what comes last fails, as it does again
        _call_all(*jobs, *last)
    else:
        gone.acquire()  # a signal may come here: all is written
    if errors:
        del errors[1:]
        raise errors.pop()  # and keep none: their tracebacks hold what was copied


def _call_all(*functions: Callable[[], Any]) -> None:
    """Call functions of C one after the other, without an instruction of Python in between."""
    deque(map(call, functions), maxlen=0)


# What lies alike is moved as bytes: one call of C for a megabyte costs nothing beside it, and does not hold the GIL.
# torch's copy kernel would have to be called for pieces of a thirtieth of that, since it divides larger ones.
def copy_together(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], nbytes: Sequence[int], *, fresh: bool = False
) -> None:
    """Do as ``copy_all`` for tensors in host memory, in threads of our own where there are enough bytes.

    ``fresh`` says that nothing was written to the targets since the system gave their memory, as far as one knows.
    """
    if torch.get_num_threads() == 1 or not targets:  # torch divides nothing
        copy_all(targets, sources)
        return
    into, of, undivided_into, undivided_of = list(targets), list(sources), list[torch.Tensor](), list[torch.Tensor]()
    moves: list[tuple[int, int, int]] = []
    step = _FRESH_PIECE if fresh else _PIECE
    if max(nbytes) > SERIAL_ELEMENTS:
        into, of, moved = [], [], []
        for target, source, size in zip(targets, sources, nbytes, strict=True):
            if size > SERIAL_ELEMENTS and _are_bytes(target, source):
                moved.append(target)
                to, start = target.data_ptr(), source.data_ptr()
                moves += [(to + at, start + at, min(step, size - at)) for at in range(0, size, step)]
            elif target.numel() <= SERIAL_ELEMENTS:
                into.append(target)
                of.append(source)
            elif _lie_alike(target, source) and not is_zero_tensor(source):
                for pieces, tensor in zip((into, of), (target, source), strict=True):
                    pieces += tensor.as_strided((tensor.numel(),), (1,)).split(SERIAL_ELEMENTS)
            else:
                undivided_into.append(target)
                undivided_of.append(source)
        increment_version(moved)  # as torch does where it writes, for the checks of autograd
    count = num_threads(sum(nbytes))
    turns = _TURNS * count if count > 1 else 1
    jobs = [_moving(moves[some]) for some in _divided(len(moves), turns)]
    jobs += [_copying(into[some], of[some]) for some in _divided(len(into), turns)]
    call_together(jobs, count, [_copying(undivided_into, undivided_of)] if undivided_into else [])


def _divided(count: int, turns: int) -> list[slice]:
    step = max(1, -(-count // turns))
    return [slice(at, at + step) for at in range(0, count, step)]


def _are_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether to copy is to move the bytes of one piece of memory into another."""
    if target.dtype != source.dtype or target.is_neg() != source.is_neg() or target.is_conj() != source.is_conj():
        return False
    return _lie_alike(target, source) and not is_zero_tensor(source)


def _moving(moves: list[tuple[int, int, int]]) -> Callable[[], Any]:
    return partial(deque, map(memmove, *zip(*moves, strict=True)), 0)


def _copying(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], Any]:
    return partial(torch._foreach_copy_, targets, sources)


def _lie_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the elements of two tensors lie in the same order, and without gaps."""
    if target.is_contiguous() and source.is_contiguous():
        return True
    return target.stride() == source.stride() and is_dense(False, target.shape, target.stride())  # noqa: FBT003
