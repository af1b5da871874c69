"""The end of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def kill(directory: str) -> None:
    """Kill this process once it has saved something: a save in the background may take longer than a tiny step."""
    while not any((path / ".metadata").exists() for path in Path(directory).glob("*/step-*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
