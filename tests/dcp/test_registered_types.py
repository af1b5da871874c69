"""Leaf types that users registered are saved in parts, or by their chunks, and come back as what they were."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.testing import run_ranks
from tests.collectives.test_custom_chunks import FULL, blocks_of

pytestmark = pytest.mark.filterwarnings("ignore:save. what restore does not make")


class Scaled:
    def __init__(self, values, scale, zeros):
        self.values, self.scale, self.zeros = values, scale, zeros


class ScaledType(statetree.LeafType):
    def unpack(self, value):
        return [value.values, value.zeros], value.scale

    def pack(self, context, parts):
        return Scaled(parts[0], context, parts[1])

    def describe(self, value):
        return {"shape": tuple(value.values.shape), "dtype": value.values.dtype}


class Holder:
    """Holds another registered value."""

    def __init__(self, inner):
        self.inner = inner


class HolderType:
    def unpack(self, value):
        return [value.inner], "outside"

    def pack(self, context, parts):
        holder = Holder(parts[0])
        holder.context = context
        return holder


class Fp(torch.Tensor):
    """A plain subclass, whose leaf type keeps something that torch does not know."""


class FpType(statetree.LeafType):
    def unpack(self, value):
        return [value.as_subclass(torch.Tensor)], value.factor

    def pack(self, context, parts):
        made = parts[0].as_subclass(Fp)
        made.factor = context
        return made


@pytest.fixture(autouse=True)
def registered():
    statetree.register_leaf_type(Scaled, ScaledType)
    statetree.register_leaf_type(Holder, HolderType())
    statetree.register_leaf_type(Fp, FpType())


def scaled(scale, start=0):
    return Scaled(torch.arange(6, dtype=torch.int8) + start, scale, torch.arange(2.0) + start)


def test_a_registered_value_comes_back(tmp_path):
    statetree.save({"q": scaled(0.5, 1), "step": 3}, tmp_path)
    template = {"q": scaled(7.0), "step": None}
    values = template["q"].values
    loaded = statetree.load(tmp_path, template, in_place=True)
    assert type(loaded["q"]) is Scaled
    assert loaded["q"].scale == 0.5
    assert loaded["q"].values is values
    assert values.tolist() == [1, 2, 3, 4, 5, 6]
    assert loaded["q"].zeros.tolist() == [1, 2]


def test_its_tensors_are_entries_that_dcp_reads(tmp_path):
    statetree.save({"q": scaled(0.5)}, tmp_path)
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {"q.<part 0>", "q.<part 1>", "q.<context>"} < set(metadata)


def test_registered_values_in_each_other(tmp_path):
    statetree.save([Holder(scaled(0.5, 1))], tmp_path)
    (loaded,) = statetree.load(tmp_path, [Holder(scaled(7.0))], in_place=True)
    assert loaded.context == "outside"
    assert loaded.inner.scale == 0.5
    assert loaded.inner.values.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_context_of_a_registered_tensor_comes_back(tmp_path):
    saved, template = (torch.arange(3.0).add(start).as_subclass(Fp) for start in (1, 0))
    saved.factor, template.factor = 0.5, 7.0
    statetree.save({"t": saved}, tmp_path)
    loaded = statetree.load(tmp_path, {"t": template}, in_place=True)["t"]
    assert loaded.factor == 0.5
    assert template.tolist() == loaded.tolist() == [1, 2, 3]


def test_a_template_of_another_shape_is_refused(tmp_path):
    statetree.save({"q": scaled(0.5)}, tmp_path)
    template = {"q": Scaled(torch.zeros(5, dtype=torch.int8), 1.0, torch.zeros(2))}
    with pytest.raises(statetree.TreeMismatch, match=r"load: layout differs at q: .*\(5,\).*\(6,\)"):
        statetree.load(tmp_path, template, in_place=True)


def test_a_context_that_does_not_come_back_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"  q \(Scaled\): .*len"):
        statetree.save({"q": scaled(len)}, tmp_path)


def test_a_context_of_a_class_that_is_not_loaded_is_named(tmp_path):
    statetree.save({"q": scaled(Fraction(1, 3))}, tmp_path)
    with pytest.raises(statetree.CheckpointError, match=r"context of the leaf at q .* does not make what .*Fraction"):
        statetree.load(tmp_path, {"q": scaled(Fraction(1, 2))})
    loaded = statetree.load(tmp_path, {"q": scaled(Fraction(1, 2))}, weights_only=False)
    assert loaded["q"].scale == Fraction(1, 3)


def test_it_takes_a_template(tmp_path):
    statetree.save({"q": scaled(0.5)}, tmp_path)
    with pytest.raises(statetree.UnsupportedLeaf, match=r"at q was saved in parts"):
        statetree.load(tmp_path)


def test_its_context_is_no_leaf_of_a_tree_of_files(tmp_path):
    statetree.save({"q": scaled(0.5), "w": torch.ones(2)}, tmp_path)
    assert list(statetree.files.open(tmp_path, skip_foreign=True)) == ["q", "w"]


def save_blocks(directory):
    statetree.save({"b": blocks_of(copies=2), "rank": dist.get_rank()}, directory)


def load_blocks(directory):
    template = {"b": blocks_of(torch.zeros_like(FULL), start=1)}
    statetree.load(directory, template, in_place=True, strict=False)
    return [(offsets, block.tolist()) for offsets, block in template["b"].blocks]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_distributed_ones_are_saved_by_their_chunks(world_size, tmp_path):
    """And loaded by other ranks, that hold other ones."""
    run_ranks(2, save_blocks, tmp_path)
    found = [block for blocks in run_ranks(world_size, load_blocks, tmp_path) for block in blocks]
    assert len(found) > 10
    for (row, column), values in found:
        block = torch.tensor(values)
        assert torch.equal(block, FULL[row : row + block.shape[0], column : column + block.shape[1]])
    plain = statetree.load(tmp_path, {"b": torch.zeros_like(FULL)}, in_place=True, where="b")
    assert torch.equal(plain["b"], FULL)
