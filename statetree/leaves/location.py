"""Errors of leaves that cannot be taken apart or put together: which leaf it was, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.errors import CheckpointError, StateTreeError, TreeMismatch, UnsupportedLeaf, describe_leaf, note_leaf
from statetree.key_paths import Path
from statetree.leaves.builtin import is_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: How many characters of somebody else's message are shown.
_LONGEST: Final = 200


def located_error(
    verb: str, doing: str, error: Exception, paths: Callable[[], Sequence[Path]], leaves: list[Any], index: int
) -> Exception:
    """Return the error to raise for one that came up while a leaf was taken apart or put together.

    Raise that one itself where leaves have no paths: the caller says which. What comes up as a stored leaf is read is
    no fault of its type: a user's function raised it, or the memory is too small.
    """
    if not (named := paths()):
        raise error
    path = named[index]
    if not isinstance(error, StateTreeError) and is_stored(leaves[index]):
        note_leaf(error, path, leaves[index])
        raise error
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
    line = str(error).strip().split("\n", 1)[0].rstrip(".")  # without the tables and advice that torch appends
    said = f"{type(error).__name__}: {line[:_LONGEST]}" if line else type(error).__name__
    remedy = "Convert it first, or mend or register its leaf type."
    if isinstance(error, MemoryError):
        remedy = "Free memory, and try again."
    msg = f"{verb}: cannot {doing} the leaf at {path or '<root>'} ({describe_leaf(leaves[index])}): {said}. {remedy}"
    return UnsupportedLeaf(msg, path)
