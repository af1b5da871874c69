"""Leaves that stand for tensors that lie elsewhere (in a file), and the tensors that a user's function gets for them.

A stored tensor is no ``torch.Tensor``: a function that asks ``isinstance`` would take the wrong branch without a word.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


class StandIn(NamedTuple):
    """What a user's function gets for a leaf of a class."""

    read: Callable[[Any], Any]  # the tensor, in memory of its own
    unread: Callable[[Any], Any]  # one that says its dtype and shape, and is read when its elements are asked for
    place: Callable[[Any], Hashable]  # what is equal for those that are the same view on the same bytes
    seen_as: Callable[[Any, Any], Any]  # what was read for one of these, as what another one is: a parameter, say


#: By the classes of leaves. Empty until a module that has such leaves is imported.
STAND_INS: Final[dict[type, StandIn]] = {}


def place_of(leaf: Any) -> Hashable:
    """Return what is equal for leaves that stand for one tensor; ``None`` for leaves that stand for none."""
    found = STAND_INS.get(type(leaf))
    return None if found is None else found.place(leaf)


def reader(leaves: Iterable[Any]) -> Callable[[Any], Any]:
    """Return a function that returns the tensor that a leaf stands for; other leaves as they are.

    Those of the given leaves that stand for one tensor (ties in a file) get one memory, which is read once.
    """
    counts = Counter(place_of(leaf) for leaf in leaves if type(leaf) in STAND_INS)
    known: dict[Hashable, Any] = {}

    def read(leaf: Any) -> Any:
        found = STAND_INS.get(type(leaf))
        if found is None:
            return leaf
        place = found.place(leaf)
        if place not in known:
            tensor = found.read(leaf)
            if counts[place] < 2:
                return tensor
            known[place] = tensor
        return found.seen_as(leaf, known[place])

    return read


def unread_leaf(leaf: Any) -> Any:
    """Return what a predicate is asked about: a tensor that is not read unless its elements are looked at."""
    found = STAND_INS.get(type(leaf))
    return leaf if found is None else found.unread(leaf)
