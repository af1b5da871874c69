"""Checkpoints of nested states: staged by statetree, written by torch.distributed.checkpoint in the background.

A checkpoint is written under a provisional name and renamed once all of it is on the disk, so that a directory called
``step-…`` is a complete checkpoint whenever the process dies.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch.distributed.checkpoint as dcp

import statetree as st

if TYPE_CHECKING:
    from pathlib import Path

PARTIAL = ".partial"


def save(state: Any, target: Path) -> None:
    """Write a state to a directory that appears when it is complete.

    ``to_flat`` makes of any tree what torch.distributed.checkpoint stores: one entry with a string key for each leaf.
    """
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    flat, _ = st.to_flat(state)
    dcp.save(flat, storage_writer=dcp.FileSystemWriter(partial, sync_files=True), no_dist=True)
    _sync(partial)
    os.replace(partial, target)
    _sync(target.parent)


def load(source: Path, template: Any) -> Any:
    """Return a checkpoint's contents in the structure of a template, which is left alone."""
    flat, spec = st.to_flat(st.allocate_like(template))
    dcp.load(flat, checkpoint_id=source, no_dist=True)
    return st.from_flat(flat, spec)


def path_of(directory: Path, step: int) -> Path:
    """Return where a step's checkpoint lies in a directory."""
    return directory / f"step-{step:06}"


def complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a directory, oldest first."""
    return sorted(path for path in directory.glob("step-*") if path.suffix != PARTIAL)


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class BackgroundSaver:
    """Saves states while training goes on: it stops the trainer for the staging only.

    One snapshot is alive at a time. Where the last one is still being written, ``save`` waits for it.

    Args:
        directory: Where the checkpoints go.
        keep: How many complete ones stay there.

    Attributes:
        last_staging_s: How long the last staging took, in seconds, waiting left out.
        waits: How often a save had to wait for the one before it.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep
        self.last_staging_s = 0.0
        self.waits = 0
        self._stager = st.Stager(max_snapshots=1)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, state: Any) -> None:
        """Stage a state and start to write it. When this returns, the state may change."""
        if self._error is not None:
            self.wait()
        start = time.perf_counter()
        try:
            staged = self._stager.stage(state)
        except st.StagerBusy:
            self.waits += 1
            self.wait()
            start = time.perf_counter()
            staged = self._stager.stage(state)
        self.last_staging_s = time.perf_counter() - start
        # The thread's arguments are the only references to the snapshot, and the thread drops them when it ends.
        self._thread = threading.Thread(target=self._write, args=(step, staged), name=f"save step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises what the last save raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._stager.close()

    def _write(self, step: int, staged: Any) -> None:
        try:
            save(staged, path_of(self.directory, step))
            for old in complete(self.directory)[: -self.keep]:
                shutil.rmtree(old)
        except BaseException as error:  # noqa: BLE001 - DCP's is one; wait raises it in the trainer's thread
            self._error = error
