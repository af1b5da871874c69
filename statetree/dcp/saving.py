"""A whole state saved by all ranks: taken apart into entries, with a structure beside them, as DCP lays it out.

Each rank describes its pieces to the first one, which says who writes which, and writes the metadata in the end.
"""

from __future__ import annotations

import io
import pickle
import uuid
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from statetree.chunks.boxes import Box, whole_box
from statetree.chunks.local import LocalChunks
from statetree.dcp.data_writer import DataWriter, Piece
from statetree.dcp.file_manifest import ID_PREFIX, MANIFEST, FileManifest, Index, ManifestFile
from statetree.dcp.groups import dealt_by_first, is_first, ranks_of, save_errors, told_to_first
from statetree.dcp.metadata import METADATA
from statetree.dcp.plain_values import why_not_restorable
from statetree.dcp.save_plan import Holdings, check_alike, check_keys, differing_values, planned
from statetree.dcp.saved_structure import SavedEntry, Structure
from statetree.dcp.state_entries import (
    PARTS_ENTRY,
    STRUCTURE_KEY,
    VALUE_ENTRY,
    compact,
    content_of,
    entries_of,
    free_key,
    is_array_of_numbers,
)
from statetree.declare import with_collections, without_collections
from statetree.errors import UnsupportedLeaf, check_now, shown, unsignalled, warn, with_checks
from statetree.exchange.call import on_all_ranks
from statetree.files.crc32 import crc32
from statetree.files.key_texts import key_text
from statetree.files.publishing import sync
from statetree.key_paths import Path
from statetree.leaves.leaf_numbers import text_number
from statetree.leaves.lowering import assumed_sums
from statetree.leaves.value_texts import value_text

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from statetree.dcp.metadata_pickle import StoredEntry
    from statetree.dcp.state_entries import StateEntry
    from statetree.files.stored import StoredTensor
    from statetree.tree.spec import TreeSpec

_StorageInfo: Final[Any] = filesystem._StorageInfo  # noqa: SLF001 - tried with torch 2.11.0 and 2.13.0
#: Classes of values that always come back. Asking that of every number in a state would take as long as saving it.
_COMING_BACK: Final = frozenset(
    {int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)


def _is_simple(value: Any) -> bool:
    """Whether a value is one of which equal ones have equal texts on all ranks."""
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    return type(value) in (type(None), bool, int, float, complex, str, bytes)


def _comes_back(value: Any) -> bool:
    cls = type(value)
    if cls in (list, tuple):
        return all(type(item) in _COMING_BACK for item in value)
    return cls in _COMING_BACK or is_array_of_numbers(value)


def _pickled(value: Any, path: Path) -> bytearray:
    file = io.BytesIO()
    try:
        torch.save(compact(value), file)
    except unsignalled(Exception) as error:
        msg = (
            f"save: the leaf at {path or '<root>'} ({type(value).__qualname__}) cannot be pickled: "
            f"{type(error).__name__}: {error}. Leave it out, or register its class as a container (register_container)."
        )
        raise UnsupportedLeaf(msg, path) from error
    # Copied: Python 3.12.1 crashes as it collects a cycle (an error's frames) that holds BytesIO's own buffer (cpython
    # issue 111211).
    return bytearray(file.getbuffer())


def _unmade(spec: TreeSpec, structure: Structure) -> Iterator[str]:
    """Yield which containers and tensors restore makes with a template only."""
    keys = {type(key) for _, keys, *_ in spec.nodes for key in keys}
    if not ({kind.cls for kind, *_ in spec.nodes} <= {dict, list, tuple} and keys <= {str, int}):  # as most states are
        yield from (f"{path or '<root>'}: {why}" for path, _, why in structure.unknown())
    for path, entry in zip(spec.paths(), structure.entries, strict=True):
        is_sparse = entry.facts.startswith("{") and "'layout': torch.sparse" in entry.facts
        if entry.sort == PARTS_ENTRY and not is_sparse:
            yield f"{path or '<root>'}: a tensor of several parts"


class WriteOptions(NamedTuple):
    """How a checkpoint is written, and what its manifest says of it: how good it is, and what else."""

    incremental: bool = False  # files are cut so that later saves find some to link
    base: pathlib.Path | None = None  # a checkpoint whose files may be linked to
    metric: float | None = None
    about: Mapping[str, Any] = {}


def write(
    state: Callable[[], Any],
    directory: pathlib.Path,
    group: ProcessGroup | None,
    options: WriteOptions = WriteOptions(),  # noqa: B008 - a tuple
) -> None:
    """Save the state that a function returns. What it raises reaches every rank. Without a group, this one saves alone.

    Metadata of a checkpoint that was there are taken away first, so that they and the new data are never taken for one
    checkpoint if the writing breaks off.
    """
    save = StateSave(state, directory, group, options)
    with save_errors(directory):
        with_checks(save.run)
    if save.unmade:
        msg = (
            f"save: what restore does not make by itself, at:\n  {shown(save.unmade)}\n"
            "Pass it a template; name classes with register_container or torch.serialization.add_safe_globals; save "
            "what values hold (of a module or an optimizer, the state_dict()), or restore them with weights_only=False."
        )
        warn(msg)
    if save.differing:
        warn(
            f"save: the ranks hold different plain values, of which the first rank's are saved, at:\n  "
            f"{shown(save.differing)}\nGive those of each rank a key of their own (with its number, say)."
        )


class StateSave:
    """One save, on one rank."""

    def __init__(
        self, state: Callable[[], Any], directory: pathlib.Path, group: ProcessGroup | None, options: WriteOptions
    ) -> None:
        self.directory = directory
        self.unmade: list[str] = []  # what does not come back by default, on the first rank
        self.differing: list[str] = []  # where ranks hold other plain values, on the first rank
        self._state = state
        self._group = group
        self._options = options
        self._held: dict[Index, Piece] = {}
        self._told = Holdings({}, {}, {}, set(), {}, {}, {}, {}, {})
        self._structure: Structure | None = None  # on the first rank
        self._entries: dict[str, StoredEntry] = {}
        self._dcp_paths: dict[str, Any] = {}
        self._id = uuid.uuid4().hex

    def run(self) -> None:
        """Save. The first rank says who writes what, and ends it; what fails on one is raised on all."""
        on_all = partial(on_all_ranks, "save", ranks_of("save", self._group))
        # No function is made here: its closure would keep the state alive in the traceback of what fails.
        told = told_to_first(on_all(self._describe), self._group)
        share = dealt_by_first(on_all(partial(self._plan, told)), self._group)
        written = told_to_first(on_all(partial(self._write, share)), self._group)
        on_all(partial(self._finish, written))

    @without_collections
    def _describe(self) -> Holdings:
        return self._hold(*entries_of(with_collections(self._state)(), verb="save"))

    def _hold(self, spec: TreeSpec, entries: Sequence[StateEntry], texts: Mapping[Path, str]) -> Holdings:
        ranks = ranks_of("save", self._group)
        taken = {entry.key for entry in entries}
        sums = assumed_sums([entry.value for entry in entries])
        self._told.divided.update({(*map(key_text, path),): text for path, text in texts.items()})
        saved = []
        for index, (path, key, value, dcp_path) in enumerate(entries):
            steps = (*map(key_text, path),)
            self._told.names[steps] = key
            content = content_of("save", value, path, ranks)
            keys: tuple[str, ...] = (key,)
            if index in sums:
                (held,) = content.tensors
                assert isinstance(held, LocalChunks)
                if held.boxes:
                    self._told.assumed[key, (*held.boxes,)] = sums[index]
            if content.sort == PARTS_ENTRY:
                keys = tuple([free_key(f"{key}.<part {number}>", taken) for number in range(len(content.tensors))])
                self._told.inseparable.update(dict.fromkeys(keys, (key_text(key),)))
                self._told.packed.update(keys)
            if content.sort == VALUE_ENTRY:
                self._add_value(key, value, path, dcp_path)
                if ranks.size > 1 and _is_simple(value):
                    self._told.values[key] = text_number(value_text(value))
            leaf = self._leaf_above(steps) if texts else None
            if leaf is not None and not any(isinstance(tensor, LocalChunks) for tensor in content.tensors):
                self._told.inseparable.update(dict.fromkeys(keys, leaf))
            for name, tensor in zip(keys, content.tensors, strict=False):
                self._add_tensor(name, tensor, dcp_path if name == key else (name,))
            context = ""
            if content.contexts:
                context = free_key(f"{key}.<context>", taken)
                self._add_value(context, content.contexts, path, (context,), type(value))
            saved.append(SavedEntry(content.sort, keys, content.facts, context))
        if is_first(self._group):
            self._structure = Structure.of(spec, saved)
            self._add_value(STRUCTURE_KEY, self._structure.to_text(), Path(), (STRUCTURE_KEY,))
            self.unmade += _unmade(spec, self._structure)
        return self._told

    def _leaf_above(self, steps: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the leaf that an entry is a part of, if it is one of several tensors, by the texts of its keys."""
        return next((steps[:count] for count in range(len(steps)) if steps[:count] in self._told.divided), None)

    def _add_value(
        self, key: str, value: Any, path: Path, dcp_path: tuple[str | int, ...], cls: type | None = None
    ) -> None:
        self._told.dcp_paths[key] = dcp_path
        self._told.pieces[Index(key, None)] = None
        data = _pickled(value, path)
        self._held[Index(key, None)] = Piece([data], 0, len(data))
        why = "" if _comes_back(value) or not is_first(self._group) else why_not_restorable(bytes(data))
        if why:
            self.unmade.append(f"{path or '<root>'} ({(cls or type(value)).__qualname__}): {why}")

    def _add_tensor(
        self, key: str, tensor: torch.Tensor | StoredTensor | LocalChunks, dcp_path: tuple[str | int, ...]
    ) -> None:
        shape = tuple(tensor.shape)
        self._told.dcp_paths[key] = dcp_path
        self._told.tensors[key] = (tensor.dtype, shape)
        boxes: Sequence[Box] = [whole_box(shape)]
        pieces: Sequence[torch.Tensor | StoredTensor]
        if not isinstance(tensor, LocalChunks):
            pieces = [tensor]
        elif 0 in shape:  # no rank holds elements, but DCP is to know of it
            pieces = [torch.empty(shape, dtype=tensor.dtype, device="cpu")]
        else:
            boxes, pieces = tensor.boxes, tensor.pieces
        for number, box in enumerate(boxes):
            index = Index(key, box.start)
            self._told.pieces[index] = box
            self._held[index] = Piece(pieces, number, prod(box.sizes) * tensor.dtype.itemsize)

    @without_collections
    def _plan(self, told: list[Holdings]) -> list[tuple[str, list[Index]]]:
        """On the first rank: tell each the save's id and which pieces it writes, and take old metadata away."""
        if not told:
            return []
        check_keys(told)
        check_alike(told)
        self.differing = differing_values(told)
        shares, self._entries = planned(told)
        for described in reversed(told):  # the first rank's count
            self._dcp_paths.update(described.dcp_paths)
        others = {keys: text for one in told for keys, text in one.divided.items() if keys not in told[0].divided}
        if others and self._structure is not None:
            text = self._structure._replace(others=others).to_text()
            self._add_value(STRUCTURE_KEY, text, Path(), (STRUCTURE_KEY,))
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in (METADATA, MANIFEST):
            (self.directory / name).unlink(missing_ok=True)
        return [(self._id, pieces) for pieces in shares]

    def _write(self, share: tuple[str, list[Index]]) -> dict[str, ManifestFile]:
        self.directory.mkdir(parents=True, exist_ok=True)  # where each rank has a disk of its own
        save, indices = share
        rank = ranks_of("save", self._group).rank
        writer = DataWriter(self.directory, rank, save, {index: self._held[index] for index in indices})
        if self._options.incremental:
            writer.link_or_write(self._options.base)
        else:
            writer.write_all()
        check_now()  # the files that elements came from: what is not whole gets no metadata
        return writer.files

    @without_collections
    def _finish(self, written: list[dict[str, ManifestFile]]) -> None:
        """On the first rank: write the manifest, then the metadata, and wait until all names are on the disk."""
        if not written:
            return
        files = {name: file for found in written for name, file in found.items()}
        places = {}
        for name, file in files.items():
            for (key, at), piece in file.pieces.items():
                start = None if at is None else _size(at)
                places[MetadataIndex(key, start)] = _StorageInfo(name, piece.offset, piece.length)
        about = StorageMeta(checkpoint_id=self.directory, save_id=f"{ID_PREFIX}{self._id}")
        entries = {key: _for_dcp(entry) for key, entry in self._entries.items()}
        metadata = Metadata(entries, self._dcp_paths, places, about)
        if hasattr(metadata, "version"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        data = pickle.dumps(metadata)
        options = self._options
        rows = {key: _for_manifest(entry) for key, entry in self._entries.items()}
        manifest = FileManifest(self._id, (len(data), crc32(data)), files, options.metric, options.about, rows)
        _write_whole(self.directory / MANIFEST, manifest.to_bytes())
        _write_whole(self.directory / METADATA, data)
        sync(self.directory)


def _for_dcp(entry: StoredEntry) -> Any:
    if entry.dtype is None:
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(_size(box.start), _size(box.sizes)) for box in entry.boxes]
    return TensorStorageMetadata(_properties(entry.dtype), _size(entry.shape), chunks)


# Entries share what is equal in them: pickle writes, and every reader makes, each object once (of 10,000 tensors, torch
# reads such metadata six times faster).


@lru_cache(64)
def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)


@lru_cache(4096)
def _size(sizes: tuple[int, ...]) -> torch.Size:
    return torch.Size(sizes)


def _for_manifest(entry: StoredEntry) -> Any:
    if entry.dtype is None:
        return None
    boxes = [] if entry.boxes[0].sizes == entry.shape else [(box.start, box.sizes) for box in entry.boxes]
    return str(entry.dtype), entry.shape, *boxes


def _write_whole(path: pathlib.Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_bytes(data)
    sync(partial)
    partial.replace(path)
