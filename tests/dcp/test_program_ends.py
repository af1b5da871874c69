"""Saves that are under way, or begin, while the interpreter ends: executors take no calls any more."""

import subprocess
import sys

import pytest
import torch

import statetree
from tests.judge import assert_trees_equal
from tests.pace import units

# More bytes than one thread writes or copies alone.
STATE = "state = {f'w{i}': torch.full((1_500_000,), float(i)) for i in range(8)}"
PENDING = f"""
import sys, torch, statetree
{STATE}
saved = statetree.Checkpointer(sys.argv[1], incremental=sys.argv[2] == "incremental")
saved.save(1, state)
saved.async_save(2, state)
"""
LAST_THREAD = f"""
import sys, threading, torch, statetree
from statetree.dcp import async_save
{STATE}
place = sys.argv[1]
saved = statetree.Checkpointer(place + "/run", incremental=True, mirror="file://" + place + "/mirror")
saved.save(1, state)

def train():
    threading.main_thread().join()
    saved.save(2, state)
    saved.async_save(3, state).result()
    async_save(state, checkpoint_id=place + "/other").result()
    statetree.save(state, place + "/model.pt")
    assert statetree.similarity(saved.restore(state), state)
    with statetree.Stager() as stager:
        assert statetree.similarity(stager.stage_async(state).result(), state)
    saved.close()
    print("done")

threading.Thread(target=train).start()
"""


def ended(program, *arguments):
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=units(60), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("kind", ["whole", "incremental"])
def test_a_save_that_is_under_way_at_the_end_is_completed(kind, tmp_path):
    ended(PENDING, tmp_path, kind)
    expected = {f"w{i}": torch.full((1_500_000,), float(i)) for i in range(8)}
    assert_trees_equal(statetree.load(tmp_path / "step-00000002"), expected)


def test_a_thread_that_outlives_the_main_one_saves(tmp_path):
    assert ended(LAST_THREAD, tmp_path) == "done\n"
    for place in ("run/step-00000003", "mirror/step-00000003", "other"):
        assert len(statetree.load(tmp_path / place)) == 8
