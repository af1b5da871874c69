"""A run of each framework that is killed and started again ends as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = [
    ("transformers", 9, ["transformers", "accelerate"], []),
    ("lightning", 7, ["lightning", "torchdata"], ["3"]),  # in the middle of an epoch
    ("lightning", 9, ["lightning", "torchdata"], ["5"]),  # due at its end
    ("lightning", 7, ["lightning", "torchdata"], ["3", "ddp"]),
    ("accelerate", 8, ["accelerate", "torchdata"], []),
    ("torchtitan", 8, ["torchtitan"], []),
]


def run(name, *arguments):
    command = [sys.executable, "-m", f"tests.integrations.run_{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert bool(lines) == (done.returncode == 0), done.stderr
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kill_at", "packages", "more"), RUNS, ids=lambda value: str(value))
def test_a_killed_run_ends_as_if_it_had_not_been(name, kill_at, packages, more, tmp_path):
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make integration installs it")
    whole = run(name, tmp_path / "whole", -1, *more)
    assert run(name, tmp_path / "killed", kill_at, *more) == []
    steps = [path for path in tmp_path.glob("killed/*/step-*") if (path / ".metadata").exists()]
    assert steps, "nothing was saved before the kill"
    assert run(name, tmp_path / "killed", -1, *more) == whole
