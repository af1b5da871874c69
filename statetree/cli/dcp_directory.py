"""Reads directories of ``torch.distributed.checkpoint``, and of ``statetree.dcp``, whose trees are known in full."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from contextlib import suppress
from operator import add
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from statetree.chunks.boxes import Box, is_covered
from statetree.cli.dcp_nesting import nested, read_paths
from statetree.dcp.flat_state import STRUCTURE_KEY
from statetree.dcp.keys import UnknownKey, key_of
from statetree.dcp.metadata import read_metadata
from statetree.dcp.saved_structure import SavedContainer, Structure, places, read, why_not_rebuilt
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY
from statetree.files.checkpoint import DCP, Checkpoint, Checksum
from statetree.files.safe_pickle import BadPickle
from statetree.files.stored import ChunkedStorage, Composite, StoredTensor
from statetree.files.torch_objects import REBUILD_SPARSE, TorchObjects
from statetree.files.torch_reader import Archive
from statetree.files.untrusted import refuse
from statetree.tree.spec import TreeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from statetree.dcp.metadata import Stored
    from statetree.files.ranges import FileRange, OpenFiles
    from statetree.files.stored import Storage
    from statetree.tree.traversal import Node

_METADATA: Final = ".metadata"
_MAX_METADATA_BYTES: Final = 1 << 30
_OPEN_PIECES: Final = 8


def read_directory(path: Path, files: OpenFiles) -> Checkpoint:
    """Open a directory.

    Raises:
        CheckpointError: If it is no complete checkpoint, or damaged, or names files outside of it.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        size = (path / _METADATA).stat().st_size
        if size > _MAX_METADATA_BYTES:
            refuse(path / _METADATA, f"it has {size} bytes: expected at most {_MAX_METADATA_BYTES}")
    metadata = read_metadata(path)
    metadata_file = files.open(path / _METADATA)
    directory = _DcpDirectory(path, files, metadata, metadata_file)
    tree, is_nested = directory.tree()
    used = [path / name for name in sorted({stored.name for stored in directory.metadata.storage_data.values()})]
    paths = [metadata_file.path, *used]
    total = sum(files.open(file).length for file in paths)
    return Checkpoint(
        path,
        DCP,
        tree,
        total,
        paths,
        checksums=directory.checksums,
        foreign=list(directory.foreign),
        storages=directory.storages,
        containers=directory.containers,
        is_nested=is_nested,
    )


class _DcpDirectory:
    def __init__(self, path: Path, files: OpenFiles, metadata: Metadata, metadata_file: FileRange) -> None:
        self.path = path
        self.metadata = metadata
        self._metadata_file = metadata_file
        self.foreign: dict[str, None] = {}
        self.containers: dict[str, str] = {}
        self.storages: list[Storage] = []
        self._files = files
        self._opened: OrderedDict[MetadataIndex, Archive] = OrderedDict()

    def place(self, index: MetadataIndex) -> FileRange:
        """Return where a piece lies."""
        stored: Stored = self.metadata.storage_data[index]
        entry = f"the entry {index.fqn!r}"
        return self._files.open(self.path / stored.name).part(stored.offset, stored.length, entry).named(entry)

    def archive(self, index: MetadataIndex) -> Archive:
        """Return a piece, opened."""
        if index in self._opened:
            self._opened.move_to_end(index)
        else:
            while len(self._opened) >= _OPEN_PIECES:
                self._opened.popitem(last=False)
            self._opened[index] = Archive(self.place(index))
        return self._opened[index]

    def checksums(self) -> Iterator[Checksum]:
        """Return the checksums of all pieces: each is an archive."""
        for index in self.metadata.storage_data:
            yield from self.archive(index).checksums()

    def tree(self) -> tuple[Any, bool]:
        """Return the tree, and whether it is known in full how it was nested.

        (DCP's own paths have texts for all keys, and lists for tuples.)
        """
        entries = self.metadata.state_dict_metadata
        values = {key: self._value(key) for key in entries if key != STRUCTURE_KEY}
        if not isinstance(entries.get(STRUCTURE_KEY), BytesStorageMetadata):
            paths = read_paths(self._metadata_file.read(0, self._metadata_file.length, "the metadata"))
            return nested(values, paths) or values, False
        saved = read(self._plain(STRUCTURE_KEY))
        for entry in saved.entries:
            wants_tensor = entry.sort in (TENSOR_ENTRY, PARTS_ENTRY)
            for key in entry.keys:
                if key not in values or isinstance(entries[key], TensorStorageMetadata) != wants_tensor:
                    refuse(self.path, f"its structure names {key!r}, which it does not hold")
        tree = self._nested(saved).rebuild(
            [_leaf(entry.sort, entry.keys, entry.facts, values) for entry in saved.entries]
        )
        placed = {key for entry in saved.entries for key in entry.keys}
        loose = {key: value for key, value in values.items() if key not in placed}  # of ranks other than the first
        if not loose:
            return tree, True
        if isinstance(tree, dict) and not any(key in tree for key in loose):
            tree.update(loose)
            return tree, True
        return values, False

    def _nested(self, saved: Structure) -> Structure:
        """Return a structure in which containers of unknown classes are mappings."""
        nodes = list(saved.spec.nodes)
        for texts, ref in places(saved.spec):
            why = why_not_rebuilt(nodes[~ref]) if ref < 0 else ""
            if why:
                self.containers[".".join(str(text[1:]) for text in texts) or "<root>"] = why
                nodes[~ref] = _as_mapping(nodes[~ref])
        return Structure(TreeSpec(tuple(nodes), saved.spec.num_leaves), saved.entries)

    def _value(self, key: str) -> Any:
        entry = self.metadata.state_dict_metadata[key]
        return self._tensor(key, entry) if isinstance(entry, TensorStorageMetadata) else self._plain(key)

    def _plain(self, key: str) -> Any:
        archive = Archive(self.place(MetadataIndex(key)))
        self.foreign.update(archive.foreign)
        self.storages += archive.storages()
        return archive.tree

    def _tensor(self, key: str, entry: TensorStorageMetadata) -> StoredTensor:
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        boxes = [Box(tuple(chunk.offsets), tuple(map(add, chunk.offsets, chunk.sizes))) for chunk in entry.chunks]
        self._check_coverage(key, shape, boxes)

        def find(index: int) -> StoredTensor:
            at = MetadataIndex(key, entry.chunks[index].offsets)
            found = self.archive(at).tree
            sizes = boxes[index].sizes
            if not isinstance(found, StoredTensor) or found.dtype != dtype or found.shape != sizes:
                name = self.metadata.storage_data[at].name
                refuse(self.path / name, f"it holds something else for {key!r}: expected {dtype} {sizes}")
            return found

        return StoredTensor(ChunkedStorage(f"the entry {key!r}", dtype, shape, boxes, find), dtype, shape)

    def _check_coverage(self, key: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        """Raise unless boxes cover every element once."""
        need = math.prod(shape)
        covered = sum(box.volume for box in boxes)
        if covered != need:
            what = f"it holds {covered} of the {need} elements of {key!r}"
            refuse(self.path, what, "Get all files of the checkpoint.")
        if not is_covered(Box((0,) * len(shape), shape), boxes):
            refuse(self.path, f"the pieces of {key!r} overlap each other, or are too many")


def _leaf(sort: str, keys: tuple[str, ...], facts: str, values: dict[str, Any]) -> Any:
    if sort != PARTS_ENTRY:
        return values[keys[0]]
    return _composite(tuple(values[key] for key in keys), facts)


def _composite(parts: tuple[StoredTensor, ...], facts: str) -> Composite:
    """Return what stands for a tensor of several parts. Sparse ones are as torch's files have them."""
    layout = re.search(r"'layout': torch\.(sparse_\w+)", facts)
    shape = re.search(r"'shape': torch\.Size\(\[([\d, ]*)\]\)", facts)
    if layout is not None and shape is not None and len(parts) == (2 if layout[1] == "sparse_coo" else 3):
        size = torch.Size(int(length) for length in shape[1].split(",") if length.strip())
        is_coalesced = ("'coalesced': True" in facts,) if layout[1] == "sparse_coo" else ()
        data = (*parts[::-1], size, *is_coalesced)
        with suppress(BadPickle, ValueError, OverflowError):  # facts out of a file may say anything
            made: Composite = TorchObjects().call(REBUILD_SPARSE, (getattr(torch, layout[1], None), data))
            return made
    return Composite(_kind(facts), parts)


def _kind(facts: str) -> str:
    """Return what a tensor of several parts is called: its layout, its dtype, or the name of its leaf type."""
    for pattern in (r"'layout': (?:torch\.|')(?!strided)(\w+)", r"'leaf type': '(?!Tensor')([^']*)'", r"torch\.(\w+)"):
        found = re.search(pattern, facts.replace("torch.strided", ""))
        if found is not None:
            return found[1]
    return "in parts"


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
