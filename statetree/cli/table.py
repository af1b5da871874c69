"""Lines of columns on standard output: aligned, and in colour where it is a terminal."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import click
from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Iterable

_WIDEST: Final = 100


class OutputLine(NamedTuple):
    """One line: a name, and what there is to say of it."""

    name: str
    dtype: str
    shape: str
    size: str
    share: str
    notes: str
    is_group: bool = False


_RIGHT: Final = (False, False, False, True, True, False)


def is_coloured(stream: IO[str]) -> bool:
    """Whether text may be coloured: on terminals, unless https://no-color.org or the terminal's kind forbids it."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def write_lines(lines: Iterable[OutputLine], stream: IO[str], columns: int | None = None) -> None:
    """Write lines, their columns aligned, and cut short where a terminal ends."""
    in_colour = is_coloured(stream)
    rows = list(lines)
    if not rows:
        return
    widths = [min(_WIDEST, max(map(cell_len, column))) for column in list(zip(*rows, strict=True))[:6]]
    for row in rows:
        cells = []
        left = columns
        for cell, width, right in zip(row[:6], widths, _RIGHT, strict=True):
            padding = " " * max(0, width - cell_len(cell))
            cells.append(padding + cell if right else cell + padding)
            if left is not None and width:
                cells[-1] = set_cell_size(cells[-1], left) if cell_len(cells[-1]) > left else cells[-1]
                left = max(0, left - cell_len(cells[-1]) - 2)
        if in_colour:
            cells[0] = click.style(cells[0], bold=True) if row.is_group else cells[0]
            cells[4:] = [click.style(cell, dim=True) if cell.strip() else cell for cell in cells[4:]]
        stream.write("  ".join(cell for cell, width in zip(cells, widths, strict=True) if width).rstrip() + "\n")
