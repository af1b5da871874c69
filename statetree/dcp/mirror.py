"""A mirror of a series of checkpoints in an object store: complete steps uploaded in the background.

A step is there once its ``.metadata`` is, which is uploaded last and removed first. What a killed process left half
uploaded is no checkpoint, and is uploaded again or removed.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, cast

from statetree.dcp.events import Event
from statetree.dcp.file_manifest import MANIFEST, read_manifest
from statetree.dcp.metadata import METADATA
from statetree.dcp.series import Series, StepDirectory, name_of
from statetree.declare import renew_after_fork
from statetree.errors import CheckpointError
from statetree.files.remote import RemotePath, is_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from statetree.dcp.series import Kept

_log = logging.getLogger("statetree")
_NAME: Final = re.compile(r"step-(\d{8,})")
#: The inode of a step that only the mirror has.
_FAR: Final = -1


class MirroredSeries(Series):
    """A series of checkpoints in a directory, and those that only its mirror has.

    Only the first rank asks, uploads and removes; ``path`` answers on every rank.

    Args:
        directory: Where checkpoints are written.
        url: Where they are mirrored.
        kept: Which of them stay.
        tell: Is told of each upload.

    Raises:
        CheckpointError: If ``url`` is none that fsspec knows.
    """

    def __init__(self, directory: Path, url: str, kept: Kept, tell: Callable[[Event], None]) -> None:
        super().__init__(directory)
        if not is_url(url):
            msg = f"Checkpointer: mirror must be a URL that fsspec knows (s3://bucket/run), got {url!r}."
            raise CheckpointError(msg)
        self.url = cast("Any", RemotePath.of(url))
        self._kept = kept
        self._tell = tell
        self._start_idle()
        renew_after_fork(self, MirroredSeries._start_idle)

    def _start_idle(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_behind = False

    def complete(self) -> list[StepDirectory]:
        """Return the complete checkpoints, local and mirrored, in the order of steps."""
        near = super().complete()
        try:
            steps = set(self._mirrored()) - {found.step for found in near}
        except (OSError, CheckpointError) as error:
            _log.warning("the mirror %s cannot be reached: %s", self.url, error)
            return near
        return sorted([*near, *(StepDirectory(step, is_named=True, name=name_of(step), inode=_FAR) for step in steps)])

    def local(self) -> list[StepDirectory]:
        """Return the complete checkpoints in the directory."""
        return super().complete()

    def all(self) -> list[StepDirectory]:
        """Return the complete checkpoints in the directory, those that are being replaced included."""
        return super().all()

    def path(self, checkpoint: StepDirectory) -> Path:
        """Return the directory of a checkpoint, or its place in the mirror if only that has it."""
        return cast("Path", self.url / checkpoint.name) if checkpoint.inode == _FAR else super().path(checkpoint)

    def _mirrored(self) -> dict[int, str | None]:
        """Return the steps that the mirror has whole, with the save of each."""
        found: dict[int, str | None] = {}
        for place in self._folders():
            match = _NAME.fullmatch(place.name)
            if match and (place / METADATA).is_file():
                try:
                    manifest = read_manifest(cast("Path", place))
                except CheckpointError:
                    manifest = None
                found[int(match[1])] = None if manifest is None else manifest.save
        return found

    def _folders(self) -> list[RemotePath]:
        try:
            return list(self.url.iterdir())
        except FileNotFoundError:
            return []

    def upload_later(self) -> None:
        """Upload in the background what the mirror lacks, and remove there what is not kept."""
        with self._lock:
            self._is_behind = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="statetree.mirror", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until what is being uploaded is there, or has failed."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_behind:
                    self._thread = None
                    return
                self._is_behind = False
            try:
                self._catch_up()
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                _log.warning("the mirror %s is behind, until the next save: %r", self.url, error)

    def _catch_up(self) -> None:
        there = self._mirrored()
        for near in self.local():
            folder = super().path(near)
            manifest = read_manifest(folder)
            if near.step in there and there[near.step] == (None if manifest is None else manifest.save):
                continue
            try:
                is_there = self._upload(near)
            except FileNotFoundError:
                if folder.exists():
                    raise
                continue  # it was removed meanwhile
            if is_there:
                there[near.step] = None if manifest is None else manifest.save
        self._prune(set(there))

    def _upload(self, near: StepDirectory) -> bool:
        """Upload a step, and return whether it was the same one all the time: who replaces it uploads it again."""
        since, folder, there = time.monotonic(), super().path(near), self.url / name_of(near.step)
        ending = {name: (folder / name).read_bytes() for name in (MANIFEST, METADATA) if (folder / name).exists()}
        (there / METADATA).unlink()
        if there.exists():
            there.remove()
        files = sorted(file for file in folder.iterdir() if file.name not in ending)
        nbytes = sum(map(len, ending.values())) + sum(file.stat().st_size for file in files)
        for file in files:
            (there / file.name).upload(file)
        # Each save is a folder of its own, with an id in its manifest: so far, what was read by name was of one save.
        is_same = folder.stat().st_ino == near.inode
        if not is_same or any((folder / name).read_bytes() != data for name, data in ending.items()):
            return False
        for name, data in ending.items():
            (there / name).write(data)
        self._tell(Event("upload", near.step, time.monotonic() - since, nbytes, 0.0))
        return True

    def _prune(self, complete: set[int]) -> None:
        """Remove steps that are not kept, and what is left of others."""
        steps, kept = sorted(complete), {found.step for found in self.local()}
        if self._kept.latest is None:
            kept.update(steps)
        else:
            kept.update(steps[-self._kept.latest :])
        kept.update(step for step in steps if self._kept.every is not None and step % self._kept.every == 0)
        if self._kept.best is not None:
            far = [StepDirectory(step, is_named=True, name=name_of(step), inode=_FAR) for step in steps]
            kept.update(found.step for part in self._best(far, self._kept.best) for found in part)
        for place in self._folders():
            match = _NAME.fullmatch(place.name)
            if match and int(match[1]) not in kept:
                (place / METADATA).unlink()
                place.remove()
