"""Checkpoints that others published, shown, compared and converted to every format and back, exactly."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.cli.states import load
from tests.judge import assert_trees_equal

pytestmark = pytest.mark.slow

FILES = {
    "resemblyzer": ["pretrained.pt"],
    "lpips": [f"weights/{version}/{net}.pth" for version in ("v0.0", "v0.1") for net in ("alex", "squeeze", "vgg")],
}


@pytest.fixture(params=[(package, name) for package, names in FILES.items() for name in names], ids="-".join)
def file(request):
    """A file of torch before 1.6."""
    package, name = request.param
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed, and its checkpoint comes with it")
    return Path(found.origin).parent / name


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def test_it_is_shown(file, statetree):
    ran = statetree("show", "--json", file)
    assert ran.status == 0
    tensors = {entry["key"]: entry for entry in ran.json["entries"] if entry["sort"] == "tensor"}
    state = read(file)
    if "model_state" in state:
        assert len(tensors) == 48
        assert tensors["model_state.lstm.weight_ih_l0"]["shape"] == [1024, 40]
        assert sum("tied_to" in entry for entry in tensors.values()) == 0
        assert "optimizer_state.state.140178894849152.exp_avg" in tensors
    else:
        assert {key: entry["shape"] for key, entry in tensors.items()} == {
            key: list(w.shape) for key, w in state.items()
        }


def test_it_goes_through_torch_files_exactly(file, tmp_path, statetree):
    assert statetree("convert", file, tmp_path / "a.pt").status == 0
    assert_trees_equal(read(tmp_path / "a.pt"), read(file))
    assert statetree("diff", "--values", file, tmp_path / "a.pt").status == 0


def test_it_goes_through_every_format(file, tmp_path, statetree):
    previous = file
    for name in ("a", "b.pt", "c"):
        assert statetree("convert", previous, tmp_path / name).status == 0
        assert statetree("show", "--verify", tmp_path / name).status == 0
        assert statetree("diff", "--values", file, tmp_path / name).status == 0
        previous = tmp_path / name
    assert_trees_equal(load(tmp_path / "c"), read(file), ties=False)
    options = ["--drop-values", "--shard-bytes", "2MiB"]
    assert statetree("convert", *options, previous, tmp_path / "d.safetensors").status == 0
    index = tmp_path / "d.safetensors.index.json"
    assert statetree("convert", index, tmp_path / "e.safetensors").status == 0
    ran = statetree("diff", "--values", "--json", file, tmp_path / "e.safetensors")
    # What is missing is plain values: every tensor is there, bit by bit.
    assert all(row["kind"] == "missing" and row["right"] == "nothing" for row in ran.json["differences"])
    tensors = [row for row in ran.json["differences"] if row["left"].startswith("tensor")]
    assert not tensors
