"""Where a checkpoint is written: under a temporary name, which its files lose once all of them are on the disk."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from statetree.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from statetree.files.remote import RemotePath

_METADATA: Final = ".metadata"
#: What statetree.dcp writes beside it.
_MANIFEST: Final = ".statetree_manifest"
_LONGEST_NAME: Final = 100
_OTHER_NAME: Final = "Choose another name (convert: or pass --force to replace it)."
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
        _refuse(path, "it exists already", _OTHER_NAME)
    if is_directory:
        if not path.is_dir() or path.is_symlink():
            _refuse(path, "it is no directory", "Choose another name.")
        other = next((file for file in sorted(path.iterdir()) if not _is_part(file)), None)
        if other is not None:
            what = f"it holds {other.name!r}, which is no part of a DCP checkpoint, and is not removed"
            _refuse(path, what, "Choose another name.")
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
    """Write a checkpoint to a folder beside it, and rename its files. What was there stays if writing fails.

    Args:
        path: Where it is written.
        write: Writes files into a folder and returns their names, the one that speaks of the others last.
        is_directory: Whether the folder itself is the checkpoint.
        overwrite: Whether what is there is replaced.
        protected: Files and directories of which none is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    target = path.parent.resolve() / path.name
    check_destination(target, is_directory=is_directory, overwrite=overwrite)
    _check_protected(path, [target], protected)
    folder = target.with_name(f".{target.name[:_LONGEST_NAME]}.partial-{uuid.uuid4().hex}")
    try:
        folder.mkdir()
        names = write(folder)
        for name in names:
            sync(folder / name)
        sync(folder)
        check_destination(target, is_directory=is_directory, overwrite=overwrite)
        home = target if is_directory else target.parent
        old = [] if not target.exists() else list(target.iterdir()) if is_directory else _shards_of(target)
        if is_directory and not old:
            folder.rename(target)
        else:
            there = [home / name for name in names if os.path.lexists(home / name)]
            if there and not overwrite:
                _refuse(there[0], "it exists already", _OTHER_NAME)
            _check_protected(path, [*there, *old], protected)
            _publish(folder, names, home, old)
            sync(home)
        sync(target.parent)
    except (OSError, CheckpointError) as failure:
        error = failure.__cause__ if isinstance(failure, CheckpointError) else failure
        if not isinstance(error, OSError):
            raise
        remedy = "Make room." if error.errno in _FULL else "Check its permissions, and the disk."
        _refuse(path, error.strerror or str(error), remedy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


#: Has every rank that takes part do something, and all raise if one fails.
Together = Callable[[Callable[[], Any]], Any]


def upload_whole(
    place: RemotePath, write: Callable[[Path], list[str]], together: Together, *, is_directory: bool, overwrite: bool
) -> None:
    """Write a checkpoint to a local folder, on each rank its own, and upload its files.

    The one that speaks of the others comes last, on the rank that wrote it, and goes first where an old checkpoint is
    replaced: what is read at any time is a whole checkpoint, or none. Other files of an old one are left.

    Args:
        place: Where it goes.
        write: As for ``write_whole``; on ranks that do not speak of the others it returns nothing.
        together: Has all ranks do something.
        is_directory: As for ``write_whole``.
        overwrite: As for ``write_whole``.
    """
    home = place if is_directory else place.parent
    with TemporaryDirectory() as name:
        folder = Path(name)
        names: list[str] = []

        def prepare() -> None:
            names.extend(write(folder))
            there = [name for name in names if (home / name).exists()]
            if there and not overwrite:
                msg = f"save: cannot write {home / there[0]}: it exists already. {_OTHER_NAME}"
                raise CheckpointError(msg)
            if len(names) > 1:
                (home / names[-1]).unlink()

        def upload() -> None:
            for file in sorted(folder.iterdir()):
                if file.name not in names[-1:]:
                    (home / file.name).upload(file)

        together(prepare)
        together(upload)

        def commit() -> None:
            for last in names[-1:]:
                (home / last).upload(folder / last)

        together(commit)


def _publish(folder: Path, names: Sequence[str], home: Path, old: Iterable[Path]) -> None:
    """Rename each file to its place, and remove what else there was of an old checkpoint.

    Of several, the one that speaks of the others is taken away first and comes last: what is read at any time is the
    old checkpoint, the new one or none, and never files of both.
    """
    targets = [home / name for name in names]
    if len(targets) > 1:
        targets[-1].unlink(missing_ok=True)
    for target in targets:
        (folder / target.name).replace(target)
    for file in set(old).difference(targets):
        file.unlink(missing_ok=True)


def _check_protected(path: Path, replaced: Iterable[Path], protected: Collection[Path]) -> None:
    """Raise ``CheckpointError`` if what is replaced is a protected file, under any name, or has one in it."""
    # What is read from elsewhere is a `RemotePath`, and cannot be replaced here.
    near = [file for file in protected if isinstance(cast("Any", file), Path)]
    kept = {each for file in near for each in (file, *file.resolve().parents)}
    kept_ids = {(about.st_dev, about.st_ino) for about in (each.stat() for each in kept if each.exists())}
    for part in replaced:
        if part.exists() and (part.stat().st_dev, part.stat().st_ino) in kept_ids:
            what = f"it would replace {part.name}, which is being read, and lose what is not written"
            _refuse(path, what, "Choose another name.")


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


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
