"""The recorded benchmarks as tables, and the machine that they were measured on.

``{benchmark-aims}`` shows the targets, ``{benchmark-results}`` all times, ``{benchmark-profiles}`` their parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sphinx.application import Sphinx

#: What `make bench` writes.
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "latest.json"
#: What `python -m benchmarks.profiles` writes.
PROFILES = RESULTS.with_name("profiles.json")
#: The groups of rows that people wait for.
WAITED_FOR = (
    *("files", "saves", "frozen", "first", "offload", "stage", "busy", "real", "gather", "distribute", "broadcast"),
    *("convert", "combine", "similarity", "delta", "digest", "import"),
)
_HEAD = ("", "median, ms", "µs/leaf", "GB/s", "times ours")


class BenchmarkResults(SphinxDirective):
    """Puts a table for each row of the results where it stands."""

    def run(self) -> list[nodes.Node]:
        """Read the results, and make the tables."""
        self.env.note_dependency(str(RESULTS))
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        made: list[nodes.Node] = [nodes.paragraph(text=measured_on(results))]
        for row in results["rows"]:
            cells = [row_cells(contender) for contender in row["contenders"]]
            measured = ", ".join(text for text in (row.get("date", "")[:10], row.get("cpu")) if text)
            made.append(_table(f"{row['title']} ({measured})" if measured else row["title"], [_HEAD, *cells]))
            made += [nodes.paragraph(text=aim_text(aim)) for aim in row["aims"]]
        return made


class BenchmarkAims(SphinxDirective):
    """Puts two tables of what was aimed at where it stands: of what people wait for, and of the rest."""

    def run(self) -> list[nodes.Node]:
        """Read the results, and make the tables."""
        self.env.note_dependency(str(RESULTS))
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
        waited_for = [row for row in rows if row["group"] in WAITED_FOR]
        others = [row for row in rows if row["group"] not in WAITED_FOR]
        return [
            _table(title, [("", "ms", "target", "measured", "reached"), *aim_cells(some)])
            for title, some in (("What people wait for", waited_for), ("The rest", others))
        ]


def aim_cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of each target."""
    return [
        (
            row["title"],
            f"{row['contenders'][0]['median_s'] * 1e3:.2f}",
            aim["text"],
            "-" if aim["value"] is None else f"{aim['value']:.2f}",
            "yes" if aim["reached"] else "no",
        )
        for row in rows
        for aim in row["aims"]
    ]


class BenchmarkProfiles(SphinxDirective):
    """Puts a table of where the time goes where it stands."""

    def run(self) -> list[nodes.Node]:
        """Read the profiles, and make the table."""
        self.env.note_dependency(str(PROFILES))
        if not PROFILES.exists():
            return [nodes.paragraph(text="No profiles are recorded for this version.")]
        profiles = json.loads(PROFILES.read_text(encoding="utf-8"))
        head, *cells = profile_cells(profiles["rows"])
        return [nodes.paragraph(text=measured_on(profiles)), _table("Where the time goes", [head, *cells])]


def profile_cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the head of the table, and the cells of each row: parts in percent."""
    head = ("", "median, ms", *rows[0]["phases_s"])
    return [head, *map(_parts, rows)]


def _parts(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = row["phases_s"].values()
    total = sum(seconds)
    return (row["title"], f"{row['median_s'] * 1e3:.2f}", *(f"{part / total:.0%}" for part in seconds))


def measured_on(results: dict[str, Any]) -> str:
    """Say when, where and with what the results were measured."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"Measured on {results['date'][:10]} with {versions} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}; load before {results['load_before']}, "
        f"after {results['load_after']}."
    )


def row_cells(contender: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one contender."""
    name = f"{contender['name']} (floor)" if contender["role"] == "floor" else contender["name"]
    rate = contender["gb_per_s"]
    return (
        name,
        f"{contender['median_s'] * 1e3:.2f}",
        f"{contender['us_per_leaf']:.2f}",
        "" if rate is None else f"{rate:.2f}",
        f"{contender['times_ours']:.2f}",
    )


def aim_text(aim: dict[str, Any]) -> str:
    """Say what was aimed at, and whether it was reached."""
    return f"{'Reached' if aim['reached'] else 'Not reached'}: {aim['text']} ({aim['value']:.2f})."


def _table(title: str, rows: Sequence[Sequence[str]]) -> nodes.table:
    group = nodes.tgroup(cols=len(rows[0]))
    group += [nodes.colspec(colwidth=width) for width in (34, *[12] * (len(rows[0]) - 1))]
    group += nodes.thead("", _row(rows[0]))
    group += nodes.tbody("", *map(_row, rows[1:]))
    return nodes.table("", nodes.title(text=title), group)


def _row(cells: Sequence[str]) -> nodes.row:
    return nodes.row("", *[nodes.entry("", nodes.paragraph(text=cell)) for cell in cells])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("benchmark-aims", BenchmarkAims)
    app.add_directive("benchmark-results", BenchmarkResults)
    app.add_directive("benchmark-profiles", BenchmarkProfiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
