"""Runs the tests on every supported torch, and writes which passed into the documentation. `make versions` runs it.

python -m tests.versions [--torch 2.11.0 …] [--environments build/versions] [--python python3] [-- pytest's arguments]

Each version has an environment of its own, made once. 2.11 and 2.15 come from an index that has builds for the CPU
alone if pip is told of one (PIP_INDEX_URL); otherwise pip takes builds of several gigabytes, which run on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
PAGE: Final = ROOT / "docs" / "versions.md"
#: The oldest, the one that development uses, and the newest.
VERSIONS: Final = ("2.11.0", "2.13.0", "2.15.0")
WITHOUT_DEPENDENCIES: Final = ("resemblyzer", "lpips", "torchao")
BEGIN, END = "<!-- results: written by make versions -->\n", "<!-- end of results -->\n"
HEAD: Final = "| torch | optree | Python | passed | skipped | failed | date |\n|---|---|---|---|---|---|---|\n"


class Outcome(NamedTuple):
    """What a run of the tests came to."""

    torch: str
    optree: str
    python: str
    passed: int
    skipped: int
    failed: int

    def row(self, date: str) -> str:
        """Return a row of the table."""
        counts = f"{self.passed:,} | {self.skipped:,} | {self.failed:,}"
        return f"| {self.torch} | {self.optree} | {self.python} | {counts} | {date} |\n"


def environment(version: str, folder: Path, python: str) -> Path:
    """Return the interpreter of a version's environment, which is made if it is not there."""
    place = folder / version
    interpreter = place / "bin" / "python"
    if not interpreter.exists():
        place.mkdir(parents=True)
        # Each torch brings a triton of its own.
        pins = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith(("torch==", "triton=="))]
        constraints = place / "constraints.txt"
        constraints.write_text("\n".join([*pins, f"torch=={version}", ""]))
        subprocess.run([python, "-m", "venv", place], check=True)
        install = [interpreter, "-m", "pip", "install", "-qq", "--no-cache-dir", "-c", constraints]
        subprocess.run([*install, "--upgrade", "pip"], check=True)
        groups = ["--group", "test", "--group", "demo"]
        subprocess.run([*install, f"torch=={version}", "optree", *groups], check=True, cwd=ROOT)
        subprocess.run([*install, "--no-deps", *WITHOUT_DEPENDENCIES, "--editable", ROOT], check=True)
    return interpreter


def run(interpreter: Path, arguments: list[str]) -> Outcome:
    """Run the tests, show what they print, and count."""
    told = "import platform, torch, optree; print(torch.__version__, optree.__version__, platform.python_version())"
    versions = subprocess.run([interpreter, "-c", told], check=True, capture_output=True, text=True).stdout.split()
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={"HYPOTHESIS_PROFILE": "quick", **os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        last = ""
        for line in process.stdout or ():
            sys.stdout.write(line)
            last = line.strip() or last
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)", last)}
    if not counts.get("passed"):
        raise SystemExit(f"{command[0]}: the tests did not run: {last}")
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return Outcome(*versions, counts["passed"], counts.get("skipped", 0), failed)


def write(outcomes: list[Outcome], page: Path = PAGE) -> None:
    """Put outcomes into the documentation, in place of those of the same versions."""
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = {line.split("|")[1].strip(): f"{line}\n" for line in table.splitlines()[2:]}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows.update((outcome.torch, outcome.row(date)) for outcome in outcomes)
    page.write_text(before + BEGIN + HEAD + "".join(rows[version] for version in sorted(rows)) + END + after)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="+", default=VERSIONS, help="versions of torch")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "versions", help="where they are made")
    parser.add_argument("--python", default="python3", help="for environments that are not there yet")
    parser.add_argument("pytest", nargs="*", default=["--numprocesses=2", "-m", "not slow"], help="after --")
    chosen = parser.parse_args()
    outcomes = []
    for version in chosen.torch:
        sys.stdout.write(f"torch {version}\n")
        outcomes.append(run(environment(version, chosen.environments, chosen.python), chosen.pytest))
    if chosen.pytest == parser.get_default("pytest"):  # a part of the tests says little
        write(outcomes)
    sys.exit(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    main()
