"""What ``import statetree`` adds to ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from benchmarks.measure import Contender, floor, ours
from benchmarks.rows import Aim, Result, Row
from benchmarks.states import State


def interpreter(_: float) -> State:
    """Nothing: every run is a process of its own."""
    return State("in a new process", {"module": "statetree"})


def importing(_: State) -> list[Contender]:
    """Import torch, and statetree on top of it."""
    return [
        ours(lambda: _import("import torch, statetree"), _succeeded),
        floor("import torch", lambda: _import("import torch"), _succeeded),
    ]


def _import(statement: str) -> Any:
    # Where this is set, what is compiled is not kept, so that all runs would measure the compiler.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", statement], capture_output=True, check=False, env=env)


def _succeeded(done: Any) -> bool:
    return bool(done.returncode == 0)


def adds_at_most(milliseconds: float, to: str) -> Aim:
    """Aim at taking so much longer than the floor, at most."""

    def value(result: Result) -> float:
        return (result.ours - result.of(to).median) * 1e3

    return Aim(f"adds ≤ {milliseconds:g} ms to {to}", value, lambda value: value <= milliseconds)


ROWS = (
    Row("import", "import", interpreter, importing, (adds_at_most(10, "import torch"),), moves_bytes=False, rounds=9),
)
