"""``statetree convert``."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import statetree as st
from tests.cli.hostile import Raw, Storage, archive, pickle_of
from tests.cli.states import bits, flat_state, load, nested_state, tied_state, write
from tests.judge import assert_trees_equal
from tests.trees import TREES, quiet

NAMES = ["a.pt", "a.safetensors", "a"]
Pair = namedtuple("Pair", "x y")


def converted(statetree, *args):
    ran = statetree("convert", *args)
    assert ran.status == 0, ran.err
    return ran


@pytest.fixture
def places(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    return tmp_path / "from", tmp_path / "to"


@pytest.mark.parametrize("to", [*NAMES, "a.safetensors.index.json"])
@pytest.mark.parametrize("of", NAMES)
def test_any_format_to_any_other_exactly(of, to, places, statetree):
    source, target = write(flat_state(), places[0] / of), places[1] / to
    converted(statetree, source, target)
    if to.endswith("json"):
        converted(statetree, target, places[1] / "b.pt")
        target = places[1] / "b.pt"
    loaded = load(target)
    assert_trees_equal({key: loaded[key] for key in flat_state()}, flat_state(), ties=False)


@pytest.mark.parametrize("chain", [["b.pt"], ["b"], ["b", "c.pt"], ["b.pt", "c", "d", "e.pt"]])
def test_nested_states_stay_nested(chain, tmp_path, statetree):
    source = write(nested_state(), tmp_path / "a.pt")
    for name in chain:
        converted(statetree, source, tmp_path / name)
        source = tmp_path / name
    assert_trees_equal(load(source), nested_state(), ties=False)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_awkward_trees_come_out_as_torch_loads_them(tree, tmp_path, statetree):
    source = tmp_path / "a.pt"
    with quiet():
        try:
            torch.save(tree.make(), source)
            expected = torch.load(source, weights_only=True)
        except Exception as error:
            # What torch refuses cannot be converted either, unless it is shown as it is: nothing may crash.
            assert statetree("show", source).status in (0, 2), error
            return
        if statetree("show", source).status == 2:  # jagged tensors, wrappers of classes that torch was told to trust
            return
        # Torch was told, by imports, to trust more than statetree does; or nothing gives back what it wrote.
        if "not loaded" in statetree("show", source).err or tree.refused == "quint4x2":
            assert statetree("convert", source, tmp_path / "b.pt").status == 2
            assert not (tmp_path / "b.pt").exists()
            return
        converted(statetree, source, tmp_path / "b.pt")
        assert_trees_equal(torch.load(tmp_path / "b.pt", weights_only=True), expected)


def test_ties_are_kept_in_torch_files(tmp_path, statetree):
    source = write(tied_state(), tmp_path / "a.pt")
    converted(statetree, source, tmp_path / "b.pt")
    assert_trees_equal(load(tmp_path / "b.pt"), load(source))


@pytest.mark.parametrize("name", ["b.safetensors", "b"])
def test_ties_are_reported_where_they_are_lost(name, tmp_path, statetree):
    ran = converted(statetree, write(tied_state(), tmp_path / "a.pt"), tmp_path / name)
    assert "note: whole, same, transposed, row, strided: share bytes, and are written once each" in ran.err
    assert "note: apart, overlapping: share bytes" in ran.err
    loaded = load(tmp_path / name)
    for key, tensor in tied_state().items():
        assert torch.equal(loaded[key], tensor), key


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("name", ["b.pt", "b.safetensors", "b"])
def test_a_file_that_is_cut_off_meanwhile_is_an_error(name, is_transposed, tmp_path, statetree, monkeypatch):
    """Mapped into memory, it would end the process by SIGBUS."""
    source = write({"a": bits(3000, 3000).t() if is_transposed else bits(3000, 3000)}, tmp_path / "a.pt")

    def cut(tree, *_args):
        os.truncate(source, 1 << 20)
        return tree

    monkeypatch.setattr("statetree.cli.convert.rename", cut)
    ran = statetree("convert", "--rename", "x=y", source, tmp_path / name)
    assert ran.status == 2
    assert "was cut off while it was read" in ran.err
    assert os.listdir(tmp_path) == ["a.pt"]


def test_only_the_bytes_in_use_are_written(tmp_path, statetree):
    source = write({"w": torch.arange(1_000_000.0)[500_000:500_010]}, tmp_path / "a.pt")
    converted(statetree, source, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 4000
    assert torch.equal(load(tmp_path / "b.pt")["w"], torch.arange(500_000.0, 500_010.0))


def test_what_torch_files_alone_hold_is_kept_in_them(tmp_path, statetree):
    attributed = torch.nn.Parameter(bits(3))
    attributed.tag = ["x", bits(2)]
    storage = bits(4)
    shared = bits(6, dtype=torch.uint16)
    state = {
        "parameter": torch.nn.Parameter(bits(2), requires_grad=False),
        "attributed": attributed,
        "grad": bits(2).requires_grad_(),
        "conj": bits(2, dtype=torch.complex64).conj(),
        "neg": bits(4, dtype=torch.complex64).conj().imag,
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "meta": torch.empty(5, 6, device="meta"),
        "quantized": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "shared": shared,
        "as floats": shared.view(torch.float8_e5m2)[3:],
        "counter": Counter("abca"),
        "storage": storage.view(torch.uint8).untyped_storage(),
    }
    source = tmp_path / "a.pt"
    with quiet():
        torch.save(state, source)
        converted(statetree, source, tmp_path / "b.pt")
        assert_trees_equal(load(tmp_path / "b.pt"), load(source))


def test_objects_in_parts_go_to_directories_as_statetree_saves_them(tmp_path, statetree):
    state = {"coo": torch.eye(3).to_sparse(), "conj": bits(2, dtype=torch.complex64).conj()}
    converted(statetree, write(state, tmp_path / "a.pt"), tmp_path / "b")

    template = {
        "coo": (torch.eye(3) * 2).to_sparse(),
        "conj": torch.zeros(2, dtype=torch.complex64),
    }
    loaded = st.load(tmp_path / "b", template, in_place=True)
    assert torch.equal(loaded["coo"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["conj"], state["conj"])


def test_sparse_tensors_come_back_from_directories(tmp_path, statetree):
    state = {
        "coo": torch.tensor([[0, 2.0], [3, 0]]).to_sparse(),
        "repeated": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3), check_invariants=True),
        "csr": torch.tensor([[0, 2.0, 0], [3, 0, 5]]).to_sparse_csr(),
        "csc": torch.tensor([[0, 2.0, 0], [3, 0, 5]]).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    }
    with quiet():
        converted(statetree, write(state, tmp_path / "a"), tmp_path / "b.pt")
        converted(statetree, tmp_path / "a", tmp_path / "c")
        converted(statetree, tmp_path / "c", tmp_path / "d.pt")
        for name in ("b.pt", "d.pt"):
            assert_trees_equal(load(tmp_path / name), state, ties=False)
        assert statetree("diff", "--values", tmp_path / "a", tmp_path / "b.pt").status == 0


def test_other_tensors_of_several_parts_are_named(tmp_path, statetree):
    with quiet():
        state = {"q": torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 1, torch.qint8), "w": bits(1)}
        ran = statetree("convert", write(state, tmp_path / "a"), tmp_path / "b.pt")
    assert ran.status == 2
    assert "at\n  q\nPass --drop-values" in ran.err


def test_dtypes_that_torch_cannot_copy_go_through_every_format_that_has_them(tmp_path, statetree):
    few = Raw(
        torch._utils._rebuild_tensor_v3, Storage("0", 4, torch.UntypedStorage), 0, (4,), (1,), False, {}, torch.uint1
    )
    source = archive(tmp_path / "a.pt", pickle_of({"few": few}), {"0": b"\x00\x01\x01\x00"})
    assert "torch cannot save the leaf at few (Tensor)" in statetree("convert", source, tmp_path / "b.pt").err
    converted(statetree, source, tmp_path / "b")

    template = {"few": torch.zeros(4, dtype=torch.uint8).view(torch.uint1)}
    assert st.load(tmp_path / "b", template, in_place=True)["few"].view(torch.uint8).tolist() == [0, 1, 1, 0]
    ran = statetree("convert", source, tmp_path / "b.safetensors")
    assert "safetensors have no uint1" in ran.err


def test_storages_go_to_directories(tmp_path, statetree):
    source = write({"s": bits(4).untyped_storage()}, tmp_path / "a.pt")
    converted(statetree, source, tmp_path / "b")

    with quiet():
        template = load(source)
        template["s"].untyped().fill_(0)
        loaded = st.load(tmp_path / "b", template, in_place=True)
        assert list(loaded["s"].untyped()) == list(bits(4).untyped_storage())


@pytest.mark.parametrize(
    "state", [bits(3), [bits(2), 5], 7, (), {"": bits(2)}, {".": bits(2), "..": 1, "a..b": {"": 3}}]
)
def test_roots_and_keys_of_every_sort(state, tmp_path, statetree):
    source = write(state, tmp_path / "a.pt")
    for sort in ("file", "name", "size"):
        assert statetree("show", "--sort", sort, source).status == 0
        assert statetree("show", "--sort", sort, "--depth", 1, source).status == 0
    converted(statetree, source, tmp_path / "b")
    converted(statetree, tmp_path / "b", tmp_path / "c.pt")
    assert_trees_equal(load(tmp_path / "c.pt"), state, ties=False)


def test_dcp_itself_loads_what_is_written(tmp_path, statetree):
    state = flat_state()
    converted(statetree, write(state, tmp_path / "a.pt"), tmp_path / "b")
    template = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with quiet():
        torch_dcp.load(template, checkpoint_id=tmp_path / "b")
    assert_trees_equal(template, state, ties=False)


def test_checkpoints_of_dcp_itself_are_nested_as_dcp_nests_them(tmp_path, statetree):
    state = {
        "model": {"embed.weight": bits(2, 3)},
        "step": 3,
        "optimizer": {"state": {0: {"m": bits(4)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "list": [bits(1), 2, None, [bits(2)]],
    }
    with quiet():
        torch_dcp.save(state, checkpoint_id=tmp_path / "a")
        dcp_to_torch_save(tmp_path / "a", tmp_path / "expected.pt")
    converted(statetree, tmp_path / "a", tmp_path / "b.pt")
    assert list(load(tmp_path / "b.pt")) == ["model", "step", "optimizer", "list"]
    assert_trees_equal(load(tmp_path / "b.pt"), load(tmp_path / "expected.pt"), ties=False)
    assert statetree("diff", "--values", tmp_path / "a", tmp_path / "b.pt").status == 0
    assert statetree("diff", "--values", tmp_path / "a", write(state, tmp_path / "c.pt")).status == 0
    converted(statetree, "--match", "model.**", tmp_path / "a", tmp_path / "d.pt")
    assert list(load(tmp_path / "d.pt")["model"]) == ["embed.weight"]


@pytest.mark.parametrize(
    "paths",
    [
        None,
        [],
        {"w": "w", "x": ()},
        {"w": ("a",), "x": ("a",)},
        {"w": ("a",), "x": ("a", "b")},
        {"w": ("a", "b"), "x": ("a",)},
        {"w": (0,), "x": (1,)},
        {"w": ("a", 0), "x": ("a", "b")},
        {"w": ("a", 2**60), "x": ("b",)},
        {"w": ("a", -1), "x": ("b",)},
        {"w": ("a", True), "x": ("a", 1.0)},
    ],
    ids=str,
)
def test_paths_that_contradict_each_other_are_passed_over(paths, tmp_path, statetree):
    with quiet():
        torch_dcp.save({"w": bits(1), "x": bits(2)}, checkpoint_id=tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, planner_data=paths)))
    converted(statetree, tmp_path / "a", tmp_path / "b.pt")
    assert_trees_equal(load(tmp_path / "b.pt"), {"w": bits(1), "x": bits(2)}, ties=False)


@pytest.mark.parametrize("kind", ["keys that read alike", "a leaf beside what is below it"])
def test_dcp_itself_loads_names_that_its_paths_do_not_make(kind, tmp_path, statetree):
    inner = {1: bits(1), "1": bits(2)} if kind == "keys that read alike" else {1: {"w": bits(1)}, "1": [3]}
    state = {"b": inner, "c": bits(3)}
    converted(statetree, write(state, tmp_path / "a.pt"), tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    expected = [bits(1), bits(2)] if kind == "keys that read alike" else [bits(1)]
    assert_trees_equal([tensor for tensor in leaves_of(loaded) if tensor.numel() < 3], expected, ties=False)
    assert torch.equal(loaded["c"], bits(3))
    assert_trees_equal(load(tmp_path / "a"), state, ties=False)


def leaves_of(tree):
    """The tensors in nested dicts."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in leaves_of(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def test_pieces_of_ranks_are_put_together(tmp_path, statetree):
    """A tensor in boxes of odd sizes, as a two-dimensional sharding would leave it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = bits(7, 5, 3, dtype=torch.int32)
    (tmp_path / "a").mkdir()
    chunks, stored = [], {}
    with (tmp_path / "a" / "data").open("wb") as file:
        for rows in ((0, 3), (3, 1), (4, 3)):
            for columns in ((0, 2), (2, 3)):
                offsets, sizes = torch.Size([rows[0], columns[0], 0]), torch.Size([rows[1], columns[1], 3])
                start = file.tell()
                torch.save(whole.narrow(0, *rows).narrow(1, *columns).clone(), file)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                stored[MetadataIndex("w", offsets)] = _StorageInfo("data", start, file.tell() - start)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.int32), whole.shape, chunks)
    torch_dcp.FileSystemWriter  # noqa: B018 - its module registers what is pickled
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, storage_data=stored)))
    converted(statetree, tmp_path / "a", tmp_path / "b.pt")
    assert torch.equal(load(tmp_path / "b.pt")["w"], whole)


@pytest.mark.parametrize("bucket", [1, 4, 17, 64, 1000])
@pytest.mark.parametrize("to", NAMES)
def test_the_size_of_buckets_does_not_matter(bucket, to, places, statetree, monkeypatch):
    for module in ("strided_reading", "ranges"):
        monkeypatch.setattr(f"statetree.files.{module}.BUCKET_BYTES", bucket)
    state = {"w": bits(5, 3, 2), "t": bits(4, 6).t(), "b": bits(7, dtype=torch.bool), "s": torch.tensor(3.0)}
    source = write({key: tensor.contiguous() for key, tensor in state.items()}, places[0] / "a")
    converted(statetree, source, places[1] / "mid.pt")
    torch.save(state, places[0] / "views.pt")
    for path in (places[1] / "mid.pt", places[0] / "views.pt"):
        converted(statetree, "--force", path, places[1] / to)
        loaded = load(places[1] / to)
        for key, tensor in state.items():
            assert torch.equal(loaded[key], tensor), key
        assert statetree("diff", "--values", path, places[1] / to).status == 0


def test_casting_converts_floating_point_tensors(tmp_path, statetree):
    state = {
        "f": bits(3, 4),
        "d": torch.arange(5.0, dtype=torch.float64),
        "i": torch.arange(3),
        "h": torch.ones(2).half(),
    }
    source = write(state, tmp_path / "a.pt")
    for name in ("b.pt", "b.safetensors", "b"):
        converted(statetree, "--cast", "bfloat16", source, tmp_path / name)
        loaded = load(tmp_path / name)
        for key, tensor in state.items():
            expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            assert_trees_equal(loaded[key], expected)


@pytest.mark.parametrize("dtype", ["int64", "complex64", "nonsense", "float4_e2m1fn_x2", "bool"])
def test_casting_is_to_floating_point(dtype, tmp_path, statetree):
    ran = statetree("convert", "--cast", dtype, write({"a": bits(1)}, tmp_path / "a.pt"), tmp_path / "b.pt")
    assert ran.status == 2
    assert "no floating-point dtype" in ran.err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_negated_views_are_cast(dtype, name, tmp_path, statetree):
    state = {"w": torch.arange(6.0).to(torch.complex64).mul(1 + 1j).conj().imag}
    assert state["w"].is_neg()
    converted(statetree, "--cast", dtype, write(state, tmp_path / "of.pt"), tmp_path / name)
    found = load(tmp_path / name)["w"]
    assert found.dtype is getattr(torch, dtype)
    assert found.float().tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


def test_values_are_refused_by_safetensors_unless_dropped(tmp_path, statetree):
    source = write({"w": bits(2), "step": 3, "nested": {"lr": 0.1}}, tmp_path / "a.pt")
    ran = statetree("convert", source, tmp_path / "b.safetensors")
    assert ran.status == 2
    assert f"safetensors hold tensors only, and {source} has 2 plain values at\n  step\n  nested.lr\nPass" in ran.err
    ran = converted(statetree, "--drop-values", source, tmp_path / "b.safetensors")
    assert "note: step, nested.lr: dropped" in ran.err
    assert set(load(tmp_path / "b.safetensors")) == {"w"}


@pytest.mark.parametrize("name", ["b.pt", "b", "b.safetensors"])
@pytest.mark.parametrize("match", [["--match", "config"], []])
def test_nothing_else_is_written_where_all_is_dropped(match, name, tmp_path, statetree):
    state = {"secret": bits(2)} if match else {}
    source = write({**state, "config": torch.nn.ReLU()}, tmp_path / "a.ckpt")
    ran = statetree("convert", "--drop-values", *match, source, tmp_path / name)
    assert (ran.status, "nothing is left to write, since these were dropped:\n  config\n" in ran.err) == (2, True)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["b.pt", "b"])
def test_unknown_classes_are_refused_unless_dropped(name, tmp_path, statetree):
    source = write({"w": bits(2), "config": {"a": torch.nn.ReLU(), "b": 1}}, tmp_path / "a.ckpt")
    ran = statetree("convert", source, tmp_path / name)
    assert ran.status == 2
    assert "at\n  config.a\nPass --drop-values" in ran.err
    ran = converted(statetree, "--drop-values", source, tmp_path / name)
    assert "config.a: dropped" in ran.err
    assert_trees_equal(load(tmp_path / name), {"w": bits(2), "config": {"b": 1}}, ties=False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"s": torch.eye(2).to_sparse()}, "s: a tensor of several parts"),
        ({"c": torch.ones(2, dtype=torch.complex128)}, "c: safetensors have no complex128"),
        ({"__metadata__": torch.ones(1)}, "a name that safetensors keep"),
        ({"a\ud800": torch.ones(1)}, "a\\ud800: a name that is no text"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(state, message, tmp_path, statetree):
    ran = statetree("convert", write(state, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert ran.status == 2
    assert message in ran.err


def test_numbers_of_half_a_byte_need_a_shape(tmp_path, statetree):
    state = {"f": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    ran = statetree("convert", write(state, tmp_path / "a.pt"), tmp_path / "b.safetensors")
    assert ran.status == 2
    assert "f: two numbers in a byte, which no shape stands for" in ran.err


def test_headers_that_are_too_long_are_refused(tmp_path, statetree, monkeypatch):
    state = {f"w{number}": bits(2, start=number) for number in range(20)}
    source = write(state, tmp_path / "a.pt")
    monkeypatch.setattr("statetree.files.safetensors_format.MAX_JSON_BYTES", 1000)
    ran = statetree("convert", source, tmp_path / "b.safetensors")
    assert ran.status == 2
    assert "the header of b.safetensors takes 1176 bytes: expected at most 1000" in ran.err
    assert os.listdir(tmp_path) == ["a.pt"]
    converted(statetree, "--shard-bytes", "80", source, tmp_path / "b.safetensors")


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_containers_of_unknown_classes_become_mappings(tmp_path, statetree):
    source = write({"pair": Pair(bits(1), 2), "w": bits(3)}, tmp_path / "a")
    ran = converted(statetree, source, tmp_path / "b.pt")
    assert "the container pair (a tests.cli.test_convert.Pair)" in ran.err
    assert_trees_equal(load(tmp_path / "b.pt"), {"pair": {"x": bits(1), "y": 2}, "w": bits(3)}, ties=False)


def test_shards(tmp_path, statetree):
    source = write(flat_state(), tmp_path / "a.pt")
    converted(statetree, "--shard-bytes", "200B", source, tmp_path / "m.safetensors")
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in flat_state().values())}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"m-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    loaded = {}
    for file in files:
        some = safetensors.torch.load_file(tmp_path / file)
        assert sum(tensor.nbytes for tensor in some.values()) <= 200
        loaded |= some
    assert_trees_equal({key: loaded[key] for key in flat_state()}, flat_state(), ties=False)
    assert statetree("convert", "--shard-bytes", "5kB", source, tmp_path / "x.pt").status == 2
    assert statetree("convert", "--shard-bytes", "0", source, tmp_path / "x").status == 2


def test_dots_in_the_names_of_directories(tmp_path, statetree):
    source = write({"w": bits(1)}, tmp_path / "a.pt")
    for name in ("run-v1.5", "llama-3.1-8B"):
        converted(statetree, source, tmp_path / name)
        assert (tmp_path / name).is_dir()
        assert statetree("diff", source, tmp_path / name).status == 0
    for name in ("model.safetensor", "model.pth.tar"):
        ran = statetree("convert", source, tmp_path / name)
        assert ran.status == 2
        assert f"error: save: cannot write {tmp_path / name}: the suffix" in ran.err


def test_headers_keep_their_texts_between_safetensors(tmp_path, statetree):
    safetensors.torch.save_file({"a": bits(2)}, tmp_path / "a.safetensors", metadata={"format": "pt", "who": "me"})
    converted(statetree, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "who": "me"}
    assert (
        "note: who: a text of the header, is not kept"
        in converted(statetree, tmp_path / "a.safetensors", tmp_path / "b.pt").err
    )


def test_attributes_of_containers_are_kept(tmp_path, statetree):
    state = OrderedDict(w=bits(2))
    state._metadata = OrderedDict({"": {"version": 2}})
    converted(statetree, write(state, tmp_path / "a.pt"), tmp_path / "b")
    converted(statetree, tmp_path / "b", tmp_path / "c.pt")
    assert load(tmp_path / "c.pt")._metadata == state._metadata


def test_deep_trees(tmp_path, statetree):
    state = bits(2)
    for _ in range(300):
        state = {"a": state}
    source = write(state, tmp_path / "a.pt")
    converted(statetree, source, tmp_path / "b.pt")
    assert_trees_equal(load(tmp_path / "b.pt"), state)


def test_casting_beyond_the_range_is_an_error(tmp_path, statetree):
    source = write({"w": torch.tensor([1.0, 1e6]), "inf": torch.tensor([float("inf")])}, tmp_path / "a.pt")
    ran = statetree("convert", "--cast", "float16", source, tmp_path / "b.safetensors")
    assert ran.status == 2
    assert "elements out of range: expected values up to 65504.0 (torch.float16), got 1000000.0" in ran.err
    converted(statetree, "--cast", "bfloat16", source, tmp_path / "b.safetensors")
    assert load(tmp_path / "b.safetensors")["inf"].isinf().all()


def test_matching_and_excluding_keep_the_nesting(tmp_path, statetree):
    source = write(nested_state(), tmp_path / "a.pt")
    converted(statetree, "--match", "model.**", "--match", "list.**", "--exclude", "list.2", source, tmp_path / "b.pt")
    expected = {"model": nested_state()["model"], "list": [bits(2), {"a": bits(1, start=3)}]}
    assert_trees_equal(load(tmp_path / "b.pt"), expected, ties=False)


def test_renaming(tmp_path, statetree):
    source = write({"model": {"a": {"w": bits(1)}, "b.w": bits(2)}}, tmp_path / "a.pt")
    target = tmp_path / "b.safetensors"
    converted(statetree, "--rename", "model.a.{x}=c.{x}", "--rename", "model.**=**", source, target)
    assert set(load(target)) == {"c.w", "b.w"}
    ran = statetree("convert", "--force", "--rename", "model.{layer}.w=model.w", source, target)
    assert ran.status == 2
    assert "model.w" in ran.err
    for rule, reason in {"nothing": "is no rule", "x.{a}=y.{b}": "does not capture", "x=y": "no path matches"}.items():
        ran = statetree("convert", "--rename", rule, source, target)
        assert ran.status == 2
        assert reason in ran.err
        assert "missing_ok" not in ran.err
    assert "Change --rename." in ran.err


def test_renaming_keeps_the_nesting(tmp_path, statetree):
    source = write(nested_state(), tmp_path / "a.pt")
    converted(statetree, "--match", "model.**", "--rename", "model.**=net.**", source, tmp_path / "b.pt")
    assert_trees_equal(load(tmp_path / "b.pt"), {"net": nested_state()["model"]}, ties=False)


def test_values_that_torch_would_refuse_are_dropped_from_torch_files_only(tmp_path, statetree):
    state = {"w": bits(2), "args": Namespace(lr=1), "paths": [Path("a")], "big": 1 << 9000, "n": 1, "l": [1, (2, "x")]}
    source = write(state, tmp_path / "a.pt")
    ran = statetree("convert", source, tmp_path / "b.pt")
    assert ran.status == 2
    assert "torch.load(weights_only=True) refuses some objects" in ran.err
    ran = statetree("convert", "--drop-values", source, tmp_path / "b.pt")
    assert (ran.status, ran.err) == (0, "note: args, paths, big: dropped\n")
    assert list(torch.load(tmp_path / "b.pt", weights_only=True)) == ["w", "n", "l"]
    assert statetree("convert", source, tmp_path / "c").status == 0
    assert statetree("diff", source, tmp_path / "c").status == 0


def test_sources_and_destinations_may_be_urls(tmp_path, statetree):
    source = write(flat_state(), tmp_path / "a.safetensors")
    url = f"file://{tmp_path}/b.pt"
    converted(statetree, source, url)
    assert statetree("diff", source, url).status == 0
    assert "torch file" in statetree("show", url).out
    missing = statetree("show", "nowhere://a")
    assert missing.status == 2
    assert "cannot be reached" in missing.err
