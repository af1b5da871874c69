"""DCP's metadata, read from a file that nobody vouches for.

DCP pickles its metadata, and unpickling can run any code, or crash. Here the pickle is read as records; names of other
classes than metadata consists of are refused, and DCP's own objects are made from what the records hold, once it was
checked.
"""

from __future__ import annotations

import math
import reprlib
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from statetree.dcp.file_manifest import MANIFEST, FileManifest, read_manifest, regular_bytes, save_of
from statetree.errors import CheckpointError
from statetree.files.safe_pickle import BadPickle, Record, collection_paused, read_records
from statetree.files.untrusted import inside, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

METADATA: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SIZE: Final = "torch.Size"
_DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
#: What torch 2.11 to 2.15 pickle as metadata.
_ADMITTED: Final = frozenset(
    [
        *(f"{_METADATA}.{cls.__name__}" for cls in (BytesStorageMetadata, ChunkStorageMetadata, Metadata)),
        *(f"{_METADATA}.{cls.__name__}" for cls in (MetadataIndex, StorageMeta, TensorProperties)),
        f"{_METADATA}.TensorStorageMetadata",
        f"{_METADATA}._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        *(_SIZE, *_DTYPES),
    ]
)
_MAX_BYTES: Final = 2 << 30
_MAX_TOLD: Final = 1000
_MAX_DIMS: Final = 64
_LARGEST: Final = 2**62


class Stored(NamedTuple):
    """Where an entry's bytes lie: a file's name in the checkpoint's directory, an offset and a length."""

    name: str
    offset: int
    length: int


def read_described(directory: Path, *, verify: bool) -> tuple[Metadata, FileManifest | None]:
    """Read a directory's metadata, without running code in them, and the manifest if the save that they name left one.

    Every name in them stays inside the directory, every piece lies inside its file, apart from the others, is as long
    as its tensor needs, and lies inside the tensor that it is a piece of.

    Args:
        directory: Where the checkpoint lies.
        verify: Whether the metadata have to be the bytes that the manifest says. Without it, a manifest that is
            missing or damaged is passed over.

    Returns:
        Metadata whose ``storage_data`` holds ``Stored``, and whose ``planner_data`` holds what is a path in it.

    Raises:
        CheckpointError: If the directory or the metadata are missing, damaged, or refer to anything else; or if the
            manifest is missing or damaged, or belongs to another save.
    """
    data = _content(directory)
    metadata = _parsed(directory, data)
    assert metadata.storage_meta is not None
    save = save_of(metadata.storage_meta.save_id)
    if save is None and not (verify and _has_listed_files(directory, metadata)):
        return metadata, None
    try:
        manifest = _manifest_of(directory)
        if verify and save in (manifest.save, None):
            manifest.check_metadata(data)
    except CheckpointError as error:
        if not verify:
            return metadata, None
        msg = (
            f"load: cannot read the checkpoint {directory}: {error}. Load another checkpoint, or pass verify=False "
            "to read it all the same."
        )
        raise CheckpointError(msg) from None
    if manifest.save != save:
        _refuse_mixture(directory, f"{METADATA} is of the save {save}, {MANIFEST} of {manifest.save}")
    for stored in metadata.storage_data.values():
        if stored.name not in manifest.files:
            _refuse_mixture(directory, f"{MANIFEST} does not list {stored.name}")
    return metadata, manifest


def _manifest_of(directory: Path) -> FileManifest:
    manifest = read_manifest(directory)
    if manifest is None:
        msg = f"it has no {MANIFEST} file, though it was saved with one: it was copied in part"
        raise CheckpointError(msg)
    return manifest


def _has_listed_files(directory: Path, metadata: Metadata) -> bool:
    """Whether the files are those of a manifest: then metadata that name no save are damaged. DCP leaves a manifest."""
    with suppress(CheckpointError):
        manifest = read_manifest(directory)
        sizes = {} if manifest is None else {name: file.nbytes for name, file in manifest.files.items()}
        names = {stored.name for stored in metadata.storage_data.values()}
        return all(sizes.get(name) == (directory / name).stat().st_size for name in names)
    return False


def _refuse_mixture(directory: Path, what: str) -> None:
    msg = f"load: the checkpoint {directory} is a mixture of two: {what}. Copy all files of one, or load another."
    raise CheckpointError(msg)


def _content(directory: Path) -> bytes:
    path = directory / METADATA
    if not path.resolve().is_relative_to(directory.resolve()):
        msg = f"load: the metadata of the checkpoint {directory} lie outside of it: {METADATA} is a link. Load a copy."
        raise CheckpointError(msg)
    try:
        return regular_bytes(path, _MAX_BYTES)
    except OSError as error:
        _raise_unreadable(directory, error)
    except CheckpointError as error:
        msg = f"load: the metadata of the checkpoint {directory} cannot be read: {error}. Load another checkpoint."
        raise CheckpointError(msg) from None


def _parsed(directory: Path, data: bytes) -> Metadata:
    try:
        with collection_paused():
            return _Reading(directory, _records(data)).metadata()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - records may hold anything, and be shared so often that their text has no end
        what = str(error) if isinstance(error, BadPickle) else f"{type(error).__name__}: {_TEXT.repr(error.args)}"
        msg = (
            f"load: the metadata of the checkpoint {directory} cannot be read: {printable(what[:500])}. It is damaged, "
            f"hostile, or of an unknown version; {METADATA} was not executed. Load another checkpoint."
        )
        raise CheckpointError(msg) from None


def _records(data: bytes) -> Any:
    records, names = read_records(data)
    unknown = names - _ADMITTED
    if unknown:
        msg = f"it refers to {min(unknown)}, which metadata does not consist of"
        raise BadPickle(msg)
    return records


def _raise_unreadable(directory: Path, error: OSError) -> NoReturn:
    if not directory.exists():
        what = "there is no such directory"
    elif not directory.is_dir():
        what = "it is not a directory"
    elif isinstance(error, FileNotFoundError):
        what = f"it has no {METADATA} file: it is no checkpoint of torch.distributed.checkpoint, or an incomplete one"
        inside_it = sorted(path.parent.name for path in directory.glob(f"*/{METADATA}"))
        if inside_it:
            what = f"{what}. {len(inside_it)} checkpoints lie in it, the last of them {printable(inside_it[-1])}"
    else:
        what = f"{METADATA} cannot be opened: {error}"
    msg = f"load: cannot read the checkpoint {directory}: {what}. Pass the directory of a complete checkpoint."
    raise CheckpointError(msg) from error


class _Reading:
    """Makes DCP's objects from the records of one pickle."""

    def __init__(self, directory: Path, record: Any) -> None:
        self._directory = directory
        self._record = record
        self._files: dict[str, os.stat_result] = {}

    def metadata(self) -> Metadata:
        state = self._state(self._record, "Metadata")
        entries = {self._text(key): self._entry(key, entry) for key, entry in state["state_dict_metadata"].items()}
        stored = {self._index(key): self._stored(info) for key, info in state["storage_data"].items()}
        for key, entry in entries.items():
            self._check_stored(key, entry, stored)
        self._check_apart(stored)
        told = state.get("planner_data")
        paths = {key: path for key, path in told.items() if _is_path(key, path)} if type(told) is dict else {}
        return Metadata(entries, paths, stored, StorageMeta(save_id=self._save_id(state)))

    def _save_id(self, state: Any) -> str | None:
        record = state.get("storage_meta")
        told = record.state if _name_of(record) == "StorageMeta" else None
        found = told.get("save_id") if type(told) is dict else None
        return found if type(found) is str else None

    def _check_apart(self, stored: Mapping[MetadataIndex, Stored]) -> None:
        """Raise if pieces overlap: one piece for any number of entries would take any amount of memory."""
        # One file may have several names: links.
        ids = {name: (status.st_dev, status.st_ino) for name, status in self._files.items()}
        places = sorted((ids[place.name], place.offset, place, index.fqn) for index, place in stored.items())
        for (one, _, before, key), (another, _, after, other) in pairwise(places):
            if one == another and after.offset < before.offset + before.length:
                whose = f"{key!r}" if key == other else f"{key!r} and {other!r}"
                self._damaged(f"the pieces of {whose} overlap in {after.name}")

    def _state(self, record: Any, name: str) -> Any:
        if _name_of(record) != name:
            self._damaged(f"expected a {name}, got a {_name_of(record)}")
        return record.state

    def _damaged(self, what: str) -> None:
        told = printable(what[:_MAX_TOLD])
        msg = f"load: the metadata of the checkpoint {self._directory} is damaged: {told}. Load another checkpoint."
        raise CheckpointError(msg)

    def _text(self, value: Any) -> str:
        if type(value) is not str:
            self._damaged(f"expected the key of an entry, got a {type(value).__name__}")
        return str(value)

    def _number(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            self._damaged(f"expected {what}, got {reprlib.repr(value)}")
        return int(value)

    def _size(self, value: Any) -> torch.Size:
        parts = value.args[0] if isinstance(value, Record) and value.name == _SIZE and value.args else None
        if type(parts) is not tuple or len(parts) > _MAX_DIMS:
            self._damaged(f"expected a size, got a {_name_of(value)}")
        return torch.Size([self._number(part, "a size") for part in parts or ()])

    def _entry(self, key: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if _name_of(record) == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = self._state(record, "TensorStorageMetadata")
        dtype = _DTYPES.get(getattr(self._state(state["properties"], "TensorProperties")[0], "name", ""))
        if dtype is None:
            self._damaged(f"expected the dtype of {key}")
        assert dtype is not None
        size = self._size(state["size"])
        if math.prod(size) * dtype.itemsize > _LARGEST:
            self._damaged(f"{key} has the impossible size {tuple(size)}")
        chunks = [self._chunk(key, size, chunk) for chunk in state["chunks"]]
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _chunk(self, key: str, whole: torch.Size, record: Any) -> ChunkStorageMetadata:
        state = self._state(record, "ChunkStorageMetadata")
        offsets, sizes = self._size(state["offsets"]), self._size(state["sizes"])
        inside = len(offsets) == len(sizes) == len(whole) and all(
            offset + size <= limit for offset, size, limit in zip(offsets, sizes, whole, strict=True)
        )
        if not inside:
            self._damaged(
                f"a piece of {key} lies at {tuple(offsets)} with the size {tuple(sizes)}: not in {tuple(whole)}"
            )
        return ChunkStorageMetadata(offsets, sizes)

    def _index(self, record: Any) -> MetadataIndex:
        state = self._state(record, "MetadataIndex")
        offset = state.get("offset")
        return MetadataIndex(self._text(state["fqn"]), None if offset is None else self._size(offset))

    def _stored(self, record: Any) -> Stored:
        state = self._state(record, "_StorageInfo")
        name = self._text(state["relative_path"])
        if state.get("transform_descriptors"):
            msg = (
                f"load: the checkpoint {self._directory} is transformed (compressed, say): "
                "expected plain files. Load it with torch.distributed.checkpoint, and save it again."
            )
            raise CheckpointError(msg)
        stored = Stored(name, self._number(state["offset"], "an offset"), self._number(state["length"], "a length"))
        size = self._file(name).st_size
        if stored.offset + stored.length > size:
            self._damaged(
                f"{name} is truncated: expected {stored.offset + stored.length} bytes or more, got {size} bytes"
            )
        return stored

    def _file(self, name: str) -> os.stat_result:
        if name not in self._files:
            try:
                self._files[name] = inside(self._directory, name, self._directory / METADATA).stat()
            except (OSError, CheckpointError) as error:
                self._damaged(str(error).removeprefix("read: ").rstrip("."))
        return self._files[name]

    def _check_stored(
        self,
        key: str,
        entry: TensorStorageMetadata | BytesStorageMetadata,
        stored: Mapping[MetadataIndex, Stored],
    ) -> None:
        if isinstance(entry, BytesStorageMetadata):
            if MetadataIndex(key) not in stored:
                self._damaged(f"it does not say where {key} is stored")
            return
        for chunk in entry.chunks:
            place = stored.get(MetadataIndex(key, chunk.offsets))
            if place is None:
                self._damaged(f"it does not say where the piece of {key} at {tuple(chunk.offsets)} is stored")
                return
            need = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if place.length < need:
                self._damaged(f"a piece of {key} is stored in {place.length} bytes: expected {need} or more")


_TEXT: Final = reprlib.Repr()
_TEXT.maxstring = _TEXT.maxother = 200


def _is_path(key: Any, path: Any) -> bool:
    return type(key) is str and type(path) is tuple and bool(path) and all(type(step) in (str, int) for step in path)


def _name_of(record: Any) -> str:
    return record.name.rpartition(".")[2] if isinstance(record, Record) else type(record).__name__
