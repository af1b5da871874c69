"""Leaves that stand for tensors that lie elsewhere (in a file), and the tensors that a user's function gets for them.

A stored tensor is no ``torch.Tensor``: a function that asks ``isinstance`` would take the wrong branch without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class StandIn(NamedTuple):
    """What a user's function gets for a leaf of a class.

    Attributes:
        read: Returns the tensor, in memory of its own.
        unread: Returns a tensor that says its dtype and shape, and is read when its elements are asked for.
    """

    read: Callable[[Any], Any]
    unread: Callable[[Any], Any]


#: By the classes of leaves. Empty until a module that has such leaves is imported.
STAND_INS: Final[dict[type, StandIn]] = {}


def read_leaf(leaf: Any) -> Any:
    """Return the tensor that a leaf stands for; other leaves as they are."""
    found = STAND_INS.get(type(leaf))
    return leaf if found is None else found.read(leaf)


def unread_leaf(leaf: Any) -> Any:
    """Return what a predicate is asked about: a tensor that is not read unless its elements are looked at."""
    found = STAND_INS.get(type(leaf))
    return leaf if found is None else found.unread(leaf)
