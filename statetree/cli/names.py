"""Names out of files: shown without harm, matched, and kept inside their directory."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NoReturn

from statetree.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST: Final = 1000
#: What to do about a file that is not what it says it is.
DISTRUST: Final = "It is damaged, truncated or hostile: get another copy."


def printable(text: str) -> str:
    """Return a text in which control characters, which a terminal would obey, are written as escapes.

    So are characters that change the direction of writing, invisible ones, line breaks and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def is_text(text: str) -> bool:
    """Whether a text has an encoding: JSON and pickles can also write halves of characters (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(text: str, limit: int = 60) -> str:
    """Return a text cut down to a length, printable."""
    cut = text[: limit - 1] + "…" if len(text) > limit else text
    return printable(cut)


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key matches one of some globs; ``*`` goes over dots. Without globs, every key does."""
    return not patterns or any(fnmatchcase(key, pattern) for pattern in patterns)


def refuse(file: Path | str, what: str, remedy: str = DISTRUST) -> NoReturn:
    """Raise the error for a file that cannot be read. Names in it may be of any length: what is said is cut short."""
    said = what if len(what) <= _LONGEST else f"{what[: _LONGEST // 2]}…{what[-_LONGEST // 2 :]}"
    msg = f"read: {file}: {said}. {remedy}"
    raise CheckpointError(msg)


def inside(directory: Path, name: object, listed_in: Path, *, follow_links: bool = False) -> Path:
    """Return the file that a name out of an untrusted file stands for.

    Args:
        directory: Where it has to be.
        name: What was read.
        listed_in: The file that it was read from, for messages.
        follow_links: Whether it may lead out of the directory over a symbolic link, which is something that whoever
            made the directory decided, not the file.

    Raises:
        CheckpointError: If it may lead out of the directory: by ``..``, as an absolute path, over a symbolic link, or
            by a name that systems read differently.
    """
    if type(name) is not str:
        refuse(listed_in, f"a file name is a {type(name).__name__}: expected a text")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or any(char in name for char in "\\\0:"):
        refuse(listed_in, f"the file name {name!r} leads out of its directory")
    path = directory / name
    try:
        if not follow_links and not path.resolve().is_relative_to(directory.resolve()):
            remedy = "If you trust whoever made the directory, pass --follow-links."
            refuse(listed_in, f"the file {name!r} is a link that leads out of its directory", remedy)
        if not path.is_file():
            refuse(listed_in, f"the file {name!r} is missing", "Get all files of the checkpoint.")
    except (OSError, ValueError) as error:
        refuse(listed_in, f"the file {name!r} cannot be found: {error}")
    return path
