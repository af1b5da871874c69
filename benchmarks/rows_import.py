"""What ``import statetree`` adds to ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Final

from benchmarks.measure import OURS, Contender, floor, ours, variant
from benchmarks.rows import Aim, Result, Row, variant_of
from benchmarks.states import State

FIRST_VERB: Final = "statetree, first verb"


def interpreter(_: float) -> State:
    """Nothing: every run is a process of its own."""
    return State("in a new process", {"module": "statetree"})


def importing(_: State) -> list[Contender]:
    """Import torch, and statetree on top of it."""
    return [
        ours(lambda: _import("import torch, statetree"), _succeeded),
        variant(FIRST_VERB, lambda: _import("import torch, statetree as st; st.offload([torch.ones(1)])"), _succeeded),
        floor("import torch", lambda: _import("import torch"), _succeeded),
    ]


def _import(statement: str) -> Any:
    # Where this is set, what is compiled is not kept, so that all runs would measure the compiler.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", statement], capture_output=True, check=False, env=env)


def _succeeded(done: Any) -> bool:
    return bool(done.returncode == 0)


def adds_at_most(milliseconds: float, to: str, timed: str = OURS) -> Aim:
    """Aim at taking so much longer than the floor, at most."""

    def value(result: Result) -> float:
        return (result.of(timed).median - result.of(to).median) * 1e3

    what = "" if timed == OURS else f" ({variant_of(timed)})"
    return Aim(f"adds ≤ {milliseconds:g} ms to {to}{what}", value, lambda value: value <= milliseconds)


ROWS = (
    Row(
        "import",
        "import",
        interpreter,
        importing,
        (adds_at_most(10, "import torch"), adds_at_most(80, "import torch", FIRST_VERB)),
        moves_bytes=False,
        rounds=9,
    ),
)
