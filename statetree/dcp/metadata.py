"""DCP's metadata, read from a file that nobody vouches for.

DCP pickles its metadata, and unpickling can run any code, or crash. Here what is pickled becomes plain data of checked
arguments; names of other classes than metadata consists of are refused.
"""

from __future__ import annotations

import math
import reprlib
from itertools import pairwise
from operator import add, le
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

import torch

from statetree.chunks.boxes import Box, whole_box
from statetree.dcp.file_manifest import ID_PREFIX, MANIFEST, FileManifest, Index, Stored, read_manifest, regular_bytes
from statetree.errors import CheckpointError, suppress, unsignalled
from statetree.files.pickled_tensors import size_of
from statetree.files.remote import RemotePath
from statetree.files.unpickling import BadPickle, Known, read_pickle
from statetree.files.untrusted import inside, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    from statetree.dcp.file_manifest import ManifestFile

METADATA: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_MAX_BYTES: Final = 2 << 30
_MAX_TOLD: Final = 1000
_LARGEST: Final = 2**62
#: In how many folders on a server a checkpoint is looked for: each is a request.
_MOST_ASKED: Final = 100

T = TypeVar("T")


class StoredEntry(NamedTuple):
    """A tensor of a checkpoint: its dtype and shape, and the boxes that it is stored in. A plain value has no dtype."""

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()


class Described(NamedTuple):
    """What a checkpoint holds, and where."""

    entries: dict[str, StoredEntry]
    pieces: dict[Index, Stored]
    paths: dict[str, tuple[str | int, ...]]  # how DCP nests entries
    save: str | None  # which left a manifest, if one did
    files: Mapping[str, ManifestFile] | None = None  # what that lists


def read_described(directory: Path, *, verify: bool) -> Described:
    """Read a directory's metadata, without running code in them, and the manifest if the save that they name left one.

    Every name in them stays inside the directory, every piece lies inside its file, apart from the others, is as long
    as its tensor needs, and lies inside the tensor that it is a piece of. Anything else raises ``CheckpointError``.
    Unless ``verify`` is set, a manifest that is missing or damaged is passed over.
    """
    data, manifest, cause = _content(directory), None, None
    try:
        manifest = read_manifest(directory)
        absence = f"it has no {MANIFEST} file, though it was saved with one: it was copied in part"
        fault = absence if manifest is None else manifest.fault_of(data)
    except CheckpointError as error:
        fault, cause = str(error), error
    if manifest is not None and manifest.entries and not fault:
        with suppress(BadPickle, TypeError, ValueError, KeyError):  # else the metadata tell what is wrong
            found = _listed(manifest)
            _check_pieces(directory, found)
            return found
    found = _parsed(directory, data)
    if found.save is None and not (verify and manifest is not None and _has_listed_files(directory, found, manifest)):
        return found
    if manifest is not None and found.save not in (manifest.save, None):
        _refuse_mixture(directory, f"{METADATA} is of the save {found.save}, {MANIFEST} of {manifest.save}")
    if verify and fault:
        raise CheckpointError(
            f"load: cannot read the checkpoint {directory}: {fault}. Load another checkpoint, or pass verify=False "
            "to read it all the same."
        ) from cause
    if verify:
        _refuse_mixture(directory, f"{MANIFEST} does not list what {METADATA} does")
    return found


def _listed(manifest: FileManifest) -> Described:
    """Return what a manifest tells of the metadata that it was written with."""
    entries = {key: StoredEntry() if row is None else _listed_tensor(*row) for key, row in manifest.entries.items()}
    pieces = {index: stored for file in manifest.files.values() for index, stored in file.pieces.items()}
    return Described(entries, pieces, {}, manifest.save, manifest.files)


def _listed_tensor(dtype: Any, shape: Any, *boxes: Any) -> StoredEntry:
    size = size_of(shape)
    found = tuple([_box(size_of(start), size_of(sizes)) for start, sizes in boxes]) or (whole_box(size),)
    return StoredEntry(_DTYPES[dtype], size, found)


def _has_listed_files(directory: Path, found: Described, manifest: FileManifest) -> bool:
    """Whether the files are those of a manifest: then metadata that name no save are damaged. DCP leaves a manifest."""
    sizes = {name: file.nbytes for name, file in manifest.files.items()}
    names = {stored.name for stored in found.pieces.values()}
    return all(sizes.get(name) == (directory / name).stat().st_size for name in names)


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
    except unsignalled(OSError) as error:
        _raise_unreadable(directory, error)
    except CheckpointError as error:
        msg = f"load: the metadata of the checkpoint {directory} cannot be read: {error}. Load another checkpoint."
        raise CheckpointError(msg) from None


def _parsed(directory: Path, data: bytes) -> Described:
    try:
        found = _of(Described, read_pickle(data, _known)[0])
        _check_pieces(directory, found)
    except BadPickle as bad:
        raise CheckpointError(
            f"load: the metadata of the checkpoint {directory} cannot be read: {printable(str(bad)[:_MAX_TOLD])}. "
            f"It is damaged, hostile, or of an unknown version; {METADATA} was not executed. Load another checkpoint."
        ) from None
    return found


def _raise_unreadable(directory: Path, error: OSError) -> NoReturn:
    if not directory.exists():
        what = "there is no such directory"
    elif not directory.is_dir():
        what = "it is not a directory"
    elif isinstance(error, FileNotFoundError):
        what = f"it has no {METADATA} file: it is no checkpoint of torch.distributed.checkpoint, or an incomplete one"
        if inside_it := _checkpoints_in(directory):
            count = f"{len(inside_it)}{' or more' if len(inside_it) == _MOST_ASKED else ''}"
            what = f"{what}. {count} checkpoints lie in it, the last of them {printable(inside_it[-1])}"
    else:
        what = f"{METADATA} cannot be opened: {error}"
    msg = f"load: cannot read the checkpoint {directory}: {what}. Pass the directory of a complete checkpoint."
    raise CheckpointError(msg) from error


def _checkpoints_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints that lie in a directory. Of a server's, the last ones."""
    found: list[str] = []
    with suppress(OSError):
        folders = sorted(directory.iterdir())
        for folder in folders[-_MOST_ASKED:] if isinstance(cast("Any", directory), RemotePath) else folders:
            with suppress(OSError):
                found += [folder.name] if (folder / METADATA).exists() else []
    return found


def _of(cls: type[T], value: Any) -> T:
    """Return a value that must be of a class."""
    if type(value) is not cls:
        raise BadPickle(f"expected a {cls.__name__}, got a {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise BadPickle(f"expected an offset or a length, got {reprlib.repr(value)}")
    return value


def _chunk(state: Any) -> Box:
    return _box(_of(torch.Size, state["offsets"]), _of(torch.Size, state["sizes"]))


def _box(start: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    if len(start) != len(sizes):
        raise BadPickle(f"a piece lies at {tuple(start)} with the size {tuple(sizes)}")
    return Box(tuple(start), (*map(add, start, sizes),))


def _tensor(state: Any) -> StoredEntry:
    dtype = _of(torch.dtype, state["properties"])
    boxes = tuple([_of(Box, chunk) for chunk in _of(list, state["chunks"])])
    return StoredEntry(dtype, tuple(_of(torch.Size, state["size"])), boxes)


def _index(state: Any) -> Index:
    offset = state.get("offset")
    return Index(_of(str, state["fqn"]), None if offset is None else tuple(_of(torch.Size, offset)))


def _stored(state: Any) -> Stored:
    if state.get("transform_descriptors"):
        remedy = "Load it with torch.distributed.checkpoint, and save it again"
        raise BadPickle(f"it is transformed (compressed, say): expected plain files. {remedy}")
    return Stored(_of(str, state["relative_path"]), _number(state["offset"]), _number(state["length"]))


def _metadata(state: Any) -> Described:
    entries, pieces = _of(dict, state["state_dict_metadata"]), _of(dict, state["storage_data"])
    for key, entry in entries.items():
        _of(str, key)
        _of(StoredEntry, entry)
    for index, piece in pieces.items():
        _of(Index, index)
        _of(Stored, piece)
    given, name = state.get("planner_data"), state.get("storage_meta")
    is_ours = isinstance(name, str) and name.startswith(ID_PREFIX)
    paths = {
        key: path
        for key, path in (given.items() if type(given) is dict else ())
        if type(key) is str and type(path) is tuple and path and all(type(step) in (str, int) for step in path)
    }
    return Described(entries, pieces, paths, name.removeprefix(ID_PREFIX) if is_ours else None)


_DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
#: What is not read here: layouts, memory formats, where the checkpoint was.
_IGNORED: Final = Known(lambda *_: None)
#: What torch 2.11 to 2.15 pickle as metadata.
_KNOWN: Final[dict[str, Known]] = {
    **{name: Known(value=dtype) for name, dtype in _DTYPES.items()},
    "torch.Size": Known(lambda parts: torch.Size(size_of(parts))),
    "torch.serialization._get_layout": _IGNORED,
    f"{_METADATA}._MEM_FORMAT_ENCODING": _IGNORED,
    f"{_METADATA}.BytesStorageMetadata": Known(lambda: StoredEntry()),  # which takes nothing from a file
    f"{_METADATA}.ChunkStorageMetadata": Known(_chunk, takes_state=True),
    f"{_METADATA}.Metadata": Known(_metadata, takes_state=True),
    f"{_METADATA}.MetadataIndex": Known(_index, takes_state=True),
    f"{_METADATA}.StorageMeta": Known(lambda state: state.get("save_id"), takes_state=True),
    f"{_METADATA}.TensorProperties": Known(lambda state: _of(tuple, state)[0], takes_state=True),
    f"{_METADATA}.TensorStorageMetadata": Known(_tensor, takes_state=True),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Known(_stored, takes_state=True),
    **{
        f"{module}.{name}": _IGNORED
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def _known(name: str) -> Known:
    if name not in _KNOWN:
        raise BadPickle(f"it refers to {name}, which metadata does not consist of")
    return _KNOWN[name]


def _check_pieces(directory: Path, found: Described) -> None:
    """Raise ``BadPickle`` unless all pieces are stored, inside of their tensor and their file, and apart.

    One piece for any number of entries would take any amount of memory.
    """
    files = {name: _file(directory, name) for name in {piece.name for piece in found.pieces.values()}}
    for piece in found.pieces.values():
        need, size = piece.offset + piece.length, files[piece.name].st_size
        if need > size:
            raise BadPickle(f"{piece.name} is truncated: expected {need} bytes or more, got {size} bytes")
    for key, entry in found.entries.items():
        _check_entry(key, entry, found.pieces)
    # One file may have several names: links.
    ids = {name: (about.st_dev, about.st_ino) for name, about in files.items()}
    pieces = sorted((ids[piece.name], piece.offset, piece, index.key) for index, piece in found.pieces.items())
    for (one, _, before, key), (another, _, after, other) in pairwise(pieces):
        if one == another and after.offset < before.offset + before.length:
            whose = f"{key!r}" if key == other else f"{key!r} and {other!r}"
            raise BadPickle(f"the pieces of {whose} overlap in {after.name}")


def _file(directory: Path, name: str) -> os.stat_result:
    try:
        return inside(directory, name, directory / METADATA).stat()
    except unsignalled(OSError, CheckpointError) as error:
        raise BadPickle(str(error).removeprefix("read: ").rstrip(".")) from error


def _check_entry(key: str, entry: StoredEntry, pieces: Mapping[Index, Stored]) -> None:
    if entry.dtype is None:
        if Index(key, None) not in pieces:
            raise BadPickle(f"it does not say where {key} is stored")
        return
    if math.prod(entry.shape) * entry.dtype.itemsize > _LARGEST:
        raise BadPickle(f"{key} has the impossible size {entry.shape}")
    for box in entry.boxes:
        if len(box.stop) != len(entry.shape) or not all(map(le, box.stop, entry.shape)):
            raise BadPickle(f"a piece of {key} lies at {box.start} with the size {box.sizes}: not in {entry.shape}")
        piece = pieces.get(Index(key, box.start))
        if piece is None:
            raise BadPickle(f"it does not say where the piece of {key} at {box.start} is stored")
        need = box.volume * entry.dtype.itemsize
        if piece.length < need:
            raise BadPickle(f"a piece of {key} is stored in {piece.length} bytes: expected {need} or more")
