"""``statetree show``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from statetree.dcp import Checkpointer
from tests.cli.states import bits, flat_state, nested_state, tied_state, write

FORMATS = ["a.pt", "a.safetensors", "a"]


def by_key(ran):
    assert ran.status == 0, ran.err
    return {entry["key"]: entry for entry in ran.json["entries"]}


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_has_its_dtype_shape_and_size(name, tmp_path, statetree):
    state = flat_state()
    path = write(state, tmp_path / name)
    entries = by_key(statetree("show", "--json", path))
    assert entries == {
        key: {
            "key": key,
            "sort": "tensor",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
        }
        for key, tensor in state.items()
    }


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_nested_states_are_shown_with_their_values(name, tmp_path, statetree):
    path = write(nested_state(), tmp_path / name)
    entries = by_key(statetree("show", "--json", path))
    assert entries["optimizer.state.0.exp_avg"]["shape"] == [4, 3]
    assert entries["optimizer.param_groups.0.lr"] == {
        "key": "optimizer.param_groups.0.lr",
        "sort": "value",
        "type": "float",
        "value": 0.1,
    }
    assert entries["optimizer.param_groups.0.betas"]["value"] == "(0.9, 0.999)"
    assert entries["values.nan"]["value"] == "nan"
    assert entries["values.bytes"]["type"] == "bytes"
    assert entries["3"]["value"] == "three"
    assert entries["torch"]["type"] == "list"


def test_one_line_an_entry_when_piped(tmp_path, statetree):
    ran = statetree("show", write(nested_state(), tmp_path / "a.pt"))
    lines = ran.out.splitlines()
    assert "torch file" in lines[0]
    assert "6 tensors" in lines[0]
    line = next(line for line in lines if line.startswith("model.layers.0.weight"))
    assert line.split() == ["model.layers.0.weight", "float32", "[4,", "3]", "48", "B", "37.5%"]
    assert "\x1b" not in ran.out


def test_a_tree_on_a_terminal(tmp_path, statetree, monkeypatch):
    path = write(nested_state(), tmp_path / "a.pt")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = statetree("show", path).out.splitlines()
    assert any("model.layers.0" in line and "2 tensors" in line for line in lines)
    assert any(line.startswith("  weight") for line in lines)


def test_ties_are_marked_and_counted_once(tmp_path, statetree):
    path = write(tied_state(), tmp_path / "a.pt")
    ran = statetree("show", "--json", path)
    entries = by_key(ran)
    assert {key: entry.get("tied_to") for key, entry in entries.items()} == {
        "whole": None,
        "same": "whole",
        "transposed": "whole",
        "row": "whole",
        "strided": "whole",
        "apart": None,
        "far": None,
        "overlapping": "apart",
        "own": None,
        "expanded": None,
    }
    unique = 6 * 8 * 4 + 20 * 4 + 10 * 4 + 3 * 4 + 2 * 4
    assert ran.json["element_bytes"] == unique
    text = statetree("show", path).out
    assert "= whole, strided" in text
    assert "tied: 5 entries" in text
    assert "expanded" in text


def test_bytes_of_ties_to_what_is_left_out_are_counted(tmp_path, statetree):
    shared = bits(100)
    path = write({"embed": shared, "head": shared, "tail": shared[:50], "own": bits(25)}, tmp_path / "a.pt")
    ran = statetree("show", "--json", "--exclude", "embed", path)
    assert ran.json["element_bytes"] == 400 + 100
    assert by_key(ran)["head"]["tied_to"] == by_key(ran)["tail"]["tied_to"] == "embed"
    lines = statetree("show", "--exclude", "embed", path).out.splitlines()
    assert "500 B of elements" in lines[0]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "head float32 [100] 400 B 80.0% = embed",
        "tail float32 [50] 200 B = embed",
        "own float32 [25] 100 B 20.0%",
    ]


def test_depth_sums_up(tmp_path, statetree):
    ran = statetree("show", "--depth", 1, write(nested_state(), tmp_path / "a.pt"))
    keys = [line.split()[0] for line in ran.out.splitlines()[1:]]
    assert keys == ["model", "optimizer", "list", "values", "torch", "3", "3x"]
    assert "2 tensors" in ran.out
    deeper = statetree("show", "--depth", 3, tmp_path / "a.pt").out
    assert "\nmodel.layers.0 " in deeper
    assert "\n  state.0 " in deeper


def test_sorting(tmp_path, statetree):
    path = write({"b": bits(2), "a": bits(9), "c": bits(4)}, tmp_path / "a.pt")

    def keys(by):
        return [line.split()[0] for line in statetree("show", "--sort", by, path).out.splitlines()[1:]]

    assert (keys("file"), keys("name"), keys("size")) == (["b", "a", "c"], ["a", "b", "c"], ["a", "c", "b"])


def test_matching(tmp_path, statetree):
    path = write(nested_state(), tmp_path / "a.pt")
    ran = statetree("show", "--json", "--match", "**.weight", "--match", "**exp_avg", path)
    assert set(by_key(ran)) == {"model.layers.0.weight", "optimizer.state.0.exp_avg"}


def test_other_tensors_are_shown_by_their_parts(tmp_path, statetree):
    attributed = torch.nn.Parameter(bits(3))
    attributed.tag = "x"
    state = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "meta": torch.empty(5, 6, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 1, torch.qint8),
        "parameter": torch.nn.Parameter(bits(2)),
        "attributed": attributed,
        "storage": bits(2).untyped_storage(),
    }
    entries = by_key(statetree("show", "--json", write(state, tmp_path / "a.pt")))
    assert entries["coo"]["sort"] == "sparse_coo tensor"
    assert entries["coo"]["shape"] == [3, 3]
    assert entries["coo"]["bytes"] == 2 * 3 * 8 + 3 * 4
    assert entries["csr"]["sort"] == "sparse_csr tensor"
    assert entries["meta"]["shape"] == [5, 6]
    assert entries["meta"]["bytes"] == 0
    assert entries["quantized"]["dtype"] == "qint8"
    assert entries["parameter"]["sort"] == "tensor"
    assert entries["attributed"]["sort"] == "tensor"
    assert entries["storage"]["value"] == "<8 bytes>"


def test_classes_that_are_not_loaded_are_named(tmp_path, statetree):
    path = write({"w": bits(2), "config": {"optimizer": torch.nn.ReLU()}}, tmp_path / "a.ckpt")
    ran = statetree("show", path)
    assert ran.status == 0
    assert "torch.nn.modules.activation.ReLU: not loaded" in ran.out
    assert "objects of these classes are not loaded: torch.nn.modules.activation.ReLU" in ran.err


def test_a_large_file_is_shown_without_reading_it(tmp_path, statetree):
    """What `show` touches of a file is its list and its pickle: the storages may as well be holes in the file."""
    path = tmp_path / "a.pt"
    with torch.serialization.skip_data():
        torch.save({f"layer.{index}": torch.empty(2**28, device="cpu") for index in range(10)}, path)
    ran = statetree("show", path)
    assert ran.status == 0
    assert "10 tensors, 10.0 GiB of elements, 2,684,354,560 parameters" in ran.out


def test_sharded_files_are_shown_as_one(tmp_path, statetree):
    write(flat_state(), tmp_path / "a.safetensors")
    assert (
        statetree("convert", "--shard-bytes", 200, tmp_path / "a.safetensors", tmp_path / "b.safetensors").status == 0
    )
    shards = list(tmp_path.glob("b-*.safetensors"))
    assert len(shards) > 2
    one = by_key(statetree("show", "--json", tmp_path / "a.safetensors"))
    assert by_key(statetree("show", "--json", tmp_path / "b.safetensors.index.json")) == one


def test_all_files_of_a_directory_count(tmp_path, statetree):
    with Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(1000), "step": step})
    size = sum(file.stat().st_size for file in checkpointer.path().iterdir() if file.name != ".statetree_manifest")
    assert json.loads(statetree("show", "--json", checkpointer.path()).out)["bytes"] == size


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_checkpoint(name, tmp_path, statetree):
    ran = statetree("show", write({}, tmp_path / name))
    assert ran.status == 0
    assert "0 tensors" in ran.out


def test_sums_of_tied_entries_say_so(tmp_path, statetree):
    embed, more = bits(4, 3), bits(2)
    state = {"embed": {"weight": embed}, "head": {"weight": embed}, "all": {"a": embed, "b": more, "c": embed[1:]}}
    lines = statetree("show", "--depth", 1, write(state, tmp_path / "a.pt")).out.splitlines()
    assert lines[1].split()[-2:] == ["B", "85.7%"]
    assert lines[2].endswith("1 tied to embed.weight")
    assert lines[3].endswith("2 tied to embed.weight")


@pytest.mark.parametrize("how", ["is_dir", "stat"])
def test_places_without_permission_are_named(how, tmp_path, statetree, monkeypatch):
    def refused(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    path = write({"w": bits(1)}, tmp_path / "a.pt")
    monkeypatch.setattr(f"pathlib.Path.{how}", refused)
    ran = statetree("show", path)
    assert (
        ran.err == f"error: read: {path}: it cannot be read: Permission denied. Check its permissions, and the disk.\n"
    )


@pytest.mark.parametrize("name", ["model.bin", "model.pth.tar", "model", "model.safetensors"])
def test_formats_are_told_by_their_content(name, tmp_path, statetree):
    torch.save({"w": bits(1)}, tmp_path / name)
    assert "torch file" in statetree("show", tmp_path / name).out
    write({"w": bits(1)}, tmp_path / "b.safetensors").rename(tmp_path / name)
    assert "safetensors file" in statetree("show", tmp_path / name).out


def test_folders_of_hugging_face_are_shown(tmp_path, statetree):
    write({"w": bits(3)}, tmp_path / "model.safetensors")
    assert "1 tensor, 12 B of elements, 3 parameters" in statetree("show", tmp_path).out


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_one_file_of_a_directory_is_refused(name, tmp_path, statetree):
    ran = statetree("show", write({"w": bits(3)}, tmp_path / "a") / name)
    assert ran.status == 2
    assert f"{name}: it is one file of a DCP directory. Pass the directory." in ran.err


def test_nothing_that_matches_is_an_error(tmp_path, statetree):
    path = write({"w": bits(3)}, tmp_path / "a.pt")
    ran = statetree("show", "--match", "nothing", path)
    assert ran.status == 2
    assert "none of the 1 keys matches" in ran.err
    assert set(by_key(statetree("show", "--json", "--exclude", "o*", write({"w": bits(1), "o": 1}, path)))) == {"w"}


@pytest.mark.parametrize("name", FORMATS)
def test_statistics_of_elements(name, tmp_path, statetree):
    values = torch.tensor([[0.0, -1.0, 3.0], [float("nan"), float("inf"), 2.0]])
    path = write({"w": values, "b": torch.tensor([True, False])}, tmp_path / name)
    entries = by_key(statetree("show", "--json", "--stats", path))
    finite = torch.tensor([0.0, -1.0, 3.0, 2.0])
    expected = {"least": -1.0, "most": 3.0, "mean": 1.0, "std": float(finite.std(correction=0))}
    assert entries["w"]["stats"] == pytest.approx({**expected, "num_nan": 1, "num_inf": 1, "num_zero": 1})
    assert "min -1, max 3, mean 1, std 1.581, 1 NaN, 1 inf, 1 zero" in statetree("show", "--stats", path).out


@pytest.mark.slow
def test_statistics_of_many_buckets_are_those_of_the_whole(tmp_path, statetree, monkeypatch):
    monkeypatch.setattr("statetree.files.strided_reading.BUCKET_BYTES", 64)
    values = (torch.arange(1000, dtype=torch.float64) * 37 % 101).view(10, 100) + 1e6
    path = write({"w": values}, tmp_path / "a.pt")
    (entry,) = by_key(statetree("show", "--json", "--stats", path)).values()
    assert entry["stats"]["mean"] == pytest.approx(float(values.mean()))
    assert entry["stats"]["std"] == pytest.approx(float(values.std(correction=0)))


WITHOUT_TORCH = """if True:
    import sys
    sys.modules["torch"] = sys.modules["optree"] = None
    from statetree.__main__ import main
    sys.argv = ["statetree", *sys.argv[1:]]
    sys.exit(main())
"""


@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=str)
def test_torch_is_not_imported_for_help(args):
    """It takes seconds."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_quantized_tensor_without_a_quantizer_is_shown(tmp_path, statetree):
    torch.save({"w": torch.zeros(3, dtype=torch.int8).view(torch.qint8)}, tmp_path / "a.pt")
    ran = statetree("show", "--stats", tmp_path / "a.pt")
    assert ran.status == 0
    assert "w  qint8  [3]  3 B" in ran.out
