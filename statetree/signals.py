"""What the handler of a signal raises (an alarm, say): it comes out of every verb as it is, wherever it came up."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

E = TypeVar("E", bound=Exception)


def unsignalled(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return kinds of errors, for an ``except``. If the handler of a signal raised what is handled, raise that instead.

    (An alarm may be of any kind: a ``TimeoutError`` is an ``OSError``. It says nothing of a file, or of a value.)
    """
    pass_on_from_signal(sys.exception())
    return kinds


class suppress(contextlib.suppress):
    """As that of ``contextlib``, but for what the handler of a signal raises."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return super().__exit__(kind, error, trace) and _from_signal(error) is None


def is_users_own(error: BaseException) -> bool:
    """Whether what came up in somebody else's code concerns that alone: an error or an exit.

    An interrupt concerns the program, and so does what the handler of a signal raises.
    """
    return isinstance(error, Exception | SystemExit) and _from_signal(error) is None


def pass_on_from_signal(error: BaseException | None) -> None:
    """Raise what the handler of a signal raised (an alarm, say), if an error is that or was raised from it."""
    raised = _from_signal(error)
    try:
        if raised is not None:
            raise raised
    finally:
        del error, raised  # the traceback holds this frame: what they hold would last until it is collected


def _from_signal(error: BaseException | None) -> BaseException | None:
    """Return what the handler of a signal raised, of an error and its causes.

    (Not of its context: whoever calls us after an alarm has that for the context of every error.)
    """
    codes: set[CodeType | None] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if len(frames) > 1:
            codes = codes or _handlers()
            if any(frame.f_code in codes and _is_given(frame, caller) for caller, frame in pairwise(frames)):
                return error
        error = error.__cause__
    return None


def _handlers() -> set[CodeType | None]:
    """Return the code of all handlers of signals that are functions of Python."""
    handlers = [found for found in map(signal.getsignal, signal.valid_signals()) if callable(found)]
    calls = [getattr(handler, "func", handler) for handler in handlers]
    return {getattr(call if hasattr(call, "__code__") else type(call).__call__, "__code__", None) for call in calls}


def _is_given(frame: FrameType, caller: FrameType) -> bool:
    """Whether a frame was given its caller, as the handler of a signal is given the frame that it interrupts.

    (Decorators share their code: not all that runs it handles a signal.)
    """
    held = frame.f_locals
    given = list(held.values())
    if type(held) is dict:
        held.clear()  # a copy, which Python up to 3.12 keeps with the frame, and all that it holds
    return any(each is caller or (type(each) is tuple and any(one is caller for one in each)) for each in given)
