"""When a checkpointer is to save: every so many steps or seconds, and when a signal says that the job is to end."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from statetree.dcp.groups import from_all
from statetree.dcp.step_numbers import as_int, check_step
from statetree.errors import CheckpointError, suppress, unsignalled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _as_signal(number: SupportsIndex) -> int:
    try:
        found = index(None if isinstance(number, bool) else number)  # type: ignore[arg-type]  # which raises
    except unsignalled(TypeError):
        raise TypeError(f"save_on: expected signals, such as signal.SIGTERM, got {number!r}.") from None
    if found in (signal.SIGKILL, signal.SIGSTOP) or found not in signal.valid_signals():
        raise ValueError(f"save_on: nobody can handle signal {found}: expected another one, such as signal.SIGTERM.")
    return found


class Schedule(ABC):
    """Says when to save.

    Args:
        every: A number of steps, a time, or neither.

    Attributes:
        signalled: The signal that ``due`` has answered to; ``None`` if none arrived on any rank.
    """

    def __init__(self, every: int | timedelta | None) -> None:
        is_time = isinstance(every, timedelta)
        if not (every is None or type(every) is int or is_time):
            raise TypeError(f"Checkpointer: every must be a number of steps, a timedelta, or None: got {every!r}.")
        self._steps: int = every if isinstance(every, int) else 0
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else None
        if every is not None and max(self._steps, self._seconds or 0) <= 0:
            raise ValueError(f"Checkpointer: every must be positive, or None: got {every}.")
        self.signalled: int | None = None
        self._since = time.monotonic()
        self._arrived = 0
        self._before: dict[int, Any] = {}
        self._closed = False  # and signals are given back
        self._process = os.getpid()

    @abstractmethod
    def _group_that_agrees(self) -> ProcessGroup | None:
        """Return the ranks that agree on what is due."""

    def save_on(self, *signals: SupportsIndex) -> None:
        """Save at a signal, such as ``signal.SIGTERM``: the next ``due`` is true, on all ranks, whichever got it.

        A second one of a kind does what it did before this call. ``close`` undoes it. Called by the main thread, on
        every rank.

        Raises:
            TypeError: If one is no number of a signal (``signal.SIGTERM``).
            ValueError: If one cannot be handled, or this is not the main thread.
            CheckpointError: If it was closed.
        """
        if self._closed:
            raise CheckpointError("save_on: the Checkpointer is closed: expected an open one. Make a new one.")
        for number in list(map(_as_signal, signals)):
            self._before.setdefault(number, signal.signal(number, self._note) or signal.SIG_DFL)

    def _note(self, number: int, frame: object) -> None:
        before = self._before[number]
        if self._closed:  # whoever took the signal since ``save_on`` may still call this
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                signal.signal(number, before)
                os.kill(os.getpid(), number)
            return
        signal.signal(number, before)
        if os.getpid() != self._process:  # a forked worker ends as it would have
            os.kill(os.getpid(), number)
        self._arrived = number

    def due(self, step: SupportsIndex) -> bool:
        """Whether to save now: at each multiple of ``every``, when that time has passed, or after a signal.

        Args:
            step: The step that was just done.

        Collective:
            Every rank calls it. With signals, or a time, they tell each other in one small exchange: the first rank's
            clock counts.

        Raises:
            ValueError: If the step is not an integer, or negative.
            RankMismatch: If a rank does not answer. Or if this process is not in the group.

        Example:
            >>> import signal, tempfile
            >>> from statetree import Checkpointer
            >>> with Checkpointer(tempfile.mkdtemp(), every=2) as checkpointer:
            ...     checkpointer.save_on(signal.SIGTERM)
            ...     for step in range(1, 6):
            ...         if checkpointer.due(step):
            ...             _ = checkpointer.async_save(step, {"step": step})
            ...         if checkpointer.signalled:
            ...             break
            ...     checkpointer.steps()[:1]
            [2]
        """
        step = as_int(step)
        check_step("due", step)
        is_due = self._steps > 0 and step > 0 and step % self._steps == 0
        if (self._before and not self._closed) or self._seconds is not None:
            is_late = self._seconds is not None and time.monotonic() - self._since > self._seconds
            arrived = self._arrived
            told = from_all("due", (is_late, arrived), self._group_that_agrees())
            if arrived:  # else one that comes now is for the next call
                self._arrived = 0
            number = max(number for _, number in told)
            is_due = is_due or told[0][0] or number > 0
            self.signalled = number or self.signalled
        if is_due:
            self._since = time.monotonic()
        return is_due

    def _give_back(self) -> None:
        """Leave signals to whoever had them before: it is closed."""
        self._closed = True
        for number, before in self._before.items():
            with suppress(ValueError):  # only the main thread may
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
