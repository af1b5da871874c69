"""``statetree show``: what a checkpoint holds."""

from __future__ import annotations

import json
import math
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.describing import human, value_text
from statetree.cli.entries import Choice, Row, RowGroup, counted, entries_of, grouped, plural, rows_of, sorting
from statetree.cli.statistics import Statistics, statistics_of, stats_text
from statetree.cli.table import OutputLine, write_lines
from statetree.errors import CheckpointError
from statetree.files.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from statetree.files.checkpoint import OpenedCheckpoint

_SIMPLE: Final = (str, int, type(None))


class ShowOptions(NamedTuple):
    """How a checkpoint is shown."""

    choice: Choice
    depth: int | None = None
    sort: str = "file"
    as_json: bool = False
    stats: bool = False


def show(path: Path, checkpoint: OpenedCheckpoint, options: ShowOptions) -> None:
    """Print what a checkpoint holds."""
    (entries,) = options.choice.of(checkpoint.tree)
    rows = rows_of(entries, entries_of(checkpoint.tree))
    if options.as_json:
        shown = sorting(options.sort)(rows)
        json.dump(_as_json(path, checkpoint, shown, stats=options.stats), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    sys.stdout.write(f"{_summary(path, checkpoint, rows)}\n")
    lines = _tree_lines if sys.stdout.isatty() else _flat_lines
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    write_lines(lines(grouped(rows, options.depth), options), sys.stdout, width)


def _summary(path: Path, checkpoint: OpenedCheckpoint, rows: Sequence[Row]) -> str:
    words = f"{printable(str(path))}: {checkpoint.title}, {human(checkpoint.files.nbytes)}: {counted(rows)}"
    numbers = sum(row.numel for row in rows)
    return f"{words}, {human(sum(row.own_bytes for row in rows))} of elements, {plural(numbers, 'parameter')}"


def _line(item: Row | RowGroup, name: str, total: int, *, stats: bool) -> OutputLine:
    if isinstance(item, RowGroup):
        share = _share(item.own_bytes, total)
        return OutputLine(name, *item.cells, human(item.own_bytes), share, ", ".join(item.notes), is_group=True)
    if item.kind == "value":
        return OutputLine(name, *item.cells, "", "", "")
    notes = [*item.notes, *([stats_text(statistics_of(item.leaf))] if stats else [])]
    share = "" if item.tied_to and not item.own_bytes else _share(item.own_bytes, total)
    return OutputLine(name, *item.cells, human(item.nbytes), share, ", ".join(notes))


def _share(nbytes: int, total: int) -> str:
    return f"{nbytes / total:.1%}" if total else ""


def _tree_lines(root: RowGroup, options: ShowOptions) -> Iterator[OutputLine]:
    """Return a line an entry and a line a group, those below it indented."""
    in_order = sorting(options.sort)
    pending: list[tuple[Row | RowGroup, int, str]] = [(item, 0, "") for item in reversed(in_order(root.below))]
    while pending:
        item, level, prefix = pending.pop()
        label = prefix + (item.label if isinstance(item, RowGroup) else item.labels[-1])
        if isinstance(item, RowGroup) and len(item.below) == 1:
            pending.append((item.below[0], level, f"{label}."))  # a chain of groups takes one line
            continue
        yield _line(item, "  " * level + label, root.own_bytes, stats=options.stats)
        if isinstance(item, RowGroup):
            pending += [(below, level + 1, "") for below in reversed(in_order(item.below))]


def _flat_lines(root: RowGroup, options: ShowOptions) -> Iterator[OutputLine]:
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
    if options.sort != "file":
        found.sort(key=lambda pair: pair[1] if options.sort == "name" else -pair[0].own_bytes)
    total = root.own_bytes
    return (_line(item, name, total, stats=options.stats) for item, name in found)


def _as_json(path: Path, checkpoint: OpenedCheckpoint, rows: Sequence[Row], *, stats: bool) -> dict[str, Any]:
    return {
        "file": str(path),
        "format": checkpoint.title.split()[0].lower(),
        "bytes": checkpoint.files.nbytes,
        "element_bytes": sum(row.own_bytes for row in rows),
        "parameters": sum(row.numel for row in rows),
        "metadata": checkpoint.metadata,
        "not_loaded": sorted(checkpoint.foreign),
        "entries": [_entry_json(row, stats=stats) for row in rows],
    }


def _is_json(value: Any) -> bool:
    """Whether JSON can hold a value: it has neither infinity nor NaN."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, _SIMPLE)


def _entry_json(row: Row, *, stats: bool) -> dict[str, Any]:
    if row.kind == "value":
        value = row.leaf if _is_json(row.leaf) else value_text(row.leaf)
        return {"key": row.key, "sort": "value", "type": row.dtype, "value": value}
    shape = list(row.shape or ())
    found = {"key": row.key, "sort": row.kind, "dtype": row.dtype, "shape": shape, "bytes": row.nbytes}
    found |= {"tied_to": row.tied_to} if row.tied_to else {}
    return {**found, "stats": _stats_json(statistics_of(row.leaf))} if stats else found


def _stats_json(found: Statistics | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict()


def verified(path: Path, checkpoint: OpenedCheckpoint) -> str:
    """Compare the checksums that a checkpoint has, and return in words how many agree.

    Raises:
        CheckpointError: If one does not, or it has none.
    """
    count = checkpoint.verify()
    if not count:
        what = f"a {checkpoint.title} has no checksums. Keep some apart (sha256sum)."
        msg = f"show: nothing to verify {printable(str(path))} by: {what}"
        raise CheckpointError(msg)
    return f"verified: {plural(count, 'checksum')} agree{'s' * (count == 1)}"
