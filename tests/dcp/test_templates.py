"""What a template must be like, and what a template that is not gets."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import statetree
from statetree import dcp
from tests.judge import assert_trees_equal


def saved_state():
    return {
        "model": OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.arange(3.0)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0) + 9}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}],
        },
        "history": [1.0, 2.0],
        "blocks": [torch.arange(2), torch.arange(3)],
        "note": "x",
    }


def template_of(state):
    return statetree.map_leaves(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None, state)


@pytest.fixture
def checkpoint(tmp_path):
    dcp.Checkpointer(tmp_path).save(0, saved_state())
    return tmp_path


def test_tensors_are_filled_in_place_and_values_come_from_the_checkpoint(checkpoint):
    template = template_of(saved_state())
    weight = template["model"]["weight"]
    template["history"] = []  # a list of plain values is a plain value itself, of any length
    loaded = dcp.Checkpointer(checkpoint).restore(template)
    assert loaded["model"]["weight"] is weight
    assert_trees_equal(loaded, saved_state())
    assert template["note"] is None
    assert template["history"] == []
    assert loaded["model"] is not template["model"]


def test_a_mapping_may_leave_keys_out(checkpoint):
    loaded = dcp.Checkpointer(checkpoint).restore({"model": {"bias": torch.zeros(3)}, "note": 0})
    assert_trees_equal(loaded, {"model": {"bias": torch.arange(3.0)}, "note": "x"})


def test_keys_are_matched_with_their_types(tmp_path):
    statetree.save({0: torch.ones(1), "0": torch.zeros(2)}, tmp_path)
    assert_trees_equal(
        statetree.load(tmp_path, {"0": torch.ones(2)}, in_place=True, strict=False), {"0": torch.zeros(2)}
    )
    with pytest.raises(statetree.TreeMismatch, match=r"(missing|unexpected) at False: expected"):
        statetree.load(tmp_path, {False: torch.ones(2)}, in_place=True)


def test_a_key_that_only_looks_like_one_of_the_checkpoint_is_told_apart(tmp_path):
    statetree.save({"a": {0: torch.ones(1)}}, tmp_path)
    expected = r"missing at a.0: expected the keys 'a', '0' \(the checkpoint has 'a', 0\), got nothing"
    with pytest.raises(statetree.TreeMismatch, match=expected):
        statetree.load(tmp_path, {"a": {"0": torch.ones(1)}}, in_place=True)


MISFITS = {
    "missing": (
        {"a": 1, "model": {"b": torch.ones(1)}},
        r"2 places:\n  missing at a: .*\n  missing at",
    ),
    "shape": ({"model": {"bias": torch.ones(4)}}, r"shape differs at model.bias: expected \(4,\), got \(3,\)"),
    "dtype": ({"model": {"bias": torch.ones(3).double()}}, "dtype differs at model.bias: expected torch.float64"),
    "value for tensor": (
        {"model": {"bias": 0}},
        "leaf type differs at model.bias: expected plain value, got Tensor",
    ),
    "tensor for value": ({"note": torch.ones(1)}, "leaf type differs at note: expected a tensor, got a plain value"),
    "fresh optimizer": (
        {"optimizer": {"state": {}}},
        r"length differs at optimizer.state: expected an empty container, got entries. .*get_optimizer_state_dict",
    ),
    "empty list": (
        {"blocks": []},
        "structure differs at blocks: expected one \\(list\\), got several entries",
    ),
    "length": ({"blocks": [torch.ones(2).long()]}, "unexpected at blocks.1: expected nothing, got present"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_named_and_nothing_is_written(name, checkpoint):
    misfit, message = MISFITS[name]
    weight = torch.zeros(2, 3)
    misfit = {**misfit, "model": {"weight": weight, **misfit.get("model", {})}}
    with pytest.raises(statetree.TreeMismatch, match=rf"load: (the trees differ in )?{message}") as caught:
        dcp.Checkpointer(checkpoint).restore(misfit)
    assert caught.value.differences
    assert not weight.any()


def test_an_inference_tensor_is_refused(checkpoint):
    with torch.inference_mode():
        tensor = torch.zeros(3)
    with pytest.raises(statetree.TreeMismatch, match=r"writability at model.bias: .*inference tensor"):
        dcp.Checkpointer(checkpoint).restore({"model": {"bias": tensor}})


def test_a_meta_template_is_refused(checkpoint):
    with pytest.raises(statetree.UnsupportedLeaf, match=r"load: .*at model.bias: .*a meta tensor.*to_empty"):
        dcp.Checkpointer(checkpoint).restore({"model": {"bias": torch.zeros(3, device="meta")}})


def test_a_zero_tensor_is_refused(checkpoint):
    zeros = torch._efficientzerotensor(3)
    with pytest.raises(statetree.UnsupportedLeaf, match=r"load: .*at model.bias: .*zero tensor, which has no memory"):
        dcp.Checkpointer(checkpoint).restore({"model": {"bias": zeros}})
    with pytest.raises(statetree.UnsupportedLeaf, match=r"save: .*at bias: .*zero tensor, which has no memory"):
        statetree.save({"bias": zeros}, checkpoint / "other")


def test_awkward_tensors_are_filled_right(tmp_path):
    values = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    statetree.save({"conj": values, "rows": values.real.clone(), "parameter": values.imag.clone()}, tmp_path)
    template = {
        "conj": torch.zeros(3, 2, dtype=torch.complex64).conj().t(),
        "rows": torch.zeros(4, 6)[::2, ::2],
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
    }
    loaded = statetree.load(tmp_path, template, in_place=True)
    assert torch.equal(loaded["conj"], values)
    assert loaded["conj"].is_conj()
    assert torch.equal(loaded["rows"], values.real)
    assert torch.equal(loaded["parameter"], values.imag)
    assert loaded["parameter"].requires_grad


def test_ties_of_the_template_stay(tmp_path):
    tied = torch.arange(4.0)
    statetree.save({"a": tied, "b": tied.view(2, 2)}, tmp_path)
    base = torch.zeros(4)
    loaded = statetree.load(tmp_path, {"a": base, "b": base.view(2, 2)}, in_place=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(base, tied)


@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base, base.view(2, 5)),
        lambda base: (base[:6], base[4:].view(2, 3)),
        lambda base: (base[:2], base, base[5:]),
    ],
)
def test_tied_tensors_of_a_template_saved_with_different_values(tmp_path, views):
    base = torch.full((10,), -1.0)
    template = {"other": torch.zeros(3), **{f"t{number}": view for number, view in enumerate(views(base))}}
    state = statetree.map_leaves(lambda leaf: torch.rand(leaf.shape), template)
    statetree.save(state, tmp_path)
    with pytest.raises(
        statetree.TreeMismatch, match=r"(?s)load: .*ties at t\d: values of its own cannot go into a ten"
    ) as e:
        statetree.load(tmp_path, template, in_place=True)
    assert {found.kind for found in e.value.differences} == {"ties"}
    assert torch.equal(template["other"], state["other"])


def test_a_tensor_that_appears_twice_saved_with_values_that_agree(tmp_path):
    saved = torch.arange(10.0)
    statetree.save({"a": saved, "b": saved.view(2, 5)}, tmp_path)
    base = torch.zeros(10)
    statetree.load(tmp_path, {"a": base, "b": base.view(2, 5)}, in_place=True)
    assert torch.equal(base, saved)


def test_tensors_that_overlap_in_part_saved_with_values_that_agree(tmp_path):
    saved = torch.arange(10.0)
    statetree.save({"a": saved[:6], "b": saved[4:].view(2, 3), "whole": saved}, tmp_path)
    base = torch.zeros(10)
    statetree.load(tmp_path, {"a": base[:6], "b": base[4:].view(2, 3), "whole": base}, in_place=True)
    assert torch.equal(base, saved)


Pair = namedtuple("Pair", "x y")


def test_tensors_of_several_dtypes_at_one_offset_of_one_memory(tmp_path):
    """The offset counts elements: that of the bytes lies elsewhere."""
    saved = {"numbers": torch.arange(2.0) + 1, "bytes": torch.tensor([3, 4], dtype=torch.uint8)}
    statetree.save(saved, tmp_path)
    for in_place in (False, True):
        memory = torch.zeros(32, dtype=torch.uint8)
        template = {"numbers": memory.view(torch.float32)[4:6], "bytes": memory[4:6]}
        loaded = statetree.load(tmp_path, template, in_place=in_place)
        assert statetree.similarity(loaded, saved, values=True)


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_containers_of_other_classes(tmp_path):
    state = {"p": Pair(torch.arange(2), 1), "d": OrderedDict(a=1)}
    statetree.save(state, tmp_path)
    template = {"p": Pair(torch.zeros(2).long(), None), "d": {"a": 0}}  # any two mappings match
    assert_trees_equal(
        statetree.load(tmp_path, template, in_place=True), {"p": Pair(torch.arange(2), 1), "d": {"a": 1}}
    )


def test_what_the_checkpoint_lacks_keeps_what_it_holds(tmp_path):
    statetree.save({"a": torch.arange(3.0), "n": {"x": 1}}, tmp_path)
    template = {
        "a": torch.zeros(3),
        "new": torch.full((2,), 7.0),
        "n": {"x": 0, "y": {"z": 5}},
    }
    with pytest.raises(statetree.TreeMismatch, match=r"missing at new"):
        statetree.load(tmp_path, template, in_place=True)
    loaded = statetree.load(tmp_path, template, in_place=True, strict=False)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["new"] is template["new"]
    assert loaded["new"].tolist() == [7, 7]
    assert loaded["n"] == {"x": 1, "y": {"z": 5}}
    with pytest.raises(statetree.TreeMismatch, match=r"shape differs at a"):
        statetree.load(tmp_path, {"a": torch.zeros(4), "new": 1}, in_place=True, strict=False)


SEVERAL = {"x": torch.ones(2), "y": [torch.ones(2)]}


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
@pytest.mark.parametrize(
    ("saved", "template", "message"),
    [
        (torch.ones(2), SEVERAL, "structure differs at a: expected entries inside it, got one entry"),
        (5, SEVERAL, "structure differs at a: expected entries inside it, got one entry"),
        (SEVERAL, torch.ones(2), "structure differs at a: expected one entry, got entries inside it"),
        (SEVERAL, 5, "structure differs at a: expected one entry, got entries inside it"),
        ([torch.ones(2)], [1, 2], "structure differs at a: expected one entry, got entries inside it"),
        ([1, 2], [torch.ones(2)], "structure differs at a: expected entries inside it, got one entry"),
        (TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2), "expected one entry, got entries inside it"),
        (torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2)), "expected entries inside it, got one entry"),
    ],
)
def test_where_one_has_a_leaf_and_the_other_several_neither_lacks_any(saved, template, message, tmp_path):
    """As torchao's moments, which are plain tensors where shards are small."""
    paths = [tmp_path / "saved", *([] if TwoTensor in {type(saved), type(template)} else [tmp_path / "saved.pt"])]
    for path in paths:
        statetree.save({"a": saved, "b": torch.arange(3.0)}, path)
        like = {"a": template, "b": torch.zeros(3)}
        with pytest.raises(statetree.TreeMismatch, match=message):
            statetree.load(path, like, strict=False)
        assert statetree.load(path, like, strict=False, where="b")["b"].tolist() == [0, 1, 2]
        with pytest.raises(statetree.TreeMismatch) as caught:
            statetree.load(path, like)
        assert "strict=False" not in str(caught.value)  # which helps nobody


def test_names_alone_do_not_tell_of_leaves_and_what_is_inside_them(tmp_path):
    """A head that was a parameter, and is a module now."""
    path = tmp_path / "saved.safetensors"
    statetree.save({"score": torch.ones(2), "c": torch.ones(2)}, path)
    for head in ({"score.weight": torch.zeros(3)}, {"score": {"weight": torch.zeros(3)}}):
        loaded = statetree.load(path, {**head, "c": torch.zeros(2)}, strict=False)
        assert_trees_equal(loaded, {**head, "c": torch.ones(2)})


class Optional(torch.Tensor):
    """A wrapper of one tensor or two."""

    @staticmethod
    def __new__(cls, a, b=None):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b=None):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a"] if self.b is None else ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Optional(inner["a"], inner.get("b"))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_no_leaf_gets_some_of_its_tensors(tmp_path):
    """torchao's have a tensor more, or less, for another configuration."""
    whole, part = Optional(torch.ones(2), torch.ones(2)), Optional(torch.ones(2))
    for number, (saved, template) in enumerate(((whole, part), (part, whole))):
        statetree.save({"q": [saved], "b": torch.arange(3.0)}, path := tmp_path / str(number))
        like = {"q": [template], "b": torch.zeros(3)}
        with pytest.raises(statetree.TreeMismatch, match=r"structure differs at q\.0: expected the same tensors, got"):
            statetree.load(path, like, strict=False)
        with pytest.raises(statetree.TreeMismatch, match=r"q\.0"):
            statetree.load(path, like, where="q.*")
        assert statetree.load(path, like, strict=False, where="b")["b"].tolist() == [0, 1, 2]
        assert statetree.load(path, {"b": torch.zeros(3), "q": []}, strict=False)["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("empty", [{}, [], None, statetree.HOLE, [statetree.HOLE, statetree.HOLE], [[], ({}, None)]])
def test_what_is_empty_lacks_what_the_other_has(empty, tmp_path):
    for saved, template in ((SEVERAL, empty), (empty, SEVERAL)):
        path = tmp_path / ("saved" if saved is SEVERAL else "empty")
        statetree.save({"a": saved, "b": torch.arange(3.0)}, path)
        loaded = statetree.load(path, {"a": template, "b": torch.zeros(3)}, strict=False)
        assert_trees_equal(loaded, {"a": template, "b": torch.arange(3.0)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_checkpoint_of_dcp_lacks_keeps_what_it_holds(tmp_path):
    torch.distributed.checkpoint.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)
    loaded = statetree.load(tmp_path, {"a": torch.zeros(3), "new": 5}, in_place=True, strict=False)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["new"] == 5


def test_dtypes_are_converted_where_that_is_asked_for(tmp_path):
    values = torch.tensor([1.0, 2.5, -3.0])
    statetree.save({"a": values, "b": values, "n": torch.arange(3)}, tmp_path)
    shared = torch.zeros(3, dtype=torch.float64)
    template = {"a": shared, "b": shared, "n": torch.zeros(3).long()}
    with pytest.raises(statetree.TreeMismatch, match=r"dtype differs at a"):
        statetree.load(tmp_path, template, in_place=True)
    assert not shared.any()
    loaded = statetree.load(tmp_path, template, in_place=True, cast=True)
    assert loaded["a"] is shared
    assert loaded["b"] is shared
    assert shared.tolist() == [1, 2.5, -3]
    assert loaded["n"].tolist() == [0, 1, 2]
    half = torch.zeros(3, dtype=torch.bfloat16)
    dcp.Checkpointer(tmp_path / "series").save(1, {"a": values})
    dcp.Checkpointer(tmp_path / "series").restore({"a": half, "new": 1}, cast=True, strict=False)
    assert half.tolist() == [1, 2.5, -3]
    with pytest.raises(statetree.TreeMismatch, match=r"dtype differs at a: expected torch.int32, got torch.float32"):
        statetree.load(tmp_path, {"a": torch.zeros(3, dtype=torch.int32)}, in_place=True, cast=True, where="a")


def test_values_out_of_range_are_no_damage(tmp_path):
    series = dcp.Checkpointer(tmp_path)
    for step, most in enumerate((1.0, 1e10)):
        series.save(step, {"m": {"a": torch.tensor([1.0, most])}})
    template = {"m": {"a": torch.zeros(2, dtype=torch.float16)}}
    told = r"^load: range differs at m.a: expected values up to 65504.0 \(torch.float16\), got 10000000000.0"
    with pytest.raises(statetree.TreeMismatch, match=told):
        statetree.load(tmp_path / "step-00000001", template, in_place=True, cast=True)
    with pytest.raises(statetree.TreeMismatch, match=told):
        series.restore(template, cast=True, fallback=True)
    assert not template["m"]["a"][1]


class Listed(list):
    """A container that no load makes by itself."""


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_attributes_below_a_known_attribute_are_found_in_an_unknown_container(tmp_path):
    state, inner = OrderedDict(w=torch.arange(2.0)), Listed()
    inner.scale = torch.arange(3.0) + 7
    state._metadata = inner
    statetree.save(state, tmp_path / "a")
    loaded = statetree.load(tmp_path / "a", state)
    assert type(loaded._metadata) is Listed
    assert loaded._metadata.scale.tolist() == [7, 8, 9]
