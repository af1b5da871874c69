"""Damaged files without end: ``python -m tests.cli.fuzz --minutes 10`` runs every reader over mutations of good files.

Whatever a file holds, a reader either opens it, and then everything in it can be read, or raises a ``StateTreeError``.
It takes neither long nor much memory. A file that breaks this is kept, and its name printed.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp

from statetree.cli.app import main
from statetree.cli.diff import DiffOptions, compare
from statetree.cli.entries import Choice, rows_of
from statetree.errors import StateTreeError
from statetree.files import StoredTensor, opened
from tests.cli.hostile import archive, pickled
from tests.cli.states import bits, flat_state, nested_state, tied_state, write
from tests.trees import quiet

#: What one file may cost.
SECONDS = 30
EXTRA_BYTES = 3 << 30
#: Tensors beyond this are not read: their elements lie on few bytes again and again.
READ_BYTES = 1 << 22

#: Numbers that are apt to go wrong.
NUMBERS = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Target(NamedTuple):
    """A reader under test.

    Attributes:
        name: What it is called.
        seeds: Good inputs.
        place: Given a folder and an input, makes a checkpoint of it.
    """

    name: str
    seeds: list[bytes]
    place: Callable[[Path, bytes], Path]


def targets(folder: Path) -> list[Target]:
    """Return the targets. Good files are written to a folder."""
    states = (
        flat_state(),
        nested_state(),
        tied_state(),
        {"coo": torch.eye(3).to_sparse(), "p": torch.nn.Parameter(bits(2))},
    )
    zips = [write(state, folder / f"{number}.pt") for number, state in enumerate(states)]
    flat = write(flat_state(), folder / "flat.safetensors")
    main(["convert", "--shard-bytes", "300", str(flat), str(folder / "shards.safetensors")])
    index = folder / "shards.safetensors.index.json"
    directory, of_torch = write(nested_state(), folder / "dcp"), folder / "of_torch"
    with quiet():
        torch_dcp.save({"model": {"a.b": bits(2)}, "list": [bits(3), {"c": 1}], "s": 1}, checkpoint_id=of_torch)
    alike = {
        f"w{start}": bits(2, 2, start=start) for start in range(6)
    }  # storages of 16 bytes, for any pickle of these
    alike |= {"t": alike["w0"].t(), "p": torch.nn.Parameter(bits(4)), "n": [1, ("x", 2.5), {"y": None, 3: bits(4)}]}
    storages = {str(number): bytes(16) for number in range(20)}
    pickles = [pickled(write(alike, folder / "alike.pt"))]

    def beside(name: str, origin: Path) -> Callable[[Path, bytes], Path]:
        """A changed file among the others of its checkpoint."""

        def place(target: Path, data: bytes) -> Path:
            if origin.is_dir():
                shutil.copytree(origin, target / "c")
                (target / "c" / name).write_bytes(data)
                return target / "c"
            for file in folder.glob(f"{origin.name.split('.')[0]}*"):
                shutil.copy(file, target)
            (target / name).write_bytes(data)
            return target / origin.name

        return place

    def plain(name: str) -> Callable[[Path, bytes], Path]:
        def place(target: Path, data: bytes) -> Path:
            (target / name).write_bytes(data)
            return target / name

        return place

    torch.save(alike, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return [
        Target("torch before 1.6", [(folder / "legacy.pt").read_bytes()], plain("a.pt")),
        Target("torch zip", [path.read_bytes() for path in zips], plain("a.pt")),
        Target("torch pickle", pickles, lambda to, data: archive(to / "a.pt", data, storages)),
        Target("safetensors", [flat.read_bytes(), safetensors.torch.save({"a": bits(3)})], plain("a.safetensors")),
        Target("safetensors index", [index.read_bytes()], beside(index.name, index)),
        Target("dcp metadata", [(directory / ".metadata").read_bytes()], beside(".metadata", directory)),
        Target("dcp paths", [(of_torch / ".metadata").read_bytes()], beside(".metadata", of_torch)),
        Target("dcp data", [(directory / "__0_0.distcp").read_bytes()], beside("__0_0.distcp", directory)),
    ]


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return data with a few faults."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(found) + 1)
        sort = rng.randrange(8)
        if sort == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif sort == 1 and at < len(found):
            found[at] = rng.randrange(256)
        elif sort == 2:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) & (256**width - 1)
            found[at : at + width] = number.to_bytes(width, "little")
        elif sort == 3:
            del found[at : at + rng.choice((1, 2, 8, 100))]
        elif sort == 4:
            found[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8, 30))))
        elif sort == 5:
            start = rng.randrange(len(other) + 1)
            piece = other[start : start + rng.choice((1, 4, 16, 200))]
            found[at : at + rng.choice((0, len(piece)))] = piece
        elif sort == 6:
            del found[at:]
        elif sort == 7:  # another number where there is one in digits
            digits = [place for place, byte in enumerate(found) if 48 <= byte <= 57]
            if digits:
                place = rng.choice(digits)
                found[place : place + 1] = str(rng.choice((0, 9, 10, -1, 2**40, 2**63))).encode()
    return bytes(found)


def exercise(path: Path) -> bool:
    """Open a checkpoint and read all there is. Returns whether it could be opened."""
    try:
        checkpoint = opened(path, skip_foreign=True)
        rows = rows_of(checkpoint.tree, Choice("show"))
        tensors = [row.leaf for row in rows if isinstance(row.leaf, StoredTensor)]
        if all(leaf.nbytes <= READ_BYTES for leaf in tensors):
            compare(checkpoint, opened(path, skip_foreign=True), DiffOptions(Choice("diff", (), ()), values=True))
            for leaf in tensors:
                leaf.tensor()
        checkpoint.verify()
    except StateTreeError:
        return False
    return True


class TooSlow(BaseException):
    """A file took longer than it may."""


@contextmanager
def limits() -> Iterator[None]:
    """Bound the time of the block, and the memory of the process while it runs."""

    def stop(*_: Any) -> None:
        raise TooSlow

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + EXTRA_BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(target: Target, rng: random.Random, folder: Path) -> tuple[bytes, bool, str]:
    """Try one mutation. Returns it, whether it could be opened, and what went wrong, if anything."""
    data = mutated(rng.choice(target.seeds), rng.choice(target.seeds), rng)
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    path = target.place(place, data)
    try:
        with limits():
            return data, exercise(path), ""
    except (Exception, TooSlow):
        return data, False, traceback.format_exc()


def fuzz(seconds: float, seed: int, keep: Path) -> int:
    """Run all targets for a time. Returns how many files broke a reader."""
    rng = random.Random(seed)
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = targets(folder)
        counts = {target.name: [0, 0] for target in found}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for target in found:
                data, is_open, fault = run(target, rng, folder)
                counts[target.name][0] += 1
                counts[target.name][1] += is_open
                if fault:
                    faults += 1
                    keep.mkdir(parents=True, exist_ok=True)
                    file = keep / f"{target.name.replace(' ', '_')}-{faults}"
                    file.write_bytes(data)
                    sys.stdout.write(f"{target.name}: {file}\n{fault}\n")
                    sys.stdout.flush()
    for name, (tried, opened_) in counts.items():
        sys.stdout.write(f"{name}: {tried} files, {opened_} of which could be opened\n")
    sys.stdout.write(f"{faults} faults\n")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "statetree_fuzz")
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    sys.exit(bool(fuzz(options.minutes * 60, options.seed, options.keep)))
