"""``statetree diff``: where two checkpoints differ."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from statetree.cli.rows import plural
from statetree.cli.stored_comparison import compare_elements
from statetree.cli.table import is_coloured, wrapped
from statetree.errors import Difference
from statetree.files.leaf_text import dtype_text, kind_of, leaf_text, short_value, type_text
from statetree.files.page import write_page
from statetree.files.shared_bytes import shared_bytes
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import brief, printable, shape_text
from statetree.key_paths import Path as TreePath
from statetree.spans.element_differences import EXACT, Tolerance, Unequal
from statetree.transforms.similarity import MAX_DIFFERENCES, Similarity, similarity
from statetree.tree.atoms import same_value
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from statetree.cli.entries import CheckpointEntry, Choice
    from statetree.files.checkpoint import OpenedCheckpoint


class DiffOptions(NamedTuple):
    """How two checkpoints are compared, and what is said of it: as JSON, as a summary, or not at all."""

    choice: Choice
    tolerance: Tolerance = EXACT
    values: bool = False
    as_json: bool = False
    stat: bool = False
    quiet: bool = False
    page: Path | None = None


class Found(NamedTuple):
    """One difference: which entry, in what, what is on each side, and how elements differ, if they do."""

    key: str
    kind: str
    left: str
    right: str
    elements: Unequal | None = None


class Comparison(NamedTuple):
    """What was found: differences, how many entries were compared, those of which too little is known, and notes."""

    differences: list[Found]
    num_compared: int
    undecided: list[str]
    notes: list[str]

    @property
    def is_undecided(self) -> bool:
        """Whether it cannot be told whether the checkpoints are the same."""
        return bool(self.undecided) and not self.differences


def diff(paths: Sequence[Path], left: OpenedCheckpoint, right: OpenedCheckpoint, options: DiffOptions) -> bool | None:
    """Print how two checkpoints differ. Returns whether they do; ``None`` if that cannot be told."""
    found = compare(left, right, options)
    if options.as_json:
        sys.stdout.write(f"{json.dumps(_as_json(paths, found), indent=2)}\n")
    elif not options.quiet:
        sys.stdout.writelines(f"{wrapped(line)}\n" for line in _lines(paths, found, options))
    if options.page is not None:
        rows = [
            Difference(TreePath((each.key,)), each.kind, each.left, each.right, each.elements and each.elements.max_abs)
            for each in found.differences
        ]
        write_page(left.tree, options.page, Similarity(tuple(rows[:MAX_DIFFERENCES]), len(rows), options.values))
    return None if found.is_undecided else bool(found.differences)


def compare(left: OpenedCheckpoint, right: OpenedCheckpoint, options: DiffOptions) -> Comparison:
    """Compare two checkpoints: entries by their keys; containers, too, where both formats have them."""
    ours, theirs = options.choice.of(left.tree, right.tree)
    one, other = ({entry.key: entry for entry in entries} for entries in (ours, theirs))
    shared = [(entry, other[key]) for key, entry in one.items() if key in other]
    found = [Found(e.key, "missing", leaf_text(e.leaf), "nothing") for e in ours if e.key not in other]
    found += [Found(e.key, "missing", "nothing", leaf_text(e.leaf)) for e in theirs if e.key not in one]
    notes: list[str] = []
    if left.is_nested and right.is_nested:
        found += _structure(left.tree, right.tree, shared, options.choice)
    undecided = []
    for a, b in shared:
        if options.quiet and found:
            break
        found += _leaves(a.key, a.leaf, b.leaf, options)
        if options.values and isinstance(a.leaf, StoredObject) and isinstance(b.leaf, StoredObject):
            undecided.append(a.key)
    keeps_ties = [side.title == "torch file" for side in (left, right)]
    if all(keeps_ties):
        found += _ties(ours, theirs, {a.key for a, _ in shared})
    elif any(keeps_ties):
        notes.append(f"ties were not compared: a {(left, right)[keeps_ties[0]].title} has none")
    if undecided:
        notes.append(f"not loaded, and compared by name alone: {brief(', '.join(undecided), 200)}")
    found.sort(key=_rank)
    return Comparison(found, len({**one, **other}), undecided, notes)


_ORDER: Final = ("structure", "missing", "type", "dtype", "shape", "ties", "value")


def _rank(found: Found) -> tuple[int, float]:
    """Return where a difference is listed: by its kind, and elements that differ most first."""
    return _ORDER.index(found.kind), -found.elements.size if found.elements else 0.0


def _structure(
    left: Any, right: Any, shared: Sequence[tuple[CheckpointEntry, CheckpointEntry]], choice: Choice
) -> Iterator[Found]:
    """Return where containers, or the types of keys, differ."""
    ours, theirs = _containers(left), _containers(right)
    is_other = False
    for key, (path, family, size) in {**theirs, **ours}.items():
        known, other = ours.get(key, (path, "", 0))[1], theirs.get(key, (path, "", 0))[1]
        if known and other and known != other:
            is_other = True
            yield Found(key or "<root>", "structure", known, other)
        elif not (known and other) and not size and not choice.patterns and not choice.excluded:
            sides = (f"an empty {known}", "nothing") if known else ("nothing", f"an empty {family}")
            yield Found(key, "missing", sides[0], sides[1])
    for a, b in shared:
        if a.path != b.path and not is_other:
            one, other = (f"the keys {brief(repr(tuple(path)))}" for path in (a.path, b.path))
            yield Found(a.key, "structure", one, other)


def _containers(tree: Any) -> dict[str, tuple[Any, str, int]]:
    """Return what every container is, and how many children it has, by its path as text."""
    spec = flatten_for("read", tree)[1]
    return {
        str(path): (path, "mapping" if issubclass(cls, dict) else cls.__name__, len(keys))
        for path, cls, keys, _ in spec.walk()
        if cls is not None
    }


def _leaves(key: str, a: Any, b: Any, options: DiffOptions) -> Iterator[Found]:
    """Return how two leaves differ."""
    if kind_of(a) != kind_of(b) or (kind_of(a) == "value" and type_text(a) != type_text(b)):
        yield Found(key, "type", leaf_text(a), leaf_text(b))
        return
    if kind_of(a) == "value":
        if options.values and not isinstance(a, StoredObject) and not same_value(a, b):
            yield Found(key, "value", short_value(a), short_value(b))
        return
    if a.dtype != b.dtype:
        yield Found(key, "dtype", dtype_text(a.dtype), dtype_text(b.dtype))
    if a.shape != b.shape:
        yield Found(key, "shape", shape_text(a.shape), shape_text(b.shape))
    elif a.is_strided and options.values:
        unequal = compare_elements(a, b, options.tolerance)
        if unequal is not None:
            yield Found(key, "value", unequal.left, unequal.right, unequal)
    elif not a.is_strided:
        for found in similarity({"": a}, {"": b}, values=options.values).differences:
            if found.kind != "dtype":
                kind = "value" if found.kind == "value" else "type"
                yield Found(key, kind, str(found.left), str(found.right))
                return


def _ties(left: Sequence[CheckpointEntry], right: Sequence[CheckpointEntry], keys: set[str]) -> Iterator[Found]:
    """Return where tensors share bytes on one side and not on the other."""
    partners: list[dict[str, list[str]]] = []
    for entries in (left, right):
        shared = [entry for entry in entries if entry.key in keys]
        groups = [[shared[index].key for index in group] for group in shared_bytes([entry.leaf for entry in shared])]
        partners.append({key: [other for other in group if other != key] for group in groups for key in group})
    reported: set[str] = set()
    for key in dict.fromkeys([*partners[0], *partners[1]]):
        sides = [of.get(key, []) for of in partners]
        if set(sides[0]) != set(sides[1]) and key not in reported:
            reported.update([key, *sides[0], *sides[1]])
            words = [f"shares bytes with {brief(', '.join(side))}" if side else "shares no bytes" for side in sides]
            yield Found(key, "ties", words[0], words[1])


def _lines(paths: Sequence[Path], found: Comparison, options: DiffOptions) -> Iterator[str]:
    in_colour = is_coloured()

    def paint(text: str, colour: str) -> str:
        return click.style(printable(text), fg=colour) if in_colour else printable(text)

    if found.differences and not options.stat:
        yield paint(f"--- {paths[0]}", "red")
        yield paint(f"+++ {paths[1]}", "green")
    for difference in () if options.stat else found.differences:
        key, left, right = printable(difference.key), paint(difference.left, "red"), paint(difference.right, "green")
        if difference.kind == "missing":
            gone = difference.right == "nothing"
            yield f"- {key}: {left}" if gone else f"+ {key}: {right}"
        elif difference.kind == "ties":
            yield f"~ {key}: {left} on the left, {right} on the right"
        else:
            yield f"~ {key}: {difference.kind} {left} against {right}{_elements(difference.elements)}"
    yield _summary(found, options)
    yield from (f"note: {printable(note)}" for note in found.notes)


def _elements(what: Unequal | None) -> str:
    if what is None:
        return ""
    index = ", ".join(map(str, what.first))
    words = f" at [{index}]; {plural(what.how_many, 'element')} differ{'s' * (what.how_many == 1)}"
    words += "" if what.max_abs is None else f", by at most {what.max_abs:.3g} (relative {what.max_rel:.3g})"
    return f"{words}; {what.num_nan} NaN on one side" if what.num_nan else words


def _summary(found: Comparison, options: DiffOptions) -> str:
    scope = "structure, dtypes, shapes and values" if options.values else "structure, dtypes and shapes; not values"
    noun = "entry" if found.num_compared == 1 else "entries"
    compared = f"{found.num_compared:,} {noun} compared ({scope})"
    if found.is_undecided:
        return f"cannot tell: no difference is seen, but not all can be read (use --match to leave it out); {compared}"
    if not found.differences:
        return f"same: {compared}"
    kinds = dict.fromkeys(difference.kind for difference in found.differences)
    counts = [f"{sum(other.kind == kind for other in found.differences)} {kind}" for kind in kinds]
    measured = [size for each in found.differences if each.elements and (size := each.elements.max_abs) is not None]
    largest = f"; elements differ by at most {max(measured):.3g}" if options.stat and measured else ""
    return f"{plural(len(found.differences), 'difference')} ({', '.join(counts)}); {compared}{largest}"


def _as_json(paths: Sequence[Path], found: Comparison) -> dict[str, Any]:
    return {
        "left": str(paths[0]),
        "right": str(paths[1]),
        "same": None if found.is_undecided else not found.differences,
        "compared": found.num_compared,
        "undecided": found.undecided,
        "differences": [_difference_json(difference) for difference in found.differences],
        "notes": found.notes,
    }


def _difference_json(found: Found) -> dict[str, Any]:
    plain = found._asdict()
    what = plain.pop("elements")
    if what is None:
        return plain
    numbers = {name: str(size) if size == math.inf else size for name, size in what._asdict().items() if "max" in name}
    counts = {"first_index": list(what.first), "num_different": what.how_many, "num_nan": what.num_nan}
    return {**plain, **counts, **numbers}  # JSON has no infinity
