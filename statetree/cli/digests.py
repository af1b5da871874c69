"""Digests of every byte of a checkpoint, in a file beside it, for ``convert --digest`` and ``show --verify``."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.names import refuse
from statetree.cli.stored import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from statetree.cli.files import Files, Region
    from statetree.cli.progress import Progress

SUFFIX: Final = ".sha256.json"
_MAX_BYTES: Final = 256 << 20
_BETWEEN: Final = "header"


class Part(NamedTuple):
    """An entry's bytes in a file."""

    entry: str
    start: int
    stop: int


class Written(NamedTuple):
    """A file that was written: its name in the checkpoint's folder, and what lies where in it."""

    name: str
    parts: Sequence[Part]


def digests_path(path: Path, *, is_directory: bool) -> Path:
    """Return where the digests of a checkpoint lie."""
    return path / SUFFIX[1:] if is_directory else path.with_name(path.name + SUFFIX)


def digests_text(written: Iterable[Written], folder: Path, files: Files, progress: Progress) -> str:
    """Return the digests of files, as they are to be stored."""
    table = {}
    for name, parts in written:
        region = files.open(folder / name)
        table[name] = [[*part, _digest(region, part, progress)] for part in _tiled(region.length, parts)]
    return json.dumps({"version": 1, "algorithm": "sha256", "files": table}, indent=1)


def _tiled(length: int, parts: Sequence[Part]) -> Iterator[Part]:
    """Return parts and what lies between them: together, the whole file."""
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > end:
            yield Part(_BETWEEN, end, part.start)
        yield part
        end = part.stop
    if end < length:
        yield Part(_BETWEEN, end, length)


def _digest(region: Region, part: Part, progress: Progress) -> str:
    found = hashlib.sha256()
    for start in range(part.start, part.stop, BUCKET_BYTES):
        count = min(BUCKET_BYTES, part.stop - start)
        found.update(region.read(start, count, part.entry))
        progress(count)
    return found.hexdigest()


def check_digests(path: Path, folder: Path, used: Sequence[Path], files: Files, progress: Progress) -> int:
    """Check the files of a checkpoint against its digests.

    Args:
        path: The file of digests.
        folder: What names in it are relative to.
        used: The files that the checkpoint consists of. All must be listed.
        files: For opening them.
        progress: Is told how many bytes were read.

    Returns:
        The number of digests.

    Raises:
        CheckpointError: If a byte is not what it was, or a file is not listed.
    """
    region = files.open(path)
    if region.length > _MAX_BYTES:
        refuse(path, f"it has {region.length} bytes: expected at most {_MAX_BYTES}")
    table = _table(path, region.read(0, region.length, "the digests"))
    missing = [file.relative_to(folder).as_posix() for file in used if file.relative_to(folder).as_posix() not in table]
    if missing and len(missing) == len(used):
        remedy = "Give the checkpoint that name, or leave out --verify."
        refuse(path, f"the digests were written for another name ({next(iter(table), '')!r})", remedy)
    if missing:
        refuse(path, f"it lists no digests of {missing[0]!r}")
    count = 0
    for name, rows in table.items():
        file = files.open(files.listed(folder, name, path))
        end = 0
        for entry, start, stop, digest in rows:
            if start != end or stop < start or stop > file.length:
                refuse(file.path, f"it has {file.length} bytes, which {path.name} does not account for at {entry!r}")
            if _digest(file, Part(entry, start, stop), progress) != digest:
                refuse(file.path, f"the bytes {start} to {stop} ({entry!r}) do not have the digest in {path.name}")
            end = stop
            count += 1
        if end != file.length:
            refuse(file.path, f"it has {file.length} bytes: expected {end}, by {path.name}")
    return count


def _table(path: Path, text: bytes) -> dict[str, list[list[Any]]]:
    try:
        table = json.loads(text.decode("utf-8"))
        if table["version"] != 1 or table["algorithm"] != "sha256":
            refuse(path, "it is of an unknown version", "Use the version of statetree that wrote it.")
        files: dict[str, list[list[Any]]] = table["files"]
        for rows in files.values():
            if any(list(map(type, row)) != [str, int, int, str] for row in rows):
                refuse(path, "it is damaged")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        refuse(path, "it is damaged")
    return files
