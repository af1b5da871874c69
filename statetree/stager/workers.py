"""Work handed to an executor in a way that no interrupt can break."""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


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
