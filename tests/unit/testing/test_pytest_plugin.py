"""The plugin for pytest: fixtures of ranks, and the marker for world sizes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from statetree.testing import Layout, local_ranks
from statetree.testing.pace import units

ROOT = Path(__file__).parents[3]
FILE = """
import pytest
import torch.distributed as dist


def place():
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.world_sizes(1, 2)
def test_places(ranks):
    assert ranks(place) == [(rank, ranks.world_size) for rank in range(ranks.world_size)]


def test_nothing():
    pass
"""
WITHOUT_TORCH = """
import sys


def test_that_torch_is_not_imported():
    assert not [name for name in ("torch", "statetree", "hypothesis") if name in sys.modules]
"""


def world_size():
    return dist.get_world_size()


def test_two_ranks_unless_said_otherwise(ranks):
    assert ranks.world_size == 2
    assert repr(ranks) == "Ranks(2)"
    assert ranks(world_size, timeout=units(20)) == [2, 2]


@pytest.mark.world_sizes(3)
def test_a_marker_says_how_many(ranks):
    assert ranks(world_size) == [3, 3, 3]


def pytest_run(folder, text):
    file = folder / "test_example.py"
    file.write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "_statetree_pytest",
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


pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(32, marks=pytest.mark.slow)]
)
def test_layouts_agree_with_torch_on_many_ranks_in_one_process(local_ranks, count):
    from torch.distributed.tensor import distribute_tensor

    if dist.is_initialized():  # by a test before, in this process: another one has none
        name = f"{__file__}::test_layouts_agree_with_torch_on_many_ranks_in_one_process[{count}]"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=units(60))
        assert done.returncode == 0, done.stdout
        return
    local_ranks(count)
    for placements in (("S0",), ("S1",), ("R",)):
        layout = Layout((7, 3), tuple(range(count)), placements)
        made = distribute_tensor(layout.full(), layout.device_mesh(), layout.torch_placements())
        found = made.to_local()._local_tensors
        assert len(found) == count
        for rank, local in found.items():
            assert torch.equal(local, layout.local(rank)), (rank, placements)


@pytest.mark.usefixtures("one_rank_group")
def test_a_group_that_is_there_already_is_left_alone():
    with pytest.raises(RuntimeError, match="there is a default process group already"), local_ranks(2):
        pass
    assert dist.get_world_size() == 1
