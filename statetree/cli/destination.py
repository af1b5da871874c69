"""Where a checkpoint is written: it appears there whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from statetree.cli.digests import digests_path
from statetree.cli.formats.safetensors_writer import INDEX
from statetree.dcp.directories import sync_directory
from statetree.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_METADATA: Final = ".metadata"
_MAX_INDEX_BYTES: Final = 256 << 20
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
        if not (path / _METADATA).is_file() and any(path.iterdir()):
            _refuse(path, "it is a directory of other files, which --force does not remove", "Choose another name.")
    elif not path.is_file():
        _refuse(path, "it is no regular file", "Choose another name.")


def _refuse(path: Path, what: str, remedy: str) -> None:
    msg = f"convert: cannot write {path}: {what}. {remedy}"
    raise CheckpointError(msg)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a folder beside a path for the block to write to. It is removed in the end, with what is still in it."""
    folder = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, path: Path, names: Sequence[str], *, is_directory: bool, force: bool) -> None:
    """Move what was written to where it belongs.

    Args:
        folder: Where it was written.
        path: The destination: the file that is opened to read it all. A directory takes the place of the whole folder.
        names: The files in the folder, in the order in which they are to appear.
        is_directory: Whether the destination is a directory.
        force: Whether what is there is replaced.
    """
    for name in names:
        _sync(folder / name)
    sync_directory(folder)
    if is_directory:
        _publish_directory(folder, path, force=force)
    else:
        _publish_files(folder, path, names, force=force)
    sync_directory(path.parent)


def _publish_directory(folder: Path, path: Path, *, force: bool) -> None:
    aside = path.with_name(f".{path.name}.removed-{uuid.uuid4().hex}")
    if force and path.exists():
        os.rename(path, aside)
    try:
        os.rename(folder, path)
    except OSError as error:
        if aside.exists():
            os.rename(aside, path)
        _refuse(path, f"it cannot be put there: {error}", "Choose another name.")
    shutil.rmtree(aside, ignore_errors=True)


def _publish_files(folder: Path, path: Path, names: Sequence[str], *, force: bool) -> None:
    placed: list[Path] = []
    targets = [path.with_name(name) for name in names]
    replaced: list[Path] = []
    if force:
        replaced = [shard for shard in _shards_of(path) if shard not in targets]
        digests_path(path, is_directory=False).unlink(missing_ok=True)
        if targets[0] != path:
            path.unlink(missing_ok=True)  # an index must not speak of other files than its own
    try:
        for name, target in zip(names, targets, strict=True):
            _place(folder / name, target, force=force)
            placed.append(target)
    except BaseException:
        for target in placed:
            with suppress(OSError):
                target.unlink()
        raise
    for shard in replaced:
        with suppress(OSError):
            shard.unlink()


def _shards_of(path: Path) -> list[Path]:
    """Return the shards beside an index that it names, if they have the names that are given to shards here."""
    stem = path.name.removesuffix(INDEX)
    if stem == path.name or not path.is_file() or path.stat().st_size > _MAX_INDEX_BYTES:
        return []
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # it is no index of ours
        return []
    is_shard = re.compile(rf"{re.escape(stem)}-\d{{5,}}-of-\d{{5,}}\.safetensors")
    return [path.with_name(name) for name in sorted(names, key=str) if type(name) is str and is_shard.fullmatch(name)]


def _place(source: Path, target: Path, *, force: bool) -> None:
    """Give a file its name, which nothing else gets in between."""
    if force:
        os.replace(source, target)
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
