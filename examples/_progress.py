"""A progress bar on a terminal, and a few plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Self

from tqdm import tqdm

LINES = 4


class Progress:
    """Shows how far a run of numbered steps has come, on standard error.

    Args:
        name: What is running.
        total: The number of the last step.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self._start = time.perf_counter()
        self._bar = (
            tqdm(desc=f"{name:>13}", total=total, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None
        )

    def show(self, step: int, loss: float) -> None:
        """Say that a step is done."""
        if self._bar is not None:
            if self._bar.n == 0:
                self._bar.n = self._bar.initial = step - 1  # a resumed run does not begin at nought
            self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % max(1, self.total // LINES) == 0:
            elapsed = time.perf_counter() - self._start
            line = f"{self.name:>13}: step {step}/{self.total}  loss {loss:.3f}  {elapsed:.0f} s"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
