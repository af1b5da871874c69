"""Lines of columns on standard output: aligned, and in colour where it is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Iterable

_WIDEST: Final = 100
#: How wide the names are at least, and the dtypes and shapes at most, where a terminal is too narrow for all.
_NARROW: Final = (16, 13, 16)


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


def _columns() -> int:
    """Return how wide the terminal is that is written to; what is none is as wide as need be."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def write_lines(lines: Iterable[OutputLine]) -> None:
    """Write lines, their columns aligned.

    Where a terminal is too narrow, shares are left out, names lose their beginning, and notes get lines of their own.
    """
    rows, in_colour, columns = list(lines), is_coloured(), _columns()
    sized = [row for row in rows if row.size] or rows  # what a value is may go on where others have sizes
    lengths = ([cell_len(str(row[at])) for row in (sized if at == 2 else rows)] for at in range(5))
    widths = [min(_WIDEST, max(column, default=0)) for column in lengths]
    is_narrow = sum(widths) + 8 > columns
    if is_narrow:
        widths[1:] = min(widths[1], _NARROW[1]), min(widths[2], _NARROW[2]), widths[3], 0
        widths[0] = min(widths[0], max(_NARROW[0], columns - sum(widths[1:]) - 6))
    for row in rows:
        shape = _clipped(row.shape, widths[2]) if row.size else row.shape
        left = (_cut(row.name, widths[0]), _clipped(row.dtype, widths[1]), shape) if is_narrow else row[:3]
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(left, widths, strict=False)]
        cells += [" " * (width - len(cell)) + cell for cell, width in zip(row[3:5], widths[3:], strict=True)]
        name, *others = (cell for cell, width in zip(cells, widths, strict=True) if width)
        rest, notes, between = "  ".join(others), [row.notes] if row.notes else [], "  "
        room = max(1, columns - cell_len(name) - 2)
        rest = rest if cell_len(rest) <= room else _clipped(rest.rstrip(), room)
        if cell_len(name) + cell_len(rest) + cell_len(row.notes) + 4 > columns:
            rest, notes, between = rest.rstrip(), wrap(row.notes, max(8, columns - 6)), "\n      "
        if in_colour:
            name = click.style(name, bold=True) if row.is_group else name
            is_whole = row.share and rest.endswith(row.share)
            rest = rest.removesuffix(row.share) + click.style(row.share, dim=True) if is_whole else rest
            notes = [click.style(note, dim=True) for note in notes]
        sys.stdout.write(between.join([f"{name}  {rest}", *notes]).rstrip() + "\n")


def _cut(name: str, width: int) -> str:
    """Return a name with half its indentation and, if that is still too long, its end."""
    name = " " * ((len(name) - len(name.lstrip(" "))) // 2) + name.lstrip(" ")
    return name if cell_len(name) <= width else f"…{set_cell_size(name[::-1], width - 1)[::-1].lstrip(' ')}"


def _clipped(text: str, width: int) -> str:
    """Return a text, with its beginning alone if it is too long."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def wrapped(line: str) -> str:
    """Return a line with breaks between words where the terminal ends, indented from then on."""
    done, at, columns = "", 0, _columns()
    for word in line.split(" "):
        width = cell_len(click.unstyle(word)) + 1
        is_break = bool(done) and at + width > columns
        done, at = (f"{done}\n    {word}", 4 + width) if is_break else (f"{done} {word}", at + width)
    return done[1:]
