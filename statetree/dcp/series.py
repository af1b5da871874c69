"""A directory of checkpoints, one a step: their names, and how they appear, are replaced and disappear as a whole.

A checkpoint is written under a name that begins with a dot, and gets its own when all of it is on the disk. A directory
cannot be renamed onto another one: a step that is replaced is first renamed to ``.step-….replaced-…``, where it still
counts as the checkpoint of its step, so that nothing is lost if the process is killed before the next renaming.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
import uuid
from math import isnan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.dcp.events import Event
from statetree.dcp.file_manifest import read_manifest
from statetree.dcp.metadata import METADATA
from statetree.errors import CheckpointError, suppress, unsignalled, warn
from statetree.files.publishing import alone_in, remove_folder, sync
from statetree.files.remote import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

_NAME: Final = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced-[0-9a-f]{32}")
_LEFTOVER: Final = re.compile(r"\.step-\d{8,}\.(partial|removed)-[0-9a-f]{32}")


class StepDirectory(NamedTuple):
    """A complete checkpoint in a series. Tuples of later ones are greater."""

    step: int
    is_named: bool  # else another is about to take its place
    name: str
    #: What tells it from the one that takes its place: its inode, whose number may be given again, and when its
    #: metadata were written.
    identity: tuple[int, int]


def identity_of(directory: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return what tells a checkpoint from another of its name; ``None`` for a directory that is no complete one."""
    with suppress(OSError):
        inode = os.stat(directory).st_ino
        try:
            about = os.stat(os.path.join(directory, METADATA))
        except unsignalled(FileNotFoundError, NotADirectoryError):
            return None
        except unsignalled(OSError):  # a folder that this user may not enter, say: whoever reads in it says so
            return inode, 0
        return (inode, about.st_mtime_ns) if stat.S_ISREG(about.st_mode) else None
    return None


def name_of(step: int) -> str:
    """Return the name of the directory of a step."""
    return f"step-{step:08}"


def folders_in(directory: Path | RemotePath) -> dict[int, Any]:
    """Return what lies in a directory, or the folders in a mirror, under the names of steps, complete or not."""
    places: list[Any] = []
    with suppress(FileNotFoundError):  # nothing was saved, or uploaded, yet
        places += directory.folders() if isinstance(directory, RemotePath) else directory.iterdir()
    steps = [(int(match[1] or match[2]), place) for place in places if (match := _NAME.fullmatch(place.name))]
    return {step: place for step, place in steps if place.name == name_of(step)}


class Kept(NamedTuple):
    """Which checkpoints stay: as many of the latest, those of every n-th step, and as many of the lowest metric."""

    latest: int | None = None
    every: int | None = None
    best: int | None = None


#: How many times names are read, at most, if some change meanwhile.
LOOKS: Final = 20


def _changed(directory: Path) -> int:
    """Return when names in a directory last changed."""
    with suppress(OSError):
        return os.stat(directory).st_mtime_ns
    return 0


def bytes_in(directory: Path | RemotePath) -> int:
    """Return how many bytes the files of a checkpoint have."""
    with suppress(OSError):  # it may be removed meanwhile
        if isinstance(directory, RemotePath):
            return sum(directory.sizes().values())
        return sum(entry.stat().st_size for entry in list(os.scandir(directory)))
    return 0


class Series:
    """The checkpoints in a directory. Only one rank uses it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def place(self) -> str:
        """Where its checkpoints are, for messages."""
        return str(self.directory)

    def complete(self) -> list[StepDirectory]:
        """Return the complete checkpoints, one of each step, in the order of steps."""
        return self.local()

    def at_hand(self) -> list[StepDirectory]:
        """Return them as far as they can be asked for now."""
        return self.complete()

    def latest_known(self) -> int:
        """Return the highest step, as far as it can be asked for now, and -1 otherwise. It never fails."""
        with suppress(OSError, CheckpointError):
            return max([found.step for found in self.at_hand()], default=-1)
        return -1

    def local(self) -> list[StepDirectory]:
        """Return those that lie in the directory, whatever a mirror has."""
        return _latest(self.all())

    def all(self) -> list[StepDirectory]:
        """Return the complete checkpoints, those that are being replaced included."""
        found: list[StepDirectory] = []
        for _ in range(LOOKS):
            found, before = [], _changed(self.directory)
            with suppress(FileNotFoundError, NotADirectoryError):
                for entry in self._entries():
                    match = _NAME.fullmatch(entry.name)
                    if match and os.path.isdir(entry.path):
                        step = int(match[1] or match[2])
                        identity = identity_of(entry.path)
                        if identity and name_of(step) in entry.name.split("."):
                            found.append(StepDirectory(step, match[1] is not None, entry.name, identity))
            if before == _changed(self.directory):
                break  # else what took the place of another may have come after the names were read
        return found

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            return list(os.scandir(self.directory))
        except unsignalled(FileNotFoundError, NotADirectoryError):
            raise
        except unsignalled(OSError) as error:
            msg = f"Checkpointer: {self.directory} cannot be read: expected a directory that can be, got: {error}."
            raise CheckpointError(f"{msg} Change its permissions, or pass another.") from error

    def find(self, verb: str, step: int | None) -> StepDirectory:
        """Return the checkpoint of a step, or the latest; raise ``CheckpointError`` if there is none."""
        for found in self.local():
            if found.step == step:
                return found
        complete = self.complete()
        chosen = [found for found in complete if step is None or found.step == step]
        if chosen:
            return chosen[-1]
        what = "a checkpoint" if step is None else f"one of step {step}"
        raise CheckpointError(
            f"{verb}: there is no complete checkpoint in {self.place}: expected {what}, got {steps_of(complete)}. "
            "Save one first, or pass the directory that holds them."
        )

    def copy_of(self, checkpoint: StepDirectory) -> StepDirectory | None:  # noqa: ARG002 - for those that have some
        """Return a copy of a checkpoint, of the same save, if there is one."""
        return None

    def path(self, checkpoint: StepDirectory) -> Path:
        """Return the directory of a checkpoint."""
        return self.directory / checkpoint.name

    def begin(self, step: int, begun: list[UnfinishedStep]) -> UnfinishedStep:
        """Make a directory to write a checkpoint into, and clean up after crashed saves.

        The checkpoint is in the list before its directory exists, for whoever has to discard it after an interrupt.
        """
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            sync(self.directory.parent)
        with alone_in(self.directory):  # nobody takes what was just made, and is not yet locked, for a leftover
            self._clean()
            named = self.directory / name_of(step)
            if os.path.lexists(named) and not (named / METADATA).is_file():
                msg = f"save: {named} is no complete checkpoint: expected one to replace, or nothing. Move it away."
                raise CheckpointError(msg)
            begun.append(UnfinishedStep(self.directory / f".{name_of(step)}.partial-{uuid.uuid4().hex}", step))
            begun[-1].make()
            return begun[-1]

    def publish(self, partial: UnfinishedStep) -> StepDirectory:
        """Give a checkpoint, which is on the disk, its name. One that has it stays until ``prune``, under another."""
        path = self.directory / name_of(partial.step)
        aside = path.with_name(f".{path.name}.replaced-{uuid.uuid4().hex}")
        identity = identity_of(partial.path)  # another writer may prune it as soon as it has its name
        if identity is None:
            raise CheckpointError(f"save: {partial.path} has no {METADATA} any more: was it removed? Save again.")
        with alone_in(self.directory):
            with suppress(FileNotFoundError):
                os.rename(path, aside)
            os.unlink(partial.path / _LOCK)
            os.rename(partial.path, path)
        sync(self.directory)
        partial.close()
        return StepDirectory(partial.step, is_named=True, name=path.name, identity=identity)

    def best(self, complete: Iterable[StepDirectory], count: int) -> tuple[list[StepDirectory], list[StepDirectory]]:
        """Return the checkpoints of the lowest metric, of equal ones the latest, and those whose metric is not known.

        Their manifest cannot be read: they may be as good.
        """
        found, unknown = [], []
        for checkpoint in complete:
            try:
                manifest = read_manifest(self.path(checkpoint))
            except CheckpointError:
                unknown.append(checkpoint)
                continue
            if manifest is not None and manifest.metric is not None and not isnan(manifest.metric):
                found.append((manifest.metric, -checkpoint.step, checkpoint))
        return [checkpoint for _, _, checkpoint in sorted(found)[:count]], unknown

    def best_step(self) -> int | None:
        """Return the step of the lowest metric, with a warning if those of others cannot be read."""
        found, unknown = self.best(self.complete(), 1)
        if unknown:
            warn(
                f"best_step: the manifests of some checkpoints cannot be read ({steps_of(unknown)}): one may be better."
            )
        return found[0].step if found else None

    def prune(self, keep: Kept, latest: StepDirectory) -> list[Event]:
        """Remove what was replaced, and all steps that are not kept; never the one just saved."""

        def leaving(found: list[StepDirectory]) -> set[StepDirectory]:
            return {*found} - {latest, *self.staying(keep, _latest(found))}

        return self.remove(leaving)

    def remove(self, chosen: Callable[[list[StepDirectory]], set[StepDirectory]]) -> list[Event]:
        """Remove what is chosen of all checkpoints."""
        with alone_in(self.directory):
            found = self.all()  # once: what another process publishes from here on is none of these
            leaving = sorted(chosen(found))
            removed = [(each.step, bytes_in(self.path(each)), self._without_name(each)) for each in leaving]
        events = []
        for step, nbytes, path in removed:
            since = time.monotonic()
            remove_folder(path)
            events.append(Event("removal", step, time.monotonic() - since, nbytes, 0.0))
        return events

    def staying(self, keep: Kept, complete: Sequence[StepDirectory]) -> set[StepDirectory]:
        """Return which of the complete checkpoints, in the order of steps, are kept."""
        found = {*(complete if keep.latest is None else complete[-keep.latest :])}
        if keep.every is not None:
            found.update(checkpoint for checkpoint in complete if checkpoint.step % keep.every == 0)
        if keep.best is not None:
            found.update(*self.best(complete, keep.best))
        return found

    def _without_name(self, checkpoint: StepDirectory) -> Path:
        """Take a checkpoint's name away, so that no half of it is ever seen. Of a link, remove the link."""
        path = self.path(checkpoint)
        aside = path.with_name(f".{name_of(checkpoint.step)}.removed-{uuid.uuid4().hex}")
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return aside
        with suppress(OSError):  # what stays is removed by a later save
            os.rename(path, aside)
        return aside

    def _clean(self) -> None:
        for entry in list(os.scandir(self.directory)):
            match = _NAME.fullmatch(entry.name)
            if match and match[2] and not os.path.lexists(self.directory / name_of(int(match[2]))):
                os.rename(entry.path, self.directory / name_of(int(match[2])))  # killed between two renamings
            if not _LEFTOVER.fullmatch(entry.name):
                continue
            if entry.is_symlink():
                os.unlink(entry.path)
            elif entry.is_dir(follow_symlinks=False) and not _is_in_use(entry.path):
                remove_folder(entry.path)


def steps_of(found: Sequence[StepDirectory]) -> str:
    """Return the last steps of some checkpoints, for messages."""
    return f"steps: {', '.join(str(each.step) for each in found[-10:]) or 'none'}"


def _latest(found: Iterable[StepDirectory]) -> list[StepDirectory]:
    return sorted({checkpoint.step: checkpoint for checkpoint in sorted(found)}.values())


class UnfinishedStep:
    """A checkpoint that is being written. While it is open, and its process alive, nobody takes it for a leftover."""

    # The lock is one of those that belong to a process, and that a forked one does not share: a DataLoader's worker
    # which outlives a killed trainer must not keep the checkpoint that nobody writes any more. Within the process these
    # locks exclude nobody, and end where any handle of the file is closed, so that our own are known by name.

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._lock = -1

    def make(self) -> None:
        """Make the directory, locked."""
        self.path.mkdir()
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        _own[self.path.name] = os.getpid()
        with suppress(OSError):  # a file system without locks: the name is as unique without
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Give up the lock."""
        _own.pop(self.path.name, None)
        handle, self._lock = self._lock, -1  # first: after an interrupt, the number may be another thread's file
        if handle >= 0:
            os.close(handle)

    def discard(self) -> None:
        """Remove what was written."""
        self.close()
        remove_folder(self.path)


#: The file by whose lock others see that a checkpoint is being written.
_LOCK: Final = ".lock"
#: The names of checkpoints that this process writes, with its number: a forked one has a copy of the names.
_own: Final[dict[str, int]] = {}


def _is_in_use(path: str) -> bool:
    if _own.get(os.path.basename(path)) == os.getpid():
        return True
    try:
        handle = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except unsignalled(OSError):
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except unsignalled(OSError) as error:
        return isinstance(error, (BlockingIOError, PermissionError))
    finally:
        os.close(handle)
    return False
