"""A few mutations for every reader; ``python -m tests.cli.fuzz`` goes on for longer."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.cli.fuzz import exercise, run, targets

NAMES = [
    *("torch before 1.6", "torch zip", "torch pickle", "safetensors", "safetensors index"),
    *("dcp metadata", "dcp paths", "dcp data"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    made = {target.name: target for target in targets(tmp_path_factory.mktemp("seeds"))}
    assert list(made) == NAMES
    return made


@pytest.mark.parametrize("name", NAMES)
def test_good_files_can_be_opened(name, found, tmp_path):
    for number, seed in enumerate(found[name].seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert exercise(found[name].place(folder, seed))
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutations_break_nothing(name, found, tmp_path):
    rng = random.Random(7)
    refused = 0
    for _ in range(60):
        data, is_open, fault = run(found[name], rng, tmp_path)
        assert not fault, f"{data[:2000]!r}\n{fault}"
        refused += not is_open
    assert refused
