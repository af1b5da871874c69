"""A type checker at its strictest sees of statetree what its users are told, in the files beside this one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import units

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = sorted(path for path in HERE.glob("*.py") if path.name not in ("__init__.py", Path(__file__).name))
MODULES = {"statetree": "st", "statetree.dcp": "dcp", "statetree.testing": "testing"}


def public_names() -> list[str]:
    return [f"{short}.{name}" for module, short in MODULES.items() for name in importlib.import_module(module).__all__]


def expected() -> set[tuple[str, int, str]]:
    """Return the errors that the comments of mistakes.py announce: file, line and kind."""
    lines = (HERE / "mistakes.py").read_text().splitlines()
    kinds = ((number, re.search(r"  # ([a-z-]+)$", line)) for number, line in enumerate(lines, 1))
    return {("mistakes.py", number, kind[1]) for number, kind in kinds if kind}


@pytest.mark.slow
def test_the_types_are_those_that_users_see(tmp_path):
    pytest.importorskip("mypy", reason="the type checker is not installed: group lint")
    options = ("--strict", "--config-file=", "--no-error-summary", f"--cache-dir={ROOT / '.mypy_cache' / 'users'}")
    command = [sys.executable, "-m", "mypy", *options, *map(str, SAMPLES)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=units(140), check=False)
    assert not ran.stderr
    found = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: .* \[([a-z-]+)\]$", ran.stdout, re.MULTILINE)
    assert {(name, int(line), kind) for name, line, kind in found} == expected(), ran.stdout
    assert len(found) == ran.stdout.count(": error: ")
    assert len(found) > 10


@pytest.mark.parametrize("name", public_names())
def test_each_public_name_is_tried(name):
    assert any(re.search(rf"\b{re.escape(name)}\b", path.read_text()) for path in SAMPLES)
