"""Where a checkpoint is written: it appears there whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final, NoReturn

from statetree.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

_METADATA: Final = ".metadata"
#: What statetree.dcp writes beside it.
_MANIFEST: Final = ".statetree_manifest"
_LONGEST_NAME: Final = 100
#: Where new files are written to, and old ones are moved to, until the new ones have their names.
_NEW: Final = "files"
_OLD: Final = "replaced"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
_MAX_INDEX_BYTES: Final = 256 << 20
_SHARD: Final = r"-\d{5,}-of-\d{5,}\.safetensors"


def check_destination(path: Path, *, is_directory: bool, overwrite: bool) -> None:
    """Raise unless something may be written there.

    Raises:
        CheckpointError: If there is something already that may not be overwritten, or is no checkpoint; or if the
            directory above is missing.
    """
    if not path.parent.is_dir():
        _refuse(path, "its directory does not exist", "Make it first.")
    if not os.path.lexists(path):
        return
    if not overwrite:
        _refuse(path, "it exists already", "Choose another name (convert: or pass --force to replace it).")
    if is_directory:
        if not path.is_dir() or path.is_symlink():
            _refuse(path, "it is no directory", "Choose another name.")
        other = next((file for file in sorted(path.iterdir()) if not _is_part(file)), None)
        if other is not None or (any(path.iterdir()) and not (path / _METADATA).is_file()):
            what = f"it holds {other.name!r}, which is" if other else "what it holds is"
            _refuse(path, f"{what} no part of a DCP checkpoint, and is not removed", "Choose another name.")
    elif not path.is_file():
        _refuse(path, "it is no regular file", "Choose another name.")


def _is_part(file: Path) -> bool:
    """Whether something in a directory is, by its name, a file of a DCP checkpoint."""
    return (
        (file.suffix == ".distcp" or file.name in (_METADATA, _MANIFEST)) and file.is_file() and not file.is_symlink()
    )


def _refuse(path: Path, what: str, remedy: str) -> NoReturn:
    msg = f"save: cannot write {path}: {what}. {remedy}"
    raise CheckpointError(msg)


def write_whole(
    path: Path,
    write: Callable[[Path], list[str]],
    *,
    is_directory: bool,
    overwrite: bool,
    protected: Collection[Path] = (),
) -> None:
    """Write a checkpoint to a folder beside its place, and move it there. If that fails, what was there stays.

    Args:
        path: Its place.
        write: Writes files into a folder and returns their names. They appear in this order.
        is_directory: Whether the folder itself is the checkpoint.
        overwrite: Whether what is there is replaced.
        protected: Files and directories of which none is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    place = path.parent.resolve() / path.name
    check_destination(place, is_directory=is_directory, overwrite=overwrite)
    _check_protected(path, [place], protected)
    try:
        with _folder_beside(place) as outer:
            folder = outer / _NEW
            folder.mkdir()  # with the permissions that the user's umask gives
            names = write(folder)
            check_destination(place, is_directory=is_directory, overwrite=overwrite)
            for name in names:
                sync(folder / name)
            sync(folder)
            moves = {folder: place} if is_directory else {folder / name: place.with_name(name) for name in names}
            old = _replaced(place, moves.values()) if overwrite else []
            _check_protected(path, old, protected)
            _publish(place, moves, old, outer / _OLD)
            sync(place.parent)
    except (OSError, CheckpointError) as failure:
        error = failure.__cause__ if isinstance(failure, CheckpointError) else failure
        if not isinstance(error, OSError):
            raise
        remedy = "Make room." if error.errno in _FULL else "Check its permissions, and the disk."
        _refuse(path, error.strerror or str(error), remedy)


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Make a folder beside a path, which nobody else can read. It is removed in the end.

    Only what was replaced, and could not be put back, stays in it.
    """
    folder = path.with_name(f".{path.name[:_LONGEST_NAME]}.partial-{uuid.uuid4().hex}")
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            _remove(folder / _NEW)
        finally:
            for empty in (folder / _OLD, folder):
                with suppress(OSError):
                    empty.rmdir()


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:  # an interrupt: it is removed all the same
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _check_protected(path: Path, replaced: Iterable[Path], protected: Collection[Path]) -> None:
    """Raise ``CheckpointError`` if what is replaced is a protected file, under any name, or has one in it."""
    kept = {each for file in protected for each in (file, *file.resolve().parents)}
    kept_ids = {(about.st_dev, about.st_ino) for about in (each.stat() for each in kept if each.exists())}
    for part in replaced:
        if part.exists() and (part.stat().st_dev, part.stat().st_ino) in kept_ids:
            what = f"it would replace {part.name}, which is being read, and lose what is not written"
            _refuse(path, what, "Choose another name.")


def _publish(path: Path, moves: dict[Path, Path], old: Sequence[Path], aside: Path) -> None:
    if len(moves) == 1 and old == [path] and path.is_file():
        os.replace(next(iter(moves)), path)  # at no time is there none
        return
    aside.mkdir()
    with ExitStack() as undo:
        for place in old:
            undo.callback(_bring_back, aside, place)  # before it is done: an interrupt may come in between
            os.rename(place, aside / place.name)
        for source, target in moves.items():
            undo.callback(_take_back, source, target)
            _place(source, target)
        undo.pop_all()
    _remove(aside)


def _replaced(path: Path, targets: Iterable[Path]) -> list[Path]:
    """Return what is there of a checkpoint that is to be replaced: first the file that speaks of the others."""
    return [part for part in dict.fromkeys([path, *_shards_of(path), *targets]) if os.path.lexists(part)]


def _shards_of(path: Path) -> list[Path]:
    """Return the shards that an index names, if they have the names that are given to shards here."""
    stem = path.name.removesuffix(".index.json")
    if stem == path.name or not path.is_file() or path.stat().st_size > _MAX_INDEX_BYTES:
        return []
    try:
        names = set(json.loads(path.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # it is no index of ours
        return []
    is_shard = re.compile(re.escape(stem.removesuffix(".safetensors")) + _SHARD)
    return [path.with_name(name) for name in sorted(names, key=str) if type(name) is str and is_shard.fullmatch(name)]


def _bring_back(aside: Path, place: Path) -> None:
    try:
        if os.path.lexists(aside / place.name):
            os.rename(aside / place.name, place)
    except OSError as error:
        what = f"what was there cannot be put back: {error.strerror or error}. It lies in {aside}"
        _refuse(place, what, "Move it back.")


def _take_back(source: Path, target: Path) -> None:
    """Undo ``_place``, if it was done."""
    with suppress(OSError):
        if not source.exists():
            os.rename(target, source)
        elif target.exists() and source.samefile(target):  # a second name of it
            target.unlink()


def _place(source: Path, target: Path) -> None:
    """Give a file or directory its name, which nothing else gets in between."""
    if source.is_dir():
        os.rename(source, target)
        return
    try:
        os.link(source, target)
    except FileExistsError:
        _refuse(target, "it exists already", "Choose another name (convert: or pass --force to replace it).")
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(target):
            raise
        os.rename(source, target)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
