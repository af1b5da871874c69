"""Lines of columns on standard output: aligned, and in colour where it is a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Columns are no wider: what is longer goes on.
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


def is_coloured() -> bool:
    """Whether text may be coloured: on terminals, unless https://no-color.org or the terminal's kind forbids it."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def write_lines(lines: Iterable[OutputLine]) -> None:
    """Write lines, their columns aligned."""
    rows, in_colour = list(lines), is_coloured()
    sized = [row for row in rows if row.size] or rows  # what a value is may go on where others have sizes
    lengths = ([cell_len(str(row[at])) for row in (sized if at == 2 else rows)] for at in range(5))
    widths = [min(_WIDEST, max(column, default=0)) for column in lengths]
    for row in rows:
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row[:3], widths[:3], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[3:5], widths[3:], strict=True)]
        cells.append(row.notes)
        if in_colour:
            cells[0] = click.style(cells[0], bold=True) if row.is_group else cells[0]
            cells[4:] = [click.style(cell, dim=True) if cell.strip() else cell for cell in cells[4:]]
        shown = "  ".join([cell for cell, width in zip(cells, (*widths, 1), strict=True) if width])
        sys.stdout.write(shown.rstrip() + "\n")
