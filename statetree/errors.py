"""Every exception that statetree raises, the record of a difference between trees, and what is done with errors.

And what is checked once more when a verb ends, for errors that can be told only then.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from functools import partial
from itertools import combinations, pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

from statetree.key_paths import is_tensor, literal, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import CodeType, TracebackType

    from statetree.key_paths import Path

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
R = TypeVar("R")

#: What comes up in somebody else's code and concerns that alone: an error or an exit. (An interrupt concerns us all.)
USERS_OWN: Final = (Exception, SystemExit)

#: How many differences a message spells out before it only counts them.
SHOWN_DIFFERENCES = 20


class Difference(NamedTuple):
    """One place where two trees differ.

    ``kind`` is one of ``missing``, ``structure``, ``length``, ``leaf type``, ``type``, ``dtype``, ``shape``,
    ``layout``, ``ties``, ``overlap``, ``range``, ``value`` and a few that a leaf type adds (``mesh``, ``placements``…).
    ``left`` and ``right`` say what each side holds there. ``largest`` is the largest difference of two elements of a
    tensor (infinity where one is NaN and the other is not); ``None`` if no numbers differ.
    """

    path: Path
    kind: str
    left: Any
    right: Any
    largest: float | None = None

    def __str__(self) -> str:
        by = "" if self.largest is None else f", by at most {self.largest:.3g}"
        return harmless(f"{self.kind} differs at {_place(self)}: {self.left} against {self.right}{by}")


def _place(found: Difference) -> str:
    return printable(str(found.path)) if found.path else "<root>"


def _told(found: Difference) -> str:
    """Say in a sentence what the left side has that does not fit the right one."""
    where = _place(found)
    if found.kind == "missing":
        if found.left == "absent":
            return f"missing at {where}: expected {found.right}, got nothing."
        return f"unexpected at {where}: expected nothing, got {found.left}."
    if found.kind in {"overlap", "ties", "writability"}:  # it is the right side that does not allow it
        return f"{found.kind} at {where}: {found.left} cannot go into {found.right}."
    verb = "do not fit" if found.kind in {"rules", "sizes"} else "differs"  # of a conversion
    return f"{found.kind} {verb} at {where}: expected {found.right}, got {found.left}."


def harmless(text: str) -> str:
    """Return a text of several lines with what is not printable in each of them written as escapes."""
    return "\n".join(map(printable, text.split("\n")))


def shown(lines: Sequence[str], total: int | None = None) -> str:
    """Join lines of a message: the first twenty in full, and the rest as a count."""
    count = len(lines) if total is None else total
    head = list(lines[:SHOWN_DIFFERENCES])
    if count > len(head):
        head.append(f"… and {count - len(head)} more")
    return "\n  ".join(head)


def chain_of(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """Yield an exception and all those that led to it, each once, as far as one that was being handled ``before``."""
    pending: list[BaseException | None] = [error]
    seen = {id(before)}
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            pending += [found.__context__, found.__cause__]


def clear_frames(error: BaseException) -> None:
    """Let go of what the tracebacks of an exception, and of those that led to it, hold."""
    for found in chain_of(error):
        traceback.clear_frames(found.__traceback__)


# What the handler of a signal raises (an alarm, say) comes out of every verb as it is, wherever it came up. It may be
# an error of any class, so that no class tells it from an error of a file or of a value; the frames of its traceback
# do. Python evaluates the expression after `except` when an exception gets there, and `sys.exception` is that one: so
# the question stands where the classes do, and costs nothing while nothing fails. A clause that stands before it and
# fits is taken unasked.


def unsignalled(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return kinds of errors, for an ``except``. If the handler of a signal raised what is handled, raise that instead.

    (An alarm may be of any kind: a ``TimeoutError`` is an ``OSError``. It says nothing of a file, or of a value.)
    """
    pass_on_from_signal(sys.exception())
    return kinds


class suppress(contextlib.suppress):
    """As that of ``contextlib``, but for what the handler of a signal raises."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return super().__exit__(kind, error, trace) and _from_signal(error) is None


def pass_on_from_signal(error: BaseException | None) -> None:
    """Raise what the handler of a signal raised (an alarm, say), if an error is that or was raised from it."""
    raised = _from_signal(error)
    try:
        if raised is not None:
            raise raised
    finally:
        del error, raised  # the traceback holds this frame: what they hold would last until it is collected


def _from_signal(error: BaseException | None) -> BaseException | None:
    """Return what the handler of a signal raised, of an error and its causes.

    (Not of its context: whoever calls us after an alarm has that for the context of every error.)
    """
    codes: set[CodeType | None] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if len(frames) > 1:
            codes = codes or _handlers()
            if any(frame.f_code in codes and _is_given(frame, caller) for caller, frame in pairwise(frames)):
                return error
        error = error.__cause__
    return None


def _handlers() -> set[CodeType | None]:
    """Return the code of all handlers of signals that are functions of Python."""
    handlers = [found for found in map(signal.getsignal, signal.valid_signals()) if callable(found)]
    calls = [handler.func if isinstance(handler, partial) else handler for handler in handlers]
    return {getattr(call if hasattr(call, "__code__") else type(call).__call__, "__code__", None) for call in calls}


def _is_given(frame: FrameType, caller: FrameType) -> bool:
    """Whether a frame was given its caller, as the handler of a signal is given the frame that it interrupts.

    (Decorators share their code: not all that runs it handles a signal. A function that deleted what it was given is
    taken for one that does. Python leaves the frames of its imports out of tracebacks.)
    """
    held, code = frame.f_locals, frame.f_code
    given, deleted = list(held.values()), {*code.co_varnames[: code.co_argcount]} - {*held}
    if type(held) is dict:
        held.clear()  # a copy, which Python up to 3.12 keeps with the frame, and all that it holds
    given += [one for each in given if type(each) is tuple for one in each]
    return bool(deleted) or any(one is caller or _is_of_import(one) for one in given)


def _is_of_import(value: object) -> bool:
    return isinstance(value, FrameType) and value.f_code.co_filename.startswith("<frozen importlib")


def describe_leaf(leaf: Any) -> str:
    """Say what a leaf is: dtype, shape and device of a tensor, the class of anything else. Never raises."""
    name = type(leaf).__qualname__
    try:
        return f"{name} {leaf.dtype} {tuple(leaf.shape)} on {leaf.device}" if is_tensor(leaf) else name
    except unsignalled(Exception):  # half-initialised tensors refuse to say
        return name


def note_leaf(error: BaseException, path: Path, leaf: Any) -> None:
    """Add to an exception which leaf it concerns."""
    error.add_note(printable(f"statetree: at {str(path) or '<root>'}, {describe_leaf(leaf)}"))


def warn(message: str) -> None:
    """Warn, at the line outside of this package that the calls come from: Python shows it once for each such line."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 - Python 3.12 has skip_file_prefixes for it
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("statetree."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class StateTreeError(Exception):
    """Base of every error that statetree raises by itself.

    Control characters of names in its message, which a terminal would obey, are written as escapes.
    """

    #: Whether other ranks failed, of what is no error of this library: they take no part any more.
    failed_elsewhere = False

    def __init__(self, *args: object) -> None:
        super().__init__(*[harmless(arg) if isinstance(arg, str) else arg for arg in args])


class TreeMismatch(StateTreeError, ValueError):
    """Two trees, or a tree and a list of leaves, do not fit together.

    ``differences`` holds every place that was found (it is capped for very different trees).
    """

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)

    @classmethod
    def between(
        cls,
        verb: str,
        differences: Sequence[Difference],
        remedy: str,
        names: tuple[Iterable[str], Iterable[str]] | None = None,
    ) -> TreeMismatch:
        """Return the error for a left tree (what was given) that does not fit a right one (what was expected).

        ``names`` are the paths of all leaves of both, if they are at hand; otherwise those that are missing count.
        """
        missing = [found for found in differences if found.kind == "missing"]
        if names is None:
            ours = [str(found.path) for found in missing if found.right == "absent"]
            names = ours, [str(found.path) for found in missing if found.left == "absent"]
        hint = prefix_hint(*names, ("given", "expected")) if missing else ""
        lines = list(map(_told, differences))
        places = f"the trees differ in {len(lines)} places:\n  " if len(lines) > 1 else ""
        return cls(f"{verb}: {places}{shown(lines)} {remedy}{hint and ' '}{hint}", differences)


def prefix_hint(left: Iterable[str], right: Iterable[str], told: tuple[str, str] = ("left", "right")) -> str:
    """Say that names which only one of two trees has differ by a prefix (``module.``), and how ``rename`` mends it.

    It is empty if they do not. ``told`` is what the trees are called.
    """
    left, right = set(left), set(right)
    ours, theirs = left - right, right - left
    longer, shorter = (ours, theirs) if sum(map(len, ours)) > sum(map(len, theirs)) else (theirs, ours)
    if not ours or len(ours) != len(theirs):
        return ""
    parts = min(longer).split(".")
    for start, stop in combinations(range(len(parts)), 2):
        above = "".join(f"{part}." for part in parts[:start])
        prefix = "".join(f"{part}." for part in parts[start:stop])
        if (
            all(name.startswith(above + prefix) for name in longer)
            and {above + name.removeprefix(above + prefix) for name in longer} == shorter
        ):
            tree = told[longer is theirs]
            rule = f"{{{f'{literal(above + prefix)}**'!r}: {f'{literal(above)}**'!r}}}"
            return f"The names differ by the prefix {prefix!r} of the {tree} tree: rename(tree, {rule}) takes it away."
    return ""


class CheckpointError(StateTreeError):
    """A checkpoint could not be written or read."""


class _AtPath(StateTreeError):
    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class UnsupportedLeaf(_AtPath, TypeError):
    """A leaf cannot be taken apart and put together exactly. ``path`` says which."""


class CyclicTree(_AtPath, ValueError):
    """A container holds itself. ``path`` is where it appears inside itself."""


class TreeTooDeep(_AtPath, RecursionError):
    """Containers are nested deeper than statetree follows them. ``path`` leads down to the limit."""


class RankMismatch(StateTreeError, ValueError):
    """The ranks of a collective do not fit together: their trees, layouts or options, or one of them failed or died."""


class StagerBusy(StateTreeError, RuntimeError):
    """Every snapshot that a stager may hold is still referred to."""


class StagerClosed(StateTreeError, RuntimeError):
    """A stager was used after ``close``."""


def place_in_tree(error: StateTreeError, paths: Mapping[str, Path]) -> None:
    """Correct the path of an error that came up in a flat dict of leaves, whose paths in the tree are given by key."""
    path = getattr(error, "path", None)
    if isinstance(path, tuple) and path and path[0] in paths:
        error.path = type(paths[path[0]])((*paths[path[0]], *path[1:]))  # type: ignore[attr-defined]


def check_function(verb: str, name: str, given: object, expected: str = "a function") -> None:
    """Raise ``TypeError`` if what was given as an argument cannot be called."""
    if not callable(given):
        raise TypeError(f"{verb}: {name} cannot be called: expected {expected}, got {given!r}.")


def check_iterable(verb: str, name: str, given: object, expected: str = "a list") -> None:
    """Raise ``TypeError`` if what was given as an argument has no items."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{verb}: {name} cannot be {given!r}: expected {expected}.")


class _Later(threading.local):
    checks: dict[tuple[Any, ...], None] | None = None


_LATER: Final = _Later()


def check_later(check: Callable[..., None], *args: Any) -> None:
    """Have something checked when the outermost ``quietly`` or ``with_checks`` of this thread ends; outside, at once.

    Elements in memory that is mapped from a file are read by whichever copy comes to them, long after the file was
    looked at. Whether it changed meanwhile can be told only after the last of them was read: when the verb ends.
    """
    if _LATER.checks is None:
        check(*args)
    else:
        _LATER.checks[check, *args] = None


def check_now() -> None:
    """Check what was left to be checked, for a verb that does something with what it has read."""
    checks = _LATER.checks or {}
    done = 0
    while done < len(checks):  # a check may leave another one to be made
        for check, *args in list(checks)[done:]:
            done += 1
            check(*args)


def checked_at_once(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that answers for what it reads: nothing of it is left to be checked when the verb ends."""
    before, _LATER.checks = _LATER.checks, None
    try:
        return function(*args, **kwargs)
    finally:
        _LATER.checks = before


def with_checks(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, and then what was left to be checked."""
    if _LATER.checks is not None:  # a call inside another, which checks when it ends
        return function(*args, **kwargs)
    try:
        _LATER.checks = {}
        result = function(*args, **kwargs)
        try:
            check_now()
        except BaseException:
            del result  # the traceback would keep it, and with it the memory that a stage leased
            raise
        return result
    finally:
        _LATER.checks = None
