"""``statetree show``: what a checkpoint holds."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final

from statetree.cli.describing import human, value_text
from statetree.cli.rows import Row, RowGroup, counted, grouped, rows_of, sorting, unread_bytes
from statetree.cli.table import OutputLine, write_lines
from statetree.files.checkpoint import TITLES, Checkpoint
from statetree.files.untrusted import printable

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


def _line(item: Row | RowGroup, name: str, total: int) -> OutputLine:
    if isinstance(item, Row) and item.sort == "value":
        return OutputLine(name, *item.cells, "", "", "")
    is_group = isinstance(item, RowGroup)
    nbytes = item.own_bytes if isinstance(item, RowGroup) else item.nbytes
    share = "" if isinstance(item, Row) and item.tied_to and not item.own_bytes else _share(item.own_bytes, total)
    return OutputLine(name, *item.cells, human(nbytes), share, ", ".join(item.notes), is_group=is_group)


def _share(nbytes: int, total: int) -> str:
    return f"{nbytes / total:.1%}" if total else ""


def _tree_lines(root: RowGroup, sort: str, total: int) -> Iterator[OutputLine]:
    """Return a line an entry and a line a group, those below it indented."""
    in_order = sorting(sort)
    pending: list[tuple[Row | RowGroup, int, str]] = [(item, 0, "") for item in reversed(in_order(root.below))]
    while pending:
        item, level, prefix = pending.pop()
        label = prefix + (item.label if isinstance(item, RowGroup) else item.labels[-1])
        if isinstance(item, RowGroup) and len(item.below) == 1:
            pending.append((item.below[0], level, f"{label}."))  # a chain of groups takes one line
            continue
        yield _line(item, "  " * level + label, total)
        if isinstance(item, RowGroup):
            pending += [(below, level + 1, "") for below in reversed(in_order(item.below))]


def _flat_lines(root: RowGroup, sort: str, total: int) -> Iterator[OutputLine]:
    """Return a line an entry, with its whole key: what other programs search."""
    found: list[tuple[Row | RowGroup, str]] = []
    pending: list[tuple[Row | RowGroup, str]] = [(root, "")]
    while pending:
        item, name = pending.pop()
        if isinstance(item, Row):
            found.append((item, printable(item.key) or "<root>"))
        elif item.below or item is root:
            pending += [(below, f"{name}{getattr(below, 'label', '')}.") for below in reversed(item.below)]
        else:
            found.append((item, f"{name}*"))
    if sort != "file":
        found.sort(key=lambda pair: pair[1] if sort == "name" else -pair[0].own_bytes)
    return (_line(item, name, total) for item, name in found)


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
