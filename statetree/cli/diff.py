"""``statetree diff``: where two checkpoints differ."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from statetree.cli.differences import Comparison, Found, compare
from statetree.cli.table import is_coloured
from statetree.files.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.files.checkpoint import Checkpoint


def diff(left: Checkpoint, right: Checkpoint, *, patterns: Sequence[str], values: bool, as_json: bool) -> bool | None:
    """Print how two checkpoints differ. Returns whether they do; ``None`` if that cannot be told."""
    found = compare(left, right, patterns, values=values)
    if as_json:
        json.dump(_as_json(left, right, found), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(left, right, found, values=values))
    return None if _is_undecided(found) else bool(found.differences)


def _is_undecided(found: Comparison) -> bool:
    return bool(found.undecided) and not found.differences


def _lines(left: Checkpoint, right: Checkpoint, found: Comparison, *, values: bool) -> Iterator[str]:
    in_colour = is_coloured(sys.stdout)

    def paint(text: str, colour: str) -> str:
        return click.style(text, fg=colour) if in_colour else text

    if found.differences:
        yield paint(f"--- {printable(str(left.path))}", "red")
        yield paint(f"+++ {printable(str(right.path))}", "green")
    for difference in found.differences:
        key = printable(difference.key)
        if difference.kind == "missing":
            gone = difference.right == "nothing"
            text = difference.left if gone else difference.right
            yield paint(f"{'-' if gone else '+'} {key}: {printable(text)}", "red" if gone else "green")
            continue
        if difference.kind == "ties":
            yield f"~ {key}: {printable(difference.left)} on the left, {printable(difference.right)} on the right"
            continue
        sides = f"{paint(printable(difference.left), 'red')} against {paint(printable(difference.right), 'green')}"
        yield f"~ {key}: {difference.kind} {sides}{_elements(difference)}"
    yield _summary(found, values=values)
    yield from (f"note: {note}" for note in found.notes)


def _elements(found: Found) -> str:
    if found.elements is None:
        return ""
    what = found.elements
    index = ", ".join(map(str, what.first))
    words = f" at [{index}]; {what.how_many} element{'s' * (what.how_many != 1)} differ{'s' * (what.how_many == 1)}"
    if what.max_abs is None:
        return words
    return f"{words}, by at most {what.max_abs:.3g} (relative {what.max_rel:.3g})"


def _summary(found: Comparison, *, values: bool) -> str:
    scope = "structure, dtypes, shapes" + (" and values" if values else "")
    compared = f"{found.num_compared} {'entry' if found.num_compared == 1 else 'entries'} compared ({scope})"
    if _is_undecided(found):
        return f"cannot tell: no difference is seen, but not all can be read (use --match to leave it out); {compared}"
    if not found.differences:
        return f"same: {compared}"
    kinds = dict.fromkeys(difference.kind for difference in found.differences)
    counts = [f"{sum(other.kind == kind for other in found.differences)} {kind}" for kind in kinds]
    count = len(found.differences)
    return f"{count} difference{'s' * (count != 1)} ({', '.join(counts)}); {compared}"


def _as_json(left: Checkpoint, right: Checkpoint, found: Comparison) -> dict[str, Any]:
    return {
        "left": str(left.path),
        "right": str(right.path),
        "same": None if _is_undecided(found) else not found.differences,
        "compared": found.num_compared,
        "undecided": found.undecided,
        "differences": [_difference_json(difference) for difference in found.differences],
        "notes": found.notes,
    }


def _difference_json(found: Found) -> dict[str, Any]:
    plain = {"key": found.key, "kind": found.kind, "left": found.left, "right": found.right}
    if found.elements is None:
        return plain
    what = found.elements
    numbers = {"max_abs": _number(what.max_abs), "max_rel": _number(what.max_rel)}
    return {**plain, "first_index": list(what.first), "num_different": what.how_many, **numbers}


def _number(value: float | None) -> float | str | None:
    """Return a number as JSON has it: infinity is a text."""
    return str(value) if value is not None and math.isinf(value) else value
