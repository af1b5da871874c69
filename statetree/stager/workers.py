"""The asynchronous half: calls made in a background thread, and handed to it in a way that no interrupt can break."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from statetree.errors import suppress

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
#: What the thread does: whose future it is, and what is called with what.
_Job = tuple["Future[Any]", "Callable[[Any], Any]", Any]


class BackgroundFuture(Future[T]):
    """A future that a signal's handler may wait for, wherever in waiting for it the main thread was interrupted.

    One of ``concurrent.futures`` is done in a lock that those who begin to wait take, and wakes those that wait only
    once: who has looked at its state, is interrupted, and then goes on to wait would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False
        self._waiting: list[_thread.LockType] = []
        self.add_done_callback(_wake)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done; ``TimeoutError`` if it is not after some seconds."""
        over = _thread.allocate_lock()
        over.acquire()
        self._waiting.append(over)
        if not self._is_over and not over.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            with suppress(ValueError):  # it is over just now
                self._waiting.remove(over)  # whoever asks again and again leaves nothing behind
            raise TimeoutError

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call, and return what it returned, or raise what it raised."""
        self.wait(timeout)
        try:
            return super().result()
        finally:
            del self  # what it raises holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call, and return what it raised."""
        self.wait(timeout)
        return super().exception()


def _wake(future: Any) -> None:
    future._is_over = True  # noqa: SLF001 - a method of its own would be a cycle
    while future._waiting:  # noqa: SLF001
        future._waiting.pop().release()  # noqa: SLF001


class Worker:
    """A background thread that makes one call after the other. It starts with the first of them."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "statetree-stager")
        self._is_closed = False
        self._under_way: set[BackgroundFuture[Any]] = set()

    def start(self, action: Callable[[Any], Any], argument: Any) -> Future[Any]:
        """Call a function in the background, and return the future of its result; ``RuntimeError`` after ``close``."""
        future: BackgroundFuture[Any] = BackgroundFuture()
        future.add_done_callback(self._under_way.discard)
        try:
            self._under_way.add(future)
            jobs: list[_Job] = [(future, action, argument)]
            if queued(self._executor, _fulfil, jobs) is None:
                if self._is_closed:
                    raise RuntimeError("start: the worker is closed")  # noqa: TRY301
                _fulfil(jobs)
        except BaseException:
            # Interrupted before it was queued, or after: it must not go on unseen, nor be waited for in vain.
            if future.cancel():
                future.set_running_or_notify_cancel()
            raise
        return future

    def wait(self) -> None:
        """Wait until all calls are over."""
        for future in tuple(self._under_way):
            future.wait()

    def close(self) -> None:
        """Take no more calls. Those that were taken are made."""
        self._is_closed = True
        aside(self._executor.shutdown, False)  # noqa: FBT003


def _fulfil(jobs: list[_Job]) -> None:
    """Carry a call's result, or the very exception, into a future, unless that was cancelled."""
    # An exception holds the frames that it passed through, and those below them. They must not hold its future.
    if not jobs:  # it could not be queued, and then was
        return
    future, action, argument = jobs.pop()
    if not future.cancelled() and future.set_running_or_notify_cancel():
        try:
            future.set_result(action(argument))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs into the future
            future.set_exception(error)
    del future, action, argument


def failed(error: Exception) -> Future[Any]:
    """Return the future of a call that failed before it could be made."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def queued(executor: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> Future[T] | None:
    """Queue a call; return ``None`` if that cannot be: the interpreter ends, or there can be no more threads.

    A save that is waited for at a program's end goes on while executors take no calls any more.
    """

    def queue() -> Future[T] | None:
        with suppress(RuntimeError):
            return executor.submit(function, *args)
        return None

    return aside(queue)


def aside(function: Callable[..., T], *args: Any) -> T:
    """Call a function that starts a thread, or takes a lock for a moment, outside the main thread; return its result.

    Signal handlers run in the main thread, between any two instructions. Executors, and ``Thread.start`` which they
    call, are written in Python: they lose a thread when a handler raises in the wrong place, and a handler that calls
    them, too, waits for a lock that the main thread holds. What is left to the main thread is written in C. If it is
    interrupted, the call is made or it is not.
    """
    if threading.get_ident() != threading.main_thread().ident or is_finalizing():
        return function(*args)
    outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    _thread.start_new_thread(_report, (outcome, function, args))
    result, error = outcome.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and with that the call
    return cast("T", result)


def _report(outcome: SimpleQueue[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    told: tuple[Any, BaseException | None]
    try:
        told = function(*args), None
    except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
        told = None, error
    # Who makes a ``Thread`` is listed among the threads of ``threading``, before Python 3.13 for ever.
    getattr(threading, "_active", {}).pop(threading.get_ident(), None)
    outcome.put(told)
