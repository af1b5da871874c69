"""A checkpoint that was opened: its tree, with what stands for tensors as leaves, and what is known of its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.files.safe_pickle import Foreign
from statetree.files.stored import Composite, StoredStorage, StoredTensor
from statetree.leaves.builtin import is_plain
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from statetree.files.stored import Storage
    from statetree.paths import Path as TreePath
    from statetree.tree.spec import TreeSpec

    #: Is told how many bytes were read or written since the last time.
    Progress = Callable[[int], None]

TORCH: Final = "torch"
SAFETENSORS: Final = "safetensors"
DCP: Final = "dcp"

#: How formats are called in messages.
TITLES: Final = {TORCH: "torch file", SAFETENSORS: "safetensors file", DCP: "DCP directory"}
#: How deep a list or tuple may be nested that is one entry: pickle calls itself for every level.
_MAX_ENTRY_DEPTH: Final = 50


class StoredEntry(NamedTuple):
    """A leaf, or a list or tuple of plain values: where it lies in the tree, and a key that no other entry has."""

    path: TreePath
    key: str
    value: Any


class FileContents(NamedTuple):
    """The entries of a tree in their order, and the structure above them."""

    entries: Sequence[StoredEntry]
    spec: TreeSpec


class Checksum(NamedTuple):
    """A stored checksum. ``check`` raises if the bytes do not have it."""

    entry: str
    nbytes: int
    check: Callable[[Progress], None]


@dataclass(eq=False)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: Where it is.
        kind: ``TORCH``, ``SAFETENSORS`` or ``DCP``.
        tree: What it holds.
        nbytes: How long its files are together.
        files: Its files.
        checksums: Returns the checksums that it stores.
        foreign: Names of classes that were not loaded.
        storages: All storages that the pickles speak of, those of objects that are not loaded, too.
        metadata: Texts that the file holds beside the tree.
        is_nested: Whether the file says how its entries are nested.
        containers: What stands as a mapping in the tree, by its path, since its class is not loaded.
    """

    path: Path
    kind: str
    tree: Any
    nbytes: int
    files: Sequence[Path]
    checksums: Callable[[], Iterable[Checksum]] = tuple
    foreign: Sequence[str] = ()
    storages: Sequence[Storage] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    is_nested: bool = True
    containers: dict[str, str] = field(default_factory=dict)

    @property
    def keeps_ties(self) -> bool:
        """Whether the format says which tensors share memory."""
        return self.kind == TORCH

    @cached_property
    def contents(self) -> FileContents:
        """The entries and the structure above them."""
        return contents_of(self.tree)

    def entries(self) -> Sequence[StoredEntry]:
        """Return the entries in the order of the file."""
        return self.contents.entries


def contents_of(tree: Any) -> FileContents:
    """Return the entries of a tree: leaves, and lists and tuples of plain values (a random state's 625 numbers)."""
    leaves, spec = flatten_for("read", tree, is_leaf=is_entry)
    rows = zip(spec.paths(), spec.flat_keys(), leaves, strict=True)
    return FileContents([StoredEntry(*row) for row in rows], spec)


def is_entry(container: Any) -> bool:
    """Whether a container is one entry, as DCP has it: a tuple of plain values, or a list of such and of values."""
    return type(container) in (list, tuple) and _is_whole(container, _MAX_ENTRY_DEPTH, in_tuple=False)


def _is_whole(value: Any, depth: int, *, in_tuple: bool) -> bool:
    cls = type(value)
    if cls in (list, tuple):
        return depth > 0 and all(_is_whole(each, depth - 1, in_tuple=in_tuple or cls is tuple) for each in value)
    if cls is dict:
        return in_tuple and depth > 0 and all(_is_whole(each, depth - 1, in_tuple=True) for each in value.values())
    return is_plain(value)


def is_value(leaf: Any) -> bool:
    """Whether a leaf is a plain value: no tensor, and no storage."""
    return not isinstance(leaf, (StoredTensor, Composite, StoredStorage))


def why_not_plain(value: Any) -> str:
    """Say why a plain value cannot be written; empty if it can. It may be of builtin types and some of torch's."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Foreign):
            return repr(part)
        if isinstance(part, dict):
            pending += [*part.keys(), *part.values(), *getattr(part, "__dict__", {}).values()]
        elif isinstance(part, (list, tuple, set)):
            pending += part
        elif type(part).__module__ not in ("builtins", "torch"):
            return f"a {type(part).__name__}"
    return ""


def tensors_in(leaf: Any) -> Sequence[StoredTensor]:
    """Return the tensors that a leaf consists of."""
    if isinstance(leaf, StoredTensor):
        return (leaf,)
    return leaf.parts if isinstance(leaf, Composite) else ()


def strided(leaf: Any) -> StoredTensor | None:
    """Return the tensor that a leaf is, apart from attributes; ``None`` for anything else."""
    if isinstance(leaf, Composite):
        return leaf.inner
    return leaf if isinstance(leaf, StoredTensor) else None
