"""The asynchronous half: calls made in a background thread, and handed to it in a way that no interrupt can break."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: What the thread does: whose future it is, and what is called with what.
_Job = tuple["Future[Any]", "Callable[[Any], Any]", Any]


class Worker:
    """A background thread that makes one call after the other. It starts with the first of them."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "statetree-stager")
        self._under_way: set[Future[Any]] = set()

    def start(self, action: Callable[[Any], Any], argument: Any) -> Future[Any]:
        """Call a function in the background, and return the future of its result; ``RuntimeError`` after ``close``."""
        future: Future[Any] = Future()
        future.add_done_callback(self._under_way.discard)
        try:
            self._under_way.add(future)
            jobs: list[_Job] = [(future, action, argument)]
            aside(self.executor.submit, _fulfil, jobs)
        except BaseException:
            # Interrupted before it was queued, or after: it must not go on unseen, nor be waited for in vain.
            if future.cancel():
                future.set_running_or_notify_cancel()
            raise
        return future

    def wait(self) -> None:
        """Wait until all calls are over."""
        wait(tuple(self._under_way))

    def close(self) -> None:
        """Take no more calls. Those that were taken are made."""
        self.executor.shutdown(wait=False)


def _fulfil(jobs: list[_Job]) -> None:
    """Carry a call's result, or the very exception, into a future, unless that was cancelled."""
    # An exception holds the frames that it passed through, and those below them. They must not hold its future.
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
