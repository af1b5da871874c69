"""A checkpoint's entries as rows: one an entry, or one a group of entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.describing import dtype_text, kind_of, shape_text, type_text, value_text
from statetree.errors import CheckpointError
from statetree.files.checkpoint import is_entry
from statetree.files.stored import StoredTensor, span_bytes
from statetree.files.untrusted import printable
from statetree.paths import Attr, render_key
from statetree.tree.flatten import flatten_for
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.paths import Path
    from statetree.tree.spec import TreeSpec

#: Into how many parts a key such as ``layers.0.weight`` is taken apart.
_MAX_PARTS: Final = 16


class CheckpointEntry(NamedTuple):
    """A leaf, or a list or tuple of plain values: its path, a key that no other entry has, and what it is."""

    path: Path
    key: str
    leaf: Any


def entries_of(tree: Any) -> list[CheckpointEntry]:
    """Return the entries of a tree."""
    leaves, spec = flatten_for("read", tree, is_leaf=is_entry)
    return list(map(CheckpointEntry, spec.paths(), spec.flat_keys(), leaves))


class Choice:
    """Which entries are looked at: those that match some globs and do not match others (see ``select``)."""

    def __init__(self, verb: str, patterns: Sequence[str], excluded: Sequence[str]) -> None:
        self._verb = verb
        self._patterns = list(patterns)
        self._excluded = list(excluded)

    def of(self, *trees: Any) -> list[list[CheckpointEntry]]:
        """Return the entries of trees that are looked at.

        Raises:
            CheckpointError: If there are none, though the trees have some.
        """
        flat = [flatten_for("read", tree, is_leaf=is_entry) for tree in trees]
        masks = [self._mask(leaves, spec) for leaves, spec in flat]
        found = [entries_of(tree) for tree in trees]
        chosen = [list(compress(entries, mask)) for entries, mask in zip(found, masks, strict=True)]
        count = len({entry.key for entries in found for entry in entries})
        if not any(chosen) and (count or self._patterns):
            msg = f"{self._verb}: none of the {count} keys matches: expected one or more. Check --match and --exclude."
            raise CheckpointError(msg)
        return chosen

    def _mask(self, leaves: list[Any], spec: TreeSpec) -> list[bool]:
        taken, left_out = (
            selected(globs, spec, leaves, verb=self._verb, missing_ok=True) if globs else [default] * len(leaves)
            for globs, default in ((self._patterns, True), (self._excluded, False))
        )
        return [take and not leave for take, leave in zip(taken, left_out, strict=True)]

    @property
    def is_all(self) -> bool:
        """Whether all entries are."""
        return not self._patterns and not self._excluded


@dataclass
class Row:
    """One entry, as it is shown.

    Attributes:
        key: Its key, which no other entry has.
        labels: The parts of its key.
        leaf: What it is.
        own_bytes: How many of its bytes no row before it has.
        tied_to: The key of the first entry that it shares bytes with; empty for that entry, and without ties.
        num_tied: How many entries share bytes with it, if it is the first one of them.
    """

    key: str
    labels: tuple[str, ...]
    leaf: Any
    own_bytes: int
    tied_to: str = ""
    num_tied: int = 0

    @cached_property
    def kind(self) -> str:
        """What it is: see ``kind_of``."""
        return kind_of(self.leaf)

    @property
    def dtype(self) -> str:
        """Its dtype, or the type of a plain value."""
        return type_text(self.leaf) if self.kind == "value" else dtype_text(self.leaf.dtype)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; ``None`` for a plain value."""
        return None if self.kind == "value" else tuple(self.leaf.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return 0 if self.kind == "value" else self.leaf.nbytes

    @property
    def numel(self) -> int:
        """How many elements it has, if no row before it has them."""
        return 0 if self.kind == "value" or self.tied_to else self.leaf.numel

    @property
    def cells(self) -> tuple[str, str]:
        """What its dtype and its shape are, in words."""
        return self.dtype, value_text(self.leaf) if self.kind == "value" else shape_text(self.shape)

    @property
    def notes(self) -> list[str]:
        """What else there is to say."""
        notes = [f"= {printable(self.tied_to)}"] * bool(self.tied_to)
        notes += [f"tied: {self.num_tied} entries"] * bool(self.num_tied)
        if self.kind != "value" and not self.leaf.is_strided:
            notes.append(printable(self.kind.removesuffix(" tensor")))
        elif self.kind != "value" and self.leaf.numel and not self.leaf.outline.is_contiguous():
            notes.append("expanded" if span_bytes(self.leaf.outline) < self.leaf.nbytes else "strided")
        return notes


def rows_of(chosen: Sequence[CheckpointEntry], entries: Sequence[CheckpointEntry]) -> list[Row]:
    """Return the rows of those entries of a checkpoint that are shown."""
    rows = {entry.key: Row(entry.key, _labels(entry.path), entry.leaf, own_bytes(entry.leaf)) for entry in chosen}
    for group in tied_entries(entries):
        keys = [entries[index].key for index in group]
        shown = [rows[key] for key in keys if key in rows]
        extents = sorted(_extent(row.leaf) for row in shown)
        for row in shown:
            row.own_bytes, row.tied_to = 0, keys[0] if row.key != keys[0] else ""
        if shown:
            shown[0].own_bytes = _covered(extents)
            shown[0].num_tied = len(keys) if not shown[0].tied_to else 0
    return list(rows.values())


def _covered(extents: Sequence[tuple[int, int, int]]) -> int:
    total = end = 0
    for _, begin, stop in extents:
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def own_bytes(leaf: Any) -> int:
    """Return how many bytes a leaf takes in its file."""
    if not isinstance(leaf, StoredTensor):
        return 0
    return min(leaf.nbytes, span_bytes(leaf.outline)) if leaf.is_strided else leaf.nbytes


def _extent(leaf: Any) -> tuple[int, int, int]:
    """Return the storage of a strided tensor that may share it, and where its bytes begin and stop there."""
    outline = leaf.outline
    begin = outline.storage_offset() * outline.dtype.itemsize
    return outline.untyped_storage().data_ptr(), begin, begin + span_bytes(outline)


def tied_entries(entries: Sequence[CheckpointEntry]) -> list[list[int]]:
    """Return which entries share bytes: their indices, in order. Of views that interlace, this is said, too."""
    extents = sorted(
        (*_extent(leaf), index)
        for index, (_, _, leaf) in enumerate(entries)
        if isinstance(leaf, StoredTensor) and leaf.is_strided and leaf.numel and not leaf.outline.is_meta
    )
    groups: list[list[int]] = [[index] for *_, index in extents[:1]]
    end = extents[0][2] if extents else 0
    for (storage, *_), (other, begin, stop, index) in pairwise(extents):
        if storage == other and begin < end:
            groups[-1].append(index)
            end = max(end, stop)
        else:
            groups.append([index])
            end = stop
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _labels(path: Sequence[Any]) -> tuple[str, ...]:
    labels: list[str] = []
    for key in path:
        text = render_key(key)
        labels += text.split(".", _MAX_PARTS) if type(key) in (str, Attr) and text.strip(".") else [text]
    return tuple(map(printable, labels)) or ("<root>",)


@dataclass
class RowGroup:
    """Rows under one label, in the groups that they are in below it. Where nothing is below it, it is summed up."""

    label: str
    rows: list[Row] = field(default_factory=list)
    below: list[Row | RowGroup] = field(default_factory=list)
    groups: dict[str, RowGroup] = field(default_factory=dict)

    @property
    def own_bytes(self) -> int:
        """How many bytes the entries have together."""
        return sum(row.own_bytes for row in self.rows)

    @property
    def cells(self) -> tuple[str, str]:
        """What is in it, in words."""
        dtypes = sorted({row.dtype for row in self.rows if row.kind != "value"})
        return ", ".join(dtypes[:3]) + (", …" if len(dtypes) > 3 else ""), counted(self.rows)

    @property
    def notes(self) -> list[str]:
        """How many of the entries of a group that is summed up have no bytes of their own, but those of others."""
        keys = {row.key for row in self.rows}
        tied = [row.tied_to for row in self.rows if row.tied_to and row.tied_to not in keys and not self.below]
        return [f"1 = {printable(tied[0])}" if len(tied) == 1 else f"{len(tied)} tied elsewhere"] * bool(tied)


def counted(rows: Sequence[Row]) -> str:
    """Return how many tensors and values there are, in words."""
    num_values = sum(row.kind == "value" for row in rows)
    num_tensors = len(rows) - num_values
    words = [plural(num_tensors, "tensor")] * bool(num_tensors or not num_values)
    return ", ".join(words + [plural(num_values, "value")] * bool(num_values))


def plural(count: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def grouped(rows: Sequence[Row], depth: int | None) -> RowGroup:
    """Return rows as a tree of groups; below a depth, groups are not taken apart."""
    root = RowGroup("")
    for row in rows:
        group = root
        group.rows.append(row)
        is_shown = depth is None or len(row.labels) <= depth
        for label in row.labels[: -1 if is_shown else depth]:
            if label not in group.groups:
                group.groups[label] = RowGroup(label)
                group.below.append(group.groups[label])
            group = group.groups[label]
            group.rows.append(row)
        if is_shown:
            group.below.append(row)
    return root


def sorting(by: str) -> Callable[[list[Any]], list[Any]]:
    """Return a function that sorts rows and groups: ``file`` (as they come), ``name`` or ``size``."""
    if by == "name":
        return lambda items: sorted(items, key=lambda item: item.label if isinstance(item, RowGroup) else item.key)
    if by == "size":
        return lambda items: sorted(items, key=lambda item: -item.own_bytes)
    return list
