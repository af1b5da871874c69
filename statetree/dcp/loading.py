"""``load``: a whole state read by DCP, into a template or without one."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from statetree.dcp.directories import DirectoryReader, local_directory
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.flat_state import flat_state
from statetree.dcp.groups import group_for, ranks_of
from statetree.dcp.internals import run_load
from statetree.dcp.part_checks import check_indices, has_indices
from statetree.dcp.planners import CarefulReader, LoadPlanner
from statetree.dcp.saved_structure import Structure, path_of, places, why_not_rebuilt
from statetree.dcp.saved_structure import read as read_structure
from statetree.dcp.templates import TemplateMatching
from statetree.dcp.tensors import PARTS_ENTRY, PLAIN, TENSOR_ENTRY, VALUE_ENTRY, content_of, overlaps, pieces_of
from statetree.errors import CheckpointError, Difference, TreeMismatch, UnsupportedLeaf
from statetree.spans.columns import Columns
from statetree.spans.overlaps import laid_like, sharing
from statetree.torch_internals import quietly
from statetree.transforms.allocate_like import allocate_like
from statetree.transforms.copy_into import copy_into
from statetree.transforms.select import select
from statetree.transforms.similarity import similarity
from statetree.tree.flatten import flatten
from statetree.tree.mapping import map_leaves
from statetree.tree.selection import selected
from statetree.tree.spec import TreeSpec

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader

    from statetree.dcp.saved_structure import SavedEntry
    from statetree.dcp.tensors import Content
    from statetree.paths import Path
    from statetree.tree.selection import Where


def load(
    template: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str],
    process_group: ProcessGroup | None = None,
    storage_reader: StorageReader | None = None,
    weights_only: bool = True,
    verify: bool = True,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
) -> Any:
    """Load a state that ``save``, or DCP's own ``save``, wrote.

    With a template, its tensors are filled in place, sharded as they are, whatever the sharding was when they were
    saved. Before anything is read, the template is compared with the whole checkpoint. A mapping may leave out keys
    that the checkpoint has; it may not be empty where the checkpoint's is not, and sequences of tensors or containers
    must have the saved length.

    Args:
        template: A tree like the saved one. Only the memory of its tensors changes. Those of its tensors that share
            memory, or overlap themselves (expanded ones), must have had the same values there when they were saved
            (ties are saved by value); they are loaded into memory of their own first. Without a template, the state
            comes back as it was saved, provided that all containers are those of Python and of ``collections``.
        checkpoint_id: The directory.
        process_group: The ranks that load; by default all.
        storage_reader: Reads from elsewhere than a directory, or a checkpoint that DCP transformed. The checks of
            untrusted files do not apply to it.
        weights_only: Whether plain values are read by the rules of ``torch.load(weights_only=True)``. With ``False``,
            what the checkpoint holds may run any code.
        verify: Whether what is loaded is compared with its checksums first: those of the manifest that ``save`` writes,
            or those that DCP wrote into each entry (CRC-32). Entries that are not loaded are not verified. It has no
            effect on a ``storage_reader``.
        where: Which leaves are loaded, as for ``select``; by default all. A list or tuple of plain values is one leaf.
            With a template, its other leaves are not checked, and stay in the result. Without one, the result has the
            chosen leaves only, and a predicate is given ``meta`` tensors, and ``None`` for plain values.
        cast: Whether tensors of the template may have another dtype than the saved ones, as for ``copy_into``.
        strict: Whether the checkpoint must have every leaf of the template. Without it, missing leaves keep the
            template's values.

    Returns:
        With a template: its containers, fresh, with its own tensors, and the checkpoint's plain values, in the types in
        which they were saved. Without: everything fresh, and distributed tensors as whole tensors on the CPU.

    Aliasing:
        The tensors are the template's, and, with ``where``, all leaves that are not loaded.

    Collective:
        Every rank of the group calls it.

    Raises:
        TreeMismatch: If the template does not fit, or is needed and missing. It names every place; nothing was read. Or
            if tensors of the template share memory or overlap themselves, and were saved with different values: where
            they differ, these keep what they hold; others may be filled.
        UnsupportedLeaf: If a leaf of the template has no elements (a meta tensor), or one of the checkpoint takes a
            template.
        CheckpointError: If the directory is missing, incomplete, damaged or hostile, or a plain value's class is not
            admitted. If damage is found only while data is read, tensors may be filled in part.
        RankMismatch: If this process is not in the group. Only this one raises.

    Note:
        Files are not trusted. Guarded against: code in DCP's ``.metadata`` (its pickle is read without being executed),
        file names that lead out of the directory, pieces that lie outside of their file or tensor, over each other, or
        need more memory than the files have bytes, indices that lead outside of their tensor, files of two checkpoints,
        and, unless ``weights_only=False``, code in plain values and tensors. Not guarded against: values that somebody
        changed, and their checksums with them, faults of ``torch.load(weights_only=True)`` itself, and files that
        change while they are read.
    """
    group = group_for("load", process_group)
    inner = storage_reader
    if inner is None:
        inner = DirectoryReader(local_directory("load", checkpoint_id), verify=verify)
    else:
        inner.reset(checkpoint_id)
    with checkpoint_errors("load", checkpoint_id):
        return read(template, inner, group, weights_only=weights_only, where=where, cast=cast, strict=strict)


def read(
    template: Any,
    storage_reader: StorageReader,
    group: ProcessGroup | None,
    *,
    weights_only: bool,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
) -> Any:
    """Load as ``load`` does, but raise what DCP raises: a ``CheckpointException``, the same one on every rank."""
    reader = CarefulReader(storage_reader)
    target = _Free(where) if template is None else _Template(template, group, where, cast=cast, strict=strict)
    planner = LoadPlanner(reader, target.choose, target.finish, weights_only=weights_only)
    run_load(reader, planner, group)
    return target.result(planner.values)


class _Template:
    """Loads into the tensors of a template."""

    def __init__(
        self, template: Any, group: ProcessGroup | None, where: Where | None, *, cast: bool, strict: bool
    ) -> None:
        self._tree = template
        self._group = group
        self._where = where
        self._cast = cast
        self._strict = strict

    def choose(self, text: str | None, metadata: Metadata) -> dict[str, Any]:
        self._state = flat_state(self._tree, verb="load")
        ranks = ranks_of("load", self._group)
        chosen = None
        if self._where is not None:
            leaves = [entry.value for entry in self._state.entries]
            chosen = selected(self._where, self._state.spec, leaves, verb="load")
        contents = [
            content_of("load", entry.value, entry.path, ranks) if chosen is None or chosen[index] else PLAIN
            for index, entry in enumerate(self._state.entries)
        ]
        saved = None if text is None else read_structure(text)
        options = {"cast": self._cast, "strict": self._strict}
        matching = TemplateMatching(self._state, contents, chosen, saved, metadata, **options)
        self._found = [
            (match, entry, content)
            for match, entry, content in zip(matching.run(), self._state.entries, contents, strict=True)
            if match is not None
        ]
        values: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        apart: dict[str, Any] = {}
        self._overlapping: list[str] = []
        for match, entry, content in self._found:
            if match.sort == VALUE_ENTRY:
                values.update(dict.fromkeys(match.keys))
                continue
            if match.context:
                values[match.context] = None
            own = dict(zip(match.keys, content.tensors, strict=True))
            tensors.update(own)
            paths.update(dict.fromkeys(match.keys, entry.path))
            if match.sort == PARTS_ENTRY and has_indices(entry.value):
                apart.update((key, allocate_like(tensor, device=tensor.device)) for key, tensor in own.items())
            for key, tensor in own.items():
                stored = metadata.state_dict_metadata[key]
                assert isinstance(stored, TensorStorageMetadata)
                if overlaps(tensor):
                    self._overlapping.append(key)
                    apart[key] = torch.empty(tensor.shape, dtype=stored.properties.dtype, device=tensor.device)
                elif stored.properties.dtype != tensor.dtype:
                    apart[key] = torch.empty_like(tensor, dtype=stored.properties.dtype)
        self._paths = paths
        self._ties = _Ties(tensors, paths)
        self._apart = apart
        self._into = {key: self._ties.loaded.get(key, tensors[key]) for key in apart}
        return {**values, **tensors, **self._ties.loaded, **apart}

    @quietly
    def finish(self) -> None:
        for match, entry, content in self._found:
            if match.sort == PARTS_ENTRY and has_indices(entry.value):
                made = content.packed([self._apart[key] for key in match.keys])
                check_indices(made, entry.value, str(entry.path) or "<root>")
        self._lay_out()
        copy_into(self._apart, self._into, cast=self._cast)
        self._ties.write()

    def _lay_out(self) -> None:
        """Have what goes into tensors that overlap themselves do so, too; refuse several values for one place."""
        found = []
        for key in self._overlapping:
            laid = laid_like(self._apart[key], self._into[key])
            if laid is None:
                found.append(
                    Difference(self._paths[key], "overlap", "values of its own", "a tensor that overlaps itself")
                )
            self._apart[key] = laid
        if found:
            remedy = "Other tensors may be loaded. Pass a template in which each element has a place of its own."
            raise TreeMismatch.between("load", found, remedy)

    def result(self, values: dict[str, Any]) -> Any:
        leaves = {id(entry): entry.value for entry in self._state.entries}
        for match, entry, content in self._found:
            if match.sort == VALUE_ENTRY:
                leaves[id(entry)] = values[match.keys[0]]
            elif match.context:
                leaves[id(entry)] = _packed(entry.path, content, values[match.context])
        return self._state.spec.unflatten(list(leaves.values()))


def _packed(path: Path, content: Content, contexts: Any) -> Any:
    """Return a value of a registered leaf type, packed of the template's tensors as it was saved."""
    unpacked = content.unpacked
    assert unpacked is not None
    if type(contexts) is not list or len(contexts) != len(content.contexts):
        msg = f"load: the context of the leaf at {path or '<root>'} is damaged. Load another checkpoint."
        raise CheckpointError(msg)
    unpacked.replace_contexts(0, contexts)
    return unpacked.pack(unpacked.parts)[0]


class _Ties:
    """What is loaded in the place of tensors that share memory: as many with memory of their own.

    Args:
        tensors: What there is to fill, by key.
        paths: Where each lies in the template.

    Attributes:
        loaded: The tensors to load into instead, by key.
    """

    def __init__(self, tensors: dict[str, Any], paths: dict[str, Path]) -> None:
        pieces = [(key, piece) for key, tensor in tensors.items() for piece in pieces_of(tensor)]
        keys = dict.fromkeys(pieces[index][0] for index in sharing(Columns([piece for _, piece in pieces])))
        self._tied = {key: tensors[key] for key in keys}
        self._paths = paths
        self.loaded: dict[str, Any] = {
            key: allocate_like(tensor, device=pieces_of(tensor)[0].device) for key, tensor in self._tied.items()
        }

    def write(self) -> None:
        """Write what was loaded into the tensors that share memory: all of them, or none where values disagree."""
        if not self._tied:
            return
        try:
            copy_into(self.loaded, self._tied)
        except TreeMismatch as error:
            # Those that overlap in part are tried out on scratch memory, in which they overlap as they do here.
            scratch = allocate_like(self._tied)
            for key, tensor in self.loaded.items():
                copy_into(tensor, scratch[key])
            if all(similarity(tensor, scratch[key], values=True) for key, tensor in self.loaded.items()):
                copy_into(scratch, self._tied)
                return
            found = [
                Difference(self._paths[path[0]], "ties", "values of its own", right)
                for path, _, _, right in error.differences
            ]
            remedy = "The other tensors were loaded. Pass a template in which these do not share memory."
            raise TreeMismatch.between("load", found, remedy) from None


class _Free:
    """Loads without a template."""

    def __init__(self, where: Where | None) -> None:
        self._where = where
        self._structure = Structure(TreeSpec((), 0), ())
        self._flat: dict[str, Any] = {}

    def choose(self, text: str | None, metadata: Metadata) -> dict[str, Any]:
        if text is None:
            msg = (
                "load: the checkpoint does not say how its entries were nested: expected one that statetree.dcp saved. "
                "Pass a template."
            )
            raise TreeMismatch(msg)
        self._structure = read_structure(text)
        entries = self._structure.entries
        chosen = [True] * len(entries)
        if self._where is None:
            _check_entries(self._structure, chosen)
        _check_containers(self._structure)
        if self._where is not None:
            # A tensor for each entry: in the attributes of a container, these alone are leaves.
            self._marks = [torch.empty(0, device="meta") for _ in entries]
            tree = self._structure.rebuild(self._marks)
            outlines = [_outline(entry, metadata) for entry in entries]
            chosen = selected(self._where, flatten(tree)[1], outlines, verb="load")
            marks = set(map(id, compress(self._marks, chosen)))
            self._selected = select(tree, lambda _, mark: id(mark) in marks)
            _check_entries(self._structure, chosen)
        for entry in compress(entries, chosen):
            (key,) = entry.keys
            stored = metadata.state_dict_metadata.get(key)
            if stored is None or isinstance(stored, TensorStorageMetadata) != (entry.sort == TENSOR_ENTRY):
                msg = f"load: the checkpoint's structure names {key}, which it does not hold. Load another checkpoint."
                raise CheckpointError(msg)
            if isinstance(stored, TensorStorageMetadata):
                self._flat[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            else:
                self._flat[key] = None
        return self._flat

    def finish(self) -> None:
        pass

    def result(self, values: dict[str, Any]) -> Any:
        found = {**self._flat, **values}
        entries = self._structure.entries
        if self._where is None:
            return self._structure.rebuild([found[entry.keys[0]] for entry in entries])
        keys = {id(mark): entry.keys[0] for mark, entry in zip(self._marks, entries, strict=True)}
        return map_leaves(lambda mark: found[keys[id(mark)]], self._selected)


def _outline(entry: SavedEntry, metadata: Metadata) -> torch.Tensor | None:
    stored = metadata.state_dict_metadata.get(entry.keys[0]) if entry.sort == TENSOR_ENTRY else None
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")


def _check_containers(saved: Structure) -> None:
    """Raise unless a structure can be made without a template."""
    differences = []
    for texts, ref in places(saved.spec):
        why = why_not_rebuilt(saved.spec.nodes[~ref]) if ref < 0 else ""
        if why:
            differences.append(Difference(path_of(texts), "structure", why, "a builtin container"))
    if differences:
        raise TreeMismatch.between("load", differences, "Pass a template like the saved tree.")


def _check_entries(saved: Structure, chosen: Sequence[bool]) -> None:
    """Raise unless entries can be made without a template."""
    for texts, ref in places(saved.spec):
        if ref >= 0 and chosen[ref] and saved.entries[ref].sort == PARTS_ENTRY:
            path = path_of(texts)
            msg = (
                f"load: the leaf at {path or '<root>'} loads into a template only: expected a strided tensor of a "
                f"dtype that DCP stores, or a plain value, got one saved in parts ({saved.entries[ref].facts}). Pass a "
                "template like the saved tree."
            )
            raise UnsupportedLeaf(msg, path)
