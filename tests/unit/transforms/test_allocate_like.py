"""``allocate_like``: the same state in other memory, but for its contents."""

import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import statetree as st
from tests.judge import assert_independent, assert_trees_equal
from tests.judge.regions import raw_bytes
from tests.judge.watch import Watch
from tests.memory import shares_memory, storages

Point = namedtuple("Point", "x y")


class Box:
    """An opaque object."""

    def __init__(self, **content):
        self.__dict__.update(content)


def ramp(*shape, dtype=torch.float32, start=0):
    count = int(np.prod(shape))
    return torch.arange(start, start + count).to(dtype).reshape(shape)


def make_state():
    base = ramp(40)
    weight = torch.nn.Parameter(ramp(4, 6))
    number = torch.complex(ramp(5), ramp(5, start=9))
    return OrderedDict(
        base=base,
        part=base[3:9],
        steps=base[::3],
        transposed=ramp(3, 5).t(),
        last=ramp(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        expanded=ramp(3, 1).expand(3, 7),
        weight=weight,
        again=weight,
        number=number,
        conj=number.conj(),
        half=ramp(9, dtype=torch.bfloat16),
        flag=torch.tensor([True, False]),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(4.5),
        box=Box(inner=base[1:2], own=ramp(3), name="box"),
        point=Point([1, "two"], None),
    )


def tensors_of(state):
    return [leaf for leaf in state.values() if isinstance(leaf, torch.Tensor)] + [state["box"].inner, state["box"].own]


def bytes_of(tensor):
    """Return the bytes from a tensor's first to its last one, as a view on its storage."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    stop = begin + last + 1 if tensor.numel() else begin
    return raw_bytes(tensor.untyped_storage())[begin * tensor.element_size() : stop * tensor.element_size()]


@pytest.mark.parametrize("options", [{}, {"share_memory": True}, {"device": torch.device("cpu")}], ids=str)
def test_everything_but_the_contents_is_kept(options):
    tree = make_state()
    watch = Watch(tree)
    fresh = st.allocate_like(tree, **options)
    watch.check()
    assert_independent(fresh, tree)
    for own, other in zip(tensors_of(fresh), tensors_of(tree), strict=True):
        bytes_of(own).copy_(bytes_of(other))
    assert_trees_equal(fresh, tree, storages="share_memory" not in options)
    assert all(storage.is_shared() is ("share_memory" in options) for storage in storages(fresh))


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        st.allocate_like({}, "cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'copy'"):
        st.allocate_like({}, copy=False)


@pytest.mark.parametrize("option", ["pin_memory", "share_memory"])
def test_only_host_memory_is_pinned_or_shared(option):
    with pytest.raises(ValueError, match="expected the device 'cpu', got 'meta'"):
        st.allocate_like({"w": ramp(2)}, device="meta", **{option: True})


def test_an_unknown_device_is_refused():
    with pytest.raises(RuntimeError, match="nowhere"):
        st.allocate_like({"w": ramp(2)}, device="nowhere")


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=["string", "device"])
def test_on_meta_nothing_is_allocated(device):
    tree = make_state()
    tree["huge"] = torch.empty(1, dtype=torch.float64).expand(1 << 40)
    fresh = st.allocate_like(tree, device=device)
    assert storages(fresh) == []
    for path, leaf, other in zip(st.paths(tree), st.flatten(fresh)[0], st.flatten(tree)[0], strict=True):
        if isinstance(other, torch.Tensor):
            assert leaf.is_meta, path
            assert (leaf.dtype, leaf.shape, leaf.stride()) == (other.dtype, other.shape, other.stride())
            assert type(leaf) is type(other)
    assert fresh["again"] is fresh["weight"]
    assert fresh["part"].untyped_storage()._cdata == fresh["base"].untyped_storage()._cdata
    assert fresh["part"].storage_offset() - fresh["base"].storage_offset() == 3


def test_meta_tensors_become_real_with_their_ties_and_geometry():
    base = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
    tree = {
        "a": base[10:20],
        "b": base[15:30:2],
        "weight": torch.nn.Parameter(torch.empty(3, 4, device="meta").t()),
        "real": ramp(3),
        "empty": torch.empty(0, device="meta"),
    }
    fresh = st.allocate_like(tree)
    assert not any(leaf.is_meta for leaf in st.flatten(fresh)[0])
    assert fresh["b"].data_ptr() - fresh["a"].data_ptr() == 10
    assert fresh["b"].stride() == (2,)
    assert isinstance(fresh["weight"], torch.nn.Parameter)
    assert fresh["weight"].stride() == (1, 4)
    assert sum(storage.nbytes() for storage in storages(fresh)) == 40 + 48 + 12
    fresh["a"].fill_(3)
    assert fresh["b"][0] == 3


def test_fake_tensors_stay_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1 << 40)
    fresh = st.allocate_like({"f": fake, "r": ramp(2)})
    assert type(fresh["f"]) is type(fake)
    assert fresh["f"] is not fake
    assert fresh["f"].shape == fake.shape
    assert type(fresh["r"]) is torch.Tensor


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_no_more_is_allocated_than_is_covered(shared):
    base = torch.zeros(64 << 20, dtype=torch.uint8)
    tree = {"head": base[100:200], "tail": base[-50:], "tensor": ramp(30)[5:8], "again": ramp(3)}
    fresh = st.allocate_like(tree, share_memory=shared)
    taken = sum(storage.nbytes() for storage in storages(fresh))
    assert taken == (128 + 64 * 3 if shared else 100 + 50 + 12 + 12)
    close = {"base": base[4:12], "part": base[6:9]}
    assert sum(storage.nbytes() for storage in storages(st.allocate_like(close))) == 8


def test_a_tree_of_views_costs_their_hull():
    base = ramp(1000)
    tree = [base[number : number + 10] for number in range(0, 500, 20)]
    assert sum(storage.nbytes() for storage in storages(st.allocate_like(tree))) == 4 * 490


def test_the_contents_are_not_read():
    """A state whose storages were freed (FSDP's) still says what it needs."""
    tree = {"w": ramp(10), "v": ramp(5)[2:]}
    for tensor in tree.values():
        tensor.untyped_storage().resize_(0)
    fresh = st.allocate_like(tree)
    assert fresh["w"].fill_(1).sum() == 10
    assert fresh["v"].fill_(1).sum() == 3
    assert fresh["w"].untyped_storage().nbytes() == 40


def test_what_a_leaf_is_put_together_by_is_copied():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 4.0]])
    jagged = torch.nested.nested_tensor([ramp(2), ramp(3)], layout=torch.jagged)
    tree = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "jagged": jagged}
    fresh = st.allocate_like(tree)
    assert torch.equal(fresh["coo"].indices(), tree["coo"].indices())
    assert torch.equal(fresh["csr"].crow_indices(), tree["csr"].crow_indices())
    assert torch.equal(fresh["csr"].col_indices(), tree["csr"].col_indices())
    assert torch.equal(fresh["jagged"].offsets(), jagged.offsets())
    assert not shares_memory(fresh, tree)
    assert fresh["coo"].values().shape == (3,)


def test_a_freed_tensor_inside_what_a_leaf_is_put_together_by_is_named():
    tree = {"a": [torch.eye(3).to_sparse()]}
    tree["a"][0]._indices().untyped_storage().resize_(0)
    with pytest.raises(st.UnsupportedLeaf, match=r"allocate_like: the storage of the leaf at a\.0 was freed") as caught:
        st.allocate_like(tree)
    assert tuple(caught.value.path) == ("a", 0)


def test_what_cannot_be_taken_apart_is_named():
    with pytest.raises(st.UnsupportedLeaf, match=r"^allocate_like: .*b\.0") as caught:
        st.allocate_like({"a": ramp(1), "b": [Box(cannot=(number for number in range(3)))]})
    assert tuple(caught.value.path) == ("b", 0)


def test_a_cycle_is_refused():
    tree = {"a": {}}
    tree["a"]["b"] = tree
    with pytest.raises(st.CyclicTree, match=r"a\.b"):
        st.allocate_like(tree)


def test_plain_values_are_taken_over_and_containers_are_new():
    value = object
    tree = {"n": None, "t": (1, "x"), "cls": value, "list": []}
    fresh = st.allocate_like(tree)
    assert fresh == tree
    assert fresh is not tree
    assert fresh["list"] is not tree["list"]


@pytest.mark.parametrize("tree", [None, 5, {}, [], ()], ids=str)
def test_trees_without_tensors(tree):
    assert_trees_equal(st.allocate_like(tree), tree)


def test_a_tensor_is_a_tree():
    fresh = st.allocate_like(ramp(3))
    assert (fresh.shape, fresh.dtype) == ((3,), torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_modes_do_not_show_in_the_result(mode):
    tree = {"w": torch.nn.Parameter(ramp(3)), "v": ramp(2)}
    with mode():
        fresh = st.allocate_like(tree)
    assert not any(leaf.is_inference() for leaf in fresh.values())
    assert fresh["w"].requires_grad
    assert fresh["w"].is_leaf
    with torch.device("meta"):
        assert not st.allocate_like(tree)["v"].is_meta


def test_gradients_are_not_allocated_and_sources_not_kept():
    weight = torch.nn.Parameter(ramp(3))
    weight.grad = ramp(3)
    fresh = st.allocate_like([weight])
    assert fresh[0].grad is None
    dead = weakref.ref(weight)
    del weight
    assert dead() is None
