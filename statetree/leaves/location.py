"""Errors of leaves that cannot be taken apart or put together: which leaf it was, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.errors import (
    CheckpointError,
    StateTreeError,
    TreeMismatch,
    UnsupportedLeaf,
    describe_leaf,
    pass_on_from_signal,
)
from statetree.key_paths import Path
from statetree.leaves.builtin import leaf_type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def located_error(
    verb: str, doing: str, error: Exception, paths: Callable[[], Sequence[Path]], leaves: list[Any], index: int
) -> Exception:
    """Return the error to raise for one that came up while a leaf was taken apart or put together.

    Raise that one itself if the handler of a signal raised it, or where leaves have no paths: the caller says which.
    """
    pass_on_from_signal(error)
    if not (named := paths()):
        raise error
    path = named[index]
    inner = getattr(error, "path", None)
    if isinstance(error, StateTreeError) and inner is not None:  # in a leaf's attributes, or in an opaque object
        return type(error)(f"{verb}: inside the leaf at {path or '<root>'}: {error}", Path((*path, *inner)))
    if isinstance(error, TreeMismatch):  # names all paths itself
        return TreeMismatch(f"{verb}: {error}", error.differences)
    if isinstance(error, CheckpointError):  # of a leaf whose elements lie in a file
        return CheckpointError(f"{verb}: the leaf at {path or '<root>'} cannot be read: {error}")
    if isinstance(error, UnsupportedLeaf):
        message = str(error).replace("%PATH%", str(path) or "<root>")
        error.args = (message,)  # it is shown as the cause
        return UnsupportedLeaf(f"{verb}: {message}", path)
    msg = (
        f"{verb}: cannot {doing} the leaf at {path or '<root>'} ({describe_leaf(leaves[index])}): "
        f"{_shown(error)}. {_remedy(error, leaves[index])}"
    )
    return UnsupportedLeaf(msg, path)


#: How many characters of somebody else's message are shown.
_LONGEST: Final = 200


def _shown(error: Exception) -> str:
    """Return the class of an error and what it says, without the tables and advice that torch appends."""
    line = str(error).strip().split("\n", 1)[0].rstrip(".")
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__  # a MemoryError says nothing


def _remedy(error: Exception, leaf: Any) -> str:
    if isinstance(error, MemoryError):
        return "Free memory, and try again."
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is not None and leaf_type.registered:
        return "Look at its leaf type."
    if type(leaf).__module__.split(".")[0] in {"builtins", "torch"}:
        return "Convert it first."
    return "Register its class with register_leaf_type."
