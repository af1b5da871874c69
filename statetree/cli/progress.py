"""How far a command has come: one line on a terminal, while it works."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from statetree.files.untrusted import human

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: When the line appears, and how often it is written anew: what takes less time shows none.
_FIRST_S: Final = 0.5
_NEXT_S: Final = 0.2
_CLEAR: Final = "\r\x1b[K"
T = TypeVar("T")


@contextmanager
def progress(label: str, total: int, done: Callable[[], int], text: Callable[[int], str] = human) -> Iterator[None]:
    """Show, while the block runs, how much is done of a total: on standard error, if that is a terminal.

    ``done`` is called by a thread of its own.
    """
    stream = sys.stderr
    if not stream.isatty() or not total or os.environ.get("TERM") == "dumb":
        yield
        return
    ended = threading.Event()

    def write() -> None:
        pause = _FIRST_S
        while not ended.wait(pause):
            pause = _NEXT_S
            with suppress(OSError, ValueError):  # the terminal is gone: the command does not need it
                stream.write(f"{_CLEAR}{label}: {text(min(done(), total))} of {text(total)}")
                stream.flush()
        if pause == _NEXT_S:
            with suppress(OSError, ValueError):
                stream.write(_CLEAR)
                stream.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def tracked(label: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yield items, and show how many of how many there have been."""
    count = 0
    with progress(label, total, lambda: count, lambda number: f"{number:,}"):
        for item in items:
            yield item
            count += 1


def bytes_written() -> int:
    """Return how many bytes this process has written, to whatever; 0 where the system does not say it."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/io", encoding="ascii") as counts:
        return int(counts.read().split("wchar:")[1].split()[0])
    return 0
