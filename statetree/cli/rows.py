"""What a checkpoint holds, as rows: one an entry, or one a group of entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from statetree.files.untrusted import printable, shape_text
from statetree.key_paths import Attr, render_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Into how many parts a key such as ``layers.0.weight`` is taken apart.
_MAX_PARTS: Final = 16


def plural(count: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass
class Row:
    """One entry, as it is shown."""

    key: str
    labels: tuple[str, ...]  # the parts of its key, which no other entry has
    kind: str  # `tensor`, the layout of one that is not strided, or `value`
    dtype: str  # its dtype, or the type of a plain value, whose `text` is the value in words
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    numel: int = 0
    own_bytes: int = 0  # how many of its bytes no row before it has
    text: str = ""
    layout: str = ""  # what is special about its strides
    leaf: Any = None
    tied_to: str = ""  # the key of the first entry that it shares bytes with; empty for that entry, and without ties
    num_tied: int = 0  # how many entries share bytes with it, if it is the first one of them

    @property
    def cells(self) -> tuple[str, str]:
        """What its dtype and its shape are, in words."""
        return self.dtype, self.text if self.kind == "value" else shape_text(self.shape)

    @property
    def notes(self) -> list[str]:
        """What else there is to say."""
        tied = f"= {printable(self.tied_to)}" if self.tied_to else f"tied: {self.num_tied} entries"
        return [*[tied] * bool(self.tied_to or self.num_tied), *[self.layout] * bool(self.layout)]


def labels_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the parts of a path, and of the keys in it that have dots."""
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
        where = f"to {printable(tied[0])}" if len({*tied}) == 1 else "elsewhere"
        return [f"{len(tied)} tied {where}"] * bool(tied)


def counted(rows: Sequence[Row]) -> str:
    """Return how many tensors and values there are, in words."""
    num_values = sum(row.kind == "value" for row in rows)
    num_tensors = len(rows) - num_values
    words = [plural(num_tensors, "tensor")] * bool(num_tensors or not num_values)
    return ", ".join(words + [plural(num_values, "value")] * bool(num_values))


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
    keys: dict[str, Callable[[Any], Any]] = {
        "name": lambda item: item.label if isinstance(item, RowGroup) else item.key,
        "size": lambda item: -item.own_bytes,
    }
    return list if by == "file" else lambda items: sorted(items, key=keys[by])
