"""How far long work is: a bar where standard error is a terminal, and nothing where it is not."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statetree.files.checkpoint import Progress


def silent(_nbytes: int) -> None:
    """Show nothing."""


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Progress]:
    """Show a bar while the block runs. It is given a function to call with the bytes that were done."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console  # takes a tenth of a second to load, and is seldom needed
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total_bytes)
        yield lambda nbytes: bars.advance(task, nbytes)
