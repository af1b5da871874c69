"""The laws of conversions: what plain torch and einx make of the same patterns, and the way back, bit for bit."""

import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from tests.judge import assert_trees_equal
from tests.laws.drawn_conversions import conversions


def nested(flat):
    tree = {}
    for name, leaf in flat.items():
        *above, last = name.split(".")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[last] = leaf
    return tree


def strided(tensor, seed):
    """Return the same elements, in memory that lies otherwise."""
    match seed % 3:
        case 1:
            return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
        case 2:
            wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 1] = tensor
            return wide[..., 1]
    return tensor


@given(conversions(), hyp.sampled_from([dict, nested]), hyp.integers(0, 2))
def test_there_and_back_is_what_torch_makes(drawn, form, seed):
    left = {name: strided(leaf, seed) for name, leaf in drawn.left.items()}
    found = drawn.conversion(form(left))
    assert_trees_equal(st.offload(found), st.offload(form(drawn.right)), ties=False, strides=False)
    again = drawn.conversion.inverse(found)
    assert_trees_equal(st.offload(again), st.offload(form(drawn.left)), ties=False, strides=False)
    back = drawn.conversion.inverse(form(drawn.right))
    assert_trees_equal(st.offload(back), st.offload(form(drawn.left)), ties=False, strides=False)


@given(conversions())
def test_einx_makes_the_same(drawn):
    einx = pytest.importorskip("einx", reason="einx is in the integration group")
    for pattern, left, right, sizes in drawn.patterns:
        if not all(size for axis, size in sizes.items() if axis in pattern):
            continue  # einx has no axes of size 0
        own = {axis: size for axis, size in sizes.items() if axis in pattern}
        found = einx.id(pattern, *map(as_integers, left), **own)
        found = found if isinstance(found, tuple) else (found,)
        assert all(map(torch.equal, found, map(as_integers, right)))


def as_integers(tensor):
    """Return elements with their bits, of a dtype in which einx's backend compares them."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def prefixed(names):
    return f"tied.{names}" if isinstance(names, str) else [f"tied.{name}" for name in names]


@given(conversions(), hyp.integers(0, 2))
def test_ties_come_back(drawn, seed):
    copied = {name: strided(leaf, seed) for name, leaf in drawn.left.items()}
    tied = {**copied, **{f"tied.{name}": leaf.view(leaf.shape) for name, leaf in copied.items()}}
    rules = [(prefixed(left), prefixed(right), *pattern) for left, right, *pattern in drawn.rules]
    conversion = st.Conversion([*drawn.rules, *rules], sizes=drawn.sizes)
    again = conversion.inverse(conversion(tied))
    assert_trees_equal(st.offload(again), st.offload(tied), strides=False, storages=False)


def test_parts_of_a_tensor_without_elements_are_not_tied():
    rows = st.Conversion([("w", "rows.{r}", "r c -> c")], sizes={"c": 0})
    found = rows({"w": torch.ones(3, 0)})
    assert len(set(map(id, found.values()))) == 3
    found = st.Conversion([("w", "w.{r}", "(r c) -> c")], sizes={"r": 2, "c": 0})({"w": torch.ones(0)})
    assert len(set(map(id, found.values()))) == 2
    found = st.Conversion([("w", ["a", "b"], "(x + y) c -> x c, y c")], sizes={"x": 0})({"w": torch.ones(0, 3)})
    assert found["a"] is not found["b"]
    one = torch.ones(0, 3)
    turned = st.Conversion([("{i}.w", "{i}.t", "a b -> b a")])({"0.w": one, "1.w": one})
    assert turned["0.t"] is turned["1.t"]


def test_the_root_is_named():
    with pytest.raises(st.TreeMismatch, match=r"rules do not fit at <root>: expected one that takes it"):
        st.Conversion([("x", "y", "a b -> b a")])(torch.ones(2, 3))


@given(conversions(), hyp.sampled_from(["a.safetensors", "a.pt"]))
def test_stored_leaves_are_read_as_they_are_converted(drawn, name):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{name}"
        st.save(drawn.left, path)
        found = drawn.conversion(st.files.open(path))
        assert all(type(leaf) is not torch.Tensor for leaf in st.flatten(found)[0])
        assert st.similarity(st.offload(found), drawn.right)
        st.save(found, f"{folder}/b.safetensors")
        stored = st.files.open(f"{folder}/b.safetensors")
        assert st.similarity(stored, drawn.right)
        assert st.similarity(drawn.conversion.inverse(stored), drawn.left)
        for key, whole in drawn.right.items():
            leaf = found[key]
            box = tuple([slice(size // 3, size) for size in whole.shape])
            assert torch.equal(as_integers(leaf.read(box)), as_integers(whole[box].contiguous()))


@given(conversions())
def test_meta_tensors_are_converted_as_others(drawn):
    meta = drawn.conversion(st.allocate_like(drawn.left, device="meta"))
    assert st.similarity(meta, st.allocate_like(drawn.right, device="meta"), values=False)
    assert all(leaf.is_meta for leaf in st.flatten(meta)[0])
