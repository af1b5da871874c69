"""A checkpoint that was opened: its tree, with what stands for tensors as leaves, and what is known of its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.stored import Composite, StoredStorage, StoredTensor
from statetree.files.safe_pickle import Foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from statetree.cli.outline import Entry, Outline
    from statetree.cli.progress import Progress
    from statetree.cli.stored import Storage

TORCH: Final = "torch"
SAFETENSORS: Final = "safetensors"
DCP: Final = "dcp"

#: How formats are called in messages.
TITLES: Final = {TORCH: "torch file", SAFETENSORS: "safetensors file", DCP: "DCP directory"}


class Check(NamedTuple):
    """A stored checksum. ``run`` raises if the bytes do not have it."""

    entry: str
    nbytes: int
    run: Callable[[Progress], None]


class Checkpoint:
    """An open checkpoint.

    Args:
        path: Where it is.
        kind: ``TORCH``, ``SAFETENSORS`` or ``DCP``.
        tree: What it holds.
        nbytes: How long its files are together.
        files: Its files.
        checks: Returns the checksums that it stores.
        foreign: Names of classes that were not loaded.
        storages: All storages that the pickles speak of, those of objects that are not loaded, too.
        metadata: Texts that the file holds beside the tree.
        is_nested: Whether the file says how its entries are nested.
        containers: What stands as a mapping in the tree, by its path, since its class is not loaded.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        tree: Any,
        nbytes: int,
        files: Sequence[Path],
        *,
        checks: Callable[[], Iterable[Check]] = tuple,
        foreign: Sequence[str] = (),
        storages: Sequence[Storage] = (),
        metadata: dict[str, str] | None = None,
        is_nested: bool = True,
        containers: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.kind = kind
        self.tree = tree
        self.nbytes = nbytes
        self.files = files
        self.checks = checks
        self.foreign = foreign
        self.storages = storages
        self.metadata = metadata or {}
        self.is_nested = is_nested
        self.containers = containers or {}
        self._outline: Outline | None = None

    @property
    def keeps_ties(self) -> bool:
        """Whether the format says which tensors share memory."""
        return self.kind == TORCH

    def outline(self) -> Outline:
        """Return the containers and entries: leaves, and lists and tuples of plain values."""
        if self._outline is None:
            from statetree.cli.outline import outline_of

            self._outline = outline_of(self.tree)
        return self._outline

    def entries(self) -> Sequence[Entry]:
        """Return the entries in the order of the file."""
        return self.outline().entries


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
