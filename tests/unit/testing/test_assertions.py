"""The assertions that users get notice what the judge of our own tests does, but for what stands in ``BEYOND``."""

import threading
import types
from collections import OrderedDict

import pytest
import torch

import statetree as st
from statetree.testing import assert_independent, assert_pure, assert_structure_preserved, assert_trees_equal
from tests.judge import test_planted_changes as changes
from tests.judge import test_planted_faults as faults
from tests.judge import test_planted_sharing as sharing
from tests.judge import test_planted_structures as structures
from tests.trees import DISTRIBUTED_TREES, TREES

#: What the judge alone notices: what leaf types do not see, and objects within objects.
BEYOND = {
    *("tie_of_fake_tensors_broken", "range_of_the_same_numbers", "attribute_of_an_array"),
    *("a tensor below a wrapper without memory", "a tensor for another below a wrapper without memory"),
    *("a_tensor_below_wrappers_without_memory", "a_tensor_that_pickle_leaves_out", "a_gradient_that_pickle_leaves_out"),
    *("a_bytearray", "a_tensor_on_a_bytearray", "a_tensor_on_an_array_of_the_library"),
    *("a_memoryview_of_a_tensor", "memoryviews_of_a_bytearray"),
    *("metadata", "a_list_in_an_object", "a_list_in_an_attribute_of_a_tensor", "a_list_in_arrays"),
}


def noticed(planted):
    return {name: made for name, made in planted.items() if name not in BEYOND}


@pytest.mark.parametrize("make", [made for made in faults.FAULTS if made.id not in BEYOND])
def test_a_planted_fault_is_noticed(make):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=r"^assert_trees_equal: the trees differ in"):
            assert_trees_equal(one, other)


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.refused], ids=str)
def test_a_tree_is_the_same_as_itself_and_as_one_made_alike(tree):
    made = tree.make()
    assert_trees_equal(made, made)
    assert_trees_equal(made, tree.make())


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("tree", [tree for tree in DISTRIBUTED_TREES if not tree.changes], ids=str)
def test_distributed_trees_are_the_same_as_themselves(tree):
    made = tree.make()
    assert_trees_equal(made, made)


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.refused], ids=str)
def test_copies_are_equal_and_independent(tree):
    source = tree.make()
    result = st.offload(source)
    assert_trees_equal(source, result, storages=False)
    assert_independent(source, result, containers=tree.name != "registered_as_leaf")


@pytest.mark.parametrize("make", noticed({**sharing.MEMORY, **sharing.HISTORY}).values())
def test_shared_memory_and_history_are_noticed(make):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=r"^assert_independent: the trees are not independent"):
            assert_independent(one, other, containers=False)


@pytest.mark.parametrize("make", noticed(sharing.OBJECTS).values(), ids=noticed(sharing.OBJECTS))
def test_shared_objects_are_noticed(make):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=r"(?s)^assert_independent: .* is the object at"):
            assert_independent(one, other)


#: Here a storage counts as a whole, and not only the part of it that a tensor is a view of.
ON_ONE_STORAGE = {"arrays_side_by_side", "mixed_places_in_one_array"}
ALLOWED = {name: make for name, make in sharing.ALLOWED.items() if name not in ON_ONE_STORAGE}


def test_what_containers_carry_is_not_to_be_shared():
    left, right = (OrderedDict(a=torch.ones(2)) for _ in range(2))
    left._metadata, right._metadata = {"": {"version": 1}}, {"": {"version": 1}}
    assert_independent(left, right)
    right._metadata[""] = left._metadata[""]
    with pytest.raises(AssertionError, match=r"  _metadata\. is the object at _metadata\."):
        assert_independent(left, right)
    right._metadata = left._metadata
    with pytest.raises(AssertionError, match=r"  _metadata is the object at _metadata\n"):
        assert_independent(left, right)


@pytest.mark.parametrize("make", ALLOWED.values(), ids=ALLOWED)
def test_what_nobody_can_change_may_be_in_both(make):
    left, right = make()
    assert_independent(left, right)
    assert_independent(right, left)


@pytest.mark.parametrize("name", noticed(changes.CHANGES))
def test_a_planted_change_is_noticed(name):
    make, change = changes.CHANGES[name]
    assert_pure(lambda tree: None, make())
    with pytest.raises(AssertionError, match=r"^assert_pure: the argument changed in \d+ place"):
        assert_pure(change, make())


@pytest.mark.parametrize("name", structures.FAULTS)
def test_a_planted_change_of_structure_is_noticed(name):
    def transform(given):
        structures.FAULTS[name](given)
        return given

    with pytest.raises(AssertionError, match=r"^assert_structure_preserved: the structures differ in "):
        assert_structure_preserved(transform, structures.tree())


@pytest.mark.parametrize("transform", structures.LEAVES.values(), ids=structures.LEAVES)
def test_leaves_may_become_others(transform):
    def changed(given):
        result = transform(given)
        result["noted"].extra = torch.zeros(2)  # in an attribute, a tensor alone is a leaf
        return result

    assert_structure_preserved(changed, structures.tree())


def test_options_say_what_is_compared():
    slab = torch.arange(8.0)
    one, other = [torch.arange(4.0), torch.arange(4.0, 8.0)], [slab[:4], slab[4:]]
    assert_trees_equal(one, other, storages=False)
    with pytest.raises(AssertionError, match="storage of 0 and 1 is one on the right, two on the left"):
        assert_trees_equal(one, other)
    tied = [slab, slab]
    assert_trees_equal(tied, [slab.clone(), slab.clone()], ties=False)
    with pytest.raises(AssertionError, match="object at 0 and 1 is one on the left, two on the right"):
        assert_trees_equal(tied, [slab.clone(), slab.clone()])
    overlapping = [slab[:4], slab[2:]]
    with pytest.raises(AssertionError, match="is one on the left, two on the right"):
        assert_trees_equal(overlapping, [slab[:4].clone(), slab[2:].clone()], storages=False)
    across = torch.arange(6.0).view(2, 3).t()
    with pytest.raises(AssertionError, match=r"strides differ at 0: \(1, 3\) against \(2, 1\)"):
        assert_trees_equal([across], [across.contiguous()])
    shared = [1]
    assert_trees_equal([shared, shared], [[1], [1]])


def test_a_report_names_the_places_and_counts_the_rest():
    left, right = ({"model": [{"w": torch.full((2,), number)}], "n": number} for number in (1, 2))
    with pytest.raises(AssertionError, match=r"in 2 places:\n  value differs at n: 1 against 2\n .* model\.0\.w"):
        assert_trees_equal(left, right)
    with pytest.raises(
        AssertionError, match=r"differ in 30 places:\n  value differs at k0: 0 against 1(?s:.*)and 10 more"
    ):
        assert_trees_equal({f"k{i}": i for i in range(30)}, {f"k{i}": i + 1 for i in range(30)})


def test_bytes_of_a_storage_are_remembered_once_however_many_tensors_lie_on_it(monkeypatch):
    flat, cloned = torch.arange(100.0), []
    tree = [flat[at : at + 1] for at in range(100)]
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: cloned.append(tensor.nbytes) or clone(tensor))
    assert_pure(len, tree)
    assert cloned == [flat.nbytes]
    with pytest.raises(AssertionError, match="bytes below 0 changed"):
        assert_pure(lambda _: flat.numpy().fill(7), tree)


def test_a_storage_that_was_freed_is_a_change_and_is_not_read():
    tree = {"w": torch.arange(100_000.0)}
    with pytest.raises(AssertionError, match=r"bytes below w changed"):
        assert_pure(lambda tree: tree["w"].untyped_storage().resize_(0), tree)


class Job:
    def __init__(self, rate, held=None):
        self.rate = rate
        self.held = held


@pytest.mark.parametrize("make", [threading.Lock, lambda: (each for each in ()), lambda: types.MappingProxyType({})])
def test_what_cannot_be_taken_apart_equals_nothing_that_can(make):
    left, right = {"job": Job(0.1, make())}, {"job": Job(0.9)}
    assert_trees_equal(left, left)
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match="object differs at job, only one can be taken apart"):
            assert_trees_equal(one, other)
