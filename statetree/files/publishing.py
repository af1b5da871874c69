"""Where a checkpoint is written: under a temporary name, which its files lose once all of them are on the disk."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import filecmp
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakValueDictionary

from statetree.declare import renew_after_fork
from statetree.errors import CheckpointError, suppress, unsignalled
from statetree.files.hugging_face import INDEX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from statetree.files.remote import RemotePath

#: What DCP writes in a directory, and what statetree.dcp writes beside it.
_DIRECTORY_FILES: Final = (".metadata", ".statetree_manifest")
_LONGEST_NAME: Final = 100
_OTHER_NAME: Final = "Choose another name (convert: or pass --force to replace it)."
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_INDEX_BYTES: Final = 256 << 20
_SHARD: Final = r"-\d{5,}-of-\d{5,}\.safetensors"


def _check_destination(path: Path, *, is_directory: bool, overwrite: bool) -> None:
    """Raise ``CheckpointError`` unless something may be written there."""
    if not path.parent.is_dir():
        _refuse(path, "its directory does not exist", "Make it first.")
    if not is_directory:
        _check_other_form(path)
    if not os.path.lexists(path):
        return
    if not overwrite:
        _refuse(path, "it exists already", _OTHER_NAME)
    if is_directory:
        if not path.is_dir() or path.is_symlink():
            _refuse(path, "it is no directory", "Choose another name.")
        for file in sorted(path.iterdir()):
            is_part = file.suffix == ".distcp" or file.name in _DIRECTORY_FILES
            if not is_part or not file.is_file() or file.is_symlink():
                what = f"it holds {file.name!r}, which is no part of a DCP checkpoint, and is not removed"
                _refuse(path, what, "Choose another name.")
    elif not path.is_file():
        _refuse(path, "it is no regular file", "Choose another name.")


def _check_other_form(path: Any) -> None:
    """Raise ``CheckpointError`` if safetensors of that name lie there in the other form: one file, or several."""
    name = path.name.removesuffix(INDEX)
    if name.endswith(".safetensors"):
        other = path.with_name(name if name != path.name else f"{name}{INDEX}")
        with suppress(OSError):  # the name may be too long
            if other.is_file():
                what = f"{other.name} lies beside it, which would be taken for it"
                _refuse(path, what, "Remove that, or choose another name.")


def _refuse(path: Any, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"save: cannot write {path}: {what}. {remedy}")


def write_whole(
    path: Path,
    write: Callable[[Path], list[str]],
    *,
    is_directory: bool,
    overwrite: bool,
    protected: Collection[Path] = (),
    by_several: bool = False,
) -> None:
    """Write a checkpoint to a folder beside it, and rename its files. What was there stays if writing fails.

    ``write`` writes files into a folder and returns their names, the one that speaks of the others last. If other
    processes may write the same checkpoint now (``by_several``), it is published once.
    """
    target = path.parent.resolve() / path.name
    _check_destination(target, is_directory=is_directory, overwrite=overwrite)
    _check_protected(path, [target], protected)
    beginning = os.fsencode(target.name)[:_LONGEST_NAME].decode(errors="ignore")  # of so many bytes, not characters
    folder = target.with_name(f".{beginning}.partial-{uuid.uuid4().hex}")
    last: Path | None = None  # while files get their names: the one that speaks of the others, if it is replaced
    try:
        folder.mkdir()
        names = write(folder)
        for name in names:
            sync(folder / name)
        sync(folder)
        home = target if is_directory else target.parent
        with alone_in(target.parent):
            # Whoever reads the one that is there would see that it was replaced.
            is_there = by_several and not any((home / name).is_symlink() for name in names)
            if is_there and overwrite and not any(filecmp.cmpfiles(folder, home, names, shallow=False)[1:]):
                return
            _check_destination(target, is_directory=is_directory, overwrite=overwrite)
            old = [] if not target.exists() else list(target.iterdir()) if is_directory else _shards_of(target)
            if is_directory and not old:
                folder.rename(target)
            else:
                there = [home / name for name in names if os.path.lexists(home / name)]
                if there and not overwrite:
                    _refuse(there[0], "it exists already", _OTHER_NAME)
                _check_protected(path, [*there, *old], protected)
                if not (is_directory and _exchanged(folder, target)):
                    last = home / names[-1] if os.path.lexists(home / names[-1]) else None
                    _publish(folder, names, home, old)
                sync(home)
            sync(target.parent)
    except unsignalled(OSError, CheckpointError) as failure:
        error = failure.__cause__ if isinstance(failure, CheckpointError) else failure
        if not isinstance(error, OSError):
            raise
        remedy = "Make room." if error.errno in _FULL else "Check its permissions, and the disk."
        if last is not None and not last.exists():
            remedy += f" Then move the files of {folder.name} beside it: what they replace is gone in part."
        _refuse(path, error.strerror or str(error), remedy)
    finally:
        if last is None or last.exists():  # else nothing else is left of what was replaced
            remove_folder(folder)


def remove_folder(folder: str | Path, *, again: bool = True) -> None:
    """Remove a folder, as far as that can be done, and no link to one. An interrupt is raised when it is.

    (``shutil.rmtree`` closes a descriptor twice if one comes there, and it may be another thread's by then.)
    """
    if os.path.islink(folder):
        return
    try:
        for above, folders, files in os.walk(folder, topdown=False):
            for name in (*files, *folders):  # of the folders, links alone are left
                with suppress(OSError):
                    os.unlink(os.path.join(above, name))
            with suppress(OSError):
                os.rmdir(above)
    except BaseException:
        if again:
            remove_folder(folder, again=False)
        raise


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Let no other process that does so go on in the directory meanwhile, nor another thread.

    A signal's handler would wait for the thread that it interrupted: it gets a ``CheckpointError``.
    """
    lock = _Lock()
    try:
        if is_alone():
            what = "a signal's handler saves while the thread that it interrupted gives files their names"
            _refuse(directory, what, "Have it set a flag, and save after it (Checkpointer.save_on).")
        lock.handle = os.open(directory, os.O_RDONLY)
        _locks[threading.get_ident()] = lock
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock.handle, fcntl.LOCK_EX)
        yield
    finally:
        try:
            lock.release()
        except BaseException:
            lock.release()
            raise


class _Lock:
    """A handle on which a lock may lie. If an interrupt comes as it is released, it is when nobody refers to it."""

    handle = -1

    def __init__(self) -> None:
        self._process = os.getpid()
        renew_after_fork(self, _leave_to_the_parent)

    def release(self) -> None:
        """Unlock, and close the handle."""
        if self.handle >= 0 and self._process == os.getpid():
            # A process that is forked meanwhile shares the lock: closing our handle alone would leave it locked.
            with suppress(OSError):
                fcntl.flock(self.handle, fcntl.LOCK_UN)
            self.close()

    __del__ = release

    def close(self) -> None:
        """Close the handle alone."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


_NO_LOCK: Final = object.__new__(_Lock)
#: The last lock of each thread.
_locks: Final[WeakValueDictionary[int, _Lock]] = WeakValueDictionary()


def is_alone() -> bool:
    """Whether this thread has others wait: a handler of a signal that it calls must not wait for these."""
    return _locks.get(threading.get_ident(), _NO_LOCK).handle >= 0


def _leave_to_the_parent(lock: _Lock) -> None:
    """In a forked process: let go of a directory that the parent is alone in, which may be killed before it is done."""
    with suppress(OSError):
        lock.close()


#: Has every rank that takes part do something, and all raise if one fails.
Together = Callable[[Callable[[], Any]], Any]


def upload_whole(
    place: RemotePath,
    write: Callable[[Path], list[str]],
    together: Together,
    *,
    is_directory: bool,
    overwrite: bool,
    protected: Collection[Path] = (),
) -> None:
    """Write a checkpoint to a local folder, on each rank its own, and upload its files: arguments as ``write_whole``.

    The one that speaks of the others comes last, on the rank that wrote it, and goes first where an old checkpoint is
    replaced: what is read at any time is a whole checkpoint, or none. Other files of an old one are left.
    """
    home = place if is_directory else place.parent
    with TemporaryDirectory() as name:
        folder = Path(name)
        names: list[str] = []  # none on ranks whose files others speak of

        def prepare() -> None:
            names.extend(write(folder))
            if names and not is_directory:
                _check_other_form(place)
            there = [name for name in names if (home / name).exists()]
            if there and not overwrite:
                raise CheckpointError(f"save: cannot write {home / there[0]}: it exists already. {_OTHER_NAME}")
            _check_protected(place, [home / name for name in there] + [place] * (place in protected), protected)
            if len(names) > 1:
                (home / names[-1]).unlink()

        def upload() -> None:
            for file in sorted(folder.iterdir()):
                if file.name not in names[-1:]:
                    (home / file.name).upload(file)

        def commit() -> None:
            for last in names[-1:]:
                (home / last).upload(folder / last)

        for step in (prepare, upload, commit):
            together(step)


#: ``AT_FDCWD`` of Linux: names are relative to the working directory.
_HERE: Final = -100
#: Of Linux, too.
_RENAME_EXCHANGE: Final = 2


# Otherwise whoever kills this process in between has neither the old checkpoint nor the new one.
def _exchanged(folder: Path, other: Path) -> bool:
    """Give each of two folders the other's name, in one step, and say whether the system could."""
    try:
        exchange = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    # What a link leads to is to be replaced, and not the link; and what may not be written is to stay.
    if other.is_symlink() or not os.access(other, os.W_OK):
        return False
    with suppress(OSError):  # a file system without modes
        shutil.copymode(other, folder)
    return not exchange(_HERE, os.fsencode(folder), _HERE, os.fsencode(other), _RENAME_EXCHANGE)


def _publish(folder: Path, names: Sequence[str], home: Path, old: Iterable[Path], *, again: bool = True) -> None:
    """Rename each file to its place, and remove what else there was of an old checkpoint.

    Of several, the one that speaks of the others is taken away first and comes last: what is read at any time is the
    old checkpoint, the new one or none, and never files of both. An interrupt is raised when all have their places.
    """
    try:
        targets = [home / name for name in names]
        if len(targets) > 1 and (folder / names[-1]).exists():
            targets[-1].unlink(missing_ok=True)
        for target in targets:
            if again or (folder / target.name).exists():  # else it has its place
                (folder / target.name).replace(target)
        for file in set(old).difference(targets):
            file.unlink(missing_ok=True)
    except BaseException:
        if again:
            _publish(folder, names, home, old, again=False)
        raise


def _check_protected(path: Any, replaced: Iterable[Path | RemotePath], protected: Collection[Path]) -> None:
    """Raise ``CheckpointError`` if what is replaced is a protected file, under any name, or has one in it."""
    kept = {each for file in protected for each in (file, *file.resolve().parents)}
    kept_ids = set(map(_identity, kept)) - {None}
    for part in replaced:
        if _identity(part) in kept_ids:
            what = f"it would replace {part.name}, which is being read, and lose what is not written"
            _refuse(path, what, "Choose another name.")


def _identity(path: Path | RemotePath) -> Any:
    """Return what is the same for all names of a file; ``None`` if there is none."""
    if not isinstance(path, Path):
        return path  # there are no links
    about = path.stat() if path.exists() else None
    return None if about is None else (about.st_dev, about.st_ino)


def _shards_of(path: Path) -> list[Path]:
    """Return the shards that an index names, if they have the names that are given to shards here."""
    stem = path.name.removesuffix(".index.json")
    if stem == path.name or not path.is_file() or path.stat().st_size > _MAX_INDEX_BYTES:
        return []
    try:
        names = set(json.loads(path.read_text("utf-8"))["weight_map"].values())
    except unsignalled(ValueError, KeyError, AttributeError, TypeError, RecursionError):  # it is no index of ours
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


_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
_BEGIN: Final = 2  # SYNC_FILE_RANGE_WRITE


def begin_to_sync(handle: int, start: int, stop: int) -> None:
    """Have the system begin to write a range of a file to the disk, so that ``fsync`` finds little left to wait for."""
    if _sync_file_range is not None:  # whose errors do not matter: ``fsync`` tells of those that do
        _sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(stop - start), _BEGIN)
