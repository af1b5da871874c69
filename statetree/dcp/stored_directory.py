"""Directories of DCP as a format of ``statetree.files``: whole trees where ``statetree.dcp`` saved them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.dcp.data_files import DataFiles
from statetree.dcp.groups import is_first
from statetree.dcp.metadata import METADATA
from statetree.dcp.plain_values import NotAdmitted, read_value
from statetree.dcp.saved_structure import read_structure
from statetree.dcp.saving import write
from statetree.dcp.state_entries import PARTS_ENTRY, STRUCTURE_KEY, VALUE_ENTRY
from statetree.dcp.stored_parts import SavedParts, sparse_tensor, tensor_name
from statetree.errors import Difference, unsignalled
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint, whole_tensors
from statetree.files.torch_format import gist
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import printable, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from statetree.dcp.saved_structure import SavedEntry, Structure
    from statetree.files.checkpoint import SaveOptions
    from statetree.files.ranges import OpenFiles


class DirectoryFormat(CheckpointFormat):
    """Directories of ``torch.distributed.checkpoint``."""

    title = "DCP directory"
    is_directory = True
    by_all_ranks = True

    def recognises(self, path: Path, beginning: bytes) -> bool:  # noqa: ARG002 - as the base class has it
        return path.is_dir()

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:
        return _Directory(path, files, skip_foreign=skip_foreign).opened()

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:  # noqa: ARG002 - the name
        write(lambda: whole_tensors(tree, by_all_ranks=True), folder, options.group)
        if not is_first(options.group):  # which renames the folder as soon as it has written
            return []
        names = sorted(file.name for file in folder.iterdir() if file.name != METADATA)
        return [*names, METADATA]


FORMAT: Final = DirectoryFormat()
_ADMIT: Final = (
    "If you trust it, name the class with torch.serialization.add_safe_globals, or pass load weights_only=False; "
    "skip_foreign=True opens the rest."
)


class _Directory:
    def __init__(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> None:
        self._data = DataFiles(path, files, verify=files.verify is not False)
        self._path = path
        self._files = files
        self._skip_foreign = skip_foreign
        self._entries = self._data.described.entries
        self._foreign: dict[str, None] = {}  # names of what was not loaded
        files.open(path / METADATA)  # one of the checkpoint's files

    def opened(self) -> OpenedCheckpoint:
        verify = bool(self._files.verify)
        values = {
            key: self._plain(key) if entry.dtype is None else self._data.tensor(key, verify=verify)
            for key, entry in self._entries.items()
            if key != STRUCTURE_KEY
        }
        made = OpenedCheckpoint(
            values, DirectoryFormat.title, self._files, verify=self._data.verify, check=self._data.check
        )
        # Whether statetree saved it, with a structure.
        made.is_nested = STRUCTURE_KEY in self._entries and self._entries[STRUCTURE_KEY].dtype is None
        if made.is_nested:
            saved = read_structure(self._plain(STRUCTURE_KEY))
            tree, made.holders = saved.rebuild([self._leaf(entry, values) for entry in saved.entries])
            made.unknown, made.divided = self._unknown_in(saved), dict(saved.divided())
            placed = {key for entry in saved.entries for key in (*entry.keys, entry.context)}
            loose = {key: value for key, value in values.items() if key not in placed}  # of ranks other than the first
            if not loose:
                made.tree = tree
            elif isinstance(tree, dict) and not any(key in tree for key in loose):
                made.tree = {**tree, **loose}
        else:
            # DCP's own paths have texts for all keys, and lists for tuples.
            made.tree = _nested(values, self._data.described.paths) or values
        made.foreign = list(self._foreign)
        return made

    def _plain(self, key: str) -> Any:
        data = self._data.value(key, verify=self._files.verify is not False)
        try:
            if not self._files.weights_only:
                return torch.load(io.BytesIO(data), weights_only=False)
            return read_value(data)
        except NotAdmitted as error:
            name = printable(str(error))
            if not self._skip_foreign:
                what = f"its value is of a class that is not loaded ({name})"
                refuse(f"{self._path}: the entry {key!r}", what, _ADMIT)
            self._foreign[name] = None
            return StoredObject(name)
        except unsignalled(Exception) as error:  # whatever it is, the value cannot be made
            what = printable(gist(error)).partition(". It is damaged")[0]  # an error of ours ends with the remedy, too
            refuse(f"{self._path}: the entry {key!r}", f"the value cannot be read: {what}")

    def _leaf(self, entry: SavedEntry, values: Mapping[str, Any]) -> Any:
        for key in entry.keys:
            if key not in values or (self._entries[key].dtype is None) != (entry.sort == VALUE_ENTRY):
                refuse(self._path, f"its structure names {key!r}, which it does not hold")
        parts = [values[key] for key in entry.keys]
        if entry.sort != PARTS_ENTRY:
            return parts[0]
        made = sparse_tensor(parts, entry.facts)
        if made is not None:
            return made
        name = tensor_name(entry.facts)
        self._skip(f"a tensor saved in parts ({name})")
        return SavedParts(name, parts, entry.facts, values.get(entry.context) if entry.context else None)

    def _unknown_in(self, saved: Structure) -> list[Difference]:
        found: list[Difference] = []
        for path, container, why in saved.unknown():
            if container.is_leaf:  # whose parts are a mapping by their names
                what = "a leaf that is made of several tensors"
                found.append(Difference(path, "structure", what, "a tree that says how (like=)"))
            else:
                found.append(Difference(path, "structure", why, "a container that is known here"))
                self._skip(f"the container {path or '<root>'} ({why})")
        return found

    def _skip(self, what: str) -> None:
        if not self._skip_foreign:
            refuse(self._path, f"it holds what is not loaded without a template: {what}", "Load it with like=.")
        self._foreign[what] = None


def _nested(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any] | None:
    """Nest entries as DCP's planner says in the metadata; ``None`` if their paths contradict each other.

    Below a number there is a list; what has no path stays at the top under its key.
    """
    root: dict[Any, Any] = {}
    containers = [root]
    inner = {id(root)}
    for key, value in values.items():
        *above, last = paths.get(key, (key,))
        place = root
        for step in above:
            if step not in place:
                place[step] = {}
                containers.append(place[step])
                inner.add(id(place[step]))
            elif id(place[step]) not in inner:
                return None
            place = place[step]
        if last in place:
            return None
        place[last] = value
    lists: dict[int, list[Any]] = {}
    for container in reversed(containers):  # what is within comes before what it is in
        for step, child in container.items():
            container[step] = lists.get(id(child), child)
        if any(type(step) is int for step in container):
            if container is root or set(container) != set(range(len(container))):
                return None
            lists[id(container)] = [container[index] for index in range(len(container))]
    return root
