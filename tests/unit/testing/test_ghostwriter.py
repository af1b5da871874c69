"""The test file that is written for a transform passes, and fails once the transform breaks a law that it kept."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from statetree.cli.app import cli
from statetree.testing.ghostwriter import ghostwrite
from statetree.testing.pace import units

MODULE = """
import torch
import statetree as st


def cloned(state):
    return st.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "written_by_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("written_by_a_user", None)


def run(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=units(60), check=False)


@pytest.mark.slow
def test_what_is_written_passes_until_a_law_is_broken(module):
    (module / "pytest.ini").write_text("[pytest]\n")
    (module / "test_it.py").write_text(ghostwrite("written_by_a_user:cloned"))
    done = run(module)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    (module / "written_by_a_user.py").write_text(MODULE.replace(".clone()", ".zero_()"))
    done = run(module)
    assert done.returncode == 1, done.stdout
    assert "pure does not hold" in done.stdout


def test_laws_that_hold_and_tests_that_fail_are_written(module):
    text = ghostwrite("written_by_a_user:cloned")
    assert "from written_by_a_user import cloned" in text
    assert "            laws.pure,\n" in text
    assert "            laws.ties,\n" not in text
    assert "def test_cloned_ties():\n    laws.ties(cloned, state_for_ties)" in text
    names = {}
    exec(text, names)
    with pytest.raises(AssertionError, match="ties: not kept"):
        names["test_cloned_ties"]()


def test_the_command_writes_it_too(module, monkeypatch):
    monkeypatch.chdir(module)
    done = CliRunner().invoke(cli, ["ghostwrite", "copy:deepcopy"])
    assert done.exit_code == 0, done.output
    assert "laws.stable" in done.output
    done = CliRunner().invoke(cli, ["ghostwrite", "copy.deepcopy"])
    assert done.exit_code == 2
    assert "expected package.module:function" in done.output


def test_what_is_no_function_is_refused():
    with pytest.raises(ValueError, match="ghostwrite: target: expected a function that can be imported"):
        ghostwrite("copy:nothing")
    with pytest.raises(TypeError, match="expected a function of a tree"):
        ghostwrite("copy:__doc__")
