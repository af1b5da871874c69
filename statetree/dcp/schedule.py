"""When a checkpointer is to save: every so many steps or seconds, and when a signal says that the job is to end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from statetree.dcp.groups import from_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


class Schedule:
    """Says when to save: every so many steps, or a time. ``signalled`` is the signal that it has answered to."""

    def __init__(self, every: int | timedelta | None) -> None:
        is_time = isinstance(every, timedelta)
        if not (every is None or type(every) is int or is_time):
            msg = f"Checkpointer: every must be a number of steps, a timedelta, or None: got {every!r}."
            raise TypeError(msg)
        self._steps: int = every if isinstance(every, int) else 0
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else None
        if every is not None and max(self._steps, self._seconds or 0) <= 0:
            msg = f"Checkpointer: every must be positive, or None: got {every}."
            raise ValueError(msg)
        self.signalled: int | None = None
        self._since = time.monotonic()
        self._arrived = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def save_on(self, *signals: int) -> None:
        """Have ``due`` answer to signals. The second of a kind does what it did before."""
        for number in signals:
            self._before.setdefault(number, signal.signal(number, self._note) or signal.SIG_DFL)

    def _note(self, number: int, _frame: object) -> None:
        signal.signal(number, self._before[number])
        if os.getpid() != self._process:  # a forked worker ends as it would have
            os.kill(os.getpid(), number)
        self._arrived = number

    def due(self, step: int, group: Callable[[], ProcessGroup | None]) -> bool:
        """Whether to save. Where time or signals matter, the ranks tell each other: the first one's clock counts."""
        is_due = self._steps > 0 and step > 0 and step % self._steps == 0
        if self._before or self._seconds is not None:
            is_late = self._seconds is not None and time.monotonic() - self._since > self._seconds
            arrived, self._arrived = self._arrived, 0
            told = from_all((is_late, arrived), group())
            number = max(number for _, number in told)
            is_due = is_due or told[0][0] or number > 0
            self.signalled = number or self.signalled
        if is_due:
            self._since = time.monotonic()
        return is_due

    def close(self) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            with suppress(ValueError):  # only the main thread may
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
        self._before.clear()
