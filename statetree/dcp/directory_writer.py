"""Writes a checkpoint into a directory as DCP's own writer does, and a manifest of it.

An incremental save compares each piece with the file of an earlier checkpoint that holds it. Files of which every piece
is as it was become hard links. The other pieces are written, those that did not change apart from those that did, so
that the next save finds files to link.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from statetree.dcp.file_manifest import (
    ID_PREFIX,
    MANIFEST,
    FileManifest,
    ManifestFile,
    ManifestPiece,
    check_file,
    read_manifest,
    trailer,
)
from statetree.dcp.internals import stamp_version, storage_info
from statetree.dcp.metadata import METADATA
from statetree.dcp.piece_sources import PieceSource
from statetree.errors import CheckpointError, check_now
from statetree.files.crc32 import crc32
from statetree.files.publishing import sync
from statetree.files.ranges import OpenFiles

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
        incremental: Whether files are cut so that later saves find some to link.
        base: The directory of a checkpoint whose files may be linked to.
        metric: What the manifest says of how good the state is.
        about: What else it says of it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        incremental: bool = False,
        base: Path | None = None,
        metric: float | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.checkpoint_id = directory
        self._incremental = incremental
        self._base = base
        self._metric = metric
        self._about = dict(about or {})
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
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=f"{ID_PREFIX}{self._save}")

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
            run.write([list(run.items)])
        check_now()  # the files that elements came from: what is not whole gets no metadata
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
        manifest = FileManifest(self._save, (len(data), crc32(data)), files, self._metric, self._about)
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
        items: What there is to write.
        results: Where each piece was written.
    """

    def __init__(self, directory: Path, plan: SavePlan, planner: SavePlanner) -> None:
        self.items: dict[Index, WriteItem] = {_index_of(item.index): item for item in plan.items}
        self.results: list[WriteResult] = []
        self._directory = directory
        self._planner = planner
        self._share: _Share = plan.storage_data

    def write(self, groups: Iterable[Sequence[Index]], tag: str = "") -> None:
        """Write each group of pieces into a file of its own."""
        for number, indices in enumerate(groups):
            self._write_file(f"__{self._share.rank}_{number}{tag}{_SUFFIX}", indices)

    def _write_file(self, name: str, indices: Sequence[Index]) -> None:
        path = self._directory / name
        path.unlink(missing_ok=True)
        values_first = sorted(indices, key=lambda index: self.items[index].type != WriteItemType.BYTE_IO)  # as DCP
        pieces, at, end = [], 0, trailer(self._share.save)
        with path.open("xb", buffering=0) as file:
            for index in values_first:
                source = self._source(index)
                pieces.append(ManifestPiece(*index, at, source.length, source.write(file.fileno(), at)))
                at += source.length
            file.seek(at)
            file.write(end)
            os.fsync(file.fileno())
        self._add(name, ManifestFile(self._share.save, at + len(end), tuple(pieces)))

    def _add(self, name: str, file: ManifestFile) -> None:
        for piece in file.pieces:
            index = self.items[piece.key, piece.chunk].index
            self.results.append(WriteResult(index, piece.length, _Written(name, (file.save, file.nbytes), piece)))

    def _source(self, index: Index) -> PieceSource:
        found: Any = self._planner.resolve_data(self.items[index])
        return PieceSource(found.getbuffer() if self.items[index].type == WriteItemType.BYTE_IO else found)

    def link_or_write(self, base: Path | None) -> None:
        """Link to files of an earlier checkpoint where nothing changed, and write the rest."""
        unchanged: set[Index] = set()
        linked: set[Index] = set()
        if base is not None:
            known = _files_of(base)
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                found = pool.map(lambda name: self._unchanged_in(base / name, known[name]), known)
            for (name, file), same in zip(known.items(), found, strict=True):
                unchanged |= same
                if len(same) == len(file.pieces) and self._link(base, name):
                    linked |= same
                    self._add(name, file)
        kept = [index for index in self.items if index in unchanged and index not in linked]
        changed = [index for index in self.items if index not in unchanged]
        tag = f"_{self._share.save}"  # linked files keep their names
        self.write([*self._grouped(kept), *self._grouped(changed)], tag)

    def _unchanged_in(self, path: Path, listed: ManifestFile) -> set[Index]:
        """Return the pieces that a file holds as they are now. Damage is a change: else it would go on."""
        same: set[Index] = set()
        if path.is_symlink():  # what it leads to may go away
            return same
        with suppress(CheckpointError):
            file = OpenFiles().open(path)
            check_file(file, listed)
            for piece in listed.pieces:
                index = piece.key, piece.chunk
                if index in self.items and self._source(index).is_in(file, piece):
                    same.add(index)
        return same

    def _link(self, base: Path, name: str) -> bool:
        with suppress(OSError):  # another file system, or it was removed meanwhile: it is written anew
            os.link(base / name, self._directory / name, follow_symlinks=False)
            return True
        return False

    def _grouped(self, indices: Sequence[Index]) -> Iterator[Sequence[Index]]:
        """Cut pieces into groups for a file each: not many, so that few are written again when one changes."""
        sizes = [_nbytes(self.items[index]) for index in indices]
        limit = min(_FILE_BYTES, sum(sizes) // _FILE_SHARE)
        group: list[Index] = []
        total = 0
        for index, nbytes in zip(indices, sizes, strict=True):
            group.append(index)
            total += nbytes
            if total >= limit:
                yield group
                group, total = [], 0
        if group:
            yield group


def _files_of(base: Path) -> Mapping[str, ManifestFile]:
    """Return the files of an earlier checkpoint that can be linked to: none if it has no manifest that is whole."""
    with suppress(CheckpointError):
        manifest = read_manifest(base)
        return {} if manifest is None else manifest.files
    return {}


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _index_of(index: MetadataIndex) -> Index:
    return index.fqn, None if index.offset is None else tuple(index.offset)
