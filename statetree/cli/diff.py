"""``statetree diff``: where two checkpoints differ."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from statetree.cli.entries import selection
from statetree.cli.progress import tracked
from statetree.cli.rows import plural
from statetree.cli.table import is_coloured
from statetree.errors import Difference, with_checks
from statetree.files.leaf_text import leaf_text, short_value
from statetree.files.page import write_page
from statetree.files.shared_bytes import shared_bytes
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import brief, printable
from statetree.key_paths import Path as TreePath
from statetree.leaves.value_texts import equal_values
from statetree.spans.bits import same_bytes
from statetree.spans.element_differences import EXACT, Tolerance, Unequal, tensor_difference
from statetree.transforms.similarity import MAX_DIFFERENCES, Similarity, similarity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from statetree.cli.entries import CheckpointEntry, Choice
    from statetree.files.checkpoint import OpenedCheckpoint


class DiffOptions(NamedTuple):
    """How two checkpoints are compared, and what is said of it: as JSON, as text, or not at all."""

    choice: Choice
    tolerance: Tolerance = EXACT
    values: bool = False
    as_json: bool = False
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
    """What was found."""

    differences: list[Found]  # what differs: of structure, a thousand at most
    num_found: int  # how many differences there are
    num_compared: int  # how many entries were compared
    undecided: list[str]  # those of which too little is known
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
        sys.stdout.writelines(f"{line}\n" for line in _lines(paths, found, options))
    if options.page is not None:
        rows = [
            Difference(TreePath((each.key,)), each.kind, each.left, each.right, each.elements and each.elements.max_abs)
            for each in found.differences
        ]
        report = Similarity(tuple(rows[:MAX_DIFFERENCES]), found.num_found, options.values)
        before, after = map(str, paths)
        write_page(left.tree, options.page, report, values=options.values, sides=(before, after))
    return None if found.is_undecided else bool(found.differences)


def compare(left: OpenedCheckpoint, right: OpenedCheckpoint, options: DiffOptions) -> Comparison:
    """Compare two checkpoints: their structure where both have one, and otherwise entries by their keys."""
    choice, notes = options.choice, []
    ours, theirs = choice.of(left.tree, right.tree)
    one, other = ({entry.key: entry.leaf for entry in entries} for entries in (ours, theirs))
    trees: tuple[Any, Any] = one, other
    where = None
    if left.is_nested and right.is_nested:
        trees = left.tree, right.tree
        where = selection([*ours, *theirs]) if choice.patterns or choice.excluded else None
    report = similarity(*trees, where=where, values=False)
    structure = [each for each in report.differences if each.kind != "ties"]  # of those, too little is said
    found = [_of_structure(difference, one, other) for difference in structure]
    shared = [key for key in one if key in other]
    keeps_ties = [side.title == "torch file" for side in (left, right)]
    if all(keeps_ties):
        found += _ties(ours, theirs, set(shared))
    elif any(keeps_ties):
        notes.append(f"ties were not compared: a {(left, right)[keeps_ties[0]].title} has none")
    differing = {difference.key for difference in found}
    undecided = []
    for key in tracked("diff", shared, len(shared)) if options.values else ():
        if options.quiet and found:
            break
        a, b = one[key], other[key]
        if isinstance(a, StoredObject) and isinstance(b, StoredObject):
            undecided.append(key)
        elif type(a) not in (list, tuple) or not any(each.startswith(f"{key}.") for each in differing):
            found += _values(key, a, b, options.tolerance)
    if undecided:
        notes.append(f"not loaded, and compared by name alone: {brief(', '.join(undecided), 200)}")
    found.sort(key=lambda each: (each.kind == "value", -each.elements.size if each.elements else 0.0))
    notes += [report.hint] * bool(report.hint)
    count = len(found) + report.count - len(report.differences)
    return Comparison(found, count, len({**one, **other}), undecided, notes)


def _of_structure(found: Difference, one: Mapping[str, Any], other: Mapping[str, Any]) -> Found:
    key = str(found.path)
    if found.kind != "missing":
        return Found(key or "<root>", found.kind, str(found.left), str(found.right))
    left, right = (
        "nothing" if side == "absent" else leaf_text(leaves[key]) if key in leaves else str(side)
        for side, leaves in ((found.left, one), (found.right, other))
    )
    return Found(key, found.kind, left, right)


def _values(key: str, a: Any, b: Any, tolerance: Tolerance) -> Iterator[Found]:
    """Return how the values of two leaves differ whose types, dtypes and shapes agree."""
    if not isinstance(a, StoredTensor) or not isinstance(b, StoredTensor):
        if type(a) is type(b) and not equal_values(a, b):
            yield Found(key, "value", short_value(a), short_value(b))
    elif not a.is_strided or not b.is_strided:
        report = similarity({"": a}, {"": b}, rtol=tolerance.rtol, atol=tolerance.atol)
        for found in report.differences:
            if found.kind == "value":
                yield Found(key, "value", str(found.left), str(found.right))
                return
    elif (a.dtype, a.shape) == (b.dtype, b.shape) and a.location() != b.location():
        unequal = with_checks(_unequal, a, b, tolerance)
        if unequal is not None:
            yield Found(key, "value", unequal.left, unequal.right, unequal)


def _unequal(a: StoredTensor, b: StoredTensor, tolerance: Tolerance) -> Unequal | None:
    left, right = a.tensor(), b.tensor()
    return None if same_bytes(left, right) else tensor_difference(left, right, tolerance)


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

    if found.differences:
        yield paint(f"--- {paths[0]}", "red")
        yield paint(f"+++ {paths[1]}", "green")
    for difference in found.differences:
        key, left, right = printable(difference.key), paint(difference.left, "red"), paint(difference.right, "green")
        if difference.kind == "missing":
            gone = difference.right == "nothing"
            yield f"- {key}: {left}" if gone else f"+ {key}: {right}"
        elif difference.kind == "ties":
            yield f"~ {key}: {left} on the left, {right} on the right"
        else:
            yield f"~ {key}: {difference.kind} {left} against {right}{_elements(difference.elements)}"
    if found.num_found > len(found.differences):
        yield f"… and {found.num_found - len(found.differences):,} more"
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
    return f"{plural(found.num_found, 'difference')} ({', '.join(counts)}); {compared}"


def _as_json(paths: Sequence[Path], found: Comparison) -> dict[str, Any]:
    return {
        "left": str(paths[0]),
        "right": str(paths[1]),
        "same": None if found.is_undecided else not found.differences,
        "compared": found.num_compared,
        "undecided": found.undecided,
        "count": found.num_found,
        "differences": list(map(_difference_json, found.differences)),
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
