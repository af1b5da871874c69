"""Directories of DCP as a format of ``statetree.files``: whole trees where ``statetree.dcp`` saved them."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from statetree.chunks.boxes import whole_box
from statetree.dcp.data_files import DataFiles, check_covered
from statetree.dcp.flat_state import STRUCTURE_KEY
from statetree.dcp.groups import is_first
from statetree.dcp.metadata import METADATA
from statetree.dcp.nesting import nested
from statetree.dcp.plain_values import gist, read_value
from statetree.dcp.saved_structure import (
    SavedContainer,
    Structure,
    is_leaf,
    path_of,
    places,
    read_structure,
    rebuilt_classes,
    why_not_rebuilt,
)
from statetree.dcp.saving import warn_of_values, write
from statetree.dcp.stored_parts import SavedParts
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY
from statetree.errors import Difference
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint, whole_tensors
from statetree.files.key_texts import UnknownKey, key_of
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import printable, refuse
from statetree.tree.spec import TreeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from statetree.dcp.saved_structure import SavedEntry
    from statetree.files.checkpoint import SaveOptions
    from statetree.files.ranges import OpenFiles
    from statetree.tree.traversal import Node


class DirectoryFormat(CheckpointFormat):
    """Directories of ``torch.distributed.checkpoint``."""

    title = "DCP directory"
    is_directory = True
    by_all_ranks = True

    def recognises(self, path: Path, beginning: bytes) -> bool:  # noqa: ARG002 - as the base class has it
        """Whether it is a directory."""
        return path.is_dir()

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:
        """Open a directory."""
        return _Directory(path, files, skip_foreign=skip_foreign).opened(self.title)

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:  # noqa: ARG002 - the name
        """Write a checkpoint, with the other ranks of the options' group."""
        warn_of_values("save", tree)
        write(lambda: whole_tensors(tree, keeps_strides=False, on_ranks=True), folder, options.group)
        if not is_first(options.group):  # which renames the folder as soon as it has written
            return []
        names = sorted(file.name for file in folder.iterdir() if file.name != METADATA)
        return [*names, METADATA]


FORMAT: Final = DirectoryFormat()
_COMPRESSED: Final = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


class _Directory:
    def __init__(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> None:
        self.path = path
        self.files = files
        self.foreign: dict[str, None] = {}
        self.unknown: list[Difference] = []
        self._skip_foreign = skip_foreign
        self._is_nested = True
        self._data = DataFiles(path, files, verify=files.verify is not False)
        self.metadata = self._data.metadata
        files.open(path / METADATA)  # one of the checkpoint's files

    def opened(self, title: str) -> OpenedCheckpoint:
        """Return the checkpoint."""
        return OpenedCheckpoint(
            self._tree(),
            title,
            self.files,
            list(self.foreign),
            self.unknown,
            is_nested=self._is_nested,
            verify=self._data.verify,
            check=self._data.check,
        )

    def _tree(self) -> Any:
        entries = self.metadata.state_dict_metadata
        values = {key: self._value(key) for key in entries if key != STRUCTURE_KEY}
        if not isinstance(entries.get(STRUCTURE_KEY), BytesStorageMetadata):
            self._is_nested = False
            # DCP's own paths have texts for all keys, and lists for tuples.
            return nested(values, self.metadata.planner_data) or values
        saved = read_structure(self._plain(STRUCTURE_KEY))
        for entry in saved.entries:
            wants_tensor = entry.sort in (TENSOR_ENTRY, PARTS_ENTRY)
            for key in entry.keys:
                if key not in values or isinstance(entries[key], TensorStorageMetadata) != wants_tensor:
                    refuse(self.path, f"its structure names {key!r}, which it does not hold")
        leaves = [self._leaf(entry, values) for entry in saved.entries]
        tree = self._rebuildable(saved).rebuild(leaves)
        placed = {key for entry in saved.entries for key in (*entry.keys, entry.context)}
        loose = {key: value for key, value in values.items() if key not in placed}  # of ranks other than the first
        if not loose:
            return tree
        if isinstance(tree, dict) and not any(key in tree for key in loose):
            return {**tree, **loose}
        return values

    def _rebuildable(self, saved: Structure) -> Structure:
        """Return a structure in which containers of unknown classes are mappings."""
        nodes, known = list(saved.spec.nodes), rebuilt_classes()
        for texts, ref in places(saved.spec):
            why = why_not_rebuilt(nodes[~ref], known) if ref < 0 else ""
            if why and is_leaf(nodes[~ref]):  # whose parts are a mapping by their names
                what = "a leaf that is made of several tensors"
                self.unknown.append(Difference(path_of(texts), "structure", what, "a tree that says how (like=)"))
            elif why:
                path = ".".join(str(text[1:]) for text in texts) or "<root>"
                known_here = "a container that is known here"
                self.unknown.append(Difference(path_of(texts), "structure", why, known_here))
                self._skip(f"the container {path} ({why})", "Load it with like=.")
            if why:
                nodes[~ref] = _as_mapping(nodes[~ref])
        return Structure(TreeSpec(tuple(nodes), saved.spec.num_leaves), saved.entries)

    def _skip(self, what: str, remedy: str) -> None:
        if not self._skip_foreign:
            refuse(self.path, f"it holds what is not loaded without a template: {what}", remedy)
        self.foreign[what] = None

    def _value(self, key: str) -> Any:
        entry = self.metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return self._plain(key)
        check_covered(self.metadata, key, whole_box(entry.size))
        return self._data.tensor(key, verify=bool(self.files.verify))

    def _plain(self, key: str) -> Any:
        data = self._data.value(key, verify=self.files.verify is not False)
        try:
            if not self.files.weights_only:
                return torch.load(io.BytesIO(data), weights_only=False)
            return read_value(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, the value cannot be made
            name = printable(gist(error))
            if not self._skip_foreign or not _is_of_a_class(error):
                refuse(f"{self.path}: the entry {key!r}", f"the value cannot be read: {name}")
            self.foreign[name] = None
            return StoredObject(name)

    def _leaf(self, entry: SavedEntry, values: Mapping[str, Any]) -> Any:
        parts, facts = [values[key] for key in entry.keys], entry.facts
        if entry.sort != PARTS_ENTRY:
            return parts[0]
        made = _sparse(parts, facts)
        if made is not None:
            return made
        found = re.search(r"'leaf type': '(?!Tensor')([^']*)'|torch\.((?!strided)\w+)", facts)
        name = (found[1] or found[2]) if found else "a tensor of several parts"
        self._skip(f"a tensor saved in parts ({name})", "Load it with like=.")
        return SavedParts(name, parts, facts, values.get(entry.context) if entry.context else None)


def _is_of_a_class(error: Exception) -> bool:
    """Whether a value was refused for what it is, and not since it is damaged."""
    return "nsupported" in str(error) and "operand" not in str(error)


def _sparse(parts: Sequence[StoredTensor], facts: str) -> StoredTensor | None:
    """Return a sparse tensor that was saved in parts, values first. Its parts are read."""
    layout = re.search(r"'layout': torch\.(sparse_\w+)", facts)
    shape = re.search(r"'shape': torch\.Size\(\[([\d, ]*)\]\)", facts)
    if layout is None or shape is None or len(parts) != (2 if layout[1] == "sparse_coo" else 3):
        return None
    size = tuple([int(length) for length in shape[1].split(",") if length.strip()])
    values, *indices = (part.read() for part in parts)
    options: dict[str, Any] = {"device": "cpu", "check_invariants": True}
    try:
        if layout[1] == "sparse_coo":
            made = torch.sparse_coo_tensor(
                indices[0], values, size, is_coalesced="'coalesced': True" in facts, **options
            )
        else:
            kind = _COMPRESSED[layout[1]]
            made = torch.sparse_compressed_tensor(indices[1], indices[0], values, size, layout=kind, **options)
    except (RuntimeError, ValueError, KeyError, OverflowError):  # facts out of a file may say anything
        return None
    return StoredTensor(made, lambda: None, None)


def _as_mapping(node: Node) -> Node:
    taken: dict[str, None] = {}
    for text in node[1]:
        try:
            key_of(text)
            key = text if text[0] != "@" else f"s{text[1:]}"
        except UnknownKey as unknown:
            key = f"s{unknown}"
        while key in taken:
            key += "~"
        taken[key] = None
    return (SavedContainer("dict", "mapping"), tuple(taken), None, *node[3:])
