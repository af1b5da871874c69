"""One rule of a conversion: which names of one side go with which of the other, and how their elements do."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.chunks.axis_blocks import AxisBlock, AxisRegion
from statetree.chunks.patterns import (
    Dims,
    Equation,
    Strand,
    block_axes,
    equations,
    parse_pattern,
    shown_dims,
    solve,
    written_out,
)
from statetree.tree.name_patterns import NamePattern, shown_capture

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Mapping, Sequence


class Slot(NamedTuple):
    """A tensor of one side of a rule."""

    names: tuple[NamePattern, ...]  # what it is called: under several names, the leaves are tied
    #: Captures of the names that the other side has not: axes, each index of which is a leaf of its own.
    axes: tuple[str, ...]
    dims: Dims | None  # the axes of its dims; None without a pattern

    def name(self, which: int, captures: Mapping[str, str | None], place: Sequence[int]) -> str:
        """Return the name of the leaf at a place along the axes."""
        numbers = dict(zip(self.axes, map(str, place), strict=True))
        return self.names[which].fill({**captures, **numbers})


#: A leaf of a rule: which slot, and where along its axes.
Place = tuple[int, tuple[int, ...]]
#: Where a name belongs: the leaf, which of its names, and its captures.
Hit = tuple[Place, int, "re.Match[str]"]


class PlannedLeaf(NamedTuple):
    """A leaf that a rule makes, and the blocks that it is made of, each with the leaf that it comes from."""

    place: Place
    shape: tuple[int, ...]
    blocks: list[tuple[Place, AxisBlock]]


class Rule:
    """Names of both sides, with the pattern between them: the tensors of each side, and the captures that both have."""

    def __init__(self, left: Sequence[str], right: Sequence[str], pattern: str | None) -> None:
        self.left, self.right, self.pattern = left, right, pattern
        #: Whether it is for the leaves that no other rule takes: they keep their names.
        self.is_rest = pattern is None and [*left] == [*right] == ["**"]
        captures = [{*NamePattern(name).captures} for name in (*left, *right)]
        shared = set[str].intersection(*captures)
        sides = set[str]().union(*captures[: len(left)]), set[str]().union(*captures[len(left) :])
        own = (sides[0] | sides[1]) - shared
        odd = sorted(name for name in own if name.startswith("_") or name in (sides[0] & sides[1]))
        if odd:
            raise self._refused("captures that all names have, or those of one side alone", shown_capture(odd[0]))
        if own and pattern is None:
            raise self._refused(f"a pattern with the axis {min(own)}", "none")
        tensors: tuple[Sequence[Dims | None], ...] = ([None], [None]) if pattern is None else parse_pattern(pattern)
        self.shared = tuple(sorted(shared))
        self.source, self.target = (
            self._slots(names, dims, own) for names, dims in zip((left, right), tensors, strict=True)
        )
        if pattern is not None:
            self._check_axes()
        self._arranged: dict[Any, list[PlannedLeaf]] = {}

    def __str__(self) -> str:
        names = [side[0] if len(side) == 1 else f"[{', '.join(side)}]" for side in (self.left, self.right)]
        return " <-> ".join(names) + (f": {self.pattern}" if self.pattern else "")

    @property
    def inverse(self) -> Rule:
        """The rule the other way round."""
        return Rule(self.right, self.left, self.pattern and " -> ".join(reversed(self.pattern.split("->"))).strip())

    def _refused(self, expected: str, got: str) -> ValueError:
        pattern = "" if self.pattern is None else f", {self.pattern!r}"
        rule = f"({list(self.left)}, {list(self.right)}{pattern})"
        return ValueError(f"Conversion: the rule {rule} is not valid: expected {expected}, got {got}. Change it.")

    def _slots(self, names: Sequence[str], tensors: Sequence[Dims | None], own: set[str]) -> list[Slot]:
        patterns = [NamePattern(name, own) for name in names]
        if len(tensors) not in (1, len(names)):
            raise self._refused(f"a tensor for each of {len(names)} names", str(len(tensors)))
        groups = [patterns] if len(tensors) == 1 else [[pattern] for pattern in patterns]
        slots = []
        for group, dims in zip(groups, tensors, strict=True):
            axes = [tuple([name for name in pattern.captures if name in own]) for pattern in group]
            if len({frozenset(each) for each in axes}) > 1:
                raise self._refused("the same captures in tied names", " and ".join(pattern.text for pattern in group))
            slots.append(Slot(tuple(group), axes[0], dims))
        return slots

    def _check_axes(self) -> None:
        """Raise ``ValueError`` if the blocks of both sides do not have the same axes."""
        sides = []
        for slots in (self.source, self.target):
            blocks = block_axes([slot.dims or () for slot in slots])
            rows = [(slot, axes) for slot, found in zip(slots, blocks, strict=True) for axes in found]
            if any(axes & {*slot.axes} for slot, axes in rows):
                raise self._refused("captures that are no dims of their own tensors", "one that is")
            sides.append([axes | {*slot.axes} for slot, axes in rows])
        counts = [len(side) for side in sides]
        if counts[0] != counts[1]:
            raise self._refused("as many summands as tensors", f"{counts[0]} and {counts[1]}")
        for ours, theirs in zip(*sides, strict=True):
            if ours != theirs:
                odd = ", ".join(sorted(ours ^ theirs))
                raise self._refused("the same axes on both sides", f"{odd} on one side only")

    def matches(self, name: str, *, back: bool = False) -> Iterator[Hit]:
        """Yield where a name belongs on the side that is converted: the leaf, which of its names, and its captures."""
        for number, slot in enumerate(self.target if back else self.source):
            for which, pattern in enumerate(slot.names):
                found = pattern.match(name)
                if found is not None:
                    yield (number, tuple([int(found[axis]) for axis in slot.axes])), which, found

    def places(self, present: Sequence[Place], sizes: Mapping[str, int]) -> tuple[list[Place], dict[str, int]]:
        """Return all leaves that there have to be if there are some, and the sizes of the axes that they lie along."""
        counts: dict[str, int] = {}
        for number, place in present:
            for axis, index in zip(self.source[number].axes, place, strict=True):
                counts[axis] = max(counts.get(axis, 0), index + 1)
        counts = {**dict.fromkeys((axis for slot in self.source for axis in slot.axes), 1), **counts}
        counts |= {axis: sizes[axis] for axis in counts if axis in sizes}
        most = len(present) + 1  # one index may be as large as it likes: then others are missing, and one is enough
        places: list[Place] = []
        for number, slot in enumerate(self.source):
            grid = product(*[range(min(counts[axis], most)) for axis in slot.axes])
            places += [(number, place) for place in islice(grid, most)]
        return places, counts

    def targets(
        self, shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int]
    ) -> tuple[Sequence[PlannedLeaf], Sequence[str]]:
        """Return the leaves that become of tensors, and in texts what does not fit."""
        if self.pattern is None:
            whole = AxisRegion((), (), ())
            return [PlannedLeaf((0, ()), shapes[0], [((0, ()), AxisBlock((), whole, whole))])], ()
        key = (*shapes, *sizes.items())
        if key not in self._arranged:
            given = []
            for slot, shape in zip(self.source, shapes, strict=True):
                dims = slot.dims or ()
                if len(dims) != len(shape):
                    return (), [f"{shape} in {slot.names[0].text}, where {shown_dims(dims)} belongs"]
                given += equations(dims, shape, slot.names[0].text)
            known, wrong = solve(given, sizes)
            both = block_axes([slot.dims or () for slot in (*self.source, *self.target)])
            names = {name for blocks in both for axes in blocks for name in axes}
            if wrong:
                return (), [_told(equation, known) for equation in wrong]
            if unknown := sorted(names - known.keys()):
                how = "give it: sizes=, or [sizes] in a file of rules"
                return (), [f"no size of {', '.join(unknown)}, which does not follow from shapes ({how})"]
            along = {axis for slot in self.target for axis in slot.axes}
            if empty := sorted(axis for axis in along if not known[axis]):
                return (), [f"{empty[0]}=0, along which there would be no leaf"]
            self._arranged[key] = self._arrange(known)
        return self._arranged[key], ()

    def _arrange(self, sizes: Mapping[str, int]) -> list[PlannedLeaf]:
        sides = [[written_out(slot.dims or (), sizes) for slot in slots] for slots in (self.source, self.target)]
        rows, others = ([(n, strands) for n, (_, blocks) in enumerate(side) for strands in blocks] for side in sides)
        found: dict[Place, PlannedLeaf] = {}
        for (number, strands), (other, other_strands) in zip(rows, others, strict=True):
            axes, other_axes = self.source[number].axes, self.target[other].axes
            # An axis that lies along leaves on one side has one index in each of them, and so on the other side.
            names = [name for strand in strands for name, _ in strand.steps if name not in other_axes]
            for there in product(*[range(sizes[axis]) for axis in other_axes]):
                source = _region(strands, dict(zip(other_axes, there, strict=True)), names)
                target = found.setdefault((other, there), PlannedLeaf((other, there), sides[1][other][0], []))
                for here in product(*[range(sizes[axis]) for axis in axes]):
                    region = _region(other_strands, dict(zip(axes, here, strict=True)), names)
                    block = AxisBlock(tuple([sizes[name] for name in names]), source, region)
                    target.blocks.append(((number, here), block.simplified()))
        return list(found.values())


def _region(strands: Sequence[Strand], fixed: Mapping[str, int], names: Sequence[str]) -> AxisRegion:
    start = [s.offset + sum(step * fixed[name] for name, step in s.steps if name in fixed) for s in strands]
    where = {name: (dim, step) for dim, strand in enumerate(strands) for name, step in strand.steps}
    return AxisRegion(
        tuple(start), tuple([where[name][0] for name in names]), tuple([where[name][1] for name in names])
    )


def _told(equation: Equation, known: Mapping[str, int]) -> str:
    terms = [" * ".join(f"{n}={known[n]}" if n in known else n for n in term) or "1" for term in equation.terms]
    return f"{equation.size} in a dim of {equation.label}, where {' + '.join(terms)} belongs"
