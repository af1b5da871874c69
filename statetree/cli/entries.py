"""A checkpoint's entries: those that are looked at, and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.cli.rows import Row, labels_of
from statetree.errors import CheckpointError
from statetree.files.checkpoint import is_entry
from statetree.files.leaf_text import dtype_text, kind_of, short_value, type_text
from statetree.files.shared_bytes import covered_bytes, shared_bytes
from statetree.files.stored import span_bytes
from statetree.files.untrusted import printable
from statetree.tree.flatten import flatten_for
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.key_paths import Path


class CheckpointEntry(NamedTuple):
    """A leaf, or a list or tuple of plain values: its path, a key that no other entry has, and what it is."""

    path: Path
    key: str
    leaf: Any


def entries_of(tree: Any) -> list[CheckpointEntry]:
    """Return the entries of a tree."""
    leaves, spec = flatten_for("read", tree, is_leaf=is_entry)
    return list(map(CheckpointEntry, spec.paths(), spec.flat_keys(), leaves))


def selection(entries: Sequence[CheckpointEntry]) -> Callable[[Path, Any], bool]:
    """Return a predicate of paths and leaves that holds for entries, and what lies in them."""
    paths = {tuple(entry.path) for entry in entries}
    return lambda path, _: any(tuple(path[:count]) in paths for count in range(len(path) + 1))


class Choice(NamedTuple):
    """Which entries are looked at: those that match some globs and do not match others (see ``select``)."""

    verb: str
    patterns: Sequence[str] = ()
    excluded: Sequence[str] = ()

    def of(self, *trees: Any) -> list[list[CheckpointEntry]]:
        """Return the entries of trees that are looked at.

        Raises:
            CheckpointError: If there are none, though the trees have some.
        """
        chosen: list[list[CheckpointEntry]] = []
        keys: set[str] = set()
        for tree in trees:
            entries = entries_of(tree)
            leaves, spec = flatten_for("read", tree, is_leaf=is_entry)
            taken, left_out = (
                selected(list(globs), spec, leaves, verb=self.verb, missing_ok=True)
                if globs
                else [default] * len(leaves)
                for globs, default in ((self.patterns, True), (self.excluded, False))
            )
            flagged = zip(entries, taken, left_out, strict=True)
            chosen.append([entry for entry, take, leave in flagged if take and not leave])
            keys.update(entry.key for entry in entries)
        if not any(chosen) and (keys or self.patterns):
            msg = (
                f"{self.verb}: none of the {len(keys)} keys matches: expected one or more. Check --match and --exclude."
            )
            raise CheckpointError(msg)
        return chosen


def rows_of(tree: Any, choice: Choice) -> list[Row]:
    """Return the rows of those entries of a checkpoint that are looked at."""
    (chosen,), entries = choice.of(tree), entries_of(tree)
    rows = {entry.key: _row(entry) for entry in chosen}
    for group in shared_bytes([entry.leaf for entry in entries]):
        keys = [entries[index].key for index in group]
        shown = [rows[key] for key in keys if key in rows]
        for row in shown:
            row.own_bytes, row.tied_to = 0, keys[0] if row.key != keys[0] else ""
        if shown:
            shown[0].own_bytes = covered_bytes([row.leaf for row in shown])
            shown[0].num_tied = len(keys) if not shown[0].tied_to else 0
    return list(rows.values())


def _row(entry: CheckpointEntry) -> Row:
    leaf, kind = entry.leaf, kind_of(entry.leaf)
    if kind == "value":
        return Row(entry.key, labels_of(entry.path), kind, type_text(leaf), text=short_value(leaf), leaf=leaf)
    layout = "" if kind == "tensor" else printable(kind.removesuffix(" tensor"))
    if leaf.is_strided and leaf.numel and not leaf.outline.is_contiguous():
        layout = "expanded" if span_bytes(leaf.outline) < leaf.nbytes else "strided"
    own = min(leaf.nbytes, span_bytes(leaf.outline)) if leaf.is_strided else leaf.nbytes
    sizes = tuple(leaf.shape), leaf.nbytes, leaf.numel, own
    return Row(entry.key, labels_of(entry.path), kind, dtype_text(leaf.dtype), *sizes, layout=layout, leaf=leaf)
