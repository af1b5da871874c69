"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.measure import Timing
    from benchmarks.rows import Result

#: Changes whenever the JSON's keys do.
FORMAT = 2

_HEAD = f"{'':34}{'µs/leaf':>9}  {'range':^15}  {'ms':>8}  {'GB/s':>6}  {'x ours':>7}"


def heading(machine: dict[str, Any], versions: dict[str, str], load: float) -> str:
    """Return the lines above the table."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{named}\n{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gb']} GB, huge pages: {machine['huge_pages']}, load before: {load}\n"
        "Medians, with the range from the fastest to the slowest run. x ours: how many times statetree's time.\n"
        f"\n{_HEAD}"
    )


def block(result: Result) -> str:
    """Return the lines of the table for one row."""
    runs = len(result.timings[0].samples)
    lines = [f"{result.title}  ({runs} runs each; others took {result.bystanders:.2f} cores)"]
    lines += [_line(result, timing) for timing in result.timings]
    lines += [
        f"  {'reached' if aim['reached'] else 'NOT REACHED'}: {aim['text']} ({aim['value']:.2f})"
        for aim in _aims(result)
    ]
    return "\n".join(lines)


def summary(results: Sequence[Result], scale: float) -> str:
    """Return the aims that were not reached, and how many were."""
    aims = [(result, aim) for result in results for aim in _aims(result)]
    missed = [(result, aim) for result, aim in aims if not aim["reached"]]
    sizes = "" if scale == 1 else f" They are for full sizes; these were {scale:g} times that."
    lines = [f"{len(aims) - len(missed)} of {len(aims)} aims reached.{sizes}"]
    lines += [f"  not: {result.title}: {aim['text']} ({aim['value']:.2f})" for result, aim in missed]
    return "\n".join(lines)


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the rows for the JSON file."""
    return [
        {
            "group": result.row.group,
            "title": result.title,
            "leaves": result.num_leaves,
            "bytes": result.nbytes,
            "bystander_cores": _rounded(result.bystanders),
            "contenders": [_contender(result, timing) for timing in result.timings],
            "aims": list(_aims(result)),
        }
        for result in results
    ]


def _line(result: Result, timing: Timing) -> str:
    facts = _contender(result, timing)
    scale = 1e6 / facts["leaves"]
    name = f"floor: {timing.name}" if timing.role == "floor" else timing.name
    spread = f"{_short(min(timing.samples) * scale)} - {_short(max(timing.samples) * scale)}"
    rate = "" if facts["gb_per_s"] is None else f"{facts['gb_per_s']:.2f}"
    line = (
        f"  {name:32}{_short(facts['us_per_leaf']):>9}  {spread:^15}  {facts['median_s'] * 1e3:>8.2f}  "
        f"{rate:>6}  {facts['times_ours']:>7.2f}"
    )
    faults = f"\n{'':4}page faults: {statistics.median(timing.faults):,.0f}" if timing.faults else ""
    return line + _by_rank("peak memory", timing.peaks) + _by_rank("sent", timing.sent) + faults


def _by_rank(what: str, counts: Sequence[int]) -> str:
    """Return what each rank took or sent, on a line of its own."""
    return f"\n{'':4}{what}: {', '.join(f'{count / 1e6:,.1f}' for count in counts)} MB" if counts else ""


def _short(number: float) -> str:
    """Return three digits that matter."""
    return f"{number:.2f}" if number < 100 else f"{number:.0f}"


def _contender(result: Result, timing: Timing) -> dict[str, Any]:
    leaves = timing.num_leaves or result.num_leaves
    nbytes = result.nbytes if timing.nbytes is None else timing.nbytes
    return {
        "name": timing.name,
        "role": timing.role,
        "leaves": leaves,
        "bytes": nbytes,
        "runs": len(timing.samples),
        "median_s": _rounded(timing.median),
        "min_s": _rounded(min(timing.samples)),
        "max_s": _rounded(max(timing.samples)),
        "us_per_leaf": _rounded(timing.median / leaves * 1e6),
        "gb_per_s": _rounded(nbytes / timing.median / 1e9) if result.row.moves_bytes else None,
        "times_ours": _rounded(timing.median / result.ours),
        "peak_bytes": timing.peaks,
        "sent_bytes": timing.sent,
        **({"page_faults": statistics.median(timing.faults)} if timing.faults else {}),
    }


def _aims(result: Result) -> Iterator[dict[str, Any]]:
    for aim in result.row.aims:
        value = aim.value(result)
        if value is not None:
            yield {"text": aim.text, "value": _rounded(value), "reached": aim.holds(value)}


def _rounded(number: float) -> float:
    """Return four digits that matter: the others are noise, and make the file longer."""
    return float(f"{number:.4g}")
