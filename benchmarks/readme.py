"""The README's figures: a line of four rows, and a table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.rows import OURS, variant_of

README: Final = Path(__file__).parents[1] / "README.md"
BEGIN: Final = "<!-- figures: written by make bench -->\n"
END: Final = "<!-- end of figures -->\n"
BEGIN_LINE: Final = "<!-- figures in a line: written by make bench -->\n"
END_LINE: Final = "<!-- end of the line -->\n"
#: The rows, not the best alone, and what the work is in words.
LINE: Final = {
    "stage again, 10,000 x 1 KB": "at staging 10,000 small tensors again",
    "similarity, 10,000 x 1 KB": "at comparing them",
    "gather to all, 1,000 x 4 KB DTensors, 2 ranks": "at gathering 1,000 small DTensors",
    "ten saves, a transformer and AdamW: 1,152 tensors, 54 MB": "at ten whole saves (`async_save`)",
}

_FASTER: Final = "times faster than "
_TIMES: Final = "\N{MULTIPLICATION SIGN}"


def write(results: dict[str, Any], file: Path = README) -> None:
    """Put the figures of a complete run into the README."""
    text = _replaced(file.read_text(encoding="utf-8"), BEGIN, figures(results), END)
    file.write_text(_replaced(text, BEGIN_LINE, line(results), END_LINE), encoding="utf-8")


def line(results: dict[str, Any]) -> str:
    """Return a few of the figures as a sentence."""
    rows = {row["title"]: row for row in reversed(results["rows"])}
    parts = [f"**{_ratio(*_aimed(rows[title]))}** {work}" for title, work in LINE.items()]
    return (
        f"Speed beside PyTorch's own helpers (above 1, statetree is faster): {'; '.join(parts)}. Measured by "
        f"`make bench`, {_measured(results)}; [all figures](#how-fast-it-is).\n"
    )


def figures(results: dict[str, Any]) -> str:
    """Return the table, and what it was measured on."""
    lines = ["| work | statetree takes | compared with | speed-up |", "|---|---|---|---|"]
    rows = {row["title"]: row for row in reversed(results["rows"])}
    lines += [_cells(title, *_aimed(rows[title])) for title in LINE]
    lines.append(
        f"\nMedians, {_measured(results)}. Speed-up = peer's time / statetree's time: above 1, statetree is faster."
    )
    return "\n".join(lines) + "\n"


def _measured(results: dict[str, Any]) -> str:
    machine, torch = results["machine"], results["versions"]["torch"]
    days = sorted({row.get("date", results["date"])[:10] for row in results["rows"] if row["title"] in LINE})
    return f"{' and '.join(days)}, torch {torch}, {machine['cores']} cores ({machine['cpu']})"


def _replaced(text: str, begin: str, between: str, end: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}{between}{end}{rest.split(end)[1]}"


def _aimed(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contenders of a row's first aim at being faster: statetree, or a variant of it, and the peer."""
    text = next(aim["text"].split(_FASTER)[1] for aim in row["aims"] if _FASTER in aim["text"])
    peer, _, variant = text.removesuffix(")").partition(" (")
    named = {contender["name"]: contender for contender in row["contenders"]}
    return named[f"{OURS}, {variant}" if variant else OURS], named[peer]


def _ratio(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    return f"{peer['median_s'] / ours['median_s']:.1f}{_TIMES}"


def _cells(title: str, ours: dict[str, Any], peer: dict[str, Any]) -> str:
    how = "" if ours["name"] == OURS else f" (`{variant_of(ours['name'])}`)"
    return f"| {title}{how} | {_time(ours['median_s'])} | `{peer['name']}` | **{_ratio(ours, peer)}** |"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
