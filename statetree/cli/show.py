"""``statetree show``: what a checkpoint holds."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.cli.entries import rows_of
from statetree.cli.progress import tracked
from statetree.cli.rows import Row, RowGroup, counted, grouped, plural, sorting
from statetree.cli.table import OutputLine, write_lines
from statetree.errors import CheckpointError
from statetree.files.leaf_text import statistics_of, stats_text
from statetree.files.untrusted import human, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from statetree.cli.entries import Choice
    from statetree.files.checkpoint import OpenedCheckpoint


class ShowOptions(NamedTuple):
    """How a checkpoint is shown."""

    depth: int | None = None
    sort: str = "file"
    as_json: bool = False
    stats: bool = False


def show(path: Path, checkpoint: OpenedCheckpoint, choice: Choice, options: ShowOptions) -> None:
    """Print what a checkpoint holds, as far as it is looked at."""
    rows = rows_of(checkpoint.tree, choice)
    with suppress(CheckpointError):  # opens all files, so that their bytes count: what is missing, --verify tells
        checkpoint.check()
    element_bytes = sum(row.own_bytes for row in rows)
    num_parameters = sum(row.numel for row in rows if not row.tied_to)
    if options.as_json:
        in_order = sorting(options.sort)(rows)
        found = {
            "file": str(path),
            "format": checkpoint.title.split()[0].lower(),
            "bytes": checkpoint.files.nbytes,
            "element_bytes": element_bytes,
            "parameters": num_parameters,
            "metadata": checkpoint.metadata,
            "not_loaded": sorted(checkpoint.foreign),
            "entries": [_entry_json(row, options) for row in tracked("show", in_order, len(in_order))],
        }
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
        return
    words = f"{printable(str(path))}: {checkpoint.title}, {human(checkpoint.files.nbytes)}: {counted(rows)}"
    numbers = f"{human(element_bytes)} of elements, {plural(num_parameters, 'parameter')}"
    sys.stdout.write(f"{words}, {numbers}\n")
    is_tree = sys.stdout.isatty() or options.depth is not None
    lines = _tree_lines(grouped(rows, options.depth), options) if is_tree else _flat_lines(rows, options)
    write_lines(list(tracked("show", lines, len(rows))) if options.stats else lines)


def _line(item: Row | RowGroup, name: str, total: int, options: ShowOptions) -> OutputLine:
    share = f"{item.own_bytes / total:.1%}" if total else ""
    if isinstance(item, RowGroup):
        return OutputLine(name, *item.cells, human(item.own_bytes), share, ", ".join(item.notes), is_group=True)
    if item.kind == "value":
        return OutputLine(name, *item.cells, "", "", "")
    notes = item.notes
    if options.stats:
        notes.append(stats_text(statistics_of(item.leaf)))
    share = "" if item.tied_to and not item.own_bytes else share
    return OutputLine(name, *item.cells, human(item.nbytes), share, ", ".join(filter(None, notes)))


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
        yield _line(item, "  " * level + label, root.own_bytes, options)
        if isinstance(item, RowGroup):
            pending += [(below, level + 1, "") for below in reversed(in_order(item.below))]


def _flat_lines(rows: list[Row], options: ShowOptions) -> Iterator[OutputLine]:
    """Return a line an entry, with its whole key: what other programs search."""
    total = sum(row.own_bytes for row in rows)
    return (_line(row, printable(row.key) or "<root>", total, options) for row in sorting(options.sort)(rows))


def _entry_json(row: Row, options: ShowOptions) -> dict[str, Any]:
    if row.kind == "value":
        is_json = math.isfinite(row.leaf) if isinstance(row.leaf, float) else isinstance(row.leaf, str | int | None)
        value = row.leaf if is_json else row.text
        return {"key": row.key, "sort": "value", "type": row.dtype, "value": value}
    found = {"key": row.key, "sort": row.kind, "dtype": row.dtype, "shape": list(row.shape), "bytes": row.nbytes}
    found |= {"tied_to": row.tied_to} if row.tied_to else {}
    if options.stats:
        numbers = statistics_of(row.leaf)
        found["stats"] = None if numbers is None else numbers._asdict()
    return found


def verified(checkpoint: OpenedCheckpoint) -> str:
    """Compare a checkpoint's checksums, and return in words how many agree; ``CheckpointError`` if one does not."""
    count = checkpoint.verify()
    if not count:
        return f"not verified: a {checkpoint.title} stores no checksums. Keep some apart (sha256sum)."
    return f"verified: {plural(count, 'checksum')} agree{'s' * (count == 1)}"
