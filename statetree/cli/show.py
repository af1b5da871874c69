"""``statetree show``: what a checkpoint holds."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final

from statetree.cli.checkpoint import TITLES, Checkpoint
from statetree.cli.describing import human, value_text
from statetree.cli.names import printable
from statetree.cli.rows import Group, Row, counted, grouped, rows_of, sorting, unread_bytes
from statetree.cli.text import Line, write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIMPLE: Final = (str, int, type(None))


def show(checkpoint: Checkpoint, *, depth: int | None, sort: str, patterns: Sequence[str], as_json: bool) -> None:
    """Print what a checkpoint holds."""
    rows = rows_of(checkpoint, patterns)
    if as_json:
        json.dump(_as_json(checkpoint, sorting(sort)(rows)), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    total = sum(row.own_bytes for row in rows)
    lines = _tree_lines if sys.stdout.isatty() else _flat_lines
    sys.stdout.write(f"{_summary(checkpoint, rows, total)}\n")
    write_lines(lines(grouped(rows, depth), sort, total), sys.stdout)


def _summary(checkpoint: Checkpoint, rows: Sequence[Row], total: int) -> str:
    tensors = sum(row.sort != "value" for row in rows)
    what = counted(tensors, len(rows) - tensors)
    words = f"{printable(str(checkpoint.path))}: {TITLES[checkpoint.kind]}, {human(checkpoint.nbytes)}: {what}"
    unread = unread_bytes(checkpoint)
    more = f", {human(unread)} in objects that are not loaded" if unread else ""
    return f"{words}, {human(total)} of elements{more}"


def _line(item: Row | Group, name: str, total: int) -> Line:
    if isinstance(item, Group):
        ties = _ties_elsewhere(item) if not item.order else ""
        return Line(name, *item.cells, human(item.own_bytes), _share(item.own_bytes, total), ties, is_group=True)
    if item.sort == "value":
        return Line(name, *item.cells, "", "", "")
    share = _share(item.own_bytes, total) if item.own_bytes or not item.tied_to else ""
    notes = [f"= {printable(item.tied_to)}"] * bool(item.tied_to) + list(item.notes)
    return Line(name, *item.cells, human(item.nbytes), share, ", ".join(notes))


def _ties_elsewhere(group: Group) -> str:
    """Say how many of the entries of a group that is summed up have no bytes of their own, but those of others."""
    keys = {row.key for row in group.rows}
    tied = [row.tied_to for row in group.rows if row.tied_to and row.tied_to not in keys]
    if len(tied) == 1:
        return f"1 = {printable(tied[0])}"
    return f"{len(tied)} tied elsewhere" if tied else ""


def _share(nbytes: int, total: int) -> str:
    return f"{nbytes / total:.1%}" if total else ""


def _tree_lines(root: Group, sort: str, total: int) -> Iterator[Line]:
    """Return a line an entry and a line a group, those below it indented."""
    in_order = sorting(sort)
    pending: list[tuple[Row | Group, int, str]] = [(item, 0, "") for item in reversed(in_order(root.order))]
    while pending:
        item, level, prefix = pending.pop()
        label = prefix + (item.label if isinstance(item, Group) else item.labels[-1])
        if isinstance(item, Group) and len(item.order) == 1:
            pending.append((item.order[0], level, f"{label}."))  # a chain of groups takes one line
            continue
        yield _line(item, "  " * level + label, total)
        if isinstance(item, Group):
            pending += [(below, level + 1, "") for below in reversed(in_order(item.order))]


def _flat_lines(root: Group, sort: str, total: int) -> Iterator[Line]:
    """Return a line an entry, with its whole key: what other programs search."""
    found: list[tuple[Row | Group, str]] = []
    pending: list[tuple[Row | Group, str]] = [(item, "") for item in reversed(root.order)]
    while pending:
        item, prefix = pending.pop()
        if isinstance(item, Group) and item.order:
            pending += [(below, f"{prefix}{item.label}.") for below in reversed(item.order)]
        else:
            found.append(
                (item, f"{prefix}{item.label}.*" if isinstance(item, Group) else printable(item.key) or "<root>")
            )
    if sort == "name":
        found.sort(key=lambda pair: pair[1])
    elif sort == "size":
        found.sort(key=lambda pair: -pair[0].own_bytes)
    for item, name in found:
        yield _line(item, name, total)


def _as_json(checkpoint: Checkpoint, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "file": str(checkpoint.path),
        "format": checkpoint.kind,
        "bytes": checkpoint.nbytes,
        "element_bytes": sum(row.own_bytes for row in rows),
        "not_loaded_bytes": unread_bytes(checkpoint),
        "metadata": checkpoint.metadata,
        "not_loaded": sorted(checkpoint.foreign),
        "entries": [_entry_json(row) for row in rows],
    }


def _is_json(value: Any) -> bool:
    """Whether JSON can hold a value: it has neither infinity nor NaN."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, _SIMPLE)


def _entry_json(row: Row) -> dict[str, Any]:
    if row.sort == "value":
        value = row.leaf if _is_json(row.leaf) else value_text(row.leaf)
        return {"key": row.key, "sort": "value", "type": row.dtype, "value": value}
    found = {
        "key": row.key,
        "sort": row.sort,
        "dtype": row.dtype or None,
        "shape": None if row.shape is None else list(row.shape),
        "bytes": row.nbytes,
    }
    return {**found, "tied_to": row.tied_to} if row.tied_to else found
