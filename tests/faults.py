"""Makes the N-th step inside statetree fail, for every N until a run succeeds (SQLite's habit).

What counts as a step depends on the kind of fault (``STEPS``). A *call* is any call of a function of torch's that a
frame of statetree makes: every allocation and every copy is one. A *signal* may strike where Python looks for one: on
entering a function of statetree, and after it has called one. The others are the system's refusals.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest import mock

import statetree

PACKAGE = str(Path(statetree.__file__).parent)

Step = Literal["call", "signal", "SIGINT", "descriptor", "room", "pin"]
#: Every kind of fault, and what it raises.
STEPS: dict[Step, type[BaseException]] = {
    "call": MemoryError,
    "signal": KeyboardInterrupt,
    "SIGINT": KeyboardInterrupt,
    "descriptor": OSError,
    "room": OSError,
    "pin": RuntimeError,
}


def _collects_garbage(frame: FrameType) -> bool:
    """Whether a frame belongs to a callback of the garbage collector, from which Python raises nothing."""
    running = (frame, frame.f_back) if frame.f_back else (frame,)
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    return any(each.f_code in codes for each in running)


class Fault:
    """Counts steps, and raises at one of them."""

    def __init__(self, at: int, error: type[BaseException], file: str = "") -> None:
        self.at = at
        self.error = error
        self.file = file
        self.steps = 0
        self.where = ""
        #: The functions of the package that were running when it struck, the innermost first.
        self.running: list[str] = []

    def step(self, frame: FrameType, strike: Callable[[], None] | None = None) -> None:
        name = frame.f_code.co_filename
        if not (name.startswith(PACKAGE) and self.file in name) or _collects_garbage(frame):
            return
        self.steps += 1
        if self.steps == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.running = list(_running(frame))
            self.strike() if strike is None else strike()

    def strike(self) -> None:
        raise self.error(f"injected at step {self.at}, {self.where}")

    @property
    def struck(self) -> bool:
        return self.steps >= self.at

    # What counts as a step

    @contextmanager
    def profiled(self, hook: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(hook)
        try:
            yield
        finally:
            sys.setprofile(before)

    def call(self) -> Any:
        def hook(frame: FrameType, event: str, called: Any) -> None:
            # Leaving a context does not fail, and nothing strikes between the body of a with and that call.
            if event == "c_call" and _is_of_torch(called) and called.__name__ != "__exit__":
                self.step(frame)

        return self.profiled(hook)

    def signal(self, strike: Callable[[], None] | None = None) -> Any:
        def hook(frame: FrameType, event: str, _: Any) -> None:
            if event in {"call", "c_return"}:
                self.step(frame, strike)

        return self.profiled(hook)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """As ``signal``, by a real one."""

        def handler(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt(f"injected at step {self.at}, {self.where}")

        before = signal.signal(signal.SIGINT, handler)
        try:
            with self.signal(lambda: signal.raise_signal(signal.SIGINT)):
                yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def replaced(self, module: Any, name: str, failure: Callable[[], BaseException]) -> Iterator[None]:
        """Count calls of a function of the system's."""
        real = getattr(module, name)

        def counted(*args: Any, **keywords: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                self.where = name
                raise failure()
            return real(*args, **keywords)

        with mock.patch.object(module, name, counted):
            yield

    @contextmanager
    def starved(self) -> Iterator[None]:
        """Leave one file descriptor less than the step's number: really, so that torch's own calls fail as well."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        holes = set(range(highest)) - set(map(int, os.listdir("/proc/self/fd")))
        fillers = [os.open(os.devnull, os.O_RDONLY) for _ in holes]
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + self.at, hard))
        self.where = f"with {self.at - 1} file descriptors"
        try:
            yield
        except OSError:
            self.steps = self.at
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)

    def steps_of(self, step: Step) -> Any:
        """Return the context in which steps of one kind are counted."""
        if step == "call":
            return self.call()
        if step == "signal":
            return self.signal()
        if step == "SIGINT":
            return self.interrupted()
        if step == "descriptor":
            return self.starved()
        if step == "room":
            full = OSError(errno.ENOSPC, "injected: No space left on device")
            return self.replaced(os, "posix_fallocate", lambda: full)
        from torch.cuda import _pin_memory_utils

        return self.replaced(_pin_memory_utils, "pin_memory", lambda: RuntimeError("injected: cudaHostRegister failed"))


def _running(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_qualname
        frame = frame.f_back


def _is_of_torch(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    owner = owner if isinstance(owner, type) else type(owner)
    return "torch" in (getattr(function, "__module__", None) or "") or owner.__module__.startswith("torch")


@contextmanager
def fault(at: int, step: Step, error: type[BaseException], file: str = "") -> Iterator[Fault]:
    """Raise at step ``at`` of what runs inside (1 is the first); ``file`` narrows where calls and signals count."""
    injected = Fault(at, error, file)
    with injected.steps_of(step):
        yield injected


def fail_each(
    action: Callable[[], Any],
    after: Callable[[str], None],
    *,
    step: Step,
    error: type[BaseException] | None = None,
    file: str = "",
    stride: int = 1,
) -> int:
    """Run an action with a fault at step 1, 2, 3 … until it succeeds; after each failure look what it left.

    Args:
        action: What is to fail. Its result is dropped.
        after: Called after each failure, with the place of the fault.
        step: What counts as a step.
        error: What is raised, if it is not as usual.
        file: Narrows where steps count: a path below the package, such as ``/stager/``.
        stride: Try every n-th place only.

    Returns:
        How many places were tried.
    """
    error = STEPS[step] if error is None else error
    tried = 0
    at = 1
    while True:
        injected = None
        try:
            with fault(at, step, error, file) as injected:
                action()
        except error as raised:
            assert injected is not None
            if not injected.struck:
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
