"""SHA-256 digests of a checkpoint's files, in a file beside it: what ``sha256sum`` writes and checks."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

from statetree.cli.progress import progress
from statetree.files.checkpoint import DCP, SAFETENSORS
from statetree.files.ranges import OpenFiles
from statetree.files.stored import BUCKET_BYTES
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from statetree.files.checkpoint import Checkpoint, Progress
    from statetree.files.ranges import FileRange

SUFFIX: Final = ".sha256"
_MAX_BYTES: Final = 256 << 20
_LINE: Final = re.compile(r"(\\?)([0-9a-f]{64})  (.+)")


def digests_path(path: Path, *, is_directory: bool) -> Path:
    """Return where the digests of a checkpoint lie."""
    return path / SUFFIX if is_directory else path.with_name(path.name + SUFFIX)


def write_digests(target: Path, folder: Path, names: Sequence[str]) -> None:
    """Write the digests of files in a folder."""
    total = sum((folder / name).stat().st_size for name in names)
    with OpenFiles() as files, progress("computing digests", total) as advance:
        lines = [_line(name, _digest(files.open(folder / name), advance)) for name in names]
    target.write_text("".join(lines), "utf-8", "surrogateescape")


def _line(name: str, digest: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{digest}  {name}\n" if escaped == name else f"\\{digest}  {escaped}\n"


def _digest(file: FileRange, advance: Progress) -> str:
    found = hashlib.sha256()
    for start in range(0, file.length, BUCKET_BYTES):
        count = min(BUCKET_BYTES, file.length - start)
        found.update(file.read(start, count, f"what lies at byte {start}"))
        advance(count)
    return found.hexdigest()


def verify(checkpoint: Checkpoint, *, follow_links: bool = False) -> str:
    """Check all stored checksums and digests. Returns what was checked, in words; empty if there are none.

    Args:
        checkpoint: What to check.
        follow_links: Whether the files that the digests list may be symbolic links that lead out of their directory.

    Raises:
        CheckpointError: If a byte is not what it was when the checkpoint was written.
    """
    found = {"digest": 0}
    if digests_path(checkpoint.path, is_directory=checkpoint.kind == DCP).is_file():
        with OpenFiles(follow_links=follow_links) as files, progress("checking digests", checkpoint.nbytes) as advance:
            found["digest"] = _check_digests(checkpoint, files, advance)
    found["checksum"] = check_sums(checkpoint)
    words = [f"{count} {what}{'s' * (count != 1)}" for what, count in found.items() if count]
    return f"verified: {' and '.join(words)} agree" if words else ""


def _check_digests(checkpoint: Checkpoint, files: OpenFiles, advance: Progress) -> int:
    """Check the files of a checkpoint against its digests. Returns how many there are."""
    is_directory = checkpoint.kind == DCP
    path = digests_path(checkpoint.path, is_directory=is_directory)
    folder = checkpoint.path if is_directory else checkpoint.path.parent
    listed = _read_digests(files.open(path))
    used = [file.relative_to(folder).as_posix() for file in checkpoint.files]
    missing = [name for name in used if name not in listed]
    if missing and len(missing) == len(used):
        remedy = "Give the checkpoint that name, or leave out --verify."
        refuse(path, f"the digests were written for another name ({next(iter(listed), '')!r})", remedy)
    if missing:
        refuse(path, f"it lists no digest of {missing[0]!r}")
    for name, digest in listed.items():
        file = files.open(files.listed(folder, name, path))
        if _digest(file, advance) != digest:
            refuse(file.path, f"its bytes do not have the digest in {path.name}")
    return len(listed)


def _read_digests(file: FileRange) -> dict[str, str]:
    if file.length > _MAX_BYTES:
        refuse(file.path, f"it has {file.length} bytes: expected at most {_MAX_BYTES}")
    found = {}
    for line in file.read(0, file.length, "the digests").decode("utf-8", "surrogateescape").split("\n")[:-1]:
        match = _LINE.fullmatch(line)
        if match is None:
            refuse(file.path, "it is damaged")
        escape, digest, name = match.groups()
        found[_unescaped(name) if escape else name] = digest
    return found


def _unescaped(name: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), name)


def check_sums(checkpoint: Checkpoint) -> int:
    """Check the checksums that the format has. Returns how many there are."""
    count = 0
    with progress("checking checksums", checkpoint.nbytes) as advance:
        for checksum in checkpoint.checksums():
            checksum.check(advance)
            count += 1
    return count


def why_nothing(checkpoint: Checkpoint) -> str:
    """Return the message that there is nothing to verify a checkpoint by."""
    what = "safetensors has" if checkpoint.kind == SAFETENSORS else "a file of old torch has"
    digests = digests_path(checkpoint.path, is_directory=checkpoint.kind == DCP).name
    why = f"{what} no checksums, and there is no {digests}"
    return f"show: nothing to verify {checkpoint.path} by: {why}. Have convert --digest write digests."
