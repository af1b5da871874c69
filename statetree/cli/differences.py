"""Two checkpoints compared: structure, dtypes, shapes, ties and, if asked for, values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.cli.describing import dtype_text, shape_text, sort_of, type_text, value_text
from statetree.cli.elements import Unequal, compare_elements
from statetree.cli.progress import progress
from statetree.cli.selecting import matches
from statetree.cli.shared_bytes import find_ties
from statetree.errors import CheckpointError
from statetree.files.checkpoint import TITLES, Checkpoint, is_value, strided, tensors_in, why_not_plain
from statetree.files.stored import Composite, StoredStorage, StoredTensor
from statetree.files.untrusted import brief
from statetree.tree.atoms import same_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.files.checkpoint import Progress, StoredEntry


class Found(NamedTuple):
    """One difference: ``kind`` is ``missing``, ``structure``, ``type``, ``dtype``, ``shape``, ``ties`` or ``value``."""

    key: str
    kind: str
    left: str
    right: str
    elements: Unequal | None = None


class Comparison(NamedTuple):
    """What a comparison found, and what it did not look at.

    Attributes:
        differences: Where the checkpoints differ.
        notes: What else a reader should know.
        num_compared: How many entries both have.
        undecided: The keys of values of classes that are not loaded, which may differ in what cannot be seen.
    """

    differences: list[Found]
    notes: list[str]
    num_compared: int
    undecided: list[str]


def compare(left: Checkpoint, right: Checkpoint, patterns: Sequence[str], *, values: bool) -> Comparison:
    """Compare two checkpoints, of any formats, entry by entry."""
    ours, theirs = _chosen(left, patterns), _chosen(right, patterns)
    shared = [(entry, theirs[key]) for key, entry in ours.items() if key in theirs]
    found = [Found(key, "missing", _words(entry.value), "nothing") for key, entry in ours.items() if key not in theirs]
    found += [Found(key, "missing", "nothing", _words(entry.value)) for key, entry in theirs.items() if key not in ours]
    if left.is_nested and right.is_nested:
        found += _structure(left, right, shared, patterns)
    undecided: list[str] = []
    total = sum(_nbytes(a.value) + _nbytes(b.value) for a, b in shared) if values else 0
    with progress("comparing", total) as advance:
        for a, b in shared:
            differences = list(_leaves(a.key, a.value, b.value, advance, values=values))
            found += differences
            if values and not differences and is_value(a.value) and why_not_plain(a.value):
                undecided.append(a.key)
    if patterns and not shared and not found:
        count = len(left.entries()) + len(right.entries())
        msg = f"diff: none of the {count} keys matches: expected one or more. Check --match."
        raise CheckpointError(msg)
    notes = []
    if undecided:
        named = brief(", ".join(undecided))
        notes.append(f"objects of classes that are not loaded were compared by name alone: {named}")
    if left.keeps_ties and right.keeps_ties:
        found += _ties(left, right, {a.key for a, _ in shared})
    else:
        without = sorted({TITLES[side.kind] for side in (left, right) if not side.keeps_ties})
        notes.append(f"ties were not compared: a {' or a '.join(without)} has none")
    return Comparison(found, notes, len(shared), undecided)


def _chosen(checkpoint: Checkpoint, patterns: Sequence[str]) -> dict[str, StoredEntry]:
    return {entry.key: entry for entry in checkpoint.entries() if matches(entry.key, patterns)}


def _nbytes(leaf: Any) -> int:
    return sum(part.nbytes for part in tensors_in(leaf))


def _words(leaf: Any) -> str:
    if is_value(leaf):
        return f"{type_text(leaf)} {value_text(leaf)}"
    if isinstance(leaf, StoredStorage):
        return f"a storage of {leaf.storage.nbytes} bytes"
    return " ".join(filter(None, (sort_of(leaf), dtype_text(leaf.dtype), shape_text(leaf.shape))))


def _structure(
    left: Checkpoint, right: Checkpoint, shared: Sequence[tuple[StoredEntry, StoredEntry]], patterns: Sequence[str]
) -> Iterator[Found]:
    """Return where containers, or the types of keys, differ."""
    ours, theirs = _containers(left), _containers(right)
    is_other = False
    for key, (family, size) in ours.items():
        other = theirs.get(key, ("", 0))[0]
        if other and other != family:
            is_other = True
            yield Found(key or "<root>", "structure", family, other)
        elif not other and not size and matches(key, patterns):
            yield Found(key, "missing", f"an empty {family}", "nothing")
    for key, (family, size) in theirs.items():
        if key not in ours and not size and matches(key, patterns):
            yield Found(key, "missing", "nothing", f"an empty {family}")
    for a, b in shared:
        if a.path != b.path and not is_other:
            one, other = (f"the keys {brief(repr(tuple(path)))}" for path in (a.path, b.path))
            yield Found(a.key, "structure", one, other)


def _containers(checkpoint: Checkpoint) -> dict[str, tuple[str, int]]:
    """Return what every container is, and how many children it has, by its path as text."""
    return {
        str(path): ("mapping" if issubclass(cls, dict) else cls.__name__, len(keys))
        for path, cls, keys, _ in checkpoint.contents.spec.walk()
        if cls is not None
    }


def _leaves(key: str, a: Any, b: Any, advance: Progress, *, values: bool) -> Iterator[Found]:
    """Return how two leaves differ."""
    if is_value(a) and is_value(b):
        if type_text(a) != type_text(b):
            yield Found(key, "type", _words(a), _words(b))
        elif values and not (repr(a) == repr(b) if why_not_plain(a) else same_value(a, b)):
            yield Found(key, "value", value_text(a), value_text(b))
        return
    if isinstance(a, StoredStorage) and isinstance(b, StoredStorage):
        a, b = (StoredTensor(each.storage, torch.uint8, (each.storage.nbytes,)) for each in (a, b))
    one, other = strided(a), strided(b)
    if one is not None and other is not None:
        yield from _tensors(key, one, other, advance, values=values)
    elif isinstance(a, Composite) and isinstance(b, Composite) and len(a.parts) == len(b.parts):
        if a.shape != b.shape and None not in (a.shape, b.shape):
            yield Found(key, "shape", shape_text(a.shape), shape_text(b.shape))
        for number, (left, right) in enumerate(zip(a.parts, b.parts, strict=True)):
            yield from _tensors(f"{key}.<part {number}>", left, right, advance, values=values)
    else:
        yield Found(key, "type", _words(a), _words(b))


def _tensors(key: str, a: StoredTensor, b: StoredTensor, advance: Progress, *, values: bool) -> Iterator[Found]:
    if a.dtype != b.dtype:
        yield Found(key, "dtype", dtype_text(a.dtype), dtype_text(b.dtype))
    if a.shape != b.shape:
        yield Found(key, "shape", shape_text(a.shape), shape_text(b.shape))
    elif values:
        unequal = compare_elements(a, b, advance)
        if unequal is not None:
            yield Found(key, "value", unequal.left, unequal.right, unequal)


def _ties(left: Checkpoint, right: Checkpoint, shared: set[str]) -> Iterator[Found]:
    """Return where tensors share bytes on one side and not on the other."""
    ours, theirs = _partners(left, shared), _partners(right, shared)
    reported: set[str] = set()
    for key in [*ours, *theirs]:
        sides = [[other for other in of.get(key, ()) if other != key] for of in (ours, theirs)]
        if set(sides[0]) != set(sides[1]) and key not in reported:
            reported.update([key], *sides)
            one, other = (
                f"shares bytes with {brief(', '.join(side))}" if side else "shares no bytes" for side in sides
            )
            yield Found(key, "ties", one, other)


def _partners(checkpoint: Checkpoint, shared: set[str]) -> dict[str, list[str]]:
    """Return what each of the shared keys is tied to, itself included."""
    entries = checkpoint.entries()
    groups = [[entries[index].key for index in group] for group in find_ties(entries).groups]
    groups = [[key for key in group if key in shared] for group in groups]
    return {key: group for group in groups for key in group}
