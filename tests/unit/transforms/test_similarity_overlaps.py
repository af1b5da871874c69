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


class Holder:
    def __init__(self, *tensors):
        self.tensors = list(tensors)


def of_another_dtype(base):
    return {"w": base.view(3, 4), "o": Holder(base[2:7].view(torch.int32))}


def imaginary(base):
    value = torch.complex(base, base + 100)
    return {"w": value, "o": Holder(value.imag)}


def beyond(base):
    return {"w": base[2:8], "x": base[6:10], "o": Holder(base.view(torch.uint8)[4:40])}


@pytest.mark.parametrize("make", [of_another_dtype, imaginary, beyond])
def test_objects_may_hold_views_of_another_dtype(make):
    source, target = make(torch.arange(12.0)), make(torch.arange(12.0) + 50)
    assert st.similarity(source, source)
    copied = st.copy_into(source, target)
    assert copied["w"] is target["w"]
    assert torch.equal(copied["w"], source["w"])
    (view,), (expected,) = copied["o"].tensors, source["o"].tensors
    assert torch.equal(view, expected)
    assert view.untyped_storage().data_ptr() == target["w"].untyped_storage().data_ptr()
    assert st.similarity(source, copied)


def test_what_differs_is_told_where_a_part_of_an_object_that_is_written_is_viewed_otherwise():
    base = torch.arange(12.0)
    tree = {"w": base[2:7], "o": Holder(base, base[8:12].view(torch.int32)), "far": torch.zeros(2)}
    assert st.similarity(tree, tree)
    other = st.offload(tree)
    other["far"] += 1
    assert [str(path) for path, *_ in st.similarity(tree, other).differences] == ["far"]
