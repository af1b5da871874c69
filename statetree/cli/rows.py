"""A checkpoint's entries as rows: one an entry, or one a group of entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.describing import dtype_text, shape_text, sort_of, type_text, value_text
from statetree.cli.selecting import matches
from statetree.cli.shared_bytes import find_ties
from statetree.files.checkpoint import is_value, tensors_in
from statetree.files.stored import Composite, StoredStorage, StoredTensor
from statetree.files.untrusted import printable
from statetree.paths import Attr, render_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.files.checkpoint import Checkpoint

#: Into how many parts a key such as ``layers.0.weight`` is taken apart.
_MAX_PARTS: Final = 16


class Row(NamedTuple):
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
    tied_to: str
    num_tied: int

    @property
    def sort(self) -> str:
        """What it is: see ``sort_of``."""
        return sort_of(self.leaf)

    @property
    def dtype(self) -> str:
        """Its dtype, or the type of a plain value."""
        return type_text(self.leaf) if is_value(self.leaf) else dtype_text(self.leaf.dtype)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; ``None`` for what has none."""
        return None if is_value(self.leaf) else getattr(self.leaf, "shape", None)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return _nbytes(self.leaf)

    @property
    def cells(self) -> tuple[str, str]:
        """What its dtype and its shape are, in words."""
        return self.dtype, value_text(self.leaf) if is_value(self.leaf) else shape_text(self.shape)

    @property
    def notes(self) -> list[str]:
        """What else there is to say."""
        notes = [f"= {printable(self.tied_to)}"] * bool(self.tied_to)
        notes += [f"tied: {self.num_tied} entries"] * bool(self.num_tied)
        leaf = self.leaf
        if isinstance(leaf, Composite):
            notes.append(
                "with attributes" if leaf.inner is not None else f"{printable(leaf.kind)}: {len(leaf.parts)} parts"
            )
        elif isinstance(leaf, StoredStorage):
            notes.append("storage")
        elif isinstance(leaf, StoredTensor) and (leaf.span < leaf.nbytes or not leaf.is_contiguous):
            notes.append("expanded" if leaf.span < leaf.nbytes else "strided")
        return notes


def rows_of(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[Row]:
    """Return the rows of the entries whose keys match."""
    entries = checkpoint.entries()
    ties = find_ties(entries)
    chosen = [index for index, entry in enumerate(entries) if matches(entry.key, patterns)]
    own_bytes = find_ties([entries[index] for index in chosen]).own_bytes if patterns else ties.own_bytes
    rows = []
    for index, own in zip(chosen, own_bytes, strict=True):
        path, key, leaf = entries[index]
        group = ties.group_of.get(index, [index])
        tied_to = entries[group[0]].key if group[0] != index else ""
        num_tied = len(group) if len(group) > 1 and not tied_to else 0
        rows.append(
            Row(key, _labels(path), leaf, _nbytes(leaf) if isinstance(leaf, StoredStorage) else own, tied_to, num_tied)
        )
    return rows


def unread_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes lie in storages that no entry has: those of objects that are not loaded."""
    if not checkpoint.foreign:
        return 0
    used = {id(part.storage) for entry in checkpoint.entries() for part in tensors_in(entry.value)}
    used |= {id(entry.value.storage) for entry in checkpoint.entries() if isinstance(entry.value, StoredStorage)}
    return sum(storage.nbytes for storage in checkpoint.storages if id(storage) not in used)


def _labels(path: Sequence[Any]) -> tuple[str, ...]:
    labels: list[str] = []
    for key in path:
        text = render_key(key)
        labels += text.split(".", _MAX_PARTS) if type(key) in (str, Attr) and text.strip(".") else [text]
    return tuple(map(printable, labels)) or ("<root>",)


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, StoredStorage):
        return leaf.storage.nbytes
    return 0 if is_value(leaf) else int(leaf.nbytes)


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
        tensors = [row for row in self.rows if row.sort != "value"]
        dtypes = sorted({row.dtype for row in tensors})
        shown = ", ".join(dtypes[:3]) + (", …" if len(dtypes) > 3 else "")
        return shown, counted(len(tensors), len(self.rows) - len(tensors))

    @property
    def notes(self) -> list[str]:
        """How many of the entries of a group that is summed up have no bytes of their own, but those of others."""
        keys = {row.key for row in self.rows}
        tied = [row.tied_to for row in self.rows if row.tied_to and row.tied_to not in keys and not self.below]
        return [f"1 = {printable(tied[0])}" if len(tied) == 1 else f"{len(tied)} tied elsewhere"] * bool(tied)


def counted(num_tensors: int, num_values: int) -> str:
    """Return how many tensors and values there are, in words."""
    words = []
    if num_tensors or not num_values:
        words.append(f"{num_tensors} tensor{'s' * (num_tensors != 1)}")
    if num_values:
        words.append(f"{num_values} value{'s' * (num_values != 1)}")
    return ", ".join(words)


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
