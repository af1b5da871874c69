"""Where two trees differ: in structure, geometry, values or ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.testing.contents import (
    GEOMETRY,
    STRUCTURE,
    TIES,
    VALUES,
    brief,
    elements,
    facts,
    fingerprint,
    is_plain,
    parts,
)
from statetree.transforms.similarity import similarity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: How many differences are shown.
SHOWN = 20
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
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise AssertionError("\n  ".join([f"{head} in {places}:", *found[:SHOWN], *more]))


def differences(
    a: Any,
    b: Any,
    *,
    ties: bool = True,
    strides: bool = True,
    device: bool = False,
    containers: bool = False,
    storages: bool = True,
) -> list[Finding]:
    """Return where two trees differ, as ``assert_trees_equal`` describes it. Every aspect is looked at by itself."""
    found: list[Finding] = []
    met: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    objects: list[tuple[str, tuple[Any, Any]]] = []
    unasked = {name for name, asked in (("strides", strides), ("device", device)) if not asked}
    pending, seen = [("", a, b)], set()
    while pending:
        at, one, other = pending.pop()
        path = at.removeprefix(".") or "<root>"
        if type(one) is not type(other):
            sides = f"{type(one).__qualname__} against {type(other).__qualname__}"
            found.append(Finding(_aspect(one, other), f"type differs at {path}: {sides}"))
        if is_plain(one) or is_plain(other):
            if type(one) is type(other) and fingerprint(one) != fingerprint(other):
                found.append(Finding(VALUES, f"value differs at {path}: {_contrast(one, other)}"))
            continue
        if isinstance(one, torch.Tensor) or (
            containers and type(one) not in (tuple, frozenset)
        ):  # equal ones may be one
            objects.append((path, (one, other)))
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        its = facts(other)
        for name, (aspect, fact) in facts(one).items():
            if name in its and name not in unasked and fact != its[name][1]:
                verb = "differ" if name.endswith("s") else "differs"
                found.append(Finding(aspect, f"{name} {verb} at {path}: {_contrast(fact, its[name][1])}"))
        left, right = elements(one), elements(other)
        if left is not None and right is not None:
            met.append((path, left, right))
        mine, others = parts(one), parts(other)
        aspect = GEOMETRY if isinstance(one, torch.Tensor) else STRUCTURE
        for side, only in (("left", [*mine.keys() - others.keys()]), ("right", [*others.keys() - mine.keys()])):
            places = sorted((at + step).removeprefix(".") for step in only)
            found += [Finding(aspect, f"only on the {side} is {place}") for place in places]
        pending += [(at + step, part, others[step]) for step, part in reversed(mine.items()) if step in others]
    exactly = strides and not any(finding.aspect == GEOMETRY for finding in found)
    found += [Finding(VALUES, text) for text in _other_elements(met)]
    if ties:
        regions = [(path, (region(left), region(right))) for path, left, right in met]
        found += [Finding(TIES, text) for text in _changed_ties(regions, storages=storages, exactly=exactly)]
        found += [Finding(TIES, text) for text in _changed_objects(objects)]
    return found


def _aspect(one: Any, other: Any) -> str:
    """Return which aspect a difference of types belongs to."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return GEOMETRY
    held = (dict, list, tuple, set, frozenset)
    is_container = [isinstance(side, held) or hasattr(type(side), "__dataclass_fields__") for side in (one, other)]
    return STRUCTURE if any(is_container) else VALUES


def _contrast(one: Any, other: Any) -> str:
    shown, another = brief(one), brief(other)
    return f"{shown} against {another}" if shown != another else f"both shown as {shown}"


def _other_elements(met: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> Iterator[str]:
    """Say which tensors have other elements than the ones in the same places."""
    compared = {}
    for path, one, other in met:
        freed = [
            tensor.numel() > 0 and region(tensor).end > tensor.untyped_storage().nbytes() for tensor in (one, other)
        ]
        sides = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (one, other)]
        if sides[0] != sides[1] or freed[0] != freed[1] or one.is_meta != other.is_meta:
            yield f"elements differ at {path}: {' against '.join(sides)}"
        elif not one.is_meta:
            compared[path] = one.cpu(), other.cpu()
    if compared:
        report = similarity(*({path: pair[side] for path, pair in compared.items()} for side in (0, 1)))
        yield from (str(each) for each in report.differences if each.kind == "value")


def region(tensor: torch.Tensor) -> Region:
    """Return where a plain tensor lies in its storage."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return Region(tensor.untyped_storage()._cdata, start * size, (start + last + 1) * size)


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


def _changed_objects(met: Sequence[tuple[str, tuple[Any, Any]]]) -> Iterator[str]:
    """Compare which places hold one and the same object."""
    for side, (here, there) in enumerate((("left", "right"), ("right", "left"))):
        first: dict[int, tuple[str, Any]] = {}
        for path, pair in met:
            known, partner = first.setdefault(id(pair[side]), (path, pair[1 - side]))
            if partner is not pair[1 - side]:
                yield f"object at {known} and {path} is one on the {here}, two on the {there}"
