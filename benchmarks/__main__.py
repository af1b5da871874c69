"""Runs the rows, prints the table, writes the JSON."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import plots, readme, report
from benchmarks.catalogue import GROUPS, ROWS, measured
from benchmarks.machine import load, machine, versions
from benchmarks.measure import Budget

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = Budget(rounds=11, most=61, seconds=4.0, attempts=3)
QUICK = Budget(rounds=3, most=3, seconds=0.0)
QUICK_SCALE = 0.1
#: After so long, rows that other processes disturbed are not measured again.
PATIENCE_S = 360

#: The results that are kept beside the code: those of a complete run.
LATEST = Path(__file__).parent / "results" / "latest.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line asks for."""
    options = _parser().parse_args(arguments)
    complete = not (options.only or options.quick or options.scale or options.threads)
    scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    budget = QUICK if options.quick else FULL
    budget = replace(budget, attempts=options.attempts or budget.attempts)
    path = options.json or (LATEST if complete or options.record else None)

    about = {
        "format": report.FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "load_before": load(),
        "scale": scale,
        "quick": options.quick,
    }
    print(report.heading(about["machine"], about["versions"], about["load_before"]))
    groups = options.only or GROUPS
    count = sum(row.group in groups for row in ROWS)
    results, began = [], time.monotonic()

    def budget_now() -> Budget:
        return budget if time.monotonic() - began <= PATIENCE_S else replace(budget, attempts=1)

    for number, result in enumerate(measured(groups, scale, budget_now, options.threads), start=1):
        results.append(result)
        print(f"\n[{number}/{count}, {time.monotonic() - began:.0f} s] {report.block(result)}", flush=True)
    print(f"\n{report.summary(results, scale)}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = report.as_json(results)
        about |= {"load_after": load(), "rows": rows}
        if options.record:
            about = _renewed(json.loads(path.read_text()), rows, date=about["date"], cpu=about["machine"]["cpu"])
        path.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        print(f"Written to {path}.")
    if path == LATEST:
        plots.write(about)
        readme.write(about)
        print(f"Drawn in {plots.PICTURES}, and put into {readme.README}.")


def _renewed(recorded: dict[str, Any], rows: list[dict[str, Any]], **measured: str) -> dict[str, Any]:
    """Return a recorded run with other rows of some groups, which say when and where they were measured."""
    groups = {row["group"] for row in rows}
    kept = [row for row in recorded["rows"] if row["group"] not in groups]
    together = [*kept, *({**row, **measured} for row in rows)]
    return {**recorded, "rows": sorted(together, key=lambda row: GROUPS.index(row["group"]))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure statetree against its peers, side by side."
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"only these: {', '.join(GROUPS)}")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="where the JSON goes. A complete run writes benchmarks/results/latest.json, others none",
    )
    parser.add_argument("--record", action="store_true", help="put the rows of --only into the recorded run")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, three runs each")
    parser.add_argument(
        "--attempts", type=int, metavar="N", help="measure a row that other processes disturb again, up to N times"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="how many threads torch uses. By default it decides")
    parser.add_argument("--scale", type=float, help=argparse.SUPPRESS)  # for the tests
    return parser


if __name__ == "__main__":
    main()
