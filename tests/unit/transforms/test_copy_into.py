"""``copy_into``: everything or nothing, and only where the result is beyond doubt."""

import contextlib
import re
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from itertools import product

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import statetree as st
from statetree.leaves.casting import castable
from statetree.torch_internals import can_negate, resolved
from tests.faults import fail_each
from tests.judge import assert_trees_equal
from tests.judge.regions import raw_bytes
from tests.judge.watch import Watch
from tests.memory import shares_memory
from tests.trees.classes import TwoTensors
from tests.trees.tensors import BITS, DTYPES, of_bytes, with_bits

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

Point = namedtuple("Point", "x y")
Other = namedtuple("Other", "x y")


class Box:
    """An opaque object."""

    def __init__(self, **content):
        self.__dict__.update(content)


def ramp(*shape, dtype=torch.float32, start=0):
    count = int(np.prod(shape))
    return torch.arange(start, start + count).to(dtype).reshape(shape)


def refused(src, dst, match, **options):
    """See a copy refused, with nothing changed on either side."""
    watches = Watch(src), Watch(dst)
    with pytest.raises(st.TreeMismatch, match=match) as caught:
        st.copy_into(src, dst, **options)
    for watch in watches:
        watch.check()
    assert str(caught.value).startswith("copy_into: ")
    return caught.value


# What comes out


def test_the_result_holds_the_destinations_tensors_and_the_sources_values():
    src = {"w": ramp(3), "deep": [ramp(2, start=9), {"step": 7}], "name": "new", "none": None}
    dst = {"w": ramp(3, start=50), "deep": [ramp(2, start=60), {"step": 1}], "name": "old", "none": 3}
    result = st.copy_into(src, dst)
    assert result["w"] is dst["w"]
    assert result["deep"][0] is dst["deep"][0]
    assert_trees_equal(result, src)
    assert result is not src
    assert result is not dst
    assert result["deep"] is not dst["deep"]
    assert result["deep"] is not src["deep"]
    assert dst["deep"][1] == {"step": 1}
    assert dst["name"] == "old"


def test_only_the_destinations_tensors_change():
    src = {"w": ramp(3), "v": ramp(4)[::2]}
    dst = {"w": ramp(3, start=50), "v": ramp(9, start=70)[2:4]}
    watch = Watch(src)
    order = list(dst)
    around = raw_bytes(dst["v"].untyped_storage()).clone()
    st.copy_into(src, dst)
    watch.check()
    assert list(dst) == order
    after = raw_bytes(dst["v"].untyped_storage())
    assert torch.equal(after[:8], around[:8])
    assert torch.equal(after[16:], around[16:])


def test_parameters_are_written_under_their_optimizer():
    model = torch.nn.Linear(3, 2)
    saved = {name: ramp(*tensor.shape, start=5) for name, tensor in model.state_dict().items()}
    st.copy_into(saved, model.state_dict())
    assert torch.equal(model.weight, saved["weight"])
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    model(torch.ones(1, 3)).sum().backward()


def test_what_a_graph_saved_is_known_to_have_changed():
    weight = torch.nn.Parameter(ramp(3))
    loss = (weight * weight).sum()
    st.copy_into({"w": ramp(3, start=4)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_written_tensors_grow():
    dst = {"w": ramp(3), "v": ramp(4)[::2]}
    before = [tensor._version for tensor in dst.values()]
    st.copy_into({"w": ramp(3, start=5), "v": ramp(2)}, dst)
    assert all(tensor._version > version for tensor, version in zip(dst.values(), before, strict=True))


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda pairs: defaultdict(list, pairs)], ids=["dict", "od", "dd"])
def test_mappings_match_by_key_whatever_their_kind_and_order(make):
    src = make([("b", ramp(2)), ("a", ramp(3)), (0, ramp(4))])
    dst = OrderedDict([(0, ramp(4, start=90)), ("a", ramp(3, start=80)), ("b", ramp(2, start=70))])
    result = st.copy_into(src, dst)
    assert type(result) is type(src)
    assert list(result) == ["b", "a", 0]
    assert torch.equal(dst["a"], ramp(3))
    assert torch.equal(dst[0], ramp(4))
    assert result["b"] is dst["b"]


@pytest.mark.parametrize(
    "src",
    [
        ramp(4, 3).t(),
        ramp(3, 8)[:, ::2],
        ramp(1, 4).expand(3, 4),
        ramp(1, 1).expand(3, 4),
        ramp(3, 4, start=9).requires_grad_(),
        torch.nn.Parameter(ramp(3, 4)),
        ramp(5, 4)[1:4],
    ],
    ids=["transposed", "strided", "expanded", "filled", "requires_grad", "parameter", "view"],
)
@pytest.mark.parametrize(
    "dst",
    [
        lambda: torch.zeros(3, 4),
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(6, 8)[::2, ::2],
        lambda: torch.nn.Parameter(torch.zeros(3, 4)),
        lambda: torch.zeros(1, 3, 4)[0],
    ],
    ids=["dense", "transposed", "strided", "parameter", "view"],
)
def test_strides_need_not_agree(src, dst):
    target = dst()
    st.copy_into([src], [target])
    assert torch.equal(target, src)


def conj_of(tensor):
    return tensor.conj()


@pytest.mark.parametrize("src_conj", [False, True])
@pytest.mark.parametrize("dst_conj", [False, True])
def test_conjugated_views(src_conj, dst_conj):
    values = torch.complex(ramp(4), ramp(4, start=10))
    src = values.conj() if src_conj else values
    below = torch.zeros(4, dtype=torch.complex64)
    dst = below.conj() if dst_conj else below
    st.copy_into({"a": ramp(2), "z": src}, {"a": torch.zeros(2), "z": dst})
    assert torch.equal(dst, src)
    assert dst.is_conj() == dst_conj
    assert torch.equal(below, src.conj() if dst_conj else src)


@pytest.mark.parametrize("src_neg", [False, True])
@pytest.mark.parametrize("dst_neg", [False, True])
def test_negated_views(src_neg, dst_neg):
    values = torch.complex(ramp(4), ramp(4, start=10))
    src = values.conj().imag if src_neg else values.imag
    below = torch.complex(ramp(4, start=50), ramp(4, start=60))
    dst = below.conj().imag if dst_neg else below.imag
    assert dst.is_neg() == dst_neg
    st.copy_into([src], [dst])
    assert torch.equal(dst, src)


def test_leaves_that_plain_copies_would_change_lie_among_others_that_they_would_not():
    numbers = torch.arange(2, 8, dtype=torch.uint8)
    values = torch.arange(6.0)
    turned = torch.complex(torch.arange(3.0), torch.ones(3))
    source = {"a": values, "bools": numbers.view(torch.bool), "c": values + 10, "conj": turned, "e": values + 20}
    destination = {
        "a": torch.zeros(6),
        "bools": torch.zeros(6, dtype=torch.bool),
        "c": torch.zeros(6),
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "e": torch.zeros(6),
    }
    st.copy_into(source, destination)
    assert torch.equal(destination["bools"].view(torch.uint8), numbers)
    assert destination["conj"].is_conj()
    for name in ("a", "c", "conj", "e"):
        assert torch.equal(destination[name], source[name]), name


def test_opaque_values_come_from_the_source_and_are_never_aliased():
    inner = ramp(3)
    src = {"box": Box(w=inner, items=[1, {"k": inner}]), "w": ramp(2)}
    dst = {"box": Box(other=ramp(9)), "w": torch.zeros(2)}
    before = Watch(dst["box"])
    result = st.copy_into(src, dst)
    before.check()
    assert result["box"] is not src["box"]
    assert result["box"].items is not src["box"].items
    assert_trees_equal(result["box"], src["box"])
    assert not shares_memory(result["box"], src)
    assert not shares_memory(result["box"], dst)


def test_opaque_values_stay_tied_to_tensors_that_are_copied():
    w, p = ramp(4, 3), torch.nn.Parameter(ramp(5))
    box = Box(w=w, part=w[1:3, :2], turned=w.T, p=p, items=[w], own=ramp(2))
    src = {"box": box, "p": p, "w": w.detach()}
    dst = {"box": Box(), "p": torch.zeros(5), "w": torch.zeros(4, 3)}
    result = st.copy_into(src, dst)
    assert result["w"] is dst["w"]
    found = result["box"]
    assert found.w is found.items[0]
    assert type(found.p) is torch.nn.Parameter
    for name, own in (("w", "w"), ("part", "w"), ("turned", "w"), ("p", "p")):
        assert shares_memory(getattr(found, name), dst[own]), name
        assert getattr(found, name).equal(getattr(box, name)), name
        assert getattr(found, name).stride() == getattr(box, name).stride(), name
    assert not shares_memory(found.own, [src, dst])
    dst["w"].fill_(-1)
    assert found.part.eq(-1).all()
    wide, columns = ramp(4, 6), {"box": Box(), "w": torch.zeros(4, 6)[:, :3]}
    result = st.copy_into({"box": Box(x=wide[:, 3:]), "w": wide[:, :3]}, columns)
    assert result["box"].x.equal(wide[:, 3:])
    # In other places of a storage nothing is tied; and what is not copied is no tie, either.
    flat = ramp(6)
    result = st.copy_into({"box": Box(x=flat[4:]), "w": flat[:4]}, {"box": Box(), "w": torch.zeros(4)})
    assert not shares_memory(result["box"], result["w"])
    result = st.copy_into({"box": Box(x=flat), "w": flat}, {"box": Box(), "w": torch.zeros(6)}, where="box")
    assert not shares_memory(result["box"], [flat, result["w"]])
    result = st.copy_into({"box": Box(x=w), "w": w}, {"box": Box(), "w": torch.zeros(3, 4).T})
    assert shares_memory(result["box"].x, result["w"])


@pytest.mark.parametrize("numel", [3, 0])
@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda tensor: tensor, lambda tensor: tensor.requires_grad_()])
def test_what_an_object_holds_of_the_leaves_is_the_destinations_leaf(make, numel):
    """An optimizer in the state trains the model's parameters, and no others on their memory."""

    def state(value):
        leaf = make(torch.full((numel,), value))
        return {"opt": torch.optim.SGD([leaf], lr=1.0), "p": leaf, "o": Box(value=leaf)}

    target = state(0.0)
    made = st.copy_into(st.offload(state(1.0)), target)
    assert made["p"] is target["p"]
    assert made["opt"].param_groups[0]["params"][0] is made["p"]
    assert made["o"].value is made["p"]
    if made["p"].requires_grad:
        made["p"].sum().backward()
        made["opt"].step()
        assert made["p"].tolist() == [0.0] * numel


@pytest.mark.filterwarnings("ignore:Seems like")  # a copied scheduler does not know that it wraps the copy's step
def test_objects_that_hold_one_another_go_on_doing_so():
    """A scheduler sets the learning rate of the state's optimizer."""

    def state(value):
        leaf = torch.nn.Parameter(torch.full((3,), value))
        optimizer = torch.optim.SGD([leaf], lr=1.0)
        return {"sched": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "opt": optimizer, "p": leaf}

    made = st.copy_into(st.offload(state(1.0)), state(0.0))
    assert made["sched"].optimizer is made["opt"]
    for _ in range(3):
        made["p"].grad = torch.ones(3)
        made["opt"].step()
        made["sched"].step()
    assert made["opt"].param_groups[0]["lr"] == 0.125
    assert made["p"].tolist() == [-0.75] * 3


def test_objects_that_hold_one_tensor_and_reach_beyond_a_leaf_stay_tied():
    def state(start):
        memory = ramp(6, start=start)
        return {"a": Box(x=memory), "b": Box(x=memory, y=memory[:2]), "w": memory[2:]}

    source, target = state(0), state(10)
    made = st.copy_into(source, target)
    assert made["w"] is target["w"]
    assert made["a"].x is made["b"].x
    assert all(shares_memory(view, target["w"]) for view in (made["a"].x, made["b"].x))
    assert made["a"].x.tolist() == source["a"].x.tolist()
    assert made["b"].y.tolist() == [0, 1]


def test_an_object_that_holds_a_leaf_of_two_holds_the_first():
    leaf = torch.ones(2)
    target = {"a": torch.zeros(2), "b": torch.zeros(2), "o": None}
    made = st.copy_into({"a": leaf, "b": leaf, "o": Box(value=leaf)}, {**target, "o": Box(value=None)})
    assert made["o"].value is target["a"]
    assert target["b"].tolist() == [1, 1]


def test_an_object_that_holds_more_than_is_copied_stays_tied_if_the_destination_is_tied_alike():
    src, flat = ramp(6), torch.zeros(6)
    dst = {"box": Box(x=flat), "w": flat[2:4]}
    result = st.copy_into({"box": Box(x=src), "w": src[2:4]}, dst)
    assert result["box"].x.equal(src)
    dst["w"].fill_(-1)
    assert result["box"].x.tolist() == [0, 1, -1, -1, 4, 5]
    refused({"box": Box(x=src), "w": src[2:4]}, {"box": Box(x=flat), "w": flat[1:3]}, "ties at box")


def test_what_is_tied_only_to_the_rest_of_an_object_stays_tied():
    src, flat = ramp(8), torch.zeros(8)
    boxes = [{"box": Box(x=whole[0:3], y=whole[2:7]), "w": whole[3:8]} for whole in (src, flat)]
    result = st.copy_into(*boxes)
    flat[2] = -1
    assert result["box"].x.tolist() == [0, 1, -1]
    assert result["box"].y.tolist() == [-1, 3, 4, 5, 6]
    apart = {"box": Box(x=torch.zeros(3), y=flat[2:7]), "w": flat[3:8]}
    refused(boxes[0], apart, "ties at box: a view on the memory of box cannot go into a tensor without such a view")


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_of_overlaps_inside_an_object_stays_tied(order):
    src, flat = ramp(12), torch.zeros(12)
    states = [
        {"box": Box(x=[whole[at : at + 3] for at in (2, 4, 6, 8)][::order]), "w": whole[0:3]} for whole in (src, flat)
    ]
    result = st.copy_into(*states)
    flat.neg_()
    assert [part.tolist() for part in result["box"].x][::order] == [[-at, -at - 1, -at - 2] for at in (2, 4, 6, 8)]


def test_what_overlaps_inside_an_object_is_not_taken_apart_by_two_destinations():
    src, one, other = ramp(10), torch.zeros(10), torch.zeros(10)
    dst = {"box": Box(x=one[2:6], y=other[5:8]), "v": one[0:3], "w": other[7:9]}
    refused({"box": Box(x=src[2:6], y=src[5:8]), "v": src[0:3], "w": src[7:9]}, dst, "ties at box")


@pytest.mark.parametrize(
    ("held", "copied", "target", "options"),
    [
        (ramp(6), slice(2, 4), torch.zeros(2), {}),
        (ramp(6), slice(0, 6), torch.zeros(6, dtype=torch.float64), {"cast": True}),
        (ramp(6), slice(0, 6, 2), torch.zeros(3), {}),
        (ramp(6)[1:4], slice(0, 3, 2), torch.zeros(4)[::2], {}),
    ],
    ids=["more than is copied", "another dtype", "other strides", "gaps"],
)
def test_a_tie_that_would_be_lost_is_refused(held, copied, target, options):
    src, dst = {"box": Box(x=held), "w": held[copied]}, {"box": Box(), "w": target}
    refused(src, dst, "ties at box: a view on the memory of w cannot go into a tensor without such a view", **options)


def test_an_opaque_value_that_cannot_be_copied_leaves_everything_untouched():
    src = {"a": ramp(3), "box": Box(lines=(n for n in ())), "z": ramp(2)}
    dst = {"a": torch.zeros(3), "box": Box(), "z": torch.zeros(2)}
    watch = Watch(dst)
    with pytest.raises(st.UnsupportedLeaf, match=r"copy_into: .*at box .*generator") as caught:
        st.copy_into(src, dst)
    assert str(caught.value.path) == "box"
    watch.check()


class Broken:
    def __init__(self):
        self.w = ramp(2)

    def __setstate__(self, state):
        raise ZeroDivisionError("this cannot be put together")


def test_an_opaque_value_that_cannot_be_put_together_leaves_everything_untouched():
    dst = {"a": torch.zeros(3), "m": {"broken": Broken()}, "z": torch.zeros(2)}
    watch = Watch(dst)
    with pytest.raises((st.UnsupportedLeaf, ZeroDivisionError), match="cannot be put together") as caught:
        st.copy_into({"a": ramp(3), "m": {"broken": Broken()}, "z": ramp(2)}, dst)
    watch.check()
    assert "m.broken" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("src", [1, None, "x", [], {}, {"a": 1}, (1, (2,))])
def test_trees_without_tensors(src):
    assert_trees_equal(st.copy_into(src, src), src)


def test_a_tensor_is_a_tree():
    dst = torch.zeros(3)
    assert st.copy_into(ramp(3), dst) is dst
    assert torch.equal(dst, ramp(3))


def test_empty_and_meta_tensors_have_nothing_to_copy():
    dst = [torch.empty(0, 3), torch.empty(2, device="meta"), torch.zeros(2)]
    result = st.copy_into([torch.empty(0, 3), torch.empty(2, device="meta"), ramp(2)], dst)
    assert result[1] is dst[1]
    assert torch.equal(dst[2], ramp(2))


def test_all_dtypes_are_copied_bit_by_bit():
    dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    plain = [d for d in dtypes if not str(d).removeprefix("torch.").startswith(("q", "quint", "qint"))]
    assert len(plain) > 30

    def bits(dtype, start):
        raw = torch.arange(start, start + 6 * dtype.itemsize).to(torch.uint8)
        raw = raw % 2 if dtype is torch.bool else raw
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (6,), (1,))

    for dtype in plain:
        for cut in (slice(None), slice(1, None, 2)):
            src, dst = bits(dtype, 1)[cut], bits(dtype, 101)[cut]
            st.copy_into({"a": ramp(2), "x": src}, {"a": torch.zeros(2), "x": dst})
            assert_trees_equal(dst.detach(), src)


# Refused: nothing is written


def test_ten_differences_are_all_reported():
    src = {str(n): ramp(2 + n % 3, start=n) for n in range(10)}
    dst = {str(n): torch.zeros(7, dtype=torch.float64) for n in range(10)}
    error = refused(src, dst, "the trees differ in 20 places")
    assert len(error.differences) == 20
    assert {str(difference.path) for difference in error.differences} == set(src)
    assert {difference.kind for difference in error.differences} == {"dtype", "shape"}
    for name in src:
        assert f"shape differs at {name}: expected (7,), got ({len(src[name])},)" in str(error)


def test_whatever_is_wrong_is_told_at_once():
    once = torch.zeros(1)
    src = {"missing": 1, "shape": torch.ones(2), "overlap": ramp(3), "good": torch.ones(2)}
    dst = {"shape": torch.zeros(3), "overlap": once.expand(3), "good": torch.zeros(2)}
    with pytest.raises(st.TreeMismatch) as caught:
        st.copy_into(src, dst)
    kinds = {(str(found.path), found.kind) for found in caught.value.differences}
    assert kinds == {("missing", "missing"), ("shape", "shape"), ("overlap", "overlap")}
    assert not dst["good"].any()


def test_ten_differences_of_ten_kinds_leave_one_good_leaf_untouched():
    src = {
        "good": ramp(3),
        "shape": ramp(3),
        "dtype": ramp(3),
        "none": ramp(3),
        "tensor": None,
        "number": 3.0,
        "leaf": ramp(3),
        "sparse": ramp(3),
        "meta": ramp(3),
        "overlaps": ramp(3),
        "inference": ramp(3),
    }
    with torch.inference_mode():
        inference = torch.zeros(3)
    dst = {
        "good": torch.zeros(3),
        "shape": torch.zeros(1, 3),
        "dtype": torch.zeros(3, dtype=torch.float16),
        "none": None,
        "tensor": torch.zeros(3),
        "number": torch.zeros(3),
        "leaf": Box(),
        "sparse": torch.zeros(3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
        "overlaps": torch.zeros(1).expand(3),
        "inference": inference,
    }
    error = refused(src, dst, "the trees differ in")
    reported = {str(difference.path) for difference in error.differences}
    assert reported >= set(src) - {"good", "overlaps", "inference"}
    assert "good" not in reported
    for name in ("overlaps", "inference"):
        refused({"a": ramp(3), name: src[name]}, {"a": torch.zeros(3), name: dst[name]}, name)


def test_more_differences_than_anyone_reads_are_counted():
    error = refused([ramp(2)] * 50, [torch.zeros(3)] * 50, re.escape("… and 30 more"))
    assert len(error.differences) == 50


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (ramp(1), torch.zeros(4), r"shape differs at w: expected \(4,\), got \(1,\)"),
        (ramp(4), torch.zeros(1), r"shape differs at w: expected \(1,\), got \(4,\)"),
        (torch.tensor(3.0), torch.zeros(4), r"shape differs at w: expected \(4,\), got \(\)"),
        (ramp(3, 4), torch.zeros(4, 3), r"shape differs at w: expected \(4, 3\), got \(3, 4\)"),
        (ramp(12), torch.zeros(3, 4), r"shape differs at w: expected \(3, 4\), got \(12,\)"),
        (torch.empty(0), torch.empty(0, 3), r"shape differs at w: expected \(0, 3\), got \(0,\)"),
        (ramp(4), torch.zeros(4, dtype=torch.int64), r"dtype differs at w: expected torch.int64, got torch.float32"),
        (ramp(4), None, "leaf type differs at w: expected plain value, got Tensor"),
        (None, torch.zeros(4), "leaf type differs at w: expected Tensor, got plain value"),
        (1.0, torch.tensor(0.0), "leaf type differs at w: expected Tensor, got plain value"),
        (torch.tensor(1.0), 0.0, "leaf type differs at w: expected plain value, got Tensor"),
        (Box(), torch.zeros(4), "leaf type differs at w: expected Tensor, got .*Box"),
        (ramp(4), Box(), "leaf type differs at w: expected .*Box, got Tensor"),
        (ramp(4), torch.zeros(4).to_sparse(), "layout differs at w"),
        (ramp(4).to_sparse(), torch.zeros(4), "layout differs at w"),
        (ramp(4), torch.zeros(4, device="meta"), "memory differs at w"),
        (torch.zeros(4, device="meta"), torch.zeros(4), "memory differs at w"),
        ([ramp(1)], (torch.zeros(1),), "structure differs at w: expected tuple of 1, got list of 1"),
        ([ramp(1)], torch.zeros(1), r"structure differs at w: expected a leaf \(Tensor\), got list of 1"),
        (ramp(1), [torch.zeros(1)], r"structure differs at w: expected list of 1, got a leaf \(Tensor\)"),
        ([ramp(1)], [torch.zeros(1)] * 2, "length differs at w: expected list of 2, got list of 1"),
        ({"a": ramp(1)}, {"b": torch.zeros(1)}, r"(missing|unexpected) at w\.a.*\n.*(missing|unexpected) at w\.b"),
        ({0: ramp(1)}, {"0": torch.zeros(1)}, r"the trees differ in 2 places"),
        ({1: ramp(1)}, {True: torch.zeros(1)}, r"the trees differ in 2 places"),
        (Point(ramp(1), 1), Other(torch.zeros(1), 1), "structure differs at w: expected Other of 2, got Point of 2"),
        (ramp(4).to(torch.complex64), torch.zeros(4), "dtype differs at w"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:30],
)
def test_what_does_not_fit_is_refused(src, dst, message):
    refused(
        {"first": ramp(3), "w": src, "last": ramp(2)},
        {"first": torch.zeros(3), "w": dst, "last": torch.zeros(2)},
        message,
    )


@pytest.mark.parametrize("missing", ["src", "dst"])
def test_missing_leaves_are_named(missing):
    full, part = {"a": ramp(2), "m": {"b": ramp(2), "c": 1}}, {"a": ramp(2), "m": {}}
    error = refused(*((part, full) if missing == "src" else (full, part)), r"2 places")
    assert {str(difference.path) for difference in error.differences} == {"m.b", "m.c"}
    assert {difference.kind for difference in error.differences} == {"missing"}


def test_a_destination_that_overlaps_itself():
    for dst in (
        torch.zeros(1).expand(4),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(5).as_strided((2, 3), (1, 1)),
        torch.zeros(20).as_strided((3, 3), (2, 4)),
    ):
        src = ramp(*dst.shape)
        refused([ramp(2), src], [torch.zeros(2), dst], r"overlap at 1: .*overlaps itself")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4,), (0,)),
        ((4, 3), (1, 0)),
        ((2, 3), (1, 1)),
        ((3, 3), (2, 4)),
        ((2, 1, 4), (0, 7, 1)),
        ((3, 3, 2), (1, 1, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cast", [False, True], ids=["same", "cast"])
def test_a_state_with_a_tensor_that_overlaps_itself_is_rolled_back(shape, stride, cast):
    memory = ramp(20, dtype=torch.float64 if cast else torch.float32)
    state = {"e": memory.as_strided(shape, stride), "w": ramp(3)}
    saved = st.offload(state)
    if cast:
        saved["e"] = ramp(20).as_strided(shape, stride)
    kept = memory.clone()
    memory += 1
    covered = {int(element) for element in torch.arange(20).as_strided(shape, stride).flatten()}
    assert bool(st.similarity(saved, state, values=False)) is not cast
    st.copy_into(saved, state, cast=cast)
    assert memory.tolist() == [kept[n] if n in covered else kept[n] + 1 for n in range(20)]


def test_copies_that_were_made_whole_go_back_into_an_expanded_tensor():
    base = ramp(3, start=50)
    dst = {"e": base[:, None].expand(3, 5), "base": base}
    st.copy_into({"e": ramp(3)[:, None].expand(3, 5).contiguous(), "base": ramp(3)}, dst)
    assert base.tolist() == [0, 1, 2]
    nan = torch.tensor([float("nan")]).expand(4)
    st.copy_into([nan.contiguous()], [base[:1].expand(4)])
    assert base[0].isnan()
    refused([torch.tensor([0.0, -0.0])], [base[:1].expand(2)], "overlaps itself")


def test_an_expanded_tensor_and_another_on_its_memory_receive_the_same():
    base = ramp(3, start=50)
    dst = {"e": base[:, None].expand(3, 5), "base": base}
    src = {"e": ramp(3)[:, None].expand(3, 5), "base": ramp(3, start=7)}
    refused(src, dst, "overlap at")


class Meddles:
    """Does something when it is pickled."""

    def __init__(self, action):
        self.action = action

    def __reduce__(self):
        self.action()
        return (Meddles, (None,))


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize(
    ("meddle", "match"),
    [
        (lambda tensor: tensor.untyped_storage().resize_(0), "freed or resized"),
        (lambda tensor: tensor.untyped_storage().resize_(1 << 20), "was changed by an object"),
        (lambda tensor: tensor.resize_(7), "was changed by an object"),
        (lambda tensor: tensor.set_(ramp(4, start=90)), "was changed by an object"),
    ],
    ids=["free", "resize the storage", "resize", "set"],
)
def test_objects_that_change_tensors_while_they_are_taken_apart(side, meddle, match):
    src, dst = ramp(4), torch.zeros(4)
    tensor = src if side == "source" else dst
    source = {"w": src, "v": ramp(2), "o": Meddles(lambda: meddle(tensor) if tensor.numel() == 4 else None)}
    other = torch.zeros(2)
    with pytest.raises(st.UnsupportedLeaf, match=match) as caught:
        st.copy_into(source, {"w": dst, "v": other, "o": None})
    assert caught.value.path == "w"
    assert not other.any()


def test_a_container_that_frees_tensors_while_it_is_put_together():
    dst = torch.zeros(4)
    st.register_container(
        Wrecks, lambda value: ((value.held,), None), lambda _, children: (children[0].untyped_storage().resize_(0),)
    )
    with pytest.raises(st.UnsupportedLeaf, match="freed or resized"):
        st.copy_into(Wrecks(ramp(4)), Wrecks(dst))


class Wrecks:
    def __init__(self, held):
        self.held = held


@pytest.mark.filterwarnings("ignore:.torch.jit")  # in torch, when it makes the first dual tensor
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("count", [1, 100])
def test_a_dual_tensor_is_refused(side, count):
    src, dst = [ramp(3) for _ in range(count)], [torch.zeros(3) for _ in range(count)]
    for _ in range(3):
        st.copy_into(src, dst)  # known by now
        dst[0].zero_()
    with forward_ad.dual_level():
        st.copy_into(src[1:], dst[1:])
        tensors = src if side == "source" else dst
        tensors[0] = forward_ad.make_dual(tensors[0], ramp(3))
        with pytest.raises(st.UnsupportedLeaf, match="at 0 is a dual tensor"):
            st.copy_into(src, dst)
        for verb in (st.offload, st.allocate_like, st.Stager().stage):
            with pytest.raises(st.UnsupportedLeaf, match="at 0 is a dual tensor"):
                verb(tensors)
        assert not st.similarity(src, dst, values=False)
    assert not dst[0].any()


def test_dims_that_interleave_without_overlap_are_filled_from_ones_that_do_alike():
    dst, src = (memory.as_strided((2, 3), (3, 2)) for memory in (torch.zeros(20), ramp(20)))  # 0 2 4, 3 5 7
    st.copy_into([src], [dst])
    assert torch.equal(dst, src)
    refused([ramp(2, 3)], [dst], "overlap at 0: .* overlaps itself")


def test_a_stride_of_zero_along_one_element_is_no_overlap():
    one = torch.zeros(1).expand(1)
    st.copy_into([ramp(1, start=5)], [one])
    assert one.item() == 5


def test_an_inference_tensor_cannot_be_written():
    with torch.inference_mode():
        dst = torch.zeros(3)
        refused([ramp(2), ramp(3)], [torch.zeros(2), dst], r"writability at 1: .*inference tensor")
    refused([ramp(3)], [dst], "inference tensor")
    normal = torch.zeros(3)
    st.copy_into([dst], [normal])  # it can be read


@pytest.mark.parametrize("which", ["src", "dst"])
@pytest.mark.parametrize("nbytes", [0, 8])
def test_freed_and_shrunk_storages(which, nbytes):
    src, dst = [ramp(2), ramp(4), ramp(3)[1:]], [torch.zeros(2), torch.zeros(4), torch.zeros(2)]
    (src if which == "src" else dst)[1].untyped_storage().resize_(nbytes)
    watches = Watch(src), Watch(dst)
    with pytest.raises((st.TreeMismatch, st.UnsupportedLeaf), match=r"copy_into: .* 1.*(freed|no memory|got)"):
        st.copy_into(src, dst)
    for watch in watches:
        watch.check()


def test_a_freed_view_at_an_offset():
    src = [ramp(10)[6:]]
    src[0].untyped_storage().resize_(20)
    dst = [torch.zeros(4)]
    with pytest.raises((st.TreeMismatch, st.UnsupportedLeaf), match="copy_into: "):
        st.copy_into(src, dst)
    assert torch.equal(dst[0], torch.zeros(4))


def test_cycles_are_refused_on_both_sides():
    cyclic = {"w": torch.zeros(2)}
    cyclic["again"] = cyclic
    plain = {"w": ramp(2), "again": 1}
    for pair in ((cyclic, plain), (plain, cyclic), (cyclic, cyclic)):
        with pytest.raises(st.CyclicTree, match="again"):
            st.copy_into(*pair)
    assert torch.equal(cyclic["w"], torch.zeros(2))


# Overlap between destinations


def overlapping(kind, start=0):
    base = ramp(10, start=start)
    return {
        "same object": lambda: [base, base],
        "same place": lambda: [base, base[:]],
        "shifted": lambda: [base[:6], base[4:]],
        "inside": lambda: [base, base[3:5]],
        "interleaved": lambda: [base[::2], base[1::2]],
        "reinterpreted": lambda: [base, base.view(torch.int32)],
        "smaller items": lambda: [base[:2], base.view(torch.uint8)[4:8]],
        "transposed": lambda: [base[:9].view(3, 3), base[:9].view(3, 3).t()],
    }[kind]()


OVERLAPS = [
    "same object",
    "same place",
    "shifted",
    "inside",
    "interleaved",
    "reinterpreted",
    "smaller items",
    "transposed",
]


@pytest.mark.parametrize("kind", OVERLAPS)
def test_destinations_that_overlap_like_their_sources(kind):
    src, dst = overlapping(kind, start=100), overlapping(kind)
    result = st.copy_into(src, dst)
    assert_trees_equal(result, src)


@pytest.mark.parametrize("kind", ["same object", "same place"])
def test_one_destination_twice_where_the_sources_agree(kind):
    src = [tensor.clone() for tensor in overlapping(kind, start=100)]
    dst = overlapping(kind)
    st.copy_into(src, dst)
    for a, b in zip(src, dst, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "kind", [kind for kind in OVERLAPS if kind not in ("same object", "same place", "interleaved")]
)
def test_destinations_that_overlap_in_part_are_refused_even_where_the_sources_agree(kind):
    src = [tensor.clone() for tensor in overlapping(kind, start=100)]
    refused(src, overlapping(kind), "overlap at")


@pytest.mark.parametrize("kind", [kind for kind in OVERLAPS if kind != "interleaved"])
@pytest.mark.parametrize("reverse", [False, True])
def test_destinations_that_overlap_where_the_sources_differ(kind, reverse):
    src = [tensor.clone() for tensor in overlapping(kind, start=100)]
    src[1] = src[1].flip(0) if kind != "smaller items" else src[1] + 1
    if kind == "transposed":
        src[1] = src[1] + 1
    dst = overlapping(kind)
    src, dst = [ramp(2), *src], [torch.zeros(2), *dst]
    if reverse:
        src.reverse()
        dst.reverse()
    refused(src, dst, "overlap at")


def test_interleaved_destinations_do_not_overlap():
    base = torch.zeros(10)
    st.copy_into([ramp(5), ramp(5, start=50)], [base[::2], base[1::2]])
    assert base[:4].tolist() == [0, 50, 1, 51]


def test_overlap_of_conjugated_views():
    base = torch.complex(ramp(3), ramp(3, start=5))
    new = torch.complex(ramp(3, start=20), ramp(3, start=30))
    refused([new, new], [base, base.conj()], "overlap at")
    refused([new.conj(), new.conj()], [base, base.conj()], "overlap at")
    dst = [base, base.conj()]
    st.copy_into([new, new.conj()], dst)
    assert torch.equal(dst[0], new)
    assert torch.equal(dst[1], new.conj())
    dst = [base, base.conj()]
    refused([new.clone(), new.conj().resolve_conj()], dst, "overlap at")
    dst = [base.conj(), base.conj()]
    st.copy_into([new.clone(), new.clone()], dst)
    assert torch.equal(dst[1], new)


def test_overlap_of_negated_views():
    base = torch.complex(ramp(3), ramp(3, start=5))
    dst = [base.imag, base.conj().imag]
    refused([ramp(3, start=9), ramp(3, start=9)], dst, "overlap at")
    shared = ramp(3, start=9)
    refused([shared, shared], dst, "overlap at")
    refused([shared, -shared], dst, "overlap at")
    new = torch.complex(ramp(3), ramp(3, start=9))
    st.copy_into([new.imag, new.conj().imag], dst)
    assert torch.equal(dst[0], shared)


def test_overlap_after_a_cast_is_judged_by_what_is_written():
    base = torch.zeros(4, dtype=torch.bfloat16)
    close = torch.tensor([1.0, 2.0, 3.0, 4.0])
    st.copy_into([close, close + 1e-4], [base, base[:]], cast=True)
    assert torch.equal(base.float(), close)
    refused([close, close + 1], [base, base[:]], "overlap at", cast=True)


def test_nan_and_zero_signs_decide_too():
    base = torch.zeros(2)
    refused([torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])], [base, base[:]], "overlap at")
    nan = torch.tensor([float("nan"), 1.0])
    st.copy_into([nan, nan.clone()], [base, base[:]])


def test_numpy_arrays_tie_tensors_too():
    """Two tensors on one array have storages of their own, on the same memory."""
    array = np.zeros(10, dtype=np.float32)
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    refused([ramp(10), ramp(10, start=50)], [first, second], "overlap at")
    refused([ramp(9), ramp(9, start=50)], [first[1:], second[:-1]], "overlap at")
    st.copy_into([ramp(10), ramp(10)], [first, second])
    assert array.tolist() == list(range(10))


# Source and destination share memory


@pytest.mark.parametrize("shift", [-300, -1, 0, 1, 300])
@pytest.mark.parametrize("step", [1, 2])
def test_shifted_views_of_one_storage(shift, step):
    base = ramp(2000)
    src, dst = base[500:1500:step], base[500 + shift : 1500 + shift : step]
    expected = src.clone()
    st.copy_into([src], [dst])
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_views_of_one_numpy_array(shift):
    array = np.arange(300_000, dtype=np.float32)
    src = torch.from_numpy(array)[10:-10]
    dst = torch.from_numpy(array)[10 + shift : len(array) - 10 + shift]
    expected = src.clone()
    st.copy_into([src], [dst])
    assert torch.equal(dst, expected)


def test_an_exchange():
    a, b = ramp(5), ramp(5, start=50)
    st.copy_into([a, b], [b, a])
    assert torch.equal(a, ramp(5, start=50))
    assert torch.equal(b, ramp(5))
    base = ramp(8)
    st.copy_into([base[:4], base[4:]], [base[4:], base[:4]])
    assert base.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_a_transposition_in_place():
    square = ramp(40, 40)
    expected = square.t().clone()
    st.copy_into([square.t()], [square])
    assert torch.equal(square, expected)


def test_a_reinterpretation_in_place():
    base = ramp(8)
    expected = base.clone().view(torch.int32)[2:].clone()
    st.copy_into([base.view(torch.int32)[2:]], [base.view(torch.int32)[:-2]])
    assert torch.equal(base.view(torch.int32)[:-2], expected)


def test_a_tree_into_itself():
    tree = {"a": ramp(4), "b": [ramp(3)[::2]], "z": torch.complex(ramp(2), ramp(2)).conj(), "n": 3}
    expected = {"a": ramp(4), "b": [ramp(3)[::2]], "z": torch.complex(ramp(2), ramp(2)).conj(), "n": 3}
    assert_trees_equal(st.copy_into(tree, tree), expected, storages=False)


# Views that autograd watches over


def test_pieces_of_one_leaf():
    weight = ramp(2, 3).requires_grad_()
    pieces = list(weight.unbind())
    with torch.no_grad():
        halves = list(weight.split(1))
    for dst in (pieces, halves):
        try:
            st.copy_into([ramp(*piece.shape, start=n) for n, piece in enumerate(dst)], dst)
        except st.StateTreeError:
            assert torch.equal(weight.detach(), ramp(2, 3))
        else:
            assert torch.equal(dst[1].detach().reshape(-1), ramp(3, start=1))
        with torch.no_grad():
            weight.copy_(ramp(2, 3))


# cast=True


LOSSLESS = [
    (torch.int8, torch.int16),
    (torch.int8, torch.int64),
    (torch.uint8, torch.int16),
    (torch.int16, torch.float32),
    (torch.int8, torch.float16),
    (torch.uint8, torch.bfloat16),
    (torch.int32, torch.float64),
    (torch.bool, torch.int8),
    (torch.bool, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float32, torch.complex64),
    (torch.complex64, torch.complex128),
    (torch.uint16, torch.int32),
]
LOSSY_FLOATS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.complex128, torch.complex64),
    (torch.float64, torch.complex64),
]
NEVER = [
    (torch.float32, torch.int8),
    (torch.float32, torch.int64),
    (torch.float64, torch.bool),
    (torch.complex64, torch.float32),
    (torch.complex64, torch.float64),
    (torch.complex64, torch.int64),
    (torch.int64, torch.int32),
    (torch.int64, torch.float32),
    (torch.int64, torch.float64),
    (torch.int32, torch.float32),
    (torch.int16, torch.float16),
    (torch.int16, torch.bfloat16),
    (torch.int8, torch.uint8),
    (torch.uint8, torch.int8),
    (torch.int8, torch.bool),
    (torch.uint16, torch.int16),
    (torch.uint64, torch.int64),
]


@pytest.mark.parametrize(("source", "target"), LOSSLESS + LOSSY_FLOATS, ids=str)
def test_casts_that_are_allowed(source, target):
    src = ramp(5).to(source)
    dst = torch.zeros(5, dtype=target)
    refused([src], [dst], f"dtype differs at 0: expected {target}, got {source}")
    result = st.copy_into([src], [dst], cast=True)
    assert result[0] is dst
    assert dst.dtype == target
    assert_trees_equal(dst, src.to(target))


@pytest.mark.parametrize(("source", "target"), NEVER, ids=str)
def test_casts_that_are_never_allowed(source, target):
    src = [ramp(2), ramp(5).to(source)]
    refused(
        src,
        [torch.zeros(2), torch.zeros(5, dtype=target)],
        f"dtype differs at 1: expected {target}, got {source}",
        cast=True,
    )


@pytest.mark.parametrize(("source", "helps"), [(torch.float64, True), (torch.int64, False), (torch.complex64, False)])
@pytest.mark.parametrize("verb", [st.copy_into, st.reshard])
def test_a_cast_is_advised_where_it_would_help(verb, source, helps):
    for cast in (False, True)[: 1 if helps else 2]:
        with pytest.raises(st.TreeMismatch, match="dtype differs at 0") as refusal:
            verb([torch.zeros(2, dtype=source)], [torch.zeros(2)], cast=cast)
        assert ("cast=True" in str(refusal.value)) == helps


def test_three_hundred_does_not_fit_into_a_byte():
    dst = torch.zeros(1, dtype=torch.int8)
    refused([torch.tensor([300.0])], [dst], "dtype differs at 0: expected torch.int8, got torch.float32", cast=True)
    refused([torch.tensor([300])], [dst], "dtype differs at 0: expected torch.int8, got torch.int64", cast=True)


@pytest.mark.parametrize(
    "dtype", [getattr(torch, name) for name in ("complex32", "bcomplex32") if hasattr(torch, name)]
)
@pytest.mark.parametrize("conj", BITS[::2], ids=str)
def test_torch_warns_of_nothing_that_is_copied(dtype, conj):
    def tensors():
        memory = torch.arange(8, dtype=torch.int32)
        return [memory.view(dtype)[:3], with_bits(memory.view(dtype)[::2], **conj), memory]

    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            source = tensors()
            for copied in (
                st.offload(source),
                st.Stager().stage(source),
                st.copy_into(source, st.allocate_like(source)),
            ):
                assert copied[2].tolist() == list(range(8))
                assert st.similarity(source, copied, values=True)
                assert copied[1].is_conj() == source[1].is_conj()
            st.copy_into(source, tensors())
    finally:
        torch.set_warn_always(False)


NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "make", [lambda value: value, lambda value: torch.stack([value, value])[:, ::2].T], ids=["", "T"]
)
def test_what_is_too_large_for_a_dtype_is_an_error(dtype, make):
    largest = torch.finfo(dtype).max
    fits = [largest, -largest, largest * (1 + torch.finfo(dtype).eps / 8), 0.0, 1e-30, float("nan")]
    st.copy_into([make(torch.tensor(fits, dtype=torch.float64))], [make(torch.zeros(6, dtype=dtype))], cast=True)
    for value in (largest * 1.3, -largest * 4, 1e300):
        src = [ramp(2), make(torch.tensor([1.0, float("nan"), value, 1.0], dtype=torch.float64))]
        message = rf"range differs at 1: expected values up to {re.escape(str(largest))} \({dtype}\), got "
        refused(src, [torch.zeros(2), make(torch.zeros(4, dtype=dtype))], message, cast=True)


def test_infinities_are_kept_where_there_are_any():
    src = [torch.tensor([float("inf"), 1.0, -float("inf")])]
    half, small = torch.zeros(3, dtype=torch.float16), torch.zeros(3, dtype=torch.float8_e4m3fn)
    st.copy_into(src, [half], cast=True)
    assert torch.equal(half.float(), src[0])
    refused(src, [small], r"range differs at 0: expected values up to 448.0 .*, got inf and 1 more", cast=True)


@pytest.mark.parametrize("part", [1e39 + 1j, 1 - 1e39j])
def test_parts_of_complex_numbers_are_looked_at(part):
    src, dst = torch.tensor([1 + 2j, part], dtype=torch.complex128).conj(), torch.zeros(2, dtype=torch.complex64)
    refused([src], [dst], "range differs at 0: .*complex64.*1e", cast=True)
    refused([torch.tensor([1e39], dtype=torch.float64)], [dst[:1]], "range differs", cast=True)


def test_what_is_too_large_is_found_anywhere_and_counted():
    src = torch.zeros(3, 1 << 18)
    src[2, -1] = src[1, 5] = 1e6
    refused([src.T], [torch.zeros(1 << 18, 3, dtype=torch.float16)], "got 1000000.0 and 1 more", cast=True)


def test_shapes_are_not_broadcast_by_a_cast():
    refused(
        [ramp(1)], [torch.zeros(4, dtype=torch.float64)], r"shape differs at 0: expected \(4,\), got \(1,\)", cast=True
    )


def test_the_whole_matrix_of_casts_is_all_or_nothing():
    """Whatever cast=True says yes to is then done; whatever it says no to leaves everything as it was."""
    allowed = 0
    assert len(DTYPES) > 35
    for source in DTYPES:
        for target in DTYPES:
            first, dst = torch.zeros(2), of_bytes(target, (6,))
            src = of_bytes(source, (6,))
            before = raw_bytes(dst.untyped_storage()).clone()
            kind = "range" if castable(source, target) or source == target else "dtype"  # any bytes may be too large
            try:
                st.copy_into([ramp(2), src], [first, dst], cast=True)
            except st.TreeMismatch as error:
                assert f"{kind} differs at 1" in str(error), (source, target)
            else:
                assert kind == "range", (source, target)
                assert torch.equal(first, ramp(2)), (source, target)
                allowed += 1
                continue
            assert torch.equal(first, torch.zeros(2)), (source, target)
            assert torch.equal(raw_bytes(dst.untyped_storage()), before), (source, target)
    assert allowed > 100


def read_with_bits(base, *, conj, neg):
    """Return what ``with_bits`` of a tensor reads as, without its kernels."""
    base = resolved(base.conj()) if conj else base
    return torch.neg(base) if neg else base


@pytest.mark.parametrize("target_bits", BITS, ids=str)
@pytest.mark.parametrize("source_bits", BITS, ids=str)
def test_the_matrix_of_casts_with_conjugate_and_negative_bits(source_bits, target_bits):
    """Elements are converted before a bit of the target is undone, and what cannot be read is refused in time."""
    done = 0
    for source, target in product(DTYPES, repeat=2):
        if not (source == target or castable(source, target)):
            continue
        if (source_bits["conj"] and not source.is_complex) or (target_bits["conj"] and not target.is_complex):
            continue
        below_source, below, first = of_bytes(source, (6,)), of_bytes(target, (6,)), torch.zeros(2)
        if source.is_complex and source != target:  # no value that is too large
            below_source = torch.complex(ramp(6, start=1), ramp(6, start=9)).to(source)
        before = raw_bytes(below.untyped_storage()).clone()
        src, dst = with_bits(below_source, **source_bits), with_bits(below, **target_bits)
        try:
            st.copy_into([ramp(2), src], [first, dst], cast=True)
        except st.TreeMismatch as error:
            (kind,) = {found.kind for found in error.differences}
            if kind == "range":
                assert float(torch.finfo(source).max) > torch.finfo(target).max
            else:
                assert kind == "negative bit"
                assert not can_negate(source) or not can_negate(target)
            assert torch.equal(first, torch.zeros(2))
            assert torch.equal(raw_bytes(below.untyped_storage()), before), (source, target)
            continue
        done += 1
        assert torch.equal(first, ramp(2))
        if src.is_neg() and dst.is_neg() and source == target:
            src, dst = torch._neg_view(src), torch._neg_view(dst)  # what both have cancels out, readable or not
        conj, neg = dst.is_conj(), dst.is_neg()
        expected = read_with_bits(below_source, conj=src.is_conj(), neg=src.is_neg())
        expected = expected if source == target else expected.to(target)
        found = read_with_bits(below, conj=conj, neg=neg)
        assert torch.equal(raw_bytes(found.untyped_storage()), raw_bytes(expected.untyped_storage())), (source, target)
    assert done >= 5  # all to all that is complex, but for torch.complex32 where it would have to be negated


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.uint8, torch.bool, torch.float64], ids=str)
def test_numbers_are_converted_before_a_view_undoes_their_sign(source):
    imaginary = torch.zeros(3, dtype=torch.complex64)
    st.copy_into([torch.ones(3).to(source)], [imaginary.conj().imag], cast=True)
    assert torch.equal(imaginary.imag, -torch.ones(3))
    st.copy_into([torch.ones(3).to(source)], [imaginary.conj()], cast=True)
    assert torch.equal(imaginary, torch.ones(3, dtype=torch.complex64))


def test_a_negative_bit_on_what_cannot_be_negated_is_refused():
    dst = [torch.zeros(2), torch._neg_view(torch.zeros(2, dtype=torch.uint32))]
    refused([ramp(2), torch.ones(2, dtype=torch.uint32)], dst, "negative bit differs at 1: expected True, got False")


def test_a_lack_of_memory_does_not_pass_for_a_lack_of_kernels(monkeypatch):
    def no_memory(*args, **kwargs):
        raise RuntimeError("not enough memory")

    can_negate.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", no_memory)
        with pytest.raises(RuntimeError, match="not enough memory"):
            can_negate(torch.float32)
    assert can_negate(torch.float32)


@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.bool], ids=str)
def test_integer_casts_lose_nothing(source):
    low, high = (0, 1) if source is torch.bool else (torch.iinfo(source).min, torch.iinfo(source).max)
    values = torch.arange(low, high + 1, max(1, (high - low) // 5000)).to(source)
    values[-1] = high
    for target in DTYPES:
        if source == target or not castable(source, target):
            continue
        dst = torch.zeros(len(values), dtype=target)
        st.copy_into([values], [dst], cast=True)
        back = dst.real if target.is_complex else dst
        assert torch.equal(back.to(torch.float64).to(torch.int64), values.to(torch.int64)), target


# Faults


def test_whatever_fails_before_the_writing_nothing_is_written():
    base = ramp(10, start=100)
    src = {
        "a": ramp(4),
        "tied": [base[:6], base[4:]],
        "box": Box(w=ramp(2)),
        "p": torch.nn.Parameter(ramp(3)),
        "sparse": ramp(3).to_sparse(),
    }
    dst = {
        "a": torch.zeros(4),
        "tied": [torch.zeros(6), torch.zeros(6)],
        "box": Box(),
        "p": torch.nn.Parameter(torch.zeros(3)),
        "sparse": torch.full((3,), 9.0).to_sparse(),
    }
    src["sparse"] = (ramp(3) + 1).to_sparse()
    watch = Watch(dst)
    writing = []
    real = torch._foreach_copy_

    def after(where):
        assert torch.is_grad_enabled()
        watch.check()

    def action():
        st.copy_into(src, dst)

    def stop(*args, **keywords):
        writing.append(1)
        raise InterruptedError

    torch._foreach_copy_ = stop
    try:
        fail_each(lambda: _until_writing(action), after, step="call", error=MemoryError)
        fail_each(lambda: _until_writing(action), after, step="signal", error=KeyboardInterrupt, stride=7)
    finally:
        torch._foreach_copy_ = real
    assert writing
    watch.check()
    assert_trees_equal(st.copy_into(src, dst), src, ties=False)


def _until_writing(action):
    with contextlib.suppress(InterruptedError):
        action()


class Unmade:
    """Its unflatten function fails."""

    def __init__(self, value):
        self.value = value


def _cannot(metadata, children):
    raise ValueError("not to be made")


def test_a_result_that_cannot_be_made_leaves_the_destination_alone():
    st.register_container(Unmade, lambda container: ((container.value,), None), _cannot)
    target = torch.zeros(2)
    with pytest.raises(ValueError, match="not to be made"):
        st.copy_into(Unmade(torch.ones(2)), Unmade(target))
    assert torch.equal(target, torch.zeros(2))


def freed(count):
    tensor = torch.zeros(count)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (torch.zeros(3), r"shape differs at 1: expected \(3,\), got \(2,\)"),
        (torch.zeros(2, device="meta"), "meta differs at 1"),
        (freed(2), "(?s) 1.*(freed|memory)"),
    ],
    ids=["shape", "meta", "freed"],
)
def test_what_a_wrapper_holds_inside_must_fit(part, reason):
    src = [ramp(2), TwoTensors(ramp(2), ramp(2))]
    dst = [torch.zeros(2), TwoTensors(torch.zeros(2), part)]
    with pytest.raises((st.TreeMismatch, st.UnsupportedLeaf), match=reason):
        st.copy_into(src, dst)
    assert not dst[0].any()
    assert not dst[1].a.any()


class Shelf:
    """A leaf of any number of tensors. Its leaf type tells nothing about them."""

    def __init__(self, tensors):
        self.tensors = tensors


class ShelfType:
    def unpack(self, value):
        return list(value.tensors), None

    def pack(self, context, parts):
        return Shelf(parts)


def test_leaves_that_only_show_when_taken_apart_that_they_do_not_fit():
    st.register_leaf_type(Shelf, ShelfType())
    refused([ramp(2), Shelf([ramp(2)])], [ramp(2), Shelf([ramp(2), ramp(3)])], "parts differs at 1: .*taken apart diff")
    with pytest.raises(st.UnsupportedLeaf, match=r"copy_into: cannot take apart the leaf at 1 .*TypeError"):
        st.copy_into([ramp(2), Shelf(None)], [ramp(2), Shelf([])])


@pytest.mark.usefixtures("one_rank_group")
def test_other_placements_are_a_case_for_reshard():
    mesh = init_device_mesh("cpu", (1,))
    sharded, copied = (distribute_tensor(ramp(2), mesh, [kind]) for kind in (Shard(0), Replicate()))
    with pytest.raises(st.TreeMismatch, match=r"placements differs at w: .*Nothing was written. Use reshard"):
        st.copy_into({"w": sharded}, {"w": copied})


@pytest.mark.parametrize(
    ("src", "dst", "remedy"),
    [
        ({"w": ramp(2)}, {"w": ramp(2, dtype=torch.float64)}, "pass cast=True"),
        ({"w": ramp(2), "x": 1}, {"w": ramp(2)}, "Pass strict=False to copy what both trees have"),
        ({"w": ramp(2)}, {"w": ramp(2), "x": 1}, "Pass strict=False to copy what both trees have"),
    ],
    ids=["dtype", "more", "fewer"],
)
def test_the_remedy_is_told(src, dst, remedy):
    refused(src, dst, remedy)


def test_layouts_name_the_verb_that_changes_them():
    shard = distribute_tensor(ramp(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    refused({"w": ramp(4)}, {"w": shard}, "Use distribute to cut whole tensors into shards")
    refused({"w": shard}, {"w": ramp(4)}, "Use gather to make whole tensors of shards")
    with pytest.raises(st.TreeMismatch, match="or strict=False to move what both have"):
        st.reshard({"w": ramp(4)}, {"w": shard, "x": 1}, in_place=True)
