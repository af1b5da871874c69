"""Which elements of two collections belong together."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.judge.values import IDENTITIES, PLAIN, bits_of_number

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class Pairing(NamedTuple):
    """Positions in two collections: of elements that belong together, in the order of the left, and of the others."""

    pairs: list[tuple[int, int]]
    only_left: list[int]
    only_right: list[int]

    def first_out_of_order(self) -> tuple[int, int] | None:
        """Return where the order of those on both sides differs first: the positions of what is there instead."""
        in_order = sorted(right for _, right in self.pairs)
        return next(
            ((left, there) for (left, right), there in zip(self.pairs, in_order, strict=True) if right != there), None
        )


def pair_up(
    left: Sequence[Any], right: Sequence[Any], same: Callable[[Any, Any], bool], *, ordered: bool = False
) -> Pairing:
    """Give every element of one collection one of the other that is the same.

    Args:
        left: The elements of one.
        right: The elements of the other.
        same: Asked about elements which their value does not tell apart at once: one by one, so few should be.
        ordered: Whether of those, if there are as many on both sides, the first belongs to the first, and so on.
    """
    names, others = list(map(_name, left)), list(map(_name, right))
    by_name: dict[Hashable, deque[int]] = defaultdict(deque)
    for position, name in enumerate(others):
        by_name[name].append(position)
    nameless = by_name.pop(None, deque())
    in_order = ordered and len(nameless) == names.count(None)
    partners: dict[int, int] = {}
    for position, name in enumerate(names):
        among = nameless if name is None else by_name[name]
        if among and (name is not None or in_order):
            partners[position] = among.popleft()
    for position, mine in enumerate(left):
        if names[position] is None and position not in partners:
            partner = next((place for place in nameless if right[place] is mine or same(mine, right[place])), None)
            if partner is not None:
                nameless.remove(partner)
                partners[position] = partner
    only_left = [position for position in range(len(left)) if position not in partners]
    return Pairing(sorted(partners.items()), only_left, sorted([*nameless, *chain.from_iterable(by_name.values())]))


def _name(value: Any) -> Hashable | None:
    """Return what is equal for values that are the same, and for no others; ``None`` if it takes more to tell."""
    cls = type(value)
    if isinstance(value, IDENTITIES):
        return cls, id(value)
    if cls in (float, complex):
        return cls, bits_of_number(value)
    if cls in PLAIN:
        return cls, value
    if cls is tuple:
        names = tuple(map(_name, value))
        return None if None in names else (cls, names)
    return None
