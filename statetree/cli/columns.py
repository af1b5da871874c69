"""Lines of columns on standard output: aligned, and in colour where it is a terminal."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import click
from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: So many lines are looked at to find how wide a column has to be.
_AHEAD: Final = 5000
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


def write_lines(lines: Iterable[OutputLine], stream: IO[str]) -> None:
    """Write lines, their columns aligned."""
    in_colour = is_coloured(stream)
    pending: list[OutputLine] = []
    for line in lines:
        pending.append(line)
        if len(pending) == _AHEAD:
            stream.writelines(_aligned(pending, in_colour=in_colour))
            pending.clear()
    stream.writelines(_aligned(pending, in_colour=in_colour))


def _aligned(lines: list[OutputLine], *, in_colour: bool) -> Iterator[str]:
    if not lines:
        return
    widths = [min(_WIDEST, max(map(cell_len, column))) for column in list(zip(*lines, strict=True))[:6]]
    for line in lines:
        cells = [
            " " * max(0, width - cell_len(cell)) + cell if right else cell + " " * max(0, width - cell_len(cell))
            for cell, width, right in zip(line[:6], widths, _RIGHT, strict=True)
        ]
        if in_colour:
            cells[0] = click.style(cells[0], bold=True) if line.is_group else cells[0]
            cells[4:] = [click.style(cell, dim=True) if cell.strip() else cell for cell in cells[4:]]
        yield "  ".join(cell for cell, width in zip(cells, widths, strict=True) if width).rstrip() + "\n"
