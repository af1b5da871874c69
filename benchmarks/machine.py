"""What a figure means nothing without: the machine, its load, and the versions."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optree
import torch

import statetree

if TYPE_CHECKING:
    from collections.abc import Callable

#: Peers that are measured where they are installed.
OPTIONAL = ("tensordict", "torch_checkpointing")


def versions() -> dict[str, str]:
    """Return the versions of everything that was measured."""
    always = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "optree": optree.__version__,
        "statetree": statetree.__version__,
    }
    return always | {name: found for name in OPTIONAL if (found := _installed(name))}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def machine() -> dict[str, Any]:
    """Return the processor, how much of it there is, and how memory is paged."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "huge_pages": _huge_pages(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def load() -> float:
    """Return how many processes wanted a core in the last minute. One of them is this one."""
    return round(os.getloadavg()[0], 2)


class Bystanders:
    """Watches how much of the processor goes to others than this process, from its construction on.

    Args:
        own: Returns how many seconds of processor time were not for others. By default those of this process, and of
            those that it started and that have ended.
    """

    def __init__(self, own: Callable[[], float] | None = None) -> None:
        self._own = own or _own_time
        self._start = self._readings()

    def cores(self) -> float:
        """Return how many cores they took on average; 0 where the system does not tell."""
        wall, busy = (now - then for now, then in zip(self._readings(), self._start, strict=True))
        return max(busy / wall, 0.0) if wall else 0.0

    def _readings(self) -> tuple[float, float]:
        """Return the time, and the seconds that all cores together have worked for others."""
        own = self._own()
        fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
        if len(fields) < 8:
            return time.perf_counter(), 0.0
        user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
        ticks = user + nice + system + irq + soft_irq + stolen
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK") - own


def _own_time() -> float:
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _huge_pages() -> str:
    """Return when the system gives huge pages: ``always``, ``madvise`` or ``never``."""
    _, found, rest = _read("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")
    return rest.partition("]")[0] if found else "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
