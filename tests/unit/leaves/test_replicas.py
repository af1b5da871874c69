"""``take_apart``: a tree's plain tensors, and the tree put together again with others."""

from collections import OrderedDict
from functools import partial

import pytest
import torch

import statetree as st
from statetree.declare import leafwise
from statetree.leaves import TreeParts, take_apart
from statetree.spans import memory_of, replicate
from tests.judge import assert_independent, assert_pure, assert_trees_equal
from tests.trees import TREES
from tests.trees.classes import PlainSubclass
from tests.trees.corpus import Held

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
COPIED = [tree for tree in TREES if not (tree.refused or tree.changes)]


@leafwise
def copied(tree, *, device="cpu"):
    parts = take_apart("copied", tree)
    return parts.put_together(replicate(parts.tensors, memory_of(device)))


@leafwise
def contiguous(tree):
    parts = take_apart("contiguous", tree)
    return parts.put_together([tensor.clone(memory_format=torch.contiguous_format) for tensor in parts.tensors])


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_a_copy_in_two_lines_is_exact(tree):
    made = tree.make()
    again = copied(made)
    assert_trees_equal(again, made)
    assert_independent(made, again, containers=False)


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_tensors_are_plain_and_on_the_memory_of_the_tree(tree):
    parts = take_apart("test", tree.make())
    assert isinstance(parts, TreeParts)
    for tensor, part in zip(parts.tensors, parts.unpacked.parts, strict=True):
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.layout is torch.strided
        if not tensor.is_meta:
            assert tensor.data_ptr() == part.data_ptr()


def state():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model = OrderedDict(weight=weight, sparse=torch.eye(3).to_sparse())
    model._metadata = {"": {"version": 1}}
    return {
        "model": model,
        "tied": [weight],
        "held": Held(),
        "step": 3,
        "own": torch.ones(2).as_subclass(PlainSubclass),
    }


def test_a_transform_that_makes_tensors_contiguous():
    made = state()
    assert_pure(contiguous, made)
    result = contiguous(made)
    weight = result["model"]["weight"]
    assert weight.stride() == (2, 1)
    assert weight.requires_grad
    assert type(weight) is torch.nn.Parameter
    assert weight.is_leaf
    assert weight is result["tied"][0]
    assert result["model"]._metadata == {"": {"version": 1}}
    assert type(result["own"]) is PlainSubclass
    assert st.similarity(result, made, values=True)
    assert_independent(made, result, containers=False)


def test_such_transforms_stream_in_a_chain():
    made = {"a": state()["model"], "b": torch.arange(4.0), "c": 1}
    save = st.chain(contiguous, partial(copied, device="cpu"))
    assert_trees_equal(save(made), contiguous(made))
    assert len(list(st.stream(made, save))) == len(st.paths(made))


def test_paths_are_those_of_the_leaves():
    parts = take_apart("test", {"a": torch.ones(1), "b": [torch.eye(2).to_sparse()]})
    assert [str(parts.path_of(index)) for index in range(len(parts.tensors))] == ["a", "b.0", "b.0"]


def test_another_number_of_tensors_is_refused():
    parts = take_apart("halve", [torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="halve: cannot put the tree together: expected 2 tensors, got 1"):
        parts.put_together(parts.tensors[:1])


def test_what_cannot_be_taken_apart_is_refused_in_the_name_of_the_verb():
    loop = {"w": torch.ones(1)}
    loop["self"] = loop
    with pytest.raises(st.CyclicTree, match="halve: the container at self"):
        take_apart("halve", loop)


def test_freed_storages_are_noticed():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    parts = take_apart("halve", {"w": freed})
    with pytest.raises(st.UnsupportedLeaf, match="halve: the storage of the leaf at w was freed"):
        parts.check_memory()


def test_modes_of_the_caller_do_not_matter():
    made = state()
    with torch.inference_mode():
        inside = copied(made)
    assert not inside["model"]["weight"].is_inference()
    assert_trees_equal({**inside, "held": 0}, {**made, "held": 0})
