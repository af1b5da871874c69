"""Thousands of flipped bits, anywhere in a checkpoint: each is an error, or changes nothing that is loaded.

``STATETREE_FLIPS`` says how many: 10,000 by default.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

import statetree
from statetree import dcp
from tests.dcp.test_checksums import flip, make_state
from tests.judge import assert_trees_equal
from tests.pace import units

FLIPS = int(os.environ.get("STATETREE_FLIPS") or 10_000)


@pytest.mark.slow
@pytest.mark.timeout(units(200))
def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(tmp_path):
    expected = {**make_state(), "generator": torch.get_rng_state()[:64], "more": {"name": ["x", 1.5]}}
    with dcp.Checkpointer(tmp_path, incremental=True) as saved:
        for step in (1, 2):
            saved.save(step, {**expected, "step": step})
    directory = tmp_path / "step-00000002"
    expected["step"] = 2
    intact = {path: path.read_bytes() for path in directory.iterdir()}
    chosen = random.Random(0)
    counts = {"error": 0, "no effect": 0}
    for number in range(FLIPS):
        path = sorted(intact)[number % len(intact)]
        path.unlink()  # it may be linked
        path.write_bytes(flip(intact[path], chosen.randrange(8 * len(intact[path]))))
        try:
            loaded = statetree.load(directory)
        except statetree.StateTreeError:
            counts["error"] += 1
        else:
            assert_trees_equal(loaded, expected, storages=False)
            counts["no effect"] += 1
        path.write_bytes(intact[path])
    print(counts)
    assert counts["error"] > FLIPS * 0.8
