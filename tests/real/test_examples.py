"""The examples of collectives, as users run them: on two ranks, with torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pace import units

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = units(100)


def run(name, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, EXAMPLES / name, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which hold the pipes open
            raise
    return process.returncode, out, err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of each format."""
    files = {}
    for suffix in ("safetensors", "pt"):
        files[suffix] = file = tmp_path_factory.mktemp("saved") / f"model.{suffix}"
        status, out, err = run("save_one_file.py", file)
        assert status == 0, err
        assert f"tensors, {file.stat().st_size} bytes in {file.name}" in out
    return files


def read(file):
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def test_the_file_holds_the_whole_model(saved, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from _transformer import Transformer

    torch.manual_seed(0)
    expected = Transformer(width=30, depth=2, dropout=0.0).state_dict()
    for file in saved.values():
        found = read(file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()  # torch's files hold ties


@pytest.mark.parametrize(("suffix", "layout"), [("safetensors", "fsdp_tp"), ("safetensors", "tp"), ("pt", "hsdp")])
def test_the_file_is_loaded_into_any_layout(saved, suffix, layout):
    status, out, err = run("load_any_layout.py", saved[suffix], layout)
    assert status == 0, err
    assert f"tensors from model.{suffix} are in the layout {layout}, bit for bit" in out


def test_weights_are_synced():
    status, out, err = run("sync_weights.py")
    assert status == 0, err
    assert [line for line in out.splitlines() if "agree" in line] == [
        f"step {step}: the tensor parallel model and the whole one agree" for step in (1, 2, 3)
    ]


def test_watching_prints_what_was_done(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "watch_checkpoints.py", tmp_path], capture_output=True, text=True, check=True
    )
    kinds = [line.split()[0] for line in done.stdout.splitlines()]
    assert [kinds.count(kind) for kind in ("stage", "save", "removal")] == [4, 4, 2]
