"""What files hold that nobody vouches for: names kept inside their directory, texts shown without harm, deep values."""

from __future__ import annotations

import os
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from statetree.errors import CheckpointError, unsignalled
from statetree.key_paths import printable as printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_LONGEST: Final = 1000
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
#: What C code takes of the stack for each tuple that it hashes in another one: 80 bytes were measured on CPython 3.11.
_FRAME: Final = 192
_SHALLOW: Final = 100
#: What no name of a file that another file lists may hold: on some system it leads elsewhere.
NOT_IN_NAMES: Final = "\\\0:"
#: What to do about a file that is not what it says it is.
DISTRUST: Final = "It is damaged, truncated or hostile: get another copy."


def brief(text: str, limit: int = 60) -> str:
    """Return a text cut down to a length, printable."""
    return printable(text[: limit - 1] + "…" if len(text) > limit else text)


def human(nbytes: int) -> str:
    """Return a number of bytes with a unit."""
    size = float(nbytes)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape."""
    return brief(f"[{', '.join(map(str, shape))}]")


def is_text(text: str) -> bool:
    """Whether a text has an encoding: JSON and pickles can also write halves of characters (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse(file: Path | str, what: str, remedy: str = DISTRUST) -> NoReturn:
    """Raise the error for a file that cannot be read. Names in it may be of any length: what is said is cut short."""
    said = what if len(what) <= _LONGEST else f"{what[: _LONGEST // 2]}…{what[-_LONGEST // 2 :]}"
    raise CheckpointError(f"read: {file}: {said}. {remedy}")


def inside(directory: Path, name: object, listed_in: Path, *, follow_links: bool = False) -> Path:
    """Return the file that a name out of an untrusted file stands for."""
    if type(name) is not str:
        refuse(listed_in, f"a file name is a {type(name).__name__}: expected a text")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or any(char in name for char in NOT_IN_NAMES):
        refuse(listed_in, f"the file name {name!r} leads out of its directory")
    if str(pure) != name or not pure.parts:
        refuse(listed_in, f"the file name {name!r} is not a plain one")
    path = directory / name
    try:
        if not follow_links and leads_out(path, directory):
            remedy = "If you trust whoever made the directory, pass --follow-links."
            refuse(listed_in, f"the file {name!r} is a link that leads out of its directory", remedy)
        if not path.is_file():
            refuse(listed_in, f"the file {name!r} is missing", "Get all files of the checkpoint.")
    except unsignalled(OSError, ValueError) as error:
        refuse(listed_in, f"the file {name!r} cannot be found: {error}")
    return path


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a path is a link that leads out of a directory. A link to itself leads nowhere."""
    try:
        return not path.resolve().is_relative_to(directory.resolve())
    except unsignalled(RuntimeError):  # before Python 3.13
        return False


class _StackSize:
    """The size of the stacks that threads get which are started now: there is one for all of them."""

    lock = threading.Lock()


def _renew() -> None:
    _StackSize.lock = threading.Lock()  # that of a parent may be held for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def on_deep_stack(levels: int, work: Callable[[], T]) -> T:
    """Return what some work returns, in which C code may call itself for so many levels of what a file holds.

    Beyond a hundred levels that is done in a thread with a stack of its own, which takes memory only where it is used.
    """
    if levels <= _SHALLOW:
        return work()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with _StackSize.lock:
        usual = threading.stack_size()
        try:
            threading.stack_size((levels * _FRAME + (1 << 20)) >> 16 << 16)
            thread.start()
        except RuntimeError as error:
            what = f"values may be nested {levels} deep: expected a thread with a stack for these, got {error}"
            raise MemoryError(f"read: {what}. Raise the limits of threads and of memory.") from None
        finally:
            threading.stack_size(usual)
    thread.join()
    if failed:
        raise failed.pop()
    return done.pop()
