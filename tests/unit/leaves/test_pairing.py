"""``comparing``: tensors without memory are seen, wherever they begin and however many there are."""

from itertools import permutations

import pytest
import torch

import statetree as st
from tests.geometries import forget_geometries
from tests.judge import assert_trees_equal


def ramp(count, start=0):
    return torch.arange(start, start + count, dtype=torch.float32)


def shrunk(nbytes, part):
    tensor = ramp(10)[part]
    tensor.untyped_storage().resize_(nbytes)
    return tensor


# Made by functions: a failing test would print the tensors, which torch does not survive.
WITHOUT_MEMORY = {
    "meta": (lambda: torch.empty(7, device="meta"), "meta"),
    "meta view": (lambda: torch.empty(10, device="meta")[3:], "meta"),  # its address is 12
    "freed": (lambda: shrunk(0, slice(7)), "freed"),
    "freed view": (lambda: shrunk(0, slice(3, None)), "freed"),
    "shrunk": (lambda: shrunk(27, slice(7)), "freed"),
    "shrunk view": (lambda: shrunk(39, slice(3, None)), "freed"),
}


@pytest.mark.parametrize("count", [1, 70], ids=["few", "many"])
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_without_memory_are_unlike_tensors_with_it(name, count):
    make, shown = WITHOUT_MEMORY[name]
    forget_geometries()
    for _ in range(4):  # the last times, those with memory are recognised
        here = [ramp(2), *(ramp(7, start=number) for number in range(count)), make()]
        there = [torch.zeros(2), *(torch.zeros(7) for _ in range(count)), torch.zeros(7)]
        expected = [tensor.clone() for tensor in there]
        for values, others in ((False, 0), (True, count + 1)):
            *unequal, difference = sorted(st.similarity(here, there, values=values).differences)
            assert difference[1:] == ("memory", shown, "present", None)
            assert tuple(difference[0]) == (count + 1,)
            assert [(tuple(found.path), found.kind) for found in unequal] == [((n,), "value") for n in range(others)]
            assert not st.similarity(there, here, values=values)
        with pytest.raises(st.TreeMismatch, match=f"memory differs at {count + 1}: expected present, got {shown}"):
            st.copy_into(here, there)
        assert_trees_equal(there, expected)
        with pytest.raises(st.TreeMismatch, match=f"memory differs at {count + 1}: expected {shown}, got present"):
            st.copy_into(there, here)


def test_meta_tensors_are_like_each_other_wherever_they_begin():
    first, second = torch.empty(10, device="meta"), torch.empty(20, device="meta")
    here, there = [first[3:5], first[3:], ramp(3)], [second[3:5], second[7:14], torch.zeros(3)]
    assert st.similarity(here, there, values=False)
    assert [difference.kind for difference in st.similarity(here, there, values=True).differences] == ["value"]
    result = st.copy_into(here, there)
    assert result[0] is there[0]
    assert torch.equal(there[2], ramp(3))


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.uint4, torch.bits8], ids=str)
def test_elements_that_python_has_no_number_for_are_shown_as_bits(dtype):
    one, other = (torch.tensor(bits, dtype=torch.uint8).view(dtype) for bits in ([1, 0x2A], [1, 0x2B]))
    report = st.similarity({"w": one}, {"w": other}, values=True)
    assert "value differs at w: 0x2a at index (1,) (1 of 2 elements differ) against 0x2b at index (1,)" in str(report)


class Shelf:
    def __init__(self, *held):
        self.held = held


class ShelfType(st.LeafType):
    def unpack(self, value):
        return value.held, None

    def pack(self, context, parts):
        return Shelf(*parts)


st.register_leaf_type(Shelf, ShelfType())


def test_the_parts_are_told_of_leaves_that_are_taken_apart_differently():
    one, two, many = Shelf(ramp(2)), Shelf(ramp(2), ramp(3).int()), Shelf(*map(ramp, range(5)))
    texts = {
        one: "1 part (torch.float32 (2,))",
        two: "2 parts (torch.float32 (2,), torch.int32 (3,))",
        many: "5 parts (torch.float32 (0,), torch.float32 (1,), torch.float32 (2,), …)",
        Shelf(): "0 parts",
    }
    for left, right in permutations(texts, 2):
        (found,) = st.similarity({"w": left}, {"w": right}).differences
        assert str(found) == f"parts differs at w: {texts[left]} against {texts[right]}"
        with pytest.raises(st.TreeMismatch) as caught:
            st.copy_into({"w": left}, {"w": right})
        said = f"expected {texts[right]}, got {texts[left]}, taken apart differently."
        assert f"parts differs at w: {said}" in str(caught.value)
