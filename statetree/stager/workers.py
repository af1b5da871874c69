"""The asynchronous half: calls made in a background thread, and handed to it in a way that no interrupt can break."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

#: What the thread does: whose future it is, and what is called with what.
_Job = tuple["Future[Any]", "Callable[[Any], Any]", Any]


class Worker:
    """A background thread that makes one call after the other. It starts with the first of them."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "statetree-stager")
        self._runs = False
        self._under_way: set[Future[Any]] = set()

    def start(self, action: Callable[[Any], Any], argument: Any) -> Future[Any]:
        """Call a function in the background, and return the future of its result; ``RuntimeError`` after ``close``."""
        future: Future[Any] = Future()
        future.add_done_callback(self._under_way.discard)
        try:
            self._under_way.add(future)
            jobs: list[_Job] = [(future, action, argument)]
            if self._runs:
                self.executor.submit(_fulfil, jobs)
            else:
                submit(self.executor, _fulfil, jobs)
                self._runs = True
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


def submit(executor: Executor, function: Callable[..., Any], *args: Any) -> None:
    """Queue a call. If this is interrupted, the call is queued or it is not, and the executor is as good as before.

    Signal handlers run in the main thread, between any two instructions. Executors, and ``Thread.start`` which they
    call, are written in Python, and lose a thread when a handler raises in the wrong place: so they are called from
    another thread. What is left to the main thread is written in C.
    """
    if threading.get_ident() != threading.main_thread().ident:
        executor.submit(function, *args)
        return
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()
    _thread.start_new_thread(_submit, (outcome, executor, function, args))
    error = outcome.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and with that the call


def _submit(
    outcome: SimpleQueue[BaseException | None], executor: Executor, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        executor.submit(function, *args)
    except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
        outcome.put(error)
    else:
        outcome.put(None)
