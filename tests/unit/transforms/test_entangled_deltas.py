"""A delta is neither made nor applied where writing one leaf changes another one that lies in the same memory."""

import numpy as np
import pytest
import torch

import statetree as st
from tests.trees.corpus import Held


def sparse(*values):
    return torch.sparse_coo_tensor([[0, 2]], list(map(float, values)), (3,), check_invariants=True).coalesce()


def over(values):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=True, is_coalesced=True)


def held(tensor):
    holder = Held()
    holder.w = tensor
    return holder


def one_sparse():
    leaf = sparse(1, 2)
    return {"a": leaf, "b": leaf}


def values_of_a_sparse():
    values = torch.tensor([1.0, 2.0])
    return {"a": values, "b": over(values)}


def inside_an_object():
    tensor = torch.tensor([1.0, 2.0])
    return {"a": tensor, "b": held(tensor)}


def of_one_array():
    array = np.array([1.0, 2.0])
    return {"a": torch.from_numpy(array), "b": torch.from_numpy(array)}


def storage_behind_an_object_that_holds_it():
    tensor = torch.tensor([1.0, 2.0])
    return {"a": tensor, "b": held(tensor.untyped_storage()), "c": tensor.untyped_storage()}


TIED = [one_sparse, values_of_a_sparse, inside_an_object, of_one_array, storage_behind_an_object_that_holds_it]


def changed(tree):
    """Return a copy of a tree, without ties, in which the first leaf is another one."""
    other = untied(tree)
    (other["a"].values() if other["a"].is_sparse else other["a"]).add_(5)
    return other


def untied(tree):
    return {key: st.offload({"x": leaf})["x"] for key, leaf in tree.items()}


@pytest.mark.parametrize("make", TIED)
def test_a_base_with_such_memory_is_refused(make):
    with pytest.raises(st.TreeMismatch, match="ties"):
        st.delta(changed(make()), make())


@pytest.mark.parametrize("make", TIED)
def test_a_tree_with_such_memory_is_refused_and_not_written(make):
    change = st.delta(changed(make()), untied(make()))
    target = make()
    with pytest.raises(st.TreeMismatch, match="memory that it shares with"):
        st.apply_delta(change, target)
    assert st.similarity(target, make(), values=True)


@pytest.mark.parametrize("make", TIED)
def test_what_does_not_change_may_lie_there(make):
    base, new, target = ({**make(), "d": torch.tensor([number])} for number in (0, 1, 0))
    st.apply_delta(st.delta(new, base), target)
    assert target["d"].tolist() == [1]


def test_one_leaf_in_two_places_changes_in_both():
    base, new, target = one_sparse(), {"a": sparse(5, 6)}, one_sparse()
    new["b"] = new["a"]
    result = st.apply_delta(st.delta(new, base), target)
    assert result["a"].to_dense().tolist() == result["b"].to_dense().tolist() == [5.0, 0.0, 6.0]


def test_an_element_that_another_change_writes_over_is_not_taken_for_its_own():
    base = {"a": torch.zeros(4), "b": torch.zeros(4)}
    new = {"a": torch.tensor([1.0, 0, 0, 0]), "b": torch.tensor([1.0, 0, 0, 0])}
    change = st.delta(new, base)
    memory = torch.zeros(6)
    target = {"a": memory[:4], "b": memory[2:]}
    with pytest.raises(st.TreeMismatch, match="at a: expected memory of its own, got memory that it shares with"):
        st.apply_delta(change, target)
    assert not memory.any()
    with pytest.raises(st.TreeMismatch, match=r"ties at a: .* memory that it shares with b"):
        st.delta(new, target)


def test_views_that_overlap_are_refused_though_their_values_agree():
    memory = torch.zeros(6)
    base = {"a": memory[:4], "b": memory[2:], "c": torch.zeros(1)}
    new = {"a": torch.tensor([1.0, 2, 3, 4]), "b": torch.tensor([3.0, 4, 5, 6]), "c": torch.zeros(1)}
    with pytest.raises(st.TreeMismatch, match=r"ties at a: .*memory that it shares with b"):
        st.delta(new, base)
    target = {"a": memory[:4], "b": memory[2:], "c": torch.zeros(1)}
    with pytest.raises(st.TreeMismatch, match="memory that it shares with"):
        st.apply_delta(st.delta(new, st.offload({k: v.clone() for k, v in base.items()})), target)
    assert not memory.any()
    assert st.apply_delta(st.delta({**base, "c": torch.ones(1)}, base), base)["c"] == 1  # these do not change


def test_different_changes_of_one_memory_are_seen_behind_equal_ones():
    first, second = torch.zeros(6), torch.zeros(6)
    first[1] = second[2] = 1
    new = {"a": first.clone(), "b": first.clone(), "c": second}
    one = torch.zeros(6)
    tied = {"a": one, "b": one, "c": one}
    with pytest.raises(st.TreeMismatch, match="at a"):
        st.delta(new, tied)
    change = st.delta(new, {key: torch.zeros(6) for key in "abc"})
    with pytest.raises(st.TreeMismatch, match="at a: expected"):
        st.apply_delta(change, tied)
    assert not one.any()
    change = st.delta({**new, "c": first.clone()}, {key: torch.zeros(6) for key in "abc"})
    assert st.apply_delta(change, tied)["c"].equal(first)
