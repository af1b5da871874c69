"""The demo, as a user runs it, in a small setting: it passes, and it can fail."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import units

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "train_resume.py"
SMALL = ("--steps", "16", "--every", "4")
TIMEOUT_S = units(100)  # it takes about 8


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    with subprocess.Popen(
        [sys.executable, DEMO, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its training runs too, which hold the pipes open
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path):
    done = run_demo(*SMALL, "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    restored = int(re.search(r"restored step (\d+) and went on to step 16", done.stdout)[1])
    assert restored in (4, 8)  # as the second checkpoint was complete or not when the kill came
    assert f"losses       {16 - restored} of {16 - restored} equal" in done.stdout
    assert re.search(r"final state  SHA-256 [0-9a-f]{64} for both", done.stdout)
    assert "Embedding and head are one storage in the staged state, and in the restored one." in done.stdout
    for cost in ("Stager.stage", "copy.deepcopy", "Checkpointer.save"):
        assert re.search(rf"{cost} +\d+\.\d ms +\d+\.\d x", done.stdout)
    for row in ("model.head.weight +1 tensor +float32 +tied to model.embed.weight", r"total +\d+ leaves"):
        assert re.search(f"^{row}", done.stdout, re.MULTILINE)
    assert "OK: killed, resumed, and no bit differs" in done.stdout
    assert "Warning" not in done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-00000012", "step-00000016"]


def test_last_bit_of_one_restored_tensor_fails_the_demo():
    done = run_demo(*SMALL, "--sabotage")
    assert done.returncode == 1, done.stderr
    assert re.search(r"^FAILED: .* differ", done.stderr, re.MULTILINE)
    assert "OK" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--steps", "8", "--every", "4"), "more than twice --every", id="too short to be killed"),
        pytest.param(("--every", "0"), "more than twice --every", id="no interval"),
        pytest.param(("--keep", str(DEMO.parent)), "is not empty", id="directory in use"),
    ],
)
def test_impossible_options_are_refused(arguments, message):
    done = run_demo(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
