"""A checkpoint's metadata and manifest, read and compared with the files that they tell of."""

from __future__ import annotations

import math
from itertools import pairwise
from operator import le
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from statetree.chunks.boxes import whole_box
from statetree.dcp.file_manifest import MANIFEST, FileManifest, Index, Stored, read_manifest, regular_bytes
from statetree.dcp.metadata_pickle import DTYPES, LARGEST, Described, StoredEntry, box_of, read_metadata
from statetree.declare import without_collections
from statetree.errors import CheckpointError, suppress, unsignalled
from statetree.files.pickled_tensors import size_of
from statetree.files.remote import RemotePath
from statetree.files.unpickling import BadPickle
from statetree.files.untrusted import inside, leads_out, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

METADATA: Final = ".metadata"
_MAX_BYTES: Final = 2 << 30
_MAX_TOLD: Final = 1000
#: In how many folders on a server a checkpoint is looked for: each is a request.
_MOST_ASKED: Final = 100


@without_collections
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
    found = tuple([box_of(size_of(start), size_of(sizes)) for start, sizes in boxes]) or (whole_box(size),)
    return StoredEntry(DTYPES[dtype], size, found)


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
    if leads_out(path, directory):
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
        found = read_metadata(data)
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
    if math.prod(entry.shape) * entry.dtype.itemsize > LARGEST:
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
