"""Huge pages: large memory provided in pages of 2 MB where that is quicker than pages of 4 KB, which is found out once.

They fault in a five hundredth of the steps. But a system whose memory is fragmented, or that backs them slowly, may
take longer to provide them, and nothing that it says beforehand tells: so a few megabytes are filled both ways.

Some virtual machines give free memory back to their host in pieces of 2 MB. There, what was freed a moment ago comes
four times as quick in huge pages, and what lay free for some seconds takes five times as long. They are not used there:
no sample tells what comes next.

The environment variable ``STATETREE_HUGE_PAGES`` decides instead if it is ``always`` or ``never``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: The environment variable that decides without asking.
SWITCH: Final = "STATETREE_HUGE_PAGES"
#: The size of a huge page.
HUGE_PAGE_BYTES: Final = 2 << 20
#: How much is filled to find out, and how often.
_SAMPLE_BYTES, _ROUNDS = 8 << 20, 3
#: Where Linux says in pieces of which order free memory is reported to a host; as -1, unsigned, if it is not.
_REPORTING: Final = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_MAX_ORDER: Final = 64
#: Anonymous mappings are shared with forked processes unless one asks otherwise (which is not possible on Windows).
_PRIVATE: Final[dict[str, Any]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


def mapped(size: int) -> torch.UntypedStorage:
    """Return memory that goes back to the system when it is freed, or raise ``OSError``."""
    return torch.frombuffer(mmap.mmap(-1, size, **_PRIVATE), dtype=torch.uint8).untyped_storage()


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Have memory that nothing was written to yet provided in huge pages, if that is quicker here."""
    if storage.nbytes() >= HUGE_PAGE_BYTES and are_used():
        _advise(storage)


@cache
def are_used() -> bool:
    """Whether large memory is to lie on huge pages. The first call finds out, in some tens of milliseconds."""
    setting = os.environ.get(SWITCH, "") or ("never" if is_reported(_REPORTING) else "")
    return decided(setting, available=_madvise() is not None, fill=_fill_s)


def is_reported(file: Path) -> bool:
    """Whether free memory is given back to a host, by the file that says so."""
    try:
        return int(file.read_text()) <= _MAX_ORDER
    except (OSError, ValueError):
        return False


def decided(setting: str, *, available: bool, fill: Callable[[bool], float]) -> bool:
    """Decide whether to use huge pages.

    Args:
        setting: What the user says: ``always``, ``never`` or nothing.
        available: Whether they can be asked for.
        fill: Fills some fresh memory on huge pages or not, and returns how long that took.
    """
    if not available or setting in ("always", "never"):
        return available and setting == "always"
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_ROUNDS):  # in turns: a busy moment hits both
        for huge, taken in times.items():
            taken.append(fill(huge))
    return sorted(times[True])[_ROUNDS // 2] < sorted(times[False])[_ROUNDS // 2]  # medians


def _fill_s(huge: bool) -> float:  # noqa: FBT001 - called by position
    try:
        storage = mapped(_SAMPLE_BYTES)
    except OSError:  # too many mappings, perhaps
        return 0.0
    if huge:
        _advise(storage)
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    began = time.perf_counter()
    tensor.zero_()
    return time.perf_counter() - began


def _advise(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages. A refusal changes nothing."""
    pointer = storage.data_ptr()
    start = -(-pointer // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (pointer + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(start, length, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
