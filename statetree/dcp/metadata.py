"""DCP's metadata, read from a file that nobody vouches for.

DCP pickles its metadata, and unpickling can run any code, or crash. Here DCP's objects are made of checked arguments;
names of other classes than metadata consists of are refused.
"""

from __future__ import annotations

import math
import reprlib
from contextlib import suppress
from itertools import pairwise
from operator import le
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

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
from statetree.files.pickled_tensors import size_of
from statetree.files.unpickling import BadPickle, Known, read_pickle
from statetree.files.untrusted import inside, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

METADATA: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_MAX_BYTES: Final = 2 << 30
_MAX_TOLD: Final = 1000
_LARGEST: Final = 2**62

T = TypeVar("T")


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
        metadata = _of(Metadata, read_pickle(data, _known)[0])
        _check_stored(directory, metadata)
    except BadPickle as bad:
        msg = (
            f"load: the metadata of the checkpoint {directory} cannot be read: {printable(str(bad)[:_MAX_TOLD])}. "
            f"It is damaged, hostile, or of an unknown version; {METADATA} was not executed. Load another checkpoint."
        )
        raise CheckpointError(msg) from None
    return metadata


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


def _damaged(what: str) -> NoReturn:
    raise BadPickle(what)


def _of(cls: type[T], value: Any) -> T:
    """Return a value that must be of a class."""
    if type(value) is not cls:
        _damaged(f"expected a {cls.__name__}, got a {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        _damaged(f"expected an offset or a length, got {reprlib.repr(value)}")
    return value


def _properties(state: Any) -> TensorProperties:
    return TensorProperties(dtype=_of(torch.dtype, _of(tuple, state)[0]))


def _chunk(state: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_of(torch.Size, state["offsets"]), _of(torch.Size, state["sizes"]))


def _tensor(state: Any) -> TensorStorageMetadata:
    chunks = [_of(ChunkStorageMetadata, chunk) for chunk in _of(list, state["chunks"])]
    return TensorStorageMetadata(_of(TensorProperties, state["properties"]), _of(torch.Size, state["size"]), chunks)


def _index(state: Any) -> MetadataIndex:
    offset = state.get("offset")
    return MetadataIndex(_of(str, state["fqn"]), None if offset is None else _of(torch.Size, offset))


def _stored(state: Any) -> Stored:
    if state.get("transform_descriptors"):
        remedy = "Load it with torch.distributed.checkpoint, and save it again"
        _damaged(f"it is transformed (compressed, say): expected plain files. {remedy}")
    return Stored(_of(str, state["relative_path"]), _number(state["offset"]), _number(state["length"]))


def _storage_meta(state: Any) -> StorageMeta:
    save_id = state.get("save_id")
    return StorageMeta(save_id=save_id if type(save_id) is str else None)


def _metadata(state: Any) -> Metadata:
    entries, stored = _of(dict, state["state_dict_metadata"]), _of(dict, state["storage_data"])
    for key, entry in entries.items():
        _of(str, key)
        _of(BytesStorageMetadata if type(entry) is BytesStorageMetadata else TensorStorageMetadata, entry)
    for index, piece in stored.items():
        _of(MetadataIndex, index)
        _of(Stored, piece)
    paths, about = state.get("planner_data"), state.get("storage_meta")
    paths = {key: path for key, path in paths.items() if _is_path(key, path)} if type(paths) is dict else {}
    return Metadata(entries, paths, stored, about if type(about) is StorageMeta else StorageMeta())


def _is_path(key: Any, path: Any) -> bool:
    return type(key) is str and type(path) is tuple and bool(path) and all(type(step) in (str, int) for step in path)


def _ignored(*_: Any) -> None:
    """Make nothing of what is not read here: layouts, memory formats, where the checkpoint was."""


#: What torch 2.11 to 2.15 pickle as metadata.
_KNOWN: Final[dict[str, Known]] = {
    **{str(value): Known(value=value) for value in vars(torch).values() if isinstance(value, torch.dtype)},
    "torch.Size": Known(lambda parts: torch.Size(size_of(parts))),
    "torch.serialization._get_layout": Known(_ignored),
    f"{_METADATA}._MEM_FORMAT_ENCODING": Known(_ignored),
    f"{_METADATA}.BytesStorageMetadata": Known(BytesStorageMetadata),
    f"{_METADATA}.ChunkStorageMetadata": Known(_chunk, takes_state=True),
    f"{_METADATA}.Metadata": Known(_metadata, takes_state=True),
    f"{_METADATA}.MetadataIndex": Known(_index, takes_state=True),
    f"{_METADATA}.StorageMeta": Known(_storage_meta, takes_state=True),
    f"{_METADATA}.TensorProperties": Known(_properties, takes_state=True),
    f"{_METADATA}.TensorStorageMetadata": Known(_tensor, takes_state=True),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Known(_stored, takes_state=True),
    **{
        f"{module}.{name}": Known(_ignored)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def _known(name: str) -> Known:
    if name not in _KNOWN:
        _damaged(f"it refers to {name}, which metadata does not consist of")
    return _KNOWN[name]


def _check_stored(directory: Path, metadata: Metadata) -> None:
    """Raise ``BadPickle`` unless all pieces are stored, inside of their tensor and their file, and apart.

    One piece for any number of entries would take any amount of memory.
    """
    files = {name: _file(directory, name) for name in {piece.name for piece in metadata.storage_data.values()}}
    for piece in metadata.storage_data.values():
        need, size = piece.offset + piece.length, files[piece.name].st_size
        if need > size:
            _damaged(f"{piece.name} is truncated: expected {need} bytes or more, got {size} bytes")
    for key, entry in metadata.state_dict_metadata.items():
        _check_entry(key, entry, metadata.storage_data)
    # One file may have several names: links.
    ids = {name: (status.st_dev, status.st_ino) for name, status in files.items()}
    pieces = sorted((ids[piece.name], piece.offset, piece, key.fqn) for key, piece in metadata.storage_data.items())
    for (one, _, before, key), (another, _, after, other) in pairwise(pieces):
        if one == another and after.offset < before.offset + before.length:
            whose = f"{key!r}" if key == other else f"{key!r} and {other!r}"
            _damaged(f"the pieces of {whose} overlap in {after.name}")


def _file(directory: Path, name: str) -> os.stat_result:
    try:
        return inside(directory, name, directory / METADATA).stat()
    except (OSError, CheckpointError) as error:
        _damaged(str(error).removeprefix("read: ").rstrip("."))


def _check_entry(key: str, entry: TensorStorageMetadata | BytesStorageMetadata, stored: Mapping[Any, Stored]) -> None:
    if isinstance(entry, BytesStorageMetadata):
        if MetadataIndex(key) not in stored:
            _damaged(f"it does not say where {key} is stored")
        return
    itemsize = entry.properties.dtype.itemsize
    if math.prod(entry.size) * itemsize > _LARGEST:
        _damaged(f"{key} has the impossible size {tuple(entry.size)}")
    for chunk in entry.chunks:
        where = f"at {tuple(chunk.offsets)}"
        stops = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        is_inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and all(map(le, stops, entry.size))
        if not is_inside:
            _damaged(f"a piece of {key} lies {where} with the size {tuple(chunk.sizes)}: not in {tuple(entry.size)}")
        piece = stored.get(MetadataIndex(key, chunk.offsets))
        if piece is None:
            _damaged(f"it does not say where the piece of {key} {where} is stored")
        need = math.prod(chunk.sizes) * itemsize
        if piece.length < need:
            _damaged(f"a piece of {key} is stored in {piece.length} bytes: expected {need} or more")
