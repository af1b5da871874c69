"""A checkpoint that was opened, and what a format of checkpoints has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from statetree.errors import CheckpointError, UnsupportedLeaf
from statetree.files.page import tree_fragments
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.leaves.builtin import is_distributed, is_plain, materialized
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.html_fragments import cell

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from statetree import key_paths
    from statetree.errors import Difference
    from statetree.files.filling import Target
    from statetree.files.ranges import OpenFiles

#: How deep a list or tuple may be nested that is one entry: pickle calls itself for every level.
_MAX_ENTRY_DEPTH: Final = 50


@dataclass
class OpenedCheckpoint:
    """A checkpoint that was opened.

    Attributes:
        tree: What it holds, with ``StoredTensor`` for its tensors.
        title: What its format is called.
        files: Its files.
        foreign: Names of classes whose objects were not loaded.
        unknown: Where there are containers of unknown classes, which are mappings here.
        holders: These, and the containers in which they stand, by their ids.
        divided: What leaves that are made of several tensors are beside these, by the ``key_text`` of each key above.
        metadata: Texts that the file holds beside the tree.
        is_nested: Whether the file says how its entries are nested: of which classes, under keys of which types.
        verify: Compares stored checksums, and returns how many there are.
        check: Raises ``CheckpointError`` unless all files are there, also those that nothing was read from yet.
    """

    tree: Any
    title: str
    files: OpenFiles
    foreign: Sequence[str] = ()
    unknown: Sequence[Difference] = ()
    holders: Collection[int] = ()
    divided: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    is_nested: bool = True
    verify: Callable[[], int] = int
    check: Callable[[], None] = lambda: None

    def _repr_html_(self) -> str:
        return cell(tree_fragments(self.tree))


class StoredParts(StoredObject, ABC):
    """A leaf that a checkpoint holds in parts, which fill those of a leaf like it. Alone, only its name is known."""

    @abstractmethod
    def targets(self, path: key_paths.Path, leaf: Any) -> Sequence[Target]:
        """Return what there is to fill of a leaf. Raises ``TreeMismatch`` if it is not like the saved one."""

    def check(self, path: key_paths.Path, leaf: Any) -> None:
        """Raise ``CheckpointError`` if parts say that elements of the leaf lie outside of it."""

    def completed(self, path: key_paths.Path, leaf: Any) -> Any:  # noqa: ARG002 - for others
        """Return the leaf, once it is filled."""
        return leaf


def not_admitted(what: str, name: str) -> CheckpointError:
    """Return the error for what is loaded and holds an object that is not made."""
    return CheckpointError(
        f"{what}: load does not make what it holds ({name}). If you trust it: of a directory, name the class with "
        "torch.serialization.add_safe_globals, or pass weights_only=False; a torch file, read with torch.load."
    )


@dataclass(frozen=True)
class SaveOptions:
    """How a tree is written.

    Attributes:
        shard_bytes: From how many bytes on a new file begins, where the format has several.
        metadata: Texts for the header, where the format has one.
        group: The ranks that write it together, if it is written by several.
    """

    shard_bytes: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    group: ProcessGroup | None = None


class CheckpointFormat(ABC):
    """A format of checkpoints: derive from it, define ``open`` and ``write``, and pass one to ``register_format``.

    Attributes:
        title: What it is called in messages.
        suffixes: The ends of names that are written in this format.
        is_directory: Whether a checkpoint is a directory.
        by_all_ranks: Whether all ranks write it, each its own part. Otherwise one does, and is given whole tensors.
    """

    title: str = ""
    suffixes: tuple[str, ...] = ()
    is_directory: bool = False
    by_all_ranks: bool = False

    def recognises(self, path: Path, beginning: bytes) -> bool:  # noqa: ARG002 - for formats that are known by it
        """Return whether a path is of this format: by its suffix, or by its first bytes (none for a directory)."""
        return path.name.lower().endswith(self.suffixes) and path.is_dir() == self.is_directory

    @abstractmethod
    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:
        """Open a checkpoint.

        Args:
            path: Where it is.
            files: Opens files: ``files.open(path)`` is a range, of which ``read`` and ``part`` take others.
            skip_foreign: Whether objects of classes that are not loaded become ``StoredObject``, and are listed. They
                are refused otherwise.
        """

    @abstractmethod
    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:
        """Write files into an empty folder, and return their names: an index of others comes last.

        Of a directory, ``folder`` is the directory itself.
        """


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


def whole_tensors(tree: Any, *, by_all_ranks: bool = False) -> Any:
    """Return a tree with the tensors that ``StoredTensor`` stands for, each object once, to be saved.

    Where one rank writes, others may not hold parts of a leaf. What all write has the elements of a tensor one by one:
    a few bytes of a file may not stand for many there, and what is made of stored tensors is made as it is written.
    """
    made: dict[int, Any] = {}

    def whole(path: key_paths.Path, leaf: Any) -> Any:
        if is_distributed(leaf) and not by_all_ranks:
            msg = f"save: the leaf at {path or '<root>'} is distributed: expected a whole tensor. Use gather first."
            raise UnsupportedLeaf(msg, path)
        if isinstance(leaf, StoredTensor) and leaf.is_repetitive and by_all_ranks:
            what = "is a view that repeats its elements: expected memory of its own. Leave it out."
            msg = f"save: the leaf at {path or '<root>'} {what}"
            raise UnsupportedLeaf(msg, path)
        if not isinstance(leaf, StoredTensor):
            return materialized(leaf)
        if by_all_ranks and leaf.is_made:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.tensor()
        return made[id(leaf)]

    leaves, spec = flatten_for("save", tree)  # and not mapped: a function would get what is read
    return unflatten(spec, list(map(whole, spec.paths(), leaves)))
