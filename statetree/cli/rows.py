"""A checkpoint's entries as rows: one an entry, or one a group of entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.checkpoint import is_value, tensors_in
from statetree.cli.describing import dtype_text, shape_text, sort_of, type_text, value_text
from statetree.cli.names import matches, printable
from statetree.cli.stored import Composite, StoredStorage, StoredTensor
from statetree.cli.ties import find_ties
from statetree.paths import Attr, render_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.cli.checkpoint import Checkpoint

#: Into how many parts a key such as ``layers.0.weight`` is taken apart.
_MAX_PARTS: Final = 16


class Row(NamedTuple):
    """One entry, as it is shown.

    Attributes:
        key: Its key, which no other entry has.
        labels: The parts of its key.
        sort: See ``sort_of``.
        dtype: Its dtype, or the type of a plain value.
        shape: Its shape, or ``None``.
        nbytes: How many bytes its elements take.
        own_bytes: How many of these no row before it has.
        tied_to: The key of the first entry that it shares bytes with; empty for that entry, and without ties.
        notes: What else there is to say.
        leaf: What it is.
    """

    key: str
    labels: tuple[str, ...]
    sort: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    own_bytes: int
    tied_to: str
    notes: tuple[str, ...]
    leaf: Any

    @property
    def cells(self) -> tuple[str, str]:
        """What its dtype and its shape are, in words."""
        if self.sort == "value":
            return self.dtype, value_text(self.leaf)
        return self.dtype, shape_text(self.shape)


def rows_of(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[Row]:
    """Return the rows of the entries whose keys match."""
    entries = checkpoint.entries()
    ties = find_ties(entries)
    sizes = [len(group) for group in ties.groups]
    chosen = [index for index, entry in enumerate(entries) if matches(entry.key, patterns)]
    own_bytes = find_ties([entries[index] for index in chosen]).own_bytes if patterns else ties.own_bytes
    rows = []
    for index, nbytes in zip(chosen, own_bytes, strict=True):
        entry = entries[index]
        group = ties.group_of.get(index)
        first = entries[ties.groups[group][0]].key if group is not None else ""
        notes = list(_notes(entry.value))
        if group is not None and first == entry.key:
            notes.insert(0, f"tied: {sizes[group]} entries")
        rows.append(
            Row(
                entry.key,
                _labels(entry.path),
                sort_of(entry.value),
                _dtype(entry.value),
                getattr(entry.value, "shape", None) if not is_value(entry.value) else None,
                _nbytes(entry.value),
                nbytes if not isinstance(entry.value, StoredStorage) else _nbytes(entry.value),
                "" if first == entry.key else first,
                tuple(notes),
                entry.value,
            )
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


def _dtype(leaf: Any) -> str:
    if is_value(leaf):
        return type_text(leaf)
    return dtype_text(leaf.dtype)


def _notes(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, Composite):
        yield "with attributes" if leaf.inner is not None else f"{printable(leaf.kind)}: {len(leaf.parts)} parts"
    elif isinstance(leaf, StoredStorage):
        yield "storage"
    elif isinstance(leaf, StoredTensor):
        if leaf.span < leaf.nbytes:
            yield "expanded"
        elif not leaf.is_contiguous:
            yield "strided"


@dataclass
class Group:
    """Entries under one label."""

    label: str
    rows: list[Row] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    order: list[Row | Group] = field(default_factory=list)

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


def counted(num_tensors: int, num_values: int) -> str:
    """Return how many tensors and values there are, in words."""
    words = []
    if num_tensors or not num_values:
        words.append(f"{num_tensors} tensor{'s' * (num_tensors != 1)}")
    if num_values:
        words.append(f"{num_values} value{'s' * (num_values != 1)}")
    return ", ".join(words)


def grouped(rows: Sequence[Row], depth: int | None) -> Group:
    """Return rows as a tree of groups; below a depth, groups are not taken apart."""
    root = Group("")
    for row in rows:
        group = root
        group.rows.append(row)
        is_shown = depth is None or len(row.labels) <= depth
        for label in row.labels[: -1 if is_shown else depth]:
            if label not in group.groups:
                group.groups[label] = Group(label)
                group.order.append(group.groups[label])
            group = group.groups[label]
            group.rows.append(row)
        if is_shown:
            group.order.append(row)
    return root


def sorting(by: str) -> Callable[[list[Any]], list[Any]]:
    """Return a function that sorts rows and groups: ``file`` (as they come), ``name`` or ``size``."""
    if by == "name":
        return lambda items: sorted(items, key=lambda item: item.label if isinstance(item, Group) else item.key)
    if by == "size":
        return lambda items: sorted(items, key=lambda item: -item.own_bytes)
    return list
