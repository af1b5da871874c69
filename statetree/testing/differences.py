"""Where two trees differ: in structure, geometry, values or ties."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import whole_box
from statetree.errors import shown as lines_shown
from statetree.spans.layout import extent_bytes, holds_memory
from statetree.spans.sums import ALL, piece_sums
from statetree.testing.contents import CONTENTS, GEOMETRY, STRUCTURE, TENSORS, TIES, VALUES, TreePlace, entries, shown
from statetree.transforms.similarity import short_repr, similarity
from statetree.tree.atoms import same_value
from statetree.tree.registry import container_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

#: Tensors on one storage that lie further apart than this may come out closer together, or on two storages.
FAR_BYTES = 1 << 20


class Finding(NamedTuple):
    """A difference, and the aspect of a tree that it belongs to."""

    aspect: str
    text: str


class Region(NamedTuple):
    """The bytes from the first element of a tensor to the last."""

    storage: int
    start: int
    end: int


def raise_for(head: str, found: Sequence[str]) -> None:
    """Raise an ``AssertionError`` with what was found, if anything was."""
    if found:
        places = f"{len(found)} place{'s' if len(found) > 1 else ''}"
        raise AssertionError(f"{head} in {places}:\n  {lines_shown(found)}")


brief = functools.partial(short_repr, limit=80)


def differences(a: Any, b: Any, *, ties: bool = True, storages: bool = True) -> list[Finding]:
    """Return where two trees differ, as ``assert_trees_equal`` describes it. Every aspect is looked at by itself."""
    left, right = entries(a), entries(b)
    pairs = {path: (entry, right[path]) for path, entry in left.items() if path in right}
    found = [finding for path, pair in pairs.items() for finding in _unlike(shown(path), pair)]
    for side, one, other in (("left", left, right), ("right", right, left)):
        alone = [path for path, entry in one.items() if path not in other and entry.above in other]
        for path in sorted(alone):
            aspect = GEOMETRY if isinstance(one[one[path].above].value, TENSORS) else STRUCTURE
            found.append(Finding(aspect, f"only on the {side} is {shown(path)}"))
    exactly = not any(finding.aspect == GEOMETRY for finding in found)
    met = [
        (shown(path), one.elements, other.elements)
        for path, (one, other) in pairs.items()
        if one.elements is not None and other.elements is not None
    ]
    found += [Finding(VALUES, text) for text in _other_elements(met)]
    if ties:
        regions = [(path, (region(one), region(other))) for path, one, other in met]
        found += [Finding(TIES, text) for text in _changed_ties(regions, storages=storages, exactly=exactly)]
        found += [Finding(TIES, text) for text in _changed_objects(pairs)]
    return found


def lost(a: Any, b: Any) -> list[str]:
    """Say which values of a tree are nowhere in another one: neither in their places nor in any that are new there."""
    left, right = entries(a), entries(b)
    new = [entry for path, entry in right.items() if path not in left]
    held = {_elements(entry.elements) for entry in new if entry.elements is not None}
    plain = [entry for entry in new if entry.elements is None]
    found = []
    for path, entry in left.items():
        if path in right or _is_in_a_tensor(entry, left, right):
            continue
        if entry.elements is not None:
            is_lost = _elements(entry.elements) not in held
        else:
            has_value = any(aspect == VALUES for aspect, _ in entry.facts.values())
            is_lost = has_value and not any(_is_same(entry, other) for other in plain)
        if is_lost:
            found.append(f"nothing has the value of {shown(path)}: {brief(entry.value)}")
    return found


def _elements(tensor: torch.Tensor) -> Hashable:
    """Return what tensors of the same elements have in common."""
    shape = tuple(tensor.shape)
    is_there = not tensor.is_meta and not hasattr(tensor, "fake_mode")
    has_memory = is_there and holds_memory(tensor)
    sums = piece_sums(tensor, whole_box(shape), shape, ALL).tolist() if has_memory else []
    return tensor.dtype, shape, has_memory, *sums


def _is_in_a_tensor(entry: TreePlace, left: Mapping[str, TreePlace], right: Mapping[str, TreePlace]) -> bool:
    """Whether it is a part of a tensor in whose place there is something else, which is told by itself."""
    while entry.above not in right:
        entry = left[entry.above]
    return isinstance(left[entry.above].value, TENSORS)


def _is_same(one: TreePlace, other: TreePlace) -> bool:
    return all(
        name in other.facts and same_value(fact, other.facts[name][1])
        for name, (aspect, fact) in one.facts.items()
        if aspect == VALUES
    )


def _unlike(place: str, pair: tuple[TreePlace, TreePlace]) -> Iterator[Finding]:
    """Yield what is true of one entry and not of the other."""
    one, other = pair
    is_same_type = type(one.value) is type(other.value)
    if not is_same_type:
        sides = f"{type(one.value).__qualname__} against {type(other.value).__qualname__}"
        yield Finding(_aspect(one.value, other.value), f"type differs at {place}: {sides}")
    elif one.facts.keys() != other.facts.keys():  # what cannot be taken apart equals itself alone
        sides = f"{brief(one.value)} against {brief(other.value)}"
        yield Finding(VALUES, f"object differs at {place}, only one can be taken apart: {sides}")
    unlike = [
        (name, aspect, fact, other.facts[name][1])
        for name, (aspect, fact) in one.facts.items()
        if name in other.facts and not same_value(fact, other.facts[name][1])
    ]
    for name, aspect, fact, its in unlike:
        if name != CONTENTS or (is_same_type and len(unlike) == 1):  # else it only says so once more
            verb = "differ" if name.endswith("s") else "differs"
            yield Finding(aspect, f"{name} {verb} at {place}: {_contrast(fact, its)}")


def _aspect(one: Any, other: Any) -> str:
    """Return which aspect a difference of types belongs to."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return GEOMETRY
    held = (set, frozenset)
    is_container = [isinstance(side, held) or container_of(type(side)) is not None for side in (one, other)]
    return STRUCTURE if any(is_container) else VALUES


def _contrast(one: Any, other: Any) -> str:
    text, another = brief(one), brief(other)
    return f"{text} against {another}" if text != another else f"both shown as {text}"


def _other_elements(met: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> Iterator[str]:
    """Say which tensors have other elements than the ones in the same places."""
    compared = {}
    for path, one, other in met:
        sides = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (one, other)]
        if sides[0] != sides[1] or holds_memory(one) != holds_memory(other) or one.is_meta != other.is_meta:
            yield f"elements differ at {path}: {' against '.join(sides)}"
        elif not one.is_meta:
            compared[path] = one.cpu(), other.cpu()
    if compared:
        report = similarity(*({path: pair[side] for path, pair in compared.items()} for side in (0, 1)))
        yield from (str(each) for each in report.differences if each.kind == "value")


def region(tensor: torch.Tensor) -> Region:
    """Return where a plain tensor lies in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
    return Region(tensor.untyped_storage()._cdata, start, end)


def _changed_ties(met: Sequence[tuple[str, tuple[Region, Region]]], *, storages: bool, exactly: bool) -> Iterator[str]:
    """Compare which tensors share storages, and how those that do lie to their neighbours. A copy may close gaps."""
    for side, (here, there) in enumerate((("left", "right"), ("right", "left"))):
        before: tuple[str, tuple[Region, Region]] | None = None  # what reaches farthest
        for tie in sorted((tie for tie in met if tie[1][side].end > tie[1][side].start), key=lambda tie: tie[1][side]):
            path, regions = tie
            mine, its = regions[side], regions[1 - side]
            if before is None or before[1][side].storage != mine.storage:
                before = tie
                continue
            first, second = before[1][side], before[1][1 - side]
            if mine.start - first.end < (FAR_BYTES if storages else 0):
                if second.storage != its.storage:
                    yield f"storage of {before[0]} and {path} is one on the {here}, two on the {there}"
                elif exactly and mine.start - first.start != its.start - second.start:
                    yield f"overlap differs: {before[0]} and {path} lie at other distances on the left and on the right"
            before = max(before, tie, key=lambda each: each[1][side].end)


def _changed_objects(pairs: dict[str, tuple[TreePlace, TreePlace]]) -> Iterator[str]:
    """Compare which places hold one and the same tensor."""
    for side, (here, there) in enumerate((("left", "right"), ("right", "left"))):
        first: dict[int, tuple[str, Any]] = {}
        for path, pair in pairs.items():
            if isinstance(pair[0].value, torch.Tensor):
                known, partner = first.setdefault(id(pair[side].value), (shown(path), pair[1 - side].value))
                if partner is not pair[1 - side].value:
                    yield f"object at {known} and {shown(path)} is one on the {here}, two on the {there}"
