"""Makes the N-th step inside statetree fail, for every N until a run succeeds (SQLite's habit).

A *call* is any call of a function of torch's that a frame of statetree makes: every allocation and every copy is one.
A *signal* may strike where Python looks for one: on entering a function of statetree, and after it has called one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import statetree

PACKAGE = str(Path(statetree.__file__).parent)

Step = Literal["call", "signal"]


class Fault:
    """Counts steps, and raises at one of them."""

    def __init__(self, at: int, error: type[BaseException], file: str = "") -> None:
        self.at = at
        self.error = error
        self.file = f"{PACKAGE}{file}"
        self.steps = 0
        self.where = ""

    def step(self, frame: FrameType) -> None:
        if not frame.f_code.co_filename.startswith(self.file):
            return
        self.steps += 1
        if self.steps == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self.error(f"injected at step {self.at}, {self.where}")

    @property
    def struck(self) -> bool:
        return self.steps >= self.at

    def calls(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and _is_of_torch(called):
            self.step(frame)

    def signals(self, frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_return"}:
            self.step(frame)


def _is_of_torch(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    owner = owner if isinstance(owner, type) else type(owner)
    return "torch" in (getattr(function, "__module__", None) or "") or owner.__module__.startswith("torch")


@contextmanager
def fault(at: int, step: Step, error: type[BaseException], file: str = "") -> Iterator[Fault]:
    """Raise at step ``at`` of what runs inside (1 is the first); ``file`` narrows where steps count."""
    injected = Fault(at, error, file)
    before = sys.getprofile()
    sys.setprofile(injected.calls if step == "call" else injected.signals)
    try:
        yield injected
    finally:
        sys.setprofile(before)


def fail_each(
    action: Callable[[], Any],
    after: Callable[[str], None],
    *,
    step: Step,
    error: type[BaseException],
    file: str = "",
    stride: int = 1,
) -> int:
    """Run an action with a fault at step 1, 2, 3 … until it succeeds; after each failure look what it left.

    Args:
        action: What is to fail. Its result is dropped.
        after: Called after each failure, with the place of the fault.
        step: What counts as a step.
        error: What is raised.
        file: Narrows where steps count: a path below the package, such as ``/stager.py``.
        stride: Try every n-th place only.

    Returns:
        How many places were tried.
    """
    tried = 0
    at = 1
    while True:
        injected = None
        try:
            with fault(at, step, error, file) as injected:
                action()
        except error as raised:
            if "injected" not in str(raised):
                raise
            # The traceback holds frames, and these what they were working on.
            raised.__traceback__ = None
        except Exception as raised:  # turned into something else on its way: it must say why
            assert injected is not None
            assert injected.struck, raised
            raised.__traceback__ = None
        assert injected is not None
        if not injected.struck:
            return tried
        after(injected.where)
        tried += 1
        at += stride
