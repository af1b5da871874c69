"""Which elements of two collections belong together."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.testing.values import IDENTITIES, PLAIN, bits_of_number

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


def pair_up(left: Sequence[Any], right: Sequence[Any], same: Callable[[Any, Any], bool]) -> Pairing:
    """Give every element of one collection one of the other that is the same.

    Args:
        left: The elements of one.
        right: The elements of the other.
        same: Asked about elements of which their value does not tell by itself: one by one, so that few should be.
    """
    by_name: dict[Hashable, deque[int]] = defaultdict(deque)
    others: list[int] = []
    for position, element in enumerate(right):
        name = _name(element)
        others.append(position) if name is None else by_name[name].append(position)
    pairs: list[tuple[int, int]] = []
    only_left: list[int] = []
    for position, element in enumerate(left):
        name = _name(element)
        if name is not None:
            partner = by_name[name].popleft() if by_name.get(name) else None
        else:
            partner = next((other for other in others if right[other] is element or same(element, right[other])), None)
            if partner is not None:
                others.remove(partner)
        if partner is None:
            only_left.append(position)
        else:
            pairs.append((position, partner))
    return Pairing(pairs, only_left, sorted([*others, *(place for places in by_name.values() for place in places)]))


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
