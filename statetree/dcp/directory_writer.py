"""Writes a checkpoint into a directory as DCP's own writer does, and a manifest of it.

An incremental save looks up each piece, by a digest of its content, in the manifest of an earlier checkpoint. Files of
which every piece is as it was become hard links. The other pieces are written, those that did not change apart from
those that did, so that the next save finds files to link.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from statetree.dcp.file_manifest import (
    MANIFEST,
    FileManifest,
    ManifestFile,
    ManifestPiece,
    as_save_id,
    check_file,
    read_manifest,
    trailer,
)
from statetree.dcp.internals import stamp_version, storage_info
from statetree.dcp.metadata import METADATA
from statetree.errors import CheckpointError
from statetree.files.publishing import sync
from statetree.files.ranges import OpenFiles
from statetree.files.strided_reading import memory_of
from statetree.torch_internals import as_copied

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_SUFFIX: Final = ".distcp"
#: An incremental save begins another file where one has so many bytes, or so much of all.
_FILE_BYTES: Final = 4 << 20
_FILE_SHARE: Final = 64

Index = tuple[str, "tuple[int, ...] | None"]


class _Share(NamedTuple):
    """What the coordinating rank tells another one: its number, and the id of the save."""

    rank: int
    save: str


class _Written(NamedTuple):
    """Where a piece was written."""

    name: str
    file: tuple[str, int]
    piece: ManifestPiece


class DirectoryWriter(StorageWriter):
    """Writes a checkpoint.

    Metadata of a checkpoint that was there are taken away first, so that they and the new data are never taken for one
    checkpoint if the writing breaks off. Files that were there are replaced, never written over: others may be linked
    to them.

    Args:
        directory: Where.
        incremental: Whether the contents of pieces are digested, for this save or later ones to compare.
        base: The directory of a checkpoint whose files may be linked to.
    """

    def __init__(self, directory: Path, *, incremental: bool = False, base: Path | None = None) -> None:
        self.checkpoint_id = directory
        self._incremental = incremental
        self._base = base
        self._save = uuid.uuid4().hex

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin another save."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id
        self._save = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether this is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """There is nothing to set up."""

    def storage_meta(self) -> StorageMeta:
        """Return what the metadata say of the save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=as_save_id(self._save))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory."""
        self.checkpoint_id.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take old metadata away, on the coordinating rank, before any rank writes, and tell every rank the save."""
        for name in (METADATA, MANIFEST):
            (self.checkpoint_id / name).unlink(missing_ok=True)
        return [dataclasses.replace(plan, storage_data=_Share(rank, self._save)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan asks for."""
        run = _RankWriter(self.checkpoint_id, plan, planner)
        if self._incremental:
            run.link_or_write(self._base)
        else:
            run.write([plan.items])
        done: Future[list[WriteResult]] = Future()
        done.set_result(run.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, then the metadata, and wait until the names of all files are on the disk."""
        stored = {}
        pieces: dict[str, list[ManifestPiece]] = {}
        facts: dict[str, tuple[str, int]] = {}
        for result in (result for listed in results for result in listed):
            written: _Written = result.storage_data
            stored[result.index] = storage_info(written.name, written.piece.offset, written.piece.length)
            facts[written.name] = written.file
            pieces.setdefault(written.name, []).append(written.piece)
        files = {name: ManifestFile(*facts[name], tuple(found)) for name, found in pieces.items()}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        stamp_version(metadata)
        data = pickle.dumps(metadata)
        manifest = FileManifest(self._save, (len(data), zlib.crc32(data)), files)
        _write_whole(self.checkpoint_id / MANIFEST, manifest.to_bytes())
        _write_whole(self.checkpoint_id / METADATA, data)
        sync(self.checkpoint_id)


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class _RankWriter:
    """Writes what one rank has to write.

    Attributes:
        results: Where each piece was written.
    """

    def __init__(self, directory: Path, plan: SavePlan, planner: SavePlanner) -> None:
        self.results: list[WriteResult] = []
        self._directory = directory
        self._items = plan.items
        self._planner = planner
        share: _Share = plan.storage_data
        self._save = share.save
        self._prefix = f"__{share.rank}_"
        self._files = 0
        self._contents: dict[Index, str] = {}

    def write(self, groups: Iterable[Sequence[WriteItem]], tag: str = "") -> None:
        """Write each group of items into a file of its own."""
        for items in groups:
            name = f"{self._prefix}{self._files}{tag}{_SUFFIX}"
            self._files += 1
            self._write_file(name, items)

    def _write_file(self, name: str, items: Sequence[WriteItem]) -> None:
        path = self._directory / name
        path.unlink(missing_ok=True)
        pieces = []
        with path.open("xb") as file:
            for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):  # values first, as DCP
                stream = _Checked(file)
                begin = file.tell()
                _write_item(stream, self._resolved(item))
                index = _index_of(item.index)
                content = self._contents.get(index, "")
                piece = ManifestPiece(*index, begin, file.tell() - begin, stream.checksum, content)
                pieces.append((item.index, piece))
            file.write(trailer(self._save))
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        self._add(name, (self._save, nbytes), pieces)

    def _add(self, name: str, file: tuple[str, int], pieces: Iterable[tuple[MetadataIndex, ManifestPiece]]) -> None:
        self.results += [WriteResult(index, piece.length, _Written(name, file, piece)) for index, piece in pieces]

    def _resolved(self, item: WriteItem) -> Any:
        """Return what is to be written: bytes, or a tensor on the CPU that fills its storage."""
        if item.type == WriteItemType.BYTE_IO:
            return self._planner.resolve_data(item).getbuffer()  # type: ignore[union-attr]
        tensor: Any = self._planner.resolve_data(item)
        tensor = tensor.detach().cpu()
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def link_or_write(self, base: Path | None) -> None:
        """Link to files of an earlier checkpoint where nothing changed, and write the rest."""
        with ThreadPoolExecutor() as pool:
            contents = pool.map(lambda item: _content_of(self._resolved(item)), self._items)
            self._contents = {
                _index_of(item.index): content for item, content in zip(self._items, contents, strict=True)
            }
            known = _manifest_of(base)
            unchanged = {
                (piece.key, piece.chunk)
                for file in known.values()
                for piece in file.pieces
                if self._contents.get((piece.key, piece.chunk)) == piece.content
            }
            linked = set() if base is None else self._link(base, known, unchanged, pool)
        rest = [item for item in self._items if _index_of(item.index) not in linked]
        kept = [item for item in rest if _index_of(item.index) in unchanged]
        changed = [item for item in rest if _index_of(item.index) not in unchanged]
        tag = f"_{self._save}"  # linked files keep their names
        self.write([*_grouped(kept), *_grouped(changed)], tag)

    def _link(
        self, base: Path, known: Mapping[str, ManifestFile], unchanged: set[Index], pool: ThreadPoolExecutor
    ) -> set[Index]:
        """Link to the files that consist of unchanged pieces only, and return these pieces.

        They are read and compared with their checksums first: else damage would go on from step to step.
        """
        indices = {_index_of(item.index): item.index for item in self._items}
        linked: set[Index] = set()
        names = [name for name, file in known.items() if {(p.key, p.chunk) for p in file.pieces} <= unchanged]
        whole = pool.map(lambda name: _is_whole(base / name, known[name]), names)
        for name in (name for name, is_whole in zip(names, whole, strict=True) if is_whole):
            file = known[name]
            own = {(piece.key, piece.chunk) for piece in file.pieces}
            if not linked.isdisjoint(own):
                continue
            with suppress(OSError):  # another file system, or it was removed meanwhile: it is written anew
                os.link(base / name, self._directory / name, follow_symlinks=False)
                linked |= own
                pieces = [(indices[piece.key, piece.chunk], piece) for piece in file.pieces]
                self._add(name, (file.save, file.nbytes), pieces)
        return linked


def _is_whole(path: Path, listed: ManifestFile) -> bool:
    """Whether a file is what was written, to the byte."""
    try:
        place = OpenFiles().open(path)
        check_file(place, listed)
        return not path.is_symlink() and all(
            place.checksum(piece.offset, piece.length) == piece.checksum for piece in listed.pieces
        )
    except CheckpointError:
        return False


def _manifest_of(base: Path | None) -> Mapping[str, ManifestFile]:
    """Return the files of an earlier checkpoint that can be linked to: none if it has no manifest that is whole."""
    if base is not None:
        with suppress(CheckpointError):
            manifest = read_manifest(base)
            if manifest is not None:
                return manifest.files
    return {}


def _grouped(items: Sequence[WriteItem]) -> Iterator[Sequence[WriteItem]]:
    """Cut items into groups for a file each: not many, so that few are written again when a piece changes."""
    sizes = [_nbytes(item) for item in items]
    limit = min(_FILE_BYTES, sum(sizes) // _FILE_SHARE)
    group: list[WriteItem] = []
    total = 0
    for item, nbytes in zip(items, sizes, strict=True):
        group.append(item)
        total += nbytes
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _index_of(index: MetadataIndex) -> Index:
    return index.fqn, None if index.offset is None else tuple(index.offset)


class _Checked:
    """A file to write to, and the CRC-32 of what was written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        written: int = self._file.write(data)
        return written

    def flush(self) -> None:
        pass


def _write_item(stream: Any, data: Any) -> None:
    if isinstance(data, torch.Tensor):
        torch.save(data, stream)
    else:
        stream.write(data)


def _content_of(data: Any) -> str:
    """Return a digest of what a piece holds. Chance does not make two alike, since what is alike is not written."""
    digest = hashlib.sha256()
    if not isinstance(data, torch.Tensor):
        digest.update(b"value ")
        digest.update(data)
        return digest.hexdigest()
    digest.update(f"{data.dtype} {tuple(data.shape)} ".encode())
    digest.update(memory_of(as_copied(data.resolve_conj().resolve_neg()).contiguous()))
    return digest.hexdigest()
