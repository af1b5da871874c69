"""Stored tensors: every transform takes them as the tensors that they stand for."""

from __future__ import annotations

import argparse
import os
import pathlib
import types
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import statetree as st
from statetree.errors import CheckpointError, TreeMismatch, UnsupportedLeaf
from statetree.files import CheckpointFormat, OpenedCheckpoint, StoredTensor, opened, publishing, register_format
from statetree.files import open as open_file
from statetree.files.formats import _FORMATS
from tests.cli.states import bits, flat_state, nested_state, tied_state, write
from tests.judge import assert_trees_equal
from tests.trees import quiet

NAMES = ["a.pt", "a.safetensors", "a"]


def rich_state():
    """What torch files hold beside strided tensors."""
    return {
        "parameter": torch.nn.Parameter(bits(4, 3)),
        "conj": bits(4, dtype=torch.complex64).conj(),
        "neg": bits(4, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([bits(2), bits(3)]),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "grad": bits(3).requires_grad_(),
    }


def torch_loaded(path):
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]):  # 2.15 does not know it by itself
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_headers_alone_are_read(name, tmp_path):
    state = {"w": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    found = opened(write(state, tmp_path / name))
    assert [str(path) for path in st.paths(found.tree)] == list(found.tree)
    assert st.similarity(found.tree, state, values=False)
    assert {key: leaf.shape for key, leaf in found.tree.items()} == {"w": (1 << 20,), "b": (1 << 20,)}
    assert found.files.nbytes_read < 20_000


@pytest.mark.parametrize("state", [flat_state, nested_state, tied_state, rich_state])
def test_every_verb_reads_what_torch_loads(state, tmp_path):
    path = write(state(), tmp_path / "a.pt")
    stored, expected = open_file(path), torch_loaded(path)
    assert_trees_equal(st.offload(stored), expected)
    assert st.similarity(stored, expected, values=True)
    assert dict(st.stream(stored, st.offload)).keys() == dict.fromkeys(st.paths(expected)).keys()
    with st.Stager() as stager:
        assert st.similarity(stager.stage(stored), expected, values=True)


def test_what_no_verb_takes_apart_is_shown_and_refused_with_its_path(tmp_path):
    scales = torch.ones(2)
    packed = torch.quantize_per_channel(torch.ones(2, 4), scales, scales, 0, torch.quint4x2)
    torch.save({"x": {"packed": packed}}, tmp_path / "a.pt")
    stored = st.files.open(tmp_path / "a.pt")
    assert st.flatten(stored)[0][0].nbytes == packed.nbytes
    for verb in (
        st.offload,
        st.digest,
        lambda _: st.load(tmp_path / "a.pt"),
        lambda tree: st.save(tree, tmp_path / "b.pt"),
    ):
        with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x\.packed has the dtype torch\.quint4x2"):
            verb(stored)


def test_values_of_torch_and_quantized_tensors_are_what_torch_loads(tmp_path):
    scales = torch.tensor([0.5, 0.1]), torch.tensor([0, 1])
    with quiet():
        state = {
            "values": [torch.Tensor, torch.nn.Parameter, torch.float32, torch.Size([2]), torch.device("cuda:1"), 1j],
            "schemes": [torch.strided, torch.per_tensor_affine, torch.float8_e4m3fn, b"ab", bytearray(b"x"), {1, 2}],
            "tensor": torch.quantize_per_tensor(bits(4).float(), 0.5, 1, torch.qint8),
            "channels": torch.quantize_per_channel(torch.arange(4.0).view(2, 2), *scales, 0, torch.qint8),
            "meta": torch.empty(3, device="meta"),
        }
        state["parameter"], state["grad"] = torch.nn.Parameter(bits(2)), bits(3)
        state["parameter"].mine, state["grad"].tag = "x", [1]
        path = write(state, tmp_path / "a.pt")
        read = st.offload(open_file(path))
        assert st.similarity(read, torch.load(path, weights_only=True), values=True)
    assert (read["parameter"].mine, read["grad"].tag) == ("x", [1])
    assert read["values"] == state["values"]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_filled_from_a_file(name, tmp_path):
    state = flat_state()
    stored = open_file(write(state, tmp_path / name))
    target = st.map_leaves(torch.zeros_like, state)
    result = st.copy_into(stored, target)
    assert_trees_equal(target, state, ties=False)
    assert all(result[key] is target[key] for key in target)


@pytest.mark.parametrize("name", NAMES)
def test_a_users_function_gets_tensors_one_leaf_after_the_other(name, tmp_path):
    one, two = ({"a": bits(4, 3), "b": bits(5)} for _ in range(2))
    sides = [open_file(write(side, tmp_path / f"{n}{name}")) for n, side in enumerate((one, two))]

    def averaged(x, y):
        assert type(x) is type(y) is torch.Tensor
        return torch.lerp(x.double(), y.double(), 0.5) if isinstance(x, torch.Tensor) else y

    result = st.map_leaves(averaged, *sides)
    expected = {key: tensor.double() for key, tensor in one.items()}
    assert_trees_equal(st.map_with_path(lambda _, x, y: averaged(x, y), *sides), expected, ties=False)
    assert_trees_equal(result, expected, ties=False)
    assert_trees_equal(st.update(sides[0], "**", lambda leaf: averaged(leaf, leaf)), expected, ties=False)
    assert_trees_equal(st.offload(sides[0]), one, ties=False)
    assert_trees_equal(st.map_leaves(averaged, one, sides[1]), expected, ties=False)
    for written in (st.map_leaves(torch.Tensor.zero_, sides[0]), st.update(sides[0], "**", torch.Tensor.zero_)):
        assert not any(tensor.any() for tensor in written.values())
        assert_trees_equal(st.offload(sides[0]), one, ties=False)


def test_a_users_function_gets_one_tensor_for_those_that_are_tied(tmp_path):
    w = bits(4, 3)
    stored = open_file(write({"a": w, "b": [w], "c": w[1:]}, tmp_path / "a.pt"))
    for made in (
        st.map_leaves(lambda leaf: leaf, stored),
        st.map_with_path(lambda _, leaf: leaf, stored),
        st.update(stored, ["a", "b.0"], lambda leaf: leaf) | {"c": stored["c"].read()},
        st.chain(lambda tree: tree)(stored),
    ):
        assert made["a"] is made["b"][0]
        assert made["a"] is not made["c"]
        assert_trees_equal(made, {"a": w, "b": [w], "c": w[1:]}, ties=False)
    calls = []
    made = st.update(stored, ["a", "b.0"], lambda leaf: calls.append(leaf) or leaf.double())
    assert made["a"] is made["b"][0]
    assert len(calls) == 1


def test_what_is_a_leaf_to_a_user_holds_tensors(tmp_path):
    state = {"x": {"w": bits(4, 3), "n": [bits(5)]}, "y": bits(2)}
    stored = open_file(write(state, tmp_path / "a.pt"))

    def looked(leaf, other):
        assert not any(isinstance(inner, StoredTensor) for inner in st.flatten([leaf, other])[0])
        return leaf

    found = st.map_leaves(looked, stored, stored, is_leaf=lambda value: isinstance(value, dict) and "w" in value)
    assert_trees_equal(found, state, ties=False)
    assert isinstance(stored["x"]["w"], StoredTensor)


def test_leaves_are_read_right_before_the_function_gets_them(tmp_path):
    stored = open_file(write({"a": bits(1000), "b": bits(2000)}, tmp_path / "a.pt"))
    path = tmp_path / "a.pt"
    seen = []

    def seeing(leaf):
        seen.append(leaf)
        if len(seen) == 1:
            path.write_bytes(b"")  # what was not read before cannot be read any more
        return leaf

    with pytest.raises(CheckpointError, match="was cut off while it was read") as caught:
        st.map_leaves(seeing, stored)
    assert len(seen) == 1
    assert any("at b" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", NAMES)
def test_a_predicate_is_asked_about_a_tensor_that_is_read_if_it_looks_at_elements(name, tmp_path, monkeypatch):
    state = {"big": torch.zeros(20, 3), "ints": torch.arange(4), "one": torch.ones(3)}
    stored = open_file(write(state, tmp_path / name))
    reads = []
    monkeypatch.setattr(StoredTensor, "tensor", lambda self, real=StoredTensor.tensor: reads.append(self) or real(self))

    def of_floats(path, leaf):
        assert isinstance(leaf, torch.Tensor)
        assert (leaf.device.type, leaf.is_meta, leaf.requires_grad) == ("cpu", False, False)
        assert leaf.numel() == leaf.shape.numel() == state[str(path)].numel()
        assert (leaf.stride(), leaf.size(0), len(leaf)) == (state[str(path)].stride(), leaf.shape[0], leaf.shape[0])
        return leaf.dtype == torch.float32 and leaf.is_floating_point() and leaf.ndim + leaf.dim() > 0

    assert sorted(st.select(stored, of_floats)) == ["big", "one"]
    assert not reads
    assert sorted(st.select(stored, lambda _, leaf: leaf.bool().all())) == ["one"]
    assert sorted(st.select(stored, lambda _, leaf: torch.equal(leaf, state["big"]))) == ["big"]
    assert sorted(st.select(stored, lambda _, leaf: torch.cat([leaf.flatten(), leaf.flatten()]).sum() == 6)) == ["one"]
    assert st.select(stored, of_floats)["one"] is stored["one"]
    kept, rest = st.partition(stored, lambda _, leaf: float(leaf.sum()) == 6)
    assert kept["ints"] is stored["ints"]
    assert rest["big"] is stored["big"]
    changed = st.update(stored, lambda _, leaf: leaf.any(), lambda leaf: -leaf)
    assert changed["one"].equal(-state["one"])
    assert changed["big"] is stored["big"]


def test_update_takes_no_stored_tensors_apart_that_share_elements(tmp_path):
    flat = torch.arange(6.0)
    st.save({"a": flat[2:4], "b": flat}, tmp_path / "tied.pt")
    stored = st.files.open(tmp_path / "tied.pt")
    with pytest.raises(st.TreeMismatch, match=r"at a: .* elements that it shares with b"):
        st.update(stored, "**", lambda leaf: leaf * 2)
    same = st.update(stored, "**", lambda leaf: leaf)
    same["b"].fill_(7)
    assert same["a"].tolist() == [7, 7]
    assert st.update(stored, "a", lambda leaf: leaf * 2)["a"].tolist() == [4, 6]


@pytest.mark.parametrize("chosen", ["embed", "half", "*"])
@pytest.mark.parametrize("fn", [lambda leaf: leaf, torch.neg, torch.neg_], ids=["same", "new", "written"])
def test_update_keeps_the_ties_of_stored_tensors_that_it_keeps_in_memory(fn, chosen, tmp_path):
    flat = torch.arange(6.0).view(2, 3)
    state = {"embed": flat, "head": flat, "half": flat[1:], "alone": torch.arange(2.0)}
    st.save(state, tmp_path / "tied.pt")

    def updated(tree):
        try:
            return st.offload(st.update(tree, chosen, fn))
        except st.TreeMismatch as error:
            return str(error)

    stored, expected = updated(st.files.open(tmp_path / "tied.pt")), updated(st.load(tmp_path / "tied.pt"))
    assert_trees_equal(stored, expected)


def test_update_leaves_stored_tensors_alone_that_share_nothing_with_what_is_chosen(tmp_path):
    flat = torch.arange(6.0)
    st.save({"a": flat[:4], "b": flat[2:4], "c": flat[4:]}, tmp_path / "tied.pt")
    stored = st.files.open(tmp_path / "tied.pt")
    found = st.update(stored, "b", lambda leaf: leaf)
    assert found["c"] is stored["c"]
    assert found["a"].add_(1).tolist() == [1, 2, 3, 4]
    assert found["b"].tolist() == [3, 4]


def test_a_step_of_a_chain_gets_tensors(tmp_path):
    stored = open_file(write({"v": bits(3), "w": bits(6)}, tmp_path / "a.safetensors"))
    seen = []

    def doubled(tree):
        seen.append({key: type(leaf) for key, leaf in tree.items()})
        return {key: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf for key, leaf in tree.items()}

    expected = {"v": bits(3) * 2, "w": bits(6) * 2}
    assert_trees_equal(st.chain(doubled)(stored), expected, ties=False)
    bucketwise = st.leafwise(lambda tree: doubled(tree))
    assert_trees_equal(st.chain(bucketwise, st.offload)(stored), expected, ties=False)
    assert {str(path): leaf.tolist() for path, leaf in st.stream(stored, bucketwise)} == {
        key: leaf.tolist() for key, leaf in expected.items()
    }
    assert all(set(types.values()) == {torch.Tensor} for types in seen)
    untouched = st.chain(partial(st.select, where="w"), partial(st.rename, rules={"w": "x"}))(stored)
    assert untouched["x"] is stored["w"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_does_not_write_to_the_file(name, tmp_path):
    path = write({"w": bits(100)}, tmp_path / name)
    before = {file: file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()}
    stored = open_file(path)
    st.offload(stored)["w"].zero_()
    stored["w"].tensor().zero_()
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("gap", [2, 20, 8192])
def test_boxes_of_any_strides_are_read(gap, tmp_path, monkeypatch):
    monkeypatch.setattr("statetree.files.strided_reading.BUCKET_BYTES", 40)
    monkeypatch.setattr("statetree.files.strided_reading._GAP_BYTES", gap)
    base = torch.arange(9000, dtype=torch.int16)
    shapes = [(), (0, 3), (5,), (4, 6), (4, 1, 6), (2, 3, 5)]
    strides = [(1, 7, 100), (200, 1, 5), (0, 40, 1), (3, 3, 3), (100, 1, 0), (1, 1000, 2)]
    views = {
        f"{shape}{stride}": base.as_strided(shape, stride[: len(shape)], 11) for shape in shapes for stride in strides
    }
    stored = open_file(write(views, tmp_path / "a.pt"))
    for key, view in views.items():
        assert torch.equal(stored[key].read(), view), key
        index = tuple(slice(size // 3, size - size // 4) for size in view.shape)
        assert torch.equal(stored[key].read(index), view[index]), key


@pytest.mark.parametrize(("step", "most"), [(1, 1.0), (2, 2.0), (3, 2.0), (50, 1.0)])
def test_reading_is_joined_up_to_twice_the_bytes_needed(step, most, tmp_path):
    stored = open_file(write({"w": torch.arange(40_000)[::step]}, tmp_path / "a.pt"))
    files = stored["w"]._pieces()[0].file.files
    before = files.nbytes_read
    assert torch.equal(stored["w"].read(), torch.arange(40_000)[::step])
    assert (files.nbytes_read - before) / stored["w"].nbytes <= most


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_between_wide_columns_is_not_read(name, tmp_path):
    values = torch.arange(12.0 * 4096).view(12, 4096)
    found = opened(write({"w": values}, tmp_path / name))
    found.tree["w"].read((slice(0, 1), slice(0, 1)))  # where its pieces lie
    before = found.files.nbytes_read
    assert torch.equal(found.tree["w"].read((slice(2, 9), slice(1000, 3000))), values[2:9, 1000:3000])
    assert found.files.nbytes_read - before == 7 * 2000 * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_changed_is_an_error(name, tmp_path):
    path = write({"w": bits(1000)}, tmp_path / name)
    stored = open_file(path)
    file = path / "__0_0.distcp" if path.is_dir() else path
    data = file.read_bytes()
    file.write_bytes(data[:-200])
    for verb in (st.offload, lambda tree: tree["w"].read()):
        with pytest.raises(CheckpointError, match="was cut off while it was read"):
            verb(stored)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="was changed while it was read: expected the file that was opened"):
        st.offload(stored)


def test_a_shard_that_is_swapped_after_the_check_is_an_error(tmp_path):
    st.save({"a": bits(9), "b": bits(8)}, tmp_path / "m.safetensors", shard_bytes=36)
    found = opened(tmp_path / "m.safetensors.index.json")
    shard = tmp_path / "m-00001-of-00002.safetensors"
    other = write({"a": bits(9, start=1)}, tmp_path / "other.safetensors")
    found.files._handles.clear()  # which closes them
    shard.unlink()
    shard.symlink_to(other)
    with pytest.raises(CheckpointError, match=r"was changed|was cut off"):
        found.tree["a"].read()


def test_a_shard_that_is_a_link_to_itself_is_missing(tmp_path):
    st.save({"a": bits(9), "b": bits(8)}, tmp_path / "m.safetensors", shard_bytes=36)
    shard = tmp_path / "m-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)
    for follow_links in (False, True):
        with pytest.raises(CheckpointError, match=r"'m-00001-of-00002.safetensors' is missing"):
            st.files.open(tmp_path / "m.safetensors.index.json", follow_links=follow_links)


def test_elements_are_converted_as_they_are_read(tmp_path):
    stored = open_file(write({"w": bits(50).t() if False else torch.arange(50.0)}, tmp_path / "a.pt"))["w"]
    half = stored.to(torch.bfloat16)
    assert (half.dtype, half.shape) == (torch.bfloat16, stored.shape)
    assert torch.equal(half.tensor(), torch.arange(50.0).bfloat16())
    assert torch.equal(half.read((slice(3, 9),)), torch.arange(3.0, 9.0).bfloat16())
    assert stored.to(torch.float32) is stored


@pytest.mark.parametrize("name", NAMES)
def test_cast_reads_no_element_of_what_is_tied_to_nothing(name, tmp_path):
    state = {"w": torch.arange(1000.0), "n": torch.arange(1000), "b": torch.arange(999.0).bfloat16()}
    found = opened(write(state, tmp_path / name))
    before = found.files.nbytes_read
    half = st.cast(found.tree, torch.bfloat16)
    assert {type(leaf) for leaf in half.values()} == {StoredTensor}
    assert (half["n"], half["b"]) == (found.tree["n"], found.tree["b"])
    assert found.files.nbytes_read - before < 1500  # of DCP, where elements lie
    assert_trees_equal(st.offload({key: half[key] for key in state}), st.cast(state, torch.bfloat16))
    with pytest.raises(
        TreeMismatch, match=r"cast: the trees differ in 2 places:(?s:.*)dtype differs at w: expected torch.int8"
    ):
        st.cast(found.tree, torch.int8)
    with pytest.raises(CheckpointError, match=r"out of range: expected values up to 448.0"):
        st.offload(st.cast(found.tree, torch.float8_e4m3fn))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_cast_twice_is_converted_twice(name, tmp_path):
    state = {"w": torch.tensor([1.2345678, 3.0]), "large": torch.tensor([1e10])}
    stored = open_file(write(state, tmp_path / name))
    once = st.cast({"w": stored["w"]}, torch.bfloat16)
    assert torch.equal(st.offload(st.cast(once, torch.float32))["w"], state["w"].bfloat16().float())
    with pytest.raises(CheckpointError, match="out of range"):
        st.offload(st.cast(st.cast({"large": stored["large"]}, torch.float16), torch.float32))


def test_cast_keeps_ties_strides_and_classes_of_stored_tensors(tmp_path):
    state = {**tied_state(), **rich_state(), "columns": bits(3, 4).t(), "twice": bits(5)}
    path = write(state, tmp_path / "a.pt")
    stored, floating = (
        open_file(path),
        lambda _, leaf: leaf.dtype is torch.float32 and not (leaf.layout is not torch.strided or leaf.is_nested),
    )
    expected = st.cast(torch_loaded(path), torch.float64, where=floating)
    where = [str(path) for path, leaf in st.to_flat(expected)[0].items() if leaf.dtype is torch.float64]
    assert len(where) > 4
    assert_trees_equal(st.offload(st.cast(stored, torch.float64, where=where)), expected)
    one = open_file(write({"w": bits(3)}, tmp_path / "a.safetensors"))["w"]
    read = st.cast({"a": one, "b": one}, torch.float64)
    assert_trees_equal(read, {"a": bits(3).double(), "b": bits(3).double()}, ties=False)


def test_a_tie_to_the_values_of_a_sparse_tensor_is_not_cut(tmp_path):
    values = torch.arange(1.0, 4)
    state = {"s": torch.sparse_coo_tensor([[0, 1, 2]], values, (3,), check_invariants=True), "w": values}
    stored = open_file(write(state, tmp_path / "a.pt"))
    with pytest.raises(TreeMismatch, match="cast: ties at w: another dtype cannot go into one tied to s"):
        st.cast(stored, torch.float64, where="w")
    assert st.cast({"w": stored["w"]}, torch.float64)["w"].tensor().tolist() == [1.0, 2.0, 3.0]


def test_distributed_and_foreign_leaves_are_refused(tmp_path):
    class Config:
        pass

    torch.save({"w": bits(2), "config": torch.nn.ReLU()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"objects of classes that are not loaded \(torch.nn"):
        open_file(tmp_path / "a.pt")
    tree = open_file(tmp_path / "a.pt", skip_foreign=True)
    assert repr(tree["config"]) == "<torch.nn.modules.activation.ReLU: not loaded>"
    with pytest.raises(CheckpointError, match=r"the leaf at config \(ReLU\) holds what torch\.load"):
        st.save({"config": torch.nn.ReLU()}, tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()
    with pytest.raises(CheckpointError, match=r"step: a plain value"):
        st.save({"step": 3}, tmp_path / "b.safetensors")


def test_saving_replaces_whole_files(tmp_path):
    for name in ("a.pt", "a.safetensors", "a", "b.safetensors.index.json"):
        for start in (0, 1):
            st.save({"w": bits(4, start=start)}, tmp_path / name)
            assert torch.equal(open_file(tmp_path / name)["w"].read(), bits(4, start=start))
    with pytest.raises(CheckpointError, match="exists already"):
        st.save({"w": bits(4)}, tmp_path / "a.pt", overwrite=False)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_directory_is_replaced_in_one_step_where_the_system_can(tmp_path, monkeypatch):
    def save(start):
        st.save({"w": bits(4, start=start), "v": bits(4)}, tmp_path / "a")
        assert torch.equal(open_file(tmp_path / "a")["w"].read(), bits(4, start=start))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]

    save(0)
    (tmp_path / "a").chmod(0o750)
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "_publish", None)  # which has a moment with neither
        save(1)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
    monkeypatch.setattr(publishing, "_exchanged", lambda *_: False)
    save(2)


def test_a_directory_that_may_not_be_written_is_not_exchanged(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a/new").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, everything may be written
    assert not publishing._exchanged(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b/new").exists()
    monkeypatch.undo()
    assert publishing._exchanged(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/new").exists()


def test_other_formats_can_be_registered(tmp_path):
    class Texts(CheckpointFormat):
        title = "text file"
        suffixes = (".txt",)

        def recognises(self, path, beginning):
            return beginning.startswith(b"#")

        def open(self, path, files, *, skip_foreign):
            place = files.open(path)
            lines = place.read(0, place.length, "the lines").decode().splitlines()[1:]
            return OpenedCheckpoint(dict.fromkeys(lines), self.title, files)

        def write(self, tree, folder, name, options):
            (folder / name).write_text("\n".join(["#", *tree]))
            return [name]

    with pytest.raises(TypeError, match="expected a CheckpointFormat"):
        register_format(Texts)
    register_format(Texts())
    try:
        st.save({"a": None, "b": None}, tmp_path / "x.txt")
        assert open_file(tmp_path / "x.txt") == {"a": None, "b": None}
    finally:
        _FORMATS.pop(0)


class Careless(CheckpointFormat):
    """Returns and raises what it is told to."""

    suffixes = (".careless",)

    def __init__(self, told):
        self.told = told

    def open(self, path, files, *, skip_foreign):
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    def write(self, tree, folder, name, options):
        (folder / name).write_text("x")
        return self.told


@pytest.fixture
def careless(request):
    register_format(Careless(request.param))
    yield
    _FORMATS.pop(0)


@pytest.mark.parametrize("careless", [None, "a.careless", ["../a"], ["other"], [1]], indirect=True)
@pytest.mark.usefixtures("careless")
def test_a_format_that_writes_other_files_than_it_says_is_named(tmp_path):
    with pytest.raises(
        TypeError, match=r"^save: write of the format Careless returned .*: expected a list of the names"
    ):
        st.save({"a": 1}, tmp_path / "a.careless")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("careless", [None, 3, {}], indirect=True)
@pytest.mark.usefixtures("careless")
def test_a_format_that_opens_something_else_is_named(tmp_path):
    (tmp_path / "a.careless").write_text("x")
    for load in (open_file, st.load):
        with pytest.raises(
            TypeError, match=r"open of the format Careless returned a \w+: expected an OpenedCheckpoint"
        ):
            load(tmp_path / "a.careless")


@pytest.mark.parametrize(
    "careless", [zipfile.BadZipFile("no zip"), KeyError("x"), CheckpointError("no zip")], indirect=True
)
@pytest.mark.usefixtures("careless")
def test_what_a_format_raises_names_the_file(tmp_path, careless):
    (tmp_path / "a.careless").write_text("x")
    told = _FORMATS[0].told
    what = (
        r"^no zip$"
        if isinstance(told, CheckpointError)
        else rf"a\.careless: the format Careless .*{type(told).__name__}: "
    )
    with pytest.raises(CheckpointError, match=what):
        st.load(tmp_path / "a.careless")


def test_a_stored_tensor_says_what_it_is(tmp_path):
    (leaf,) = open_file(write({"w": bits(2, 3, dtype=torch.int8)}, tmp_path / "a.pt")).values()
    assert isinstance(leaf, StoredTensor)
    assert (repr(leaf), leaf.nbytes, leaf.numel, leaf.device.type) == ("StoredTensor(int8, [2, 3])", 6, 6, "cpu")
    assert UnsupportedLeaf
    assert Path


@pytest.mark.parametrize("nbytes", [0, 20, 25, 48])
def test_a_range_of_other_than_its_bytes_is_no_tensor(nbytes, tmp_path):
    (tmp_path / "a.raw").write_bytes(bytes(range(64)))
    file = opened(write({"w": bits(2)}, tmp_path / "a.pt")).files.open(tmp_path / "a.raw")
    message = r"a\.raw: w: torch.float32 of shape \[2, 3\] does not fit .*: expected 24 bytes, got " + str(nbytes)
    with pytest.raises(CheckpointError, match=message):
        StoredTensor.at(file.part(4, nbytes, "w"), torch.float32, (2, 3))
    stored = StoredTensor.at(file.part(4, 24, "w"), torch.float32, (2, 3))
    assert stored.read().view(torch.uint8).flatten().tolist() == list(range(4, 28))
    assert StoredTensor.at(file.part(4, 0, "w"), torch.float32, (2, 0)).read().shape == (2, 0)


def test_a_format_without_its_methods_cannot_be_made():
    class Unfinished(CheckpointFormat):
        title = "unfinished file"

    with pytest.raises(TypeError, match=r"abstract methods.*open.*write"):
        Unfinished()


def test_views_of_one_memory_that_are_a_parameter_and_a_tensor_stay_that(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(4.0))
    torch.save({"p": parameter, "v": parameter.data, "again": parameter}, tmp_path / "a.pt")
    stored = open_file(tmp_path / "a.pt")
    made = st.map_leaves(lambda leaf: leaf, stored)
    assert [type(leaf) for leaf in made.values()] == [torch.nn.Parameter, torch.Tensor, torch.nn.Parameter]
    assert [leaf.requires_grad for leaf in made.values()] == [True, False, True]
    assert len({leaf.data_ptr() for leaf in made.values()}) == 1
    assert made["p"] is made["again"]
    updated = st.update(stored, "*", lambda leaf: leaf)
    assert [type(leaf) for leaf in updated.values()] == [torch.nn.Parameter, torch.Tensor, torch.nn.Parameter]
    with pytest.raises(TreeMismatch, match="update: memory differs at p"):
        st.update(stored, "*", lambda leaf: leaf.detach() * 2)


def values_that_hold_what_is_not_loaded():
    times = np.array(["2020"], "M8[s]")
    return {
        "namespace": types.SimpleNamespace(c=times),
        "arguments": argparse.Namespace(c=[{"d": times}]),
        "set": {pathlib.PurePath("a"), Unknown()},
        "frozen set": frozenset([Unknown(), 1]),
        "key": types.SimpleNamespace(c={(1, Unknown()): 2}),
        "attribute": with_attribute(Unknown()),
    }


class Unknown:
    pass


def with_attribute(value):
    found = types.SimpleNamespace(inner=OrderedDict(a=1))
    found.inner.extra = value
    return found


@pytest.mark.parametrize("name", values_that_hold_what_is_not_loaded())
def test_values_that_hold_what_is_not_loaded_are_not_handed_out(name, tmp_path):
    value = values_that_hold_what_is_not_loaded()[name]
    torch.save({"v": value, "w": torch.ones(2)}, tmp_path / "x.pt")
    assert st.load(tmp_path / "x.pt", where="w")["w"].tolist() == [1, 1]
    for like in (None, {"v": value, "w": torch.zeros(2)}):
        with pytest.raises(CheckpointError, match=r"load: the plain value at v cannot be read"):
            st.load(tmp_path / "x.pt", like, where="v" if like is None else None)


@pytest.mark.parametrize("make", [lambda t: types.SimpleNamespace(t=t), lambda t: {t}, lambda t: t.untyped_storage()])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_in_plain_values_are_compared_with_their_checksums(make, tied, tmp_path):
    path, t = tmp_path / "x.pt", torch.arange(100, dtype=torch.uint8)
    torch.save({"v": make(t), "t": t if tied else torch.ones(3), "w": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(bytes(range(100))) + 50] ^= 1
    path.write_bytes(data)
    for like in (None, {"v": make(t), "t": t.clone() if tied else torch.ones(3), "w": torch.ones(2)}):
        with pytest.raises(CheckpointError, match="has the checksum"):
            st.load(path, like)
    with pytest.raises(CheckpointError, match="has the checksum"):
        st.load(path, where="v")
    assert st.load(path, verify=False)["w"].tolist() == [1, 1]


def test_a_format_that_fails_to_recognise_a_file_is_named(tmp_path):
    class Failing(CheckpointFormat):
        title, suffixes = "failing", (".failing",)

        def recognises(self, path, beginning):
            raise RuntimeError("boom")

        open = write = recognises

    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    known = list(_FORMATS)
    try:
        register_format(Failing())
        with pytest.raises(CheckpointError, match=r"Failing cannot read it: RuntimeError: boom"):
            open_file(tmp_path / "x.pt")
    finally:
        _FORMATS[:] = known


def test_update_reads_no_ties_between_tensors_that_are_not_chosen(tmp_path):
    w = torch.arange(6.0)
    torch.save({"a": w, "b": w[2:], "c": torch.ones(3), "d": torch.ones(2)}, tmp_path / "x.pt")
    found = st.update(open_file(tmp_path / "x.pt"), "c", lambda leaf: leaf * 2)
    assert [type(leaf) for leaf in found.values()] == [StoredTensor, StoredTensor, torch.Tensor, StoredTensor]
