"""How much memory some work takes, as the system sees it: that of Python, of torch, and of the libraries below."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
#: What has to be written there, so that the peak is what is in use now.
_RESET_PEAK: Final = "5"


def peak_of(work: Callable[[], Any]) -> int | None:
    """Return how many bytes of memory some work takes at most, its result included.

    Memory that was freed before is given back to the system first, so that it counts when it is taken again.

    Returns:
        The bytes, or ``None`` on systems other than Linux, which do not forget an earlier peak.
    """
    give_back_freed_memory()
    try:
        _RESET.write_text(_RESET_PEAK)
        before = _read("VmRSS")
    except OSError:
        return None
    result = work()
    most = _read("VmHWM")
    del result
    return max(most - before, 0)


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library keeps it."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def _read(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    msg = f"{_STATUS} has no {name}"
    raise OSError(msg)
