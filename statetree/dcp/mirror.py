"""A mirror of a series of checkpoints in an object store: complete steps uploaded in the background.

Its ``.metadata`` is uploaded last and removed first, and a step is there if all files that its manifest lists are. What
a killed process left half uploaded is no checkpoint, and is uploaded again or removed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, cast

from statetree.dcp.events import Event
from statetree.dcp.file_manifest import MANIFEST, read_manifest
from statetree.dcp.metadata import METADATA, read_described
from statetree.dcp.series import LOOKS, Series, StepDirectory, folders_in, identity_of, name_of, steps_of
from statetree.declare import renew_after_fork
from statetree.errors import CheckpointError, suppress, unsignalled
from statetree.files.formats import opened
from statetree.files.remote import RemotePath, is_url
from statetree.stager.workers import BackgroundFuture, aside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from statetree.dcp.series import Kept

_log = logging.getLogger("statetree")
#: What a step has in the place of an inode that only the mirror has.
_FAR: Final = -1


class MirroredSeries(Series):
    """A series of checkpoints in a directory, and those that only its mirror has.

    Only the first rank asks, uploads (and tells of it) and removes; ``path`` answers on every rank.
    """

    def __init__(self, directory: Path, url: str, kept: Kept, tell: Callable[[Event], None]) -> None:
        super().__init__(directory)
        if not is_url(url):
            msg = f"Checkpointer: mirror must be a URL that fsspec knows (s3://bucket/run), got {url!r}."
            raise CheckpointError(msg)
        self.url = cast("Any", RemotePath.of(url))
        self.url.check_uncached("Checkpointer")
        if self.url.is_local and os.path.realpath(self.url.path) == os.path.realpath(directory):
            msg = f"Checkpointer: the mirror {url} is the directory of the checkpoints: expected another place."
            raise CheckpointError(f"{msg} Pass the URL of one, or no mirror.")
        self._kept = kept
        self._tell = tell
        self._start_idle()
        renew_after_fork(self, MirroredSeries._start_idle)

    def _start_idle(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over: BackgroundFuture[None] = BackgroundFuture()
        self._is_behind = False
        self._awaited: set[int] = set()  # steps that were saved, and are not known to be there
        self._sent: set[StepDirectory] = set()  # what is being uploaded
        self._overdue: set[StepDirectory] = set()  # and is to be removed then

    @property
    def place(self) -> str:
        """Where its checkpoints are, for messages."""
        return f"{self.directory} and its mirror {self.url}"

    def complete(self) -> list[StepDirectory]:
        """Return the complete checkpoints, local and mirrored, in the order of steps.

        Raises:
            CheckpointError: If the mirror cannot be reached: else what lies here would pass for the newest.
        """
        near = self.local()
        try:
            there, unknown = steps_at(self.url)
        except unsignalled(OSError) as error:
            raise CheckpointError(
                f"Checkpointer: the mirror {self.url} cannot be reached: expected it to answer, got: "
                f"{str(error).rstrip('.')}. It may have later steps than {self.directory}, which has {steps_of(near)}. "
                "Try again. What is here can be restored by its step, or without the mirror."
            ) from error
        known = {found.step for found in near} | there.keys()
        # What cannot be looked at now is listed if it is the newest: else an older one would pass for that.
        newest = {step for step in unknown if step > max(known, default=-1)}
        far = (there.keys() | newest) - {found.step for found in near}
        return sorted([*near, *[_far_step(step, there.get(step, "")) for step in far]])

    def at_hand(self) -> list[StepDirectory]:
        """Return the complete checkpoints, or those that are local where the mirror cannot be reached."""
        near = self.local()
        try:
            return self.complete()
        except CheckpointError as error:
            _log.warning("the mirror %s cannot be reached: %s", self.url, error.__cause__)
            return near

    def copy_of(self, checkpoint: StepDirectory) -> StepDirectory | None:
        """Return the mirror's copy of a local checkpoint, of the same save, if there is one."""
        with suppress(OSError, CheckpointError):
            save = None if _is_far(checkpoint) else _save_named_in(self.path(checkpoint))
            if save is not None and steps_at(self.url)[0].get(checkpoint.step) == save:
                return _far_step(checkpoint.step, save)
        return None

    def path(self, checkpoint: StepDirectory) -> Path:
        """Return the directory of a checkpoint, or its place in the mirror if only that has it."""
        return cast("Path", self.url / checkpoint.name) if _is_far(checkpoint) else super().path(checkpoint)

    def remove(self, chosen: Callable[[list[StepDirectory]], set[StepDirectory]]) -> list[Event]:
        """Remove what is chosen of all checkpoints; what is being uploaded only when it is there.

        (Else nothing ever would be, where an upload takes longer than the time between two saves.)
        """

        def now(found: list[StepDirectory]) -> set[StepDirectory]:
            leaving = chosen(found)
            self._overdue = leaving & self._sent
            return leaving - self._sent

        return super().remove(now)

    def upload_later(self, *saved: int) -> None:
        """Upload in the background what the mirror lacks, such as what was saved, and remove there what is not kept."""

        def begin() -> None:
            with self._lock:
                self._awaited.update(saved)
                self._is_behind = True
                if self._thread is None:
                    self._over = BackgroundFuture()
                    thread = threading.Thread(
                        target=self._run, args=(self._over,), name="statetree.mirror", daemon=True
                    )
                    thread.start()
                    self._thread = thread

        aside(begin)

    def wait(self) -> None:
        """Wait until what is being uploaded is there, or has failed."""
        thread, over = aside(self._uploading)
        if thread is threading.current_thread():  # in on_event
            msg = "close: it would wait for the upload that calls on_event: expected another thread, got the upload's."
            raise CheckpointError(f"{msg} Close it in the training loop.")
        if thread is not None:
            over.wait()  # after a ``join`` that was interrupted, the next one would not wait

    def _uploading(self) -> tuple[threading.Thread | None, BackgroundFuture[None]]:
        with self._lock:  # in which it is started, too
            return self._thread, self._over

    def _run(self, over: BackgroundFuture[None]) -> None:
        while True:
            with self._lock:
                if not self._is_behind:
                    self._thread = None
                    over.set_result(None)
                    return
                self._is_behind = False
            try:
                self._catch_up()
            except BaseException as error:  # noqa: BLE001 - whatever it is, training goes on, and later steps follow
                _log.warning("the mirror %s is behind, until the next save: %r", self.url, error)

    def _catch_up(self) -> None:
        there, unknown = steps_at(self.url)
        awaited = self._awaited.copy()  # before the look: what is saved after it is not gone
        local = self.local()
        here = {near.step for near in local}
        for step in sorted(awaited - here):
            self._awaited.discard(step)
            if step not in there.keys() | unknown:
                _log.warning("step %d was removed before it was uploaded to the mirror %s", step, self.url)
        self._awaited.update(here)
        for near in reversed(local):
            folder = self.path(near)
            try:
                manifest = read_manifest(folder)
                save = "" if manifest is None else manifest.save
                if near.step not in unknown and (there.get(near.step) == save or self._upload(near)):
                    there[near.step] = save
                    self._awaited.discard(near.step)
            except CheckpointError as error:  # an earlier one may be whole
                if folder.exists():
                    _log.warning("step %d is not uploaded to the mirror %s: %s", near.step, self.url, error)
            except FileNotFoundError:
                if folder.exists():
                    raise  # else it was removed meanwhile
            if self._is_behind:
                break  # what was saved meanwhile goes first
        self._prune(sorted(there), unknown)

    def _upload(self, near: StepDirectory) -> bool:
        """Upload a step, and remove it then if that was put off. Returns what ``_send`` does."""
        self._sent = {near}
        try:
            return self._send(near)
        finally:
            self._sent = set()
            for event in self.remove(lambda found: self._overdue.intersection(found)):  # as it is once nobody prunes
                self._tell(event)

    def _send(self, near: StepDirectory) -> bool:
        """Upload a step, and return whether it was the same one all the time: who replaces it uploads it again.

        Raises:
            CheckpointError: If it is not whole: what the mirror has of its step, or of others, is worth more.
        """
        since, folder, there = time.monotonic(), self.path(near), self.url / name_of(near.step)
        opened(folder, skip_foreign=True).check()
        if there.is_file():
            raise CheckpointError(f"{there} is a file. Remove it")
        ending = {name: (folder / name).read_bytes() for name in (MANIFEST, METADATA) if (folder / name).exists()}
        (there / METADATA).unlink()
        if there.exists():
            there.remove()
        files = sorted(file for file in folder.iterdir() if file.name not in ending)
        nbytes = sum(map(len, ending.values())) + sum(file.stat().st_size for file in files)
        for file in files:
            (there / file.name).upload(file)
        # Each save is a folder of its own, with an id in its manifest: so far, what was read by name was of one save.
        is_same = identity_of(folder) == near.identity
        if not is_same or any((folder / name).read_bytes() != data for name, data in ending.items()):
            return False
        for name, data in ending.items():
            (there / name).write(data)
        self._tell(Event("upload", near.step, time.monotonic() - since, nbytes, 0.0))
        return True

    def _prune(self, complete: Sequence[int], unknown: set[int]) -> None:
        """Remove steps that are not kept, and what is left of others: of the newest, it may be of use."""
        folders = folders_in(self.url)
        staying = self.staying(self._kept, list(map(_far_step, complete)))
        kept = {found.step for found in [*self.local(), *staying]} | unknown
        for step, folder in folders.items():
            is_newest = step > max(complete, default=-1) and (folder / METADATA).is_file()
            if step not in kept and not is_newest:
                (folder / METADATA).unlink()
                folder.remove()


def steps_at(url: RemotePath) -> tuple[dict[int, str], set[int]]:
    """Return the steps that a mirror has whole, with the save of each, and those that cannot be looked at now.

    The save is empty if it left no manifest. Raises ``OSError`` if the mirror cannot be reached.
    """
    for _ in range(LOOKS):
        found: dict[int, str] = {}
        unknown: set[int] = set()
        folders = folders_in(url)
        for step, folder in sorted(folders.items()):  # what takes an earlier one's place is whole before that goes
            try:
                save = _save_in(folder)
            except unsignalled(OSError) as error:
                _log.warning("step %d of the mirror %s cannot be looked at: %s", step, url, error)
                unknown.add(step)
                continue
            if save is not None:
                found[step] = save
        if len(found) + len(unknown) == len(folders) or folders_in(url).keys() == folders.keys():
            break  # else what took the place of one that is gone may have come after they were listed
    return found, unknown


def _save_named_in(folder: Path) -> str | None:
    """Return which save wrote a checkpoint that may be damaged: its manifest says so, and its metadata."""
    with suppress(CheckpointError):
        manifest = read_manifest(folder)
        if manifest is not None:
            return manifest.save
    return read_described(folder, verify=False).save


def _save_in(folder: RemotePath) -> str | None:
    """Return which save a folder has whole; ``None`` if it has none. Raises ``OSError`` if it cannot be looked at."""
    with suppress(FileNotFoundError):  # it is being removed
        sizes = folder.sizes()
        try:
            manifest = read_manifest(cast("Path", folder))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            return None  # it is damaged
        files = {} if manifest is None else {name: file.nbytes for name, file in manifest.files.items()}
        length = sizes.get(METADATA, -1) if manifest is None else manifest.metadata[0]
        if sizes.get(METADATA) == length and files.items() <= sizes.items():
            return "" if manifest is None else manifest.save
    return None


def _far_step(step: int, save: str = "") -> StepDirectory:
    """Return a step of the mirror: its save tells it from the one that takes its place."""
    return StepDirectory(step, is_named=True, name=name_of(step), identity=(_FAR, zlib.crc32(save.encode())))


def _is_far(checkpoint: StepDirectory) -> bool:
    return checkpoint.identity[0] == _FAR
