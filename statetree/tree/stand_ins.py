"""Leaves that stand for tensors that lie elsewhere (in a file), and the tensors that a user's function gets for them.

A stored tensor is no ``torch.Tensor``: a function that asks ``isinstance`` would take the wrong branch without a word.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

#: Their classes. Empty until a module that has such leaves is imported. These have ``location()``, which is equal for
#: those that are the same view on the same bytes; ``fresh()``, the tensor in memory of its own; ``unread()``, one that
#: says its dtype and shape, and is read when its elements are asked for; and ``seen_as(tensor)``: what was read for
#: another one, as what it is itself (a parameter, say).
STAND_INS: Final[set[type]] = set()


def reader(leaves: Iterable[Any]) -> Callable[[Any], Any]:
    """Return a function that returns the tensor that a leaf stands for; other leaves as they are.

    Those of the given leaves that stand for one tensor (ties in a file) get one memory, which is read once.
    """
    counts = Counter(leaf.location() for leaf in leaves if type(leaf) in STAND_INS)
    known: dict[Hashable, Any] = {}

    def read(leaf: Any) -> Any:
        if type(leaf) not in STAND_INS:
            return leaf
        place = leaf.location()
        if place not in known:
            tensor = leaf.fresh()
            if counts[place] < 2:
                return tensor
            known[place] = tensor
        return leaf.seen_as(known[place])

    return read


def unread_leaf(leaf: Any) -> Any:
    """Return what a predicate is asked about: a tensor that is not read unless its elements are looked at."""
    return leaf.unread() if type(leaf) in STAND_INS else leaf
