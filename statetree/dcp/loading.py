"""``load``: a whole state read by DCP, into a template or without one."""

from __future__ import annotations

import io
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from statetree.chunks.boxes import whole_box
from statetree.dcp.data_files import DataFiles, check_covered, local_directory
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.flat_state import STRUCTURE_KEY, flat_state
from statetree.dcp.foreign_storage import ForeignStorage
from statetree.dcp.groups import group_for, is_first, on_all, ranks_of
from statetree.dcp.part_checks import check_indices, has_indices
from statetree.dcp.plain_values import gist, read_value
from statetree.dcp.saved_structure import Structure, path_of, places, read_structure, rebuilt_classes, why_not_rebuilt
from statetree.dcp.templates import TemplateMatching
from statetree.dcp.tensors import PARTS_ENTRY, PLAIN, TENSOR_ENTRY, VALUE_ENTRY, boxes_of, content_of
from statetree.errors import CheckpointError, Difference, TreeMismatch, UnsupportedLeaf
from statetree.files.filling import Target, fill
from statetree.torch_internals import quietly
from statetree.transforms.select import select
from statetree.tree.flatten import flatten
from statetree.tree.mapping import map_leaves
from statetree.tree.selection import selected

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader

    from statetree.dcp.saved_structure import SavedEntry
    from statetree.dcp.tensors import Content
    from statetree.files.stored import StoredTensor
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
            (ties are saved by value). Without a template, the state comes back as it was saved, provided that all
            containers are those of Python and of ``collections``, or of classes that are registered here
            (``register_container``) or listed (``torch.serialization.add_safe_globals``).
        checkpoint_id: The directory.
        process_group: The ranks that load; by default all.
        storage_reader: Reads from elsewhere than a directory, or a checkpoint that DCP transformed. The checks of
            untrusted files do not apply to it.
        weights_only: Whether plain values are read by the rules of ``torch.load(weights_only=True)``. With ``False``,
            what the checkpoint holds may run any code.
        verify: Whether what is loaded is compared with its checksums first: those of the manifest that ``save`` writes,
            or those that DCP wrote into each entry (CRC-32). Entries that are not loaded are not verified. Each rank
            reads every stored piece of which it needs a part as a whole for that. It has no effect on a
            ``storage_reader``.
        where: Which leaves are loaded, as for ``select``; by default all. A list or tuple of plain values is one leaf.
            With a template, its other leaves are not checked, and stay in the result. Without one, the result has the
            chosen leaves only, and a predicate is given ``meta`` tensors, and ``None`` for plain values.
        cast: Whether tensors of the template may have another dtype than the saved ones, as for ``copy_into``; but
            values are compared with the range of the dtype only as they are read.
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
            if tensors of the template share memory or overlap themselves, and were saved with different values, or
            with ``cast`` a value is out of range: these and others may be filled then.
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
    if storage_reader is not None:
        storage_reader.reset(checkpoint_id)

    def opened() -> Storage:
        if storage_reader is not None:
            return ForeignStorage(storage_reader, is_coordinator=is_first(group))
        return DataFiles(directory, verify=verify)

    directory = Path() if storage_reader is not None else local_directory("load", checkpoint_id)
    options = {"weights_only": weights_only, "verify": verify, "cast": cast, "strict": strict}
    with checkpoint_errors("load", checkpoint_id):
        return load_from(template, opened, group, where=where, **options)


Storage = DataFiles | ForeignStorage


def load_from(
    template: Any,
    opened: Callable[[], Storage],
    group: ProcessGroup | None,
    *,
    weights_only: bool,
    verify: bool,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
) -> Any:
    """Load as ``load`` does, but raise a ``CheckpointException``, the same one on every rank."""
    target = _Free(where) if template is None else _Template(template, group, where, cast=cast, strict=strict)

    def plan() -> CheckpointSource:
        source = CheckpointSource(opened(), weights_only=weights_only, verify=verify)
        target.choose(source)
        return source

    source = on_all("plan", group, plan)
    return on_all("read", group, lambda: target.filled(source))


class CheckpointSource:
    """A checkpoint that is being loaded.

    Attributes:
        metadata: Its metadata.
        structure: Its structure; ``None`` if DCP itself wrote it.
    """

    def __init__(self, storage: Storage, *, weights_only: bool, verify: bool) -> None:
        self.metadata: Metadata = storage.metadata
        self._storage = storage
        self._verify = verify
        self._weights_only = True
        has_structure = isinstance(self.metadata.state_dict_metadata.get(STRUCTURE_KEY), BytesStorageMetadata)
        self.structure = read_structure(self.value(STRUCTURE_KEY)) if has_structure else None
        self._weights_only = weights_only

    def tensor(self, key: str) -> StoredTensor:
        """Return a tensor."""
        return self._storage.tensor(key, verify=self._verify)

    def value(self, key: str) -> Any:
        """Read a plain value."""
        data = self._storage.value(key, verify=self._verify)
        try:
            return read_value(data) if self._weights_only else torch.load(io.BytesIO(data), weights_only=False)
        except Exception as error:  # noqa: BLE001 - damaged or hostile bytes may raise anything
            reason = f"{type(error).__name__}: {gist(error)}"
            remedy = (
                "If you trust where the checkpoint comes from, pass weights_only=False, or name its classes with "
                "torch.serialization.add_safe_globals."
                if self._weights_only
                else "Load another checkpoint."
            )
            msg = f"load: the plain value at {key} cannot be read: {reason}. {remedy}"
            raise CheckpointError(msg) from None


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

    def choose(self, source: CheckpointSource) -> None:
        """Match the template with the checkpoint."""
        self._state = flat_state(self._tree, verb="load")
        ranks = ranks_of("load", self._group)
        chosen = None
        if self._where is not None:
            lowered = self._state.lowered
            mask = selected(self._where, lowered.outline.spec, lowered.outer, verb="load")
            chosen = [mask[owner] for owner in lowered.outline.owners()]
        contents = [
            content_of("load", entry.value, entry.path, ranks) if chosen is None or chosen[index] else PLAIN
            for index, entry in enumerate(self._state.entries)
        ]
        options = {"cast": self._cast, "strict": self._strict}
        matching = TemplateMatching(self._state, contents, chosen, source.structure, source.metadata, **options)
        self._found = [
            (index, match, contents[index]) for index, match in enumerate(matching.run()) if match is not None
        ]
        self._targets: list[Target] = []
        for index, match, content in self._found:
            for key, tensor in zip(match.keys, content.tensors, strict=False):
                stored = source.tensor(key)
                for box, piece in boxes_of(tensor):
                    check_covered(source.metadata, key, box)
                    if piece.numel():
                        self._targets.append(Target(self._state.entries[index].path, stored, box, piece))

    def filled(self, source: CheckpointSource) -> Any:
        """Read into the template's tensors, and return a tree with them."""
        leaves = [entry.value for entry in self._state.entries]
        self._check_indices(source)
        fill("load", self._targets)
        for index, match, content in self._found:
            if match.sort == VALUE_ENTRY:
                leaves[index] = source.value(match.keys[0])
            elif match.context:
                leaves[index] = _packed(self._place(index), content, source.value(match.context))
        return self._state.rebuilt("load", leaves)

    @quietly
    def _check_indices(self, source: CheckpointSource) -> None:
        """Raise if parts of tensors would lead outside of these."""
        for index, match, content in self._found:
            leaf = self._state.entries[index].value
            if match.sort == PARTS_ENTRY and has_indices(leaf):
                made = content.packed([source.tensor(key).read() for key in match.keys])
                check_indices(made, leaf, self._place(index))

    def _place(self, index: int) -> str:
        return str(self._state.entries[index].path) or "<root>"


def _packed(where: str, content: Content, contexts: Any) -> Any:
    """Return a value of a registered leaf type, packed of the template's tensors as it was saved."""
    unpacked = content.unpacked
    assert unpacked is not None
    if type(contexts) is not list or len(contexts) != len(content.contexts):
        msg = f"load: the context of the leaf at {where} is damaged. Load another checkpoint."
        raise CheckpointError(msg)
    unpacked.replace_contexts(0, contexts)
    return unpacked.pack(unpacked.parts)[0]


class _Free:
    """Loads without a template."""

    def __init__(self, where: Where | None) -> None:
        self._where = where

    def choose(self, source: CheckpointSource) -> None:
        """Choose what is loaded."""
        saved = source.structure
        if saved is None:
            msg = (
                "load: the checkpoint does not say how its entries were nested: expected one that statetree.dcp saved. "
                "Pass a template."
            )
            raise TreeMismatch(msg)
        _check_containers(saved)
        # A tensor for each entry: in the attributes of a container, these alone are leaves.
        marks = [torch.empty(0, device="meta") for _ in saved.entries]
        self._tree = saved.rebuild(marks)
        chosen = [True] * len(marks)
        if self._where is not None:
            outlines = [_outline(entry, source.metadata) for entry in saved.entries]
            chosen = selected(self._where, flatten(self._tree)[1], outlines, verb="load")
            kept = set(map(id, compress(marks, chosen)))
            self._tree = select(self._tree, lambda _, mark: id(mark) in kept)
        _check_entries(saved, chosen)
        self._entries = {id(mark): entry for mark, entry in compress(zip(marks, saved.entries, strict=True), chosen)}
        for entry in self._entries.values():
            (key,) = entry.keys
            stored = source.metadata.state_dict_metadata.get(key)
            if stored is None or isinstance(stored, TensorStorageMetadata) != (entry.sort == TENSOR_ENTRY):
                msg = f"load: the checkpoint's structure names {key}, which it does not hold. Load another checkpoint."
                raise CheckpointError(msg)
            if isinstance(stored, TensorStorageMetadata):
                check_covered(source.metadata, key, whole_box(stored.size))

    def filled(self, source: CheckpointSource) -> Any:
        """Read it."""
        return map_leaves(lambda mark: _read_entry(self._entries[id(mark)], source), self._tree)


def _read_entry(entry: SavedEntry, source: CheckpointSource) -> Any:
    (key,) = entry.keys
    return source.tensor(key).read() if entry.sort == TENSOR_ENTRY else source.value(key)


def _outline(entry: SavedEntry, metadata: Metadata) -> torch.Tensor | None:
    stored = metadata.state_dict_metadata.get(entry.keys[0]) if entry.sort == TENSOR_ENTRY else None
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")


def _check_containers(saved: Structure) -> None:
    """Raise unless a structure can be made without a template."""
    differences, known = [], rebuilt_classes()
    for texts, ref in places(saved.spec):
        why = why_not_rebuilt(saved.spec.nodes[~ref], known) if ref < 0 else ""
        if why:
            differences.append(Difference(path_of(texts), "structure", why, "a container that is known here"))
    if differences:
        remedy = (
            "Pass a template like the saved tree, or make the class known: register_container, or "
            "torch.serialization.add_safe_globals."
        )
        raise TreeMismatch.between("load", differences, remedy)


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
