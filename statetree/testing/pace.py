"""How fast this machine is now. Tests wait for multiples of a unit, and never for a fixed number of seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "STATETREE_TESTS_UNIT_S"
#: What a unit is at least: the machine may become busy after it was measured.
LEAST_S = 2.0


def units(count: float) -> float:
    """Return how many seconds some units are: a unit is how long a process takes to start and to import torch.

    It is measured once, at the first call or where the first rank is started; processes that are started later know it.
    """
    if _VARIABLE not in os.environ:
        with unit_measured():
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return count * float(os.environ[_VARIABLE])


@contextlib.contextmanager
def unit_measured() -> Iterator[None]:
    """Start a process that imports torch: if no unit is known, it is as long as that takes."""
    started = time.monotonic()
    yield
    os.environ.setdefault(_VARIABLE, str(max(LEAST_S, time.monotonic() - started)))
