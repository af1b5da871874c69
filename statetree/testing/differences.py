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


class Tie(NamedTuple):
    """A tensor that was met in one place of both trees."""

    path: str
    left: Region
    right: Region


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
    same_geometry = True
    numbers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    regions: list[Tie] = []
    objects: list[tuple[str, Any, Any]] = []
    unasked = {name for name, asked in (("strides", strides), ("device", device)) if not asked}
    pending, seen = [("", a, b)], set()
    while pending:
        at, one, other = pending.pop()
        path = at.removeprefix(".") or "<root>"
        if type(one) is not type(other):
            sides = f"{type(one).__qualname__} against {type(other).__qualname__}"
            found.append(Finding(_kind(one, other), f"type differs at {path}: {sides}"))
        if is_plain(one) or is_plain(other):
            if type(one) is type(other) and fingerprint(one) != fingerprint(other):
                found.append(Finding(VALUES, f"value differs at {path}: {_contrast(one, other)}"))
            continue
        if containers or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            objects += [(path, one, other)] if type(one) not in (tuple, frozenset) else []  # equal ones may be one
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        true_of = facts(other)
        for name, (aspect, fact) in facts(one).items():
            if name in true_of and name not in unasked and fact != true_of[name][1]:
                same_geometry = same_geometry and aspect != GEOMETRY
                verb = "differ" if name in ("keys", "strides", "placements") else "differs"
                found.append(Finding(aspect, f"{name} {verb} at {path}: {_contrast(fact, true_of[name][1])}"))
        plain = elements(one), elements(other)
        if plain[0] is not None and plain[1] is not None:
            _pair(path, *plain, numbers, found)
            regions.append(Tie(path, region(plain[0]), region(plain[1])))
        mine, others = parts(one), parts(other)
        for side, only in (("left", mine.keys() - others.keys()), ("right", others.keys() - mine.keys())):
            aspect = GEOMETRY if isinstance(one, torch.Tensor) else STRUCTURE
            places = sorted((at + step).removeprefix(".") for step in only if not step.startswith("<key"))
            found += [Finding(aspect, f"only on the {side} is {place}") for place in places]
        pending += [(at + step, part, others[step]) for step, part in reversed(mine.items()) if step in others]
    report = similarity(*numbers).differences if numbers[0] else ()
    found += [Finding(VALUES, str(found)) for found in report if found.kind == "value"]
    if ties:
        found += [
            Finding(TIES, text) for text in _changed_ties(regions, storages=storages, far=strides and same_geometry)
        ]
        found += [Finding(TIES, text) for text in _changed_objects(objects)]
    return found


def _kind(one: Any, other: Any) -> str:
    """Return which aspect a difference of types belongs to."""
    held = (dict, list, tuple, set, frozenset)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return GEOMETRY
    is_container = [isinstance(side, held) or hasattr(type(side), "__dataclass_fields__") for side in (one, other)]
    return STRUCTURE if any(is_container) else VALUES


def _contrast(one: Any, other: Any) -> str:
    shown, another = brief(one), brief(other)
    return f"{shown} against {another}" if shown != another else f"both shown as {shown}"


def _pair(path: str, one: torch.Tensor, other: torch.Tensor, numbers: Any, found: list[Finding]) -> None:
    """Have the elements of two tensors compared, if they can be."""
    if one.is_meta and other.is_meta:
        return
    if one.is_meta or other.is_meta or one.dtype != other.dtype or one.shape != other.shape:
        sides = " against ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (one, other))
        found.append(Finding(VALUES, f"elements differ at {path}: {sides}"))
    elif _is_freed(one) != _is_freed(other):
        found.append(Finding(VALUES, f"elements differ at {path}: one storage is freed"))
    else:
        numbers[0][path], numbers[1][path] = one.cpu(), other.cpu()


def _is_freed(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and region(tensor).end > tensor.untyped_storage().nbytes()


def region(tensor: torch.Tensor) -> Region:
    """Return where a plain tensor lies in its storage."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    start = int(tensor.storage_offset()) * size
    return Region(storage._cdata, start, start + (last + 1) * size)


def _changed_ties(met: Sequence[Tie], *, storages: bool, far: bool) -> Iterator[str]:
    """Compare which tensors share storages, and how those that do lie to their neighbours."""
    for side, other_side in ((1, 2), (2, 1)):
        here, there = ("left", "right") if side == 1 else ("right", "left")
        reaching: Tie | None = None
        for tie in sorted((tie for tie in met if tie[side].end > tie[side].start), key=lambda tie: tie[side]):
            if reaching is not None and reaching[side].storage == tie[side].storage:
                gap = tie[side].start - reaching[side].end
                if gap < (FAR_BYTES if storages else 0):
                    first, second = reaching[other_side], tie[other_side]
                    both = f"{reaching.path} and {tie.path}"
                    if first.storage != second.storage:
                        yield f"storage of {both} is one on the {here}, two on the {there}"
                    elif far and tie[side].start - reaching[side].start != second.start - first.start:
                        yield f"overlap differs: {both} lie at other distances on the {here} and on the {there}"
            if reaching is None or reaching[side].storage != tie[side].storage or tie[side].end > reaching[side].end:
                reaching = tie


def _changed_objects(met: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    """Compare which places hold one and the same object."""
    for side, here, there in ((1, "left", "right"), (2, "right", "left")):
        first: dict[int, tuple[str, Any, Any]] = {}
        for place in met:
            known = first.setdefault(id(place[side]), place)
            if known[3 - side] is not place[3 - side]:
                yield f"object at {known[0]} and {place[0]} is one on the {here}, two on the {there}"
