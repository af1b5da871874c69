"""Where a checkpoint is written: it appears there whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import uuid
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Final, NoReturn

from statetree.cli.digests import digests_path
from statetree.dcp.directories import sync_directory
from statetree.dcp.file_manifest import MANIFEST
from statetree.errors import CheckpointError
from statetree.files.safetensors_writer import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_METADATA: Final = ".metadata"
_PIECES: Final = ".distcp"
_LONGEST_NAME: Final = 100
_MAX_INDEX_BYTES: Final = 256 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


def check_destination(path: Path, *, is_directory: bool, force: bool) -> None:
    """Raise unless something may be written there.

    Raises:
        CheckpointError: If there is something already and ``force`` is not set, or what is there is no checkpoint; or
            if the directory above is missing.
    """
    if not path.parent.is_dir():
        _refuse(path, "its directory does not exist", "Make it first.")
    if not os.path.lexists(path):
        return
    if not force:
        _refuse(path, "it exists already", "Choose another name, or pass --force to replace it.")
    if is_directory:
        if not path.is_dir() or path.is_symlink():
            _refuse(path, "it is no directory", "Choose another name.")
        other = next((file for file in sorted(path.iterdir()) if not _is_part(file)), None)
        if other is not None or (any(path.iterdir()) and not (path / _METADATA).is_file()):
            what = f"it holds {other.name!r}, which is" if other else "what it holds is"
            _refuse(path, f"{what} no part of a DCP checkpoint: --force does not remove that", "Choose another name.")
    elif not path.is_file():
        _refuse(path, "it is no regular file", "Choose another name.")


def _is_part(file: Path) -> bool:
    """Whether something in a directory is, by its name, a file of a DCP checkpoint."""
    names = (_METADATA, MANIFEST, digests_path(file.parent, is_directory=True).name)
    is_named_so = file.suffix == _PIECES or file.name in names
    return is_named_so and file.is_file() and not file.is_symlink()


def absolute(path: Path) -> Path:
    """Return where a destination lies, even if the current directory is what it replaces. A link stays one."""
    return path.parent.resolve() / path.name if path.name else path.resolve()


def _refuse(path: Path, what: str, remedy: str) -> NoReturn:
    msg = f"convert: cannot write {path}: {what}. {remedy}"
    raise CheckpointError(msg)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Say of errors of the system in the block that they are about a destination."""
    try:
        yield
    except OSError as error:
        remedy = "Make room." if error.errno in _FULL else "Check its permissions, and the disk."
        _refuse(path, error.strerror or str(error), remedy)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a folder beside a path for the block to write to, which nobody else can read.

    It is removed in the end, with what is still in it.
    """
    folder = _new_name(path, "partial")
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)


def _new_name(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name[:_LONGEST_NAME]}.{what}-{uuid.uuid4().hex}")


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:  # an interrupt: the next one is ignored
        shutil.rmtree(folder, ignore_errors=True)
        raise


def keep_private(folder: Path, names: Sequence[str], sources: Sequence[Path]) -> None:
    """Take away permissions from files that what they were made of does not give, either."""
    allowed = stat.S_IRUSR | stat.S_IWUSR | _common_mode(sources)
    for name in names:
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        if mode & ~allowed:
            (folder / name).chmod(mode & allowed)


def _common_mode(files: Sequence[Path]) -> int:
    return reduce(and_, (file.stat().st_mode for file in files), 0o777)


def publish(folder: Path, path: Path, names: Sequence[str], *, is_directory: bool, force: bool) -> None:
    """Move what was written to where it belongs. If that fails, what was there is there again.

    Args:
        folder: Where it was written.
        path: The destination: the file that is opened to read it all. A directory takes the place of the whole folder.
        names: The files in the folder, in the order in which they are to appear.
        is_directory: Whether the destination is a directory.
        force: Whether what is there is replaced.
    """
    for name in names:
        _sync(folder / name)
    if is_directory:
        _open_up(folder, [folder / name for name in names])
    sync_directory(folder)
    moves = {folder: path} if is_directory else {folder / name: path.with_name(name) for name in names}
    old = _replaced(path, list(moves.values()), is_directory=is_directory) if force else []
    if not is_directory and len(moves) == 1 and old == [path]:
        os.replace(folder / names[0], path)  # at no time is there none
    else:
        with _set_aside(path, old), ExitStack() as undo:
            for source, target in moves.items():
                undo.callback(_take_back, source, target)  # before it is done: an interrupt may come in between
                _place(source, target)
            undo.pop_all()
    sync_directory(path.parent)


def _open_up(folder: Path, files: Sequence[Path]) -> None:
    """Let those enter a folder who may read all that is in it, and those change it who may change that."""
    allowed = _common_mode(files) & 0o666
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | allowed | (allowed & 0o444) >> 2)


def _replaced(path: Path, targets: Sequence[Path], *, is_directory: bool) -> list[Path]:
    """Return what is there of a checkpoint that is to be replaced: first the file that speaks of the others."""
    if is_directory:
        return [path] if path.exists() else []
    parts = dict.fromkeys([path, digests_path(path, is_directory=False), *_shards_of(path), *targets])
    return [part for part in parts if part.is_file() or part.is_symlink()]


@contextmanager
def _set_aside(path: Path, old: Sequence[Path]) -> Iterator[None]:
    """Move files or directories away while the block puts others in their places. If it fails, they come back."""
    aside = _new_name(path, "removed")
    with ExitStack() as undo:
        undo.callback(_remove_if_empty, aside)
        if old:
            aside.mkdir(mode=0o700)
        for place in old:
            undo.callback(_bring_back, aside, place)
            os.rename(place, aside / place.name)
        yield
        undo.pop_all()
    _remove(aside)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _bring_back(aside: Path, place: Path) -> None:
    try:
        if os.path.lexists(aside / place.name):
            os.rename(aside / place.name, place)
    except OSError as error:
        _refuse(place, f"what was there cannot be put back ({error.strerror or error})", f"It is in {aside}.")


def _take_back(source: Path, target: Path) -> None:
    """Undo ``_place``, if it was done."""
    with suppress(OSError):
        if not source.exists():
            os.rename(target, source)
        elif target.exists() and source.samefile(target):  # a second name of it
            target.unlink()


def _shards_of(path: Path) -> list[Path]:
    """Return the shards beside an index that it names, if they have the names that are given to shards here."""
    stem = path.name.removesuffix(INDEX)
    if stem == path.name or not path.is_file() or path.stat().st_size > _MAX_INDEX_BYTES:
        return []
    try:
        names = set(json.loads(path.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # it is no index of ours
        return []
    is_shard = re.compile(rf"{re.escape(stem)}-\d{{5,}}-of-\d{{5,}}\.safetensors")
    return [path.with_name(name) for name in sorted(names, key=str) if type(name) is str and is_shard.fullmatch(name)]


def _place(source: Path, target: Path) -> None:
    """Give a file or directory its name, which nothing else gets in between."""
    if source.is_dir():
        os.rename(source, target)
        return
    try:
        os.link(source, target)
    except FileExistsError:
        _refuse(target, "it exists already", "Choose another name, or pass --force to replace it.")
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(target):
            raise
        os.rename(source, target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
