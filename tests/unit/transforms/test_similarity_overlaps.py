"""``similarity`` of tensors that overlap themselves: if it is true, ``copy_into`` succeeds."""

import pytest
import torch

import statetree as st


def expanded():
    return {"a": torch.zeros(1).expand(4), "b": torch.zeros(2)}


def windows():
    memory = torch.arange(12.0)
    return {"a": memory[7:8], "b": memory.as_strided((3, 3), (1, 1), 5)}


def crossing(first, second):
    memory = torch.arange(12.0)
    return {"a": memory[slice(*first)], "b": memory[slice(*second)]}


def crossing_square():
    memory = torch.arange(12.0)
    return {"a": memory[8:9], "b": memory[:9].view(3, 3)}


@pytest.mark.parametrize(
    ("one", "other"),
    [(expanded(), crossing((0, 4), (3, 5))), (windows(), crossing_square())],
    ids=["expanded", "windows"],
)
def test_they_are_not_like_tensors_that_overlap_another(one, other):
    assert not st.similarity(one, other, values=False)
    assert not st.similarity(other, one, values=False)
    with pytest.raises(st.TreeMismatch, match="overlap"):
        st.copy_into(one, other)


@pytest.mark.parametrize("make", [expanded, windows])
def test_they_are_like_themselves_and_copies_that_overlap_alike(make):
    tree = make()
    assert st.similarity(tree, tree, values=True)
    assert st.similarity(tree, st.offload(tree), values=True)
    st.copy_into(tree, st.offload(tree))


def test_they_are_like_apart_tensors():
    one, other = {**expanded(), "b": torch.ones(2)}, {"a": torch.zeros(4), "b": torch.ones(2)}
    assert st.similarity(one, other, values=True)
    st.copy_into(one, other)
    st.copy_into(other, one)


def test_an_expanded_tensor_tied_to_another_is_not_like_untied_ones_of_other_values():
    memory = torch.arange(3.0)
    tied, untied = {"a": memory[:1].expand(4), "b": memory}, {"a": torch.ones(4), "b": torch.arange(3.0)}
    assert not st.similarity(tied, untied, values=False)
    with pytest.raises(st.TreeMismatch, match="overlap"):
        st.copy_into(untied, tied)
