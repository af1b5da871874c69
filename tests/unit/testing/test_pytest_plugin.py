"""The plugin for pytest: fixtures of ranks, and the marker for world sizes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from statetree import testing
from statetree.testing.pace import units

ROOT = Path(__file__).parents[3]
FILE = """
import pytest
import torch.distributed as dist


def place():
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.statetree_world_sizes(1, 2)
def test_places(statetree_ranks):
    found = statetree_ranks(place)
    assert found == [(rank, len(found)) for rank in range(len(found))]


def test_nothing():
    pass
"""
WITHOUT_TORCH = """
import sys


def test_that_torch_is_not_imported():
    assert not [name for name in ("torch", "optree", "hypothesis") if name in sys.modules]
"""

#: Names that this plugin had, or might have, as others have them.
FOREIGN = """
import pytest


@pytest.fixture
def local_ranks():
    return 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_parametrized(ranks, local_ranks):
    assert ranks in (2, 4) and local_ranks == 3


class TestFixture:
    @pytest.fixture
    def ranks(self):
        return "mine"

    def test_mine(self, ranks):
        assert ranks == "mine"


def test_what_is_seen_of_the_plugin(request):
    (plugin,) = [each for name, each in request.config.pluginmanager.list_name_plugin() if "statetree" in name]
    ours = [name for name, value in vars(plugin).items() if isinstance(value, type(pytest.fixture(lambda: None)))]
    ours += [line.split("(")[0] for line in request.config.getini("markers") if "statetree" in line]
    assert sorted(ours) == ["statetree_ranks", "statetree_world_sizes"]
    hooks = [name for name in vars(plugin) if name.startswith("pytest_")]
    assert sorted(hooks) == ["pytest_configure", "pytest_generate_tests"]  # no option
"""


def world_size():
    return dist.get_world_size()


def test_two_ranks_unless_said_otherwise(statetree_ranks):
    assert statetree_ranks(world_size, timeout=units(20)) == [2, 2]


@pytest.mark.statetree_world_sizes(3)
def test_a_marker_says_how_many(statetree_ranks):
    assert statetree_ranks(world_size) == [3, 3, 3]


def pytest_run(folder, text):
    file = folder / "test_example.py"
    file.write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "statetree.testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-v",
        "--strict-markers",
    ]
    return subprocess.run(
        [*command, "-p", "no:hypothesispytest", str(file)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=units(60),
        check=False,
    )


@pytest.mark.slow
def test_in_a_project_of_its_own(tmp_path):
    done = pytest_run(tmp_path, FILE)
    assert done.returncode == 0, done.stdout
    for name in ("test_places[1 ranks] PASSED", "test_places[2 ranks] PASSED", "test_nothing PASSED"):
        assert name in done.stdout


def test_a_session_that_uses_none_of_it_does_not_import_torch(tmp_path):
    done = pytest_run(tmp_path, WITHOUT_TORCH)
    assert done.returncode == 0, done.stdout


def test_a_suite_with_the_same_names_runs_as_before(tmp_path):
    done = pytest_run(tmp_path, FOREIGN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_names_of_the_package_are_completed():
    names = dir(testing)
    assert {"check_transform", "conformance", "run_ranks", "state_trees", "laws"} <= set(names)
    assert "import_module" not in names
