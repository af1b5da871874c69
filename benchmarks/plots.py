"""Draws the recorded results: ``python -m benchmarks.plots`` writes a picture of each group for the documentation."""

from __future__ import annotations

import json
import math
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

#: Where the pictures go, and the lines that show them in docs/benchmarks.md.
PICTURES: Final = Path(__file__).parents[1] / "docs" / "pictures" / "benchmarks"
FIGURES: Final = "figures.txt"

#: Groups whose contenders are sizes: what is on the axes.
CURVES: Final = {
    "leaves": ("leaves", "leaves", "us_per_leaf", "µs a leaf"),
    "bytes": ("bytes", "bytes", "gb_per_s", "GB/s"),
}

INK, PAPER = "#1f2933", "#ffffff"
COLORS: Final = {"ours": "#2f6fb2", "variant": "#9cc1e6", "peer": "#e09f3e", "floor": "#a3acb5"}
NAMES: Final = {"ours": "statetree", "variant": "statetree otherwise", "peer": "peer", "floor": "floor"}
LINES: Final = ("#2f6fb2", "#d1495b", "#3c8d5a", "#8a5fb5")
WIDTH: Final = 860


def write(results: dict[str, Any], folder: Path = PICTURES) -> None:
    """Write a picture of each group, and what shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    shown = []
    for group, rows in groupby(results["rows"], key=itemgetter("group")):
        draw = curves if group in CURVES else bars
        (folder / f"{group}.svg").write_text(draw(group, list(rows)), encoding="utf-8")
        shown.append(f"![{_alt(group)}](pictures/benchmarks/{group}.svg)\n")
    (folder / FIGURES).write_text("\n".join(shown), encoding="utf-8")


def bars(group: str, rows: list[dict[str, Any]]) -> str:
    """Draw a bar for each contender: its median, and the range from its fastest to its slowest run."""
    parts = [_text(20, 30, f"{group}: shorter is faster", size=17, bold=True), *_legend(rows)]
    left, full, y = 270, 350, 64
    for row in rows:
        y += 22
        parts.append(_text(20, y, row["title"], bold=True))
        longest = max(contender["median_s"] for contender in row["contenders"])
        for contender in row["contenders"]:
            y += 22
            length = full * contender["median_s"] / longest
            low, high = (min(full * contender[key] / longest, full * 1.05) for key in ("min_s", "max_s"))
            times = "" if contender["role"] == "ours" else f"  ({contender['times_ours']:.2f} times ours)"
            parts += [
                _text(left - 10, y, contender["name"], anchor="end", size=13),
                _box(left, y - 13, max(length, 1), 16, COLORS[contender["role"]]),
                _line([(left + low, y - 5), (left + high, y - 5)], INK, width=1),
                _text(left + max(length, high) + 8, y, f"{_duration(contender['median_s'])}{times}", size=13),
            ]
        y += 12
    return _picture(_alt(group), y + 10, parts)


def curves(group: str, rows: list[dict[str, Any]]) -> str:
    """Draw a line for each row, through what it costs at each size; and a dashed one through its floor."""
    key, across, figure, up = CURVES[group]
    lines = []
    for row, color in zip(rows, LINES, strict=False):
        for is_floor in (False, True):
            chosen = [one for one in row["contenders"] if (one["role"] == "floor") is is_floor]
            points = sorted((one[key], one[figure]) for one in chosen if one[figure])
            name = row["title"].partition(",")[0]
            if points:
                lines.append((f"{name}: floor" if is_floor else name, color, is_floor, points))
    every = [point for *_, points in lines for point in points]
    across_range, up_range = (_decades([point[axis] for point in every]) for axis in (0, 1))
    left, top, width, height = 80, 60, 520, 320

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (
            (math.log10(value) - first) / (last - first)
            for value, (first, last) in zip(point, (across_range, up_range), strict=True)
        )
        return left + width * x, top + height * (1 - y)

    parts = [_text(20, 30, f"{group}: what they cost as there are more", size=17, bold=True)]
    for power in range(across_range[0], across_range[1] + 1):
        x, _ = place((10**power, 10 ** up_range[0]))
        parts += [_line([(x, top), (x, top + height)], "#e4e7eb"), _text(x, top + height + 20, _power(power), "middle")]
    for power in range(up_range[0], up_range[1] + 1):
        _, y = place((10 ** across_range[0], 10**power))
        parts += [_line([(left, y), (left + width, y)], "#e4e7eb"), _text(left - 8, y + 5, _power(power), "end")]
    parts += [_text(left + width / 2, top + height + 44, across, "middle"), _text(left, top - 10, up)]
    for number, (name, color, dashed, points) in enumerate(lines):
        placed = list(map(place, points))
        y = top + 16 + 24 * number
        parts += [
            _line(placed, color, width=2, dashed=dashed),
            *(_dot(x, y, color) for x, y in placed),
            _line([(left + width + 20, y - 5), (left + width + 44, y - 5)], color, width=2, dashed=dashed),
            _text(left + width + 52, y, name, size=13),
        ]
    return _picture(_alt(group), top + height + 64, parts)


def _alt(group: str) -> str:
    return f"Benchmarks of the group {group}; the tables below have the same figures."


def _legend(rows: list[dict[str, Any]]) -> list[str]:
    roles = {contender["role"] for row in rows for contender in row["contenders"]}
    parts, x = [], 20
    for role, name in NAMES.items():
        if role in roles:
            parts += [_box(x, 46, 14, 14, COLORS[role]), _text(x + 20, 58, name, size=13)]
            x += 40 + 8 * len(name)
    return parts


def _duration(seconds: float) -> str:
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def _decades(values: list[float]) -> tuple[int, int]:
    """Return the powers of ten around values, as exponents."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return first, max(last, first + 1)


def _power(exponent: int) -> str:
    if 0 <= exponent <= 3:
        return str(10**exponent)
    if -3 <= exponent < 0:
        return f"{10**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _picture(title: str, height: float, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label={quoteattr(title)}>\n'
        f"<title>{escape(title)}</title>\n{_box(0, 0, WIDTH, height, PAPER)}\n{body}\n</svg>\n"
    )


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{fill}"/>'


def _dot(x: float, y: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}"/>'


def _line(points: list[tuple[float, float]], stroke: str, *, width: float = 1, dashed: bool = False) -> str:
    through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{through}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'


def _text(x: float, y: float, words: str, anchor: str = "start", *, size: int = 14, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="system-ui, sans-serif" '
        f'font-size="{size}" fill="{INK}"{weight}>{escape(words)}</text>'
    )


if __name__ == "__main__":
    write(json.loads((Path(__file__).parent / "results" / "latest.json").read_text(encoding="utf-8")))
