"""What tensors inside of leaves are beside their elements: a layout, a scale, metadata. It counts as much as these."""

import cmath
import dataclasses
import enum
import functools
import math
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import statetree as st
from statetree.leaves.value_texts import value_text
from statetree.testing import run_ranks


class Color(enum.Enum):
    RED = 1


class Wrapping(torch.Tensor):
    """A wrapper of one tensor, with a number beside it."""

    @staticmethod
    def __new__(cls, inner, scale=None):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner, made.scale = inner, scale
        return made

    def __tensor_flatten__(self):
        return ["inner"], {"scale": self.scale}

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
        return cls(inner["inner"], metadata["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(str(func))


class Holder:
    def __init__(self, held):
        self.held = held


def scaled(scale):
    return torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2], dtype=torch.int8), scale, 0)


CSR = torch.tensor([[0.0, 5.0], [1.0, 0.0]]).to_sparse_csr()
CSC = torch.sparse_csc_tensor(CSR.crow_indices(), CSR.col_indices(), CSR.values(), (2, 2))
AT = torch.tensor([[0, 0], [1, 1]])
PAIRS = {
    "layout": (CSR, CSC),
    "shape": (torch.sparse_coo_tensor(AT, torch.ones(2), (2, 2)), torch.sparse_coo_tensor(AT, torch.ones(2), (2, 3))),
    "scale": (scaled(0.5), scaled(1.0)),
    "metadata": (Wrapping(torch.ones(2), 0.5), Wrapping(torch.ones(2), 1.0)),
    "leaf type": (Wrapping(torch.ones(2)), torch.ones(2)),
}


def known(tensor):
    """Return all that one of these tensors is."""
    if isinstance(tensor, Wrapping):
        return "wrapping", known(tensor.inner), tensor.scale
    if tensor.is_quantized:
        return tensor.q_scale(), tensor.int_repr().tolist()
    return tensor.layout, tuple(tensor.shape), tensor.to_dense().tolist()


@pytest.mark.parametrize("kind", PAIRS)
def test_objects_differ_if_the_tensors_in_them_do(kind):
    for new, base in (PAIRS[kind], PAIRS[kind][::-1]):
        a, b = {"o": Holder(new)}, {"o": Holder(base)}
        assert st.similarity(a, {"o": Holder(st.offload(new))})
        for values in (True, False):
            report = st.similarity(a, b, values=values)
            assert not report
            assert kind in {difference.kind for difference in report.differences}
        assert st.digest(a) != st.digest(b)
        assert st.digest(a) == st.digest(st.offload(a))
        change = st.delta(a, b)
        assert known(st.apply_delta(change, b)["o"].held) == known(new)


@pytest.mark.parametrize("kind", ["metadata", "leaf type"])
def test_wrappers_differ_if_the_wrappers_in_them_do(kind):
    new, base = ({"w": Wrapping(tensor)} for tensor in PAIRS[kind])
    assert not st.similarity(new, base)
    assert not st.similarity(new, base, values=False)
    assert st.digest(new) != st.digest(base)
    with pytest.raises(st.TreeMismatch, match=f"{kind} differs at w"):
        st.copy_into(new, base)
    with pytest.raises(st.TreeMismatch, match=f"{kind} differs at w"):
        st.combine(torch.add, new, base)
    assert known(st.apply_delta(st.delta(new, base), base)["w"]) == known(new["w"])
    again = st.offload(new)
    assert st.similarity(new, again)
    assert not st.delta(new, again)


@pytest.mark.parametrize("kind", ["scale", "metadata"])
def test_what_lies_inside_is_compared_where_dtypes_are_converted(kind):
    class Named(Wrapping):
        """Of a dtype that no tensor in it has."""

        @staticmethod
        def __new__(cls, inner, scale=None):
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=scale, device=inner.device)
            made.inner, made.scale = inner, scale
            return made

        def __tensor_flatten__(self):
            return ["inner"], {"scale": torch.float32}

    new, base = PAIRS[kind]
    before = known(base)
    with pytest.raises(st.TreeMismatch, match=f"{kind} differs at w"):
        st.copy_into({"w": Named(new, torch.float32)}, {"w": Named(base, torch.bfloat16)}, cast=True)
    assert known(base) == before


def sized(number):
    return number.size


@dataclasses.dataclass
class Made:
    how: object
    scale: float = dataclasses.field(default=1.0, repr=False)
    note: str = dataclasses.field(default="", compare=False)


class Told:
    """Metadata that can be compared, and do not print what they hold."""

    def __init__(self, **held):
        self.held = held

    def __eq__(self, other):
        return self.held == other.held

    __hash__ = None


SCALES = {
    "a method of a text": ("a".join, "b".join),
    "a field that is not shown": (Made("a", 1.0), Made("a", 2.0)),
    "beside a function": (Made(sized, 1.0), Made(sized, 2.0)),
    "a function": (Made(sized), Made(known)),
    "an array": (Made(numpy.zeros(3)), Made(numpy.array([0.0, 1e-12, 0.0]))),
    "a long array": (numpy.zeros(3000), numpy.r_[numpy.zeros(1500), 1.0, numpy.zeros(1499)]),
    "an object": (Told(a=1, b=sized), Told(a=2, b=sized)),
    "an object with a tensor": (Told(a=torch.ones(2)), Told(a=torch.zeros(2))),
    "a long list of an object": (Told(a=numpy.zeros(2000)), Told(a=numpy.r_[numpy.zeros(1000), 1.0, numpy.zeros(999)])),
    "a namespace": (types.SimpleNamespace(a=numpy.zeros(2000)), types.SimpleNamespace(a=numpy.ones(2000))),
    "a pattern": (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "a flag": (re.RegexFlag(1 << 20), re.RegexFlag(1 << 21)),
    "a partial function": (functools.partial(sized, 1), functools.partial(sized, 2)),
    "a bound method": (Told(a=Told(a=1).__eq__), Told(a=Told(a=2).__eq__)),
    "functions of one name": (math.sqrt, cmath.sqrt),
    "a quantized tensor": (Told(a=scaled(0.5)), Told(a=scaled(1.0))),
    "an empty tensor": (Told(a=torch.zeros(0, 3)), Told(a=torch.zeros(0, 5))),
    "an attribute that cannot be pickled": (Made((x for x in ()), 1.0), Made((x for x in ()), 2.0)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_metadata_that_print_alike_differ(kind, tmp_path):
    new, base = ({"w": Wrapping(torch.ones(2), scale)} for scale in SCALES[kind])
    assert st.digest(new) != st.digest(base)
    assert st.digest(new) == st.digest({"w": Wrapping(torch.ones(2), SCALES[kind][0])})
    assert st.delta(new, base)
    if "pickled" not in kind:
        saved_as(tmp_path / "saved", new, base, {"w": Wrapping(torch.zeros(2), SCALES[kind][0])}, compare=False)


def test_what_is_equal_in_metadata_is_so_however_it_is_kept():
    shared = (1, 2)
    array = numpy.arange(6.0).reshape(2, 3)
    pairs = [
        (Told(a=shared, b=shared), Told(a=(1, int("2")), b=(int("1"), 2))),
        (Told(a=array), Told(a=numpy.asfortranarray(array))),
        (Made(array), Made(array[::-1][::-1])),
        (Made({"x", "y", "z"}), Made({"z", "y", "x"})),
        (Told(a=1, b=2), Told(b=2, a=1)),
        (Told(a={"x": 1, "y": 2}), Told(a={"y": 2, "x": 1})),
    ]
    for one, other in pairs:
        first, second = ({"w": Wrapping(torch.ones(2), scale)} for scale in (one, other))
        assert st.digest(first) == st.digest(second)


def told(scale):
    return st.digest({"w": Wrapping(torch.ones(2), scale)})


class Kept(Told):
    @functools.cached_property
    def size(self):
        return len(self.held)


def test_what_was_computed_of_metadata_does_not_count():
    used = Kept(a=1)
    assert used.size == 1
    assert told(used) == told(Kept(a=1)) != told(Kept(a=2))
    operator = torch.ops.aten.mul.Tensor
    before = told(Made(operator))
    assert operator(torch.ones(1), torch.ones(1)).item() == 1
    assert told(Made(operator)) == before != told(Made(torch.ops.aten.add.Tensor))


def test_devices_in_metadata_count_only_if_they_are_to():
    first, second = (Told(a=[torch.device("cuda", number)]) for number in (0, 1))
    assert value_text(first, devices=False) == value_text(second, devices=False)
    assert value_text(first) != value_text(second)


def test_metadata_may_lead_back_to_themselves_and_to_the_tensor():
    def cycle(number):
        made = Told(a=number)
        made.held["self"] = [made]
        return made

    assert told(cycle(1)) == told(cycle(1)) != told(cycle(2))
    tensors = [Wrapping(torch.ones(2), Told(a=number)) for number in (1, 1, 2)]
    for tensor in tensors:
        tensor.scale.held["of"] = tensor
    one, same, other = ({"w": tensor} for tensor in tensors)
    assert st.digest(one) == st.digest(same) != st.digest(other)


def test_metadata_that_share_much_or_are_deep_take_no_longer():
    shared = Told(a=1)
    for _ in range(60):  # each holds two of the one before
        shared = Told(a=shared, b=[shared])
    chain = Told(a=1)
    for _ in range(2000):
        chain = Told(a=chain)
    assert told(shared) == told(shared)
    assert told(chain) == told(chain) != told(Told(a=1))


def test_what_is_not_compared_of_metadata_does_not_count():
    new, other = ({"w": Wrapping(torch.ones(2), Made(sized, 1.0, note))} for note in ("a", "b"))
    assert st.similarity(new, other)
    assert st.digest(new) == st.digest(other)
    assert not st.delta(new, other)


@pytest.mark.slow
def test_sets_in_metadata_are_the_same_in_every_process():
    script = (
        "import torch, types, statetree as st; from collections import deque; "
        "from tests.unit.transforms.test_inside_of_leaves import Made, Wrapping; "
        "words = {'alpha', 'beta', 'gamma', 'delta', torch.int8}; "
        "kept = types.SimpleNamespace(a=words, b=deque([words])); "
        "print(st.digest({'w': Wrapping(torch.ones(2), Made(words)), 'v': Wrapping(torch.ones(2), [words]), "
        "'k': Wrapping(torch.ones(2), kept)}))"
    )
    found = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(ran.stdout)
    assert len(found) == 1, found


def saved_as(path, state, other, alike, *, compare=True):
    """Save a state, and load it into one that is another one beside its elements, and into one that is not."""
    with warnings.catch_warnings(action="ignore"):  # it takes a template
        st.save(state, path)
    for in_place in (False, True):
        before = st.offload(other)
        with pytest.raises(st.TreeMismatch, match="differs at w"):
            st.load(path, other, in_place=in_place)
        loaded = st.load(path, alike, in_place=in_place)
        if compare:
            assert st.similarity(other, before)
            assert st.similarity(loaded, state)
        else:  # metadata that were copied are no others' equal
            assert torch.equal(other["w"].inner, before["w"].inner)
            assert torch.equal(loaded["w"].inner, state["w"].inner)


@pytest.mark.parametrize("depth", range(4))
def test_nothing_is_loaded_into_wrappers_of_another_kind(depth, tmp_path):
    def wrapped(value, scale):
        tensor = Wrapping(torch.full((2,), value), scale)
        for _ in range(depth):
            tensor = Wrapping(tensor)
        return {"w": tensor}

    saved_as(tmp_path / "saved", wrapped(3.0, 0.5), wrapped(0.0, 1.0), wrapped(0.0, 0.5))


KEYS = {0: 0.5, "0": 1.0, "a.b": 2.0, Color.RED: 4.0, torch.float32: 5.0, (1, Color.RED): 6.0, (1, 2): 7.0}
KEYS[frozenset([Color.RED])] = 8.0


def test_wrappers_under_keys_that_look_alike_are_told_apart(tmp_path):
    def tree(value, **scales):
        wrapped = {key: Wrapping(torch.full((2,), value), scales.get(str(key), scale)) for key, scale in KEYS.items()}
        return {**wrapped, "a": {"b": Wrapping(torch.full((2,), value), 3.0)}}

    with warnings.catch_warnings(action="ignore"):
        st.save(tree(3.0), tmp_path / "saved")
    assert st.similarity(st.load(tmp_path / "saved", tree(0.0)), tree(3.0))
    for key in KEYS:
        with pytest.raises(st.TreeMismatch, match="leaf type differs at"):
            st.load(tmp_path / "saved", tree(0.0, **{str(key): 9.0}))


def test_wrappers_are_loaded_with_another_dtype_and_with_metadata_in_another_order(tmp_path):
    path = tmp_path / "saved"
    with warnings.catch_warnings(action="ignore"):
        st.save({"w": Wrapping(torch.full((2,), 3.0), {"a": 1, "b": 2})}, path)
    like = {"w": Wrapping(torch.zeros(2, dtype=torch.bfloat16), {"b": 2, "a": 1})}
    for in_place in (False, True):
        with pytest.raises(st.TreeMismatch, match="at w"):
            st.load(path, like, in_place=in_place)
        assert st.load(path, like, in_place=in_place, cast=True)["w"].inner.tolist() == [3.0, 3.0]
    with pytest.raises(st.TreeMismatch, match="leaf type differs at w"):
        st.load(path, {"w": Wrapping(like["w"].inner, {"a": 1, "b": 3})}, cast=True)
    kinds = [
        {"w": Wrapping(torch.ones(2, dtype=dtype), [dtype, torch.int8])} for dtype in (torch.float32, torch.bfloat16)
    ]
    with warnings.catch_warnings(action="ignore"):
        st.save(kinds[0], tmp_path / "kinds")
        st.save({"w": Wrapping(torch.ones(2), [torch.bfloat16])}, tmp_path / "others")
    assert st.load(tmp_path / "kinds", kinds[1], cast=True)["w"].inner.dtype == torch.bfloat16
    same = {"w": Wrapping(torch.ones(2, dtype=torch.bfloat16), [torch.bfloat16])}
    assert st.load(tmp_path / "others", same, cast=True)["w"].inner.dtype == torch.bfloat16
    with pytest.raises(st.TreeMismatch, match="leaf type differs at w"):
        st.load(tmp_path / "kinds", {"w": Wrapping(torch.ones(2), [torch.float32, torch.uint8])}, cast=True)


def test_a_wrapper_of_a_sparse_tensor_is_not_loaded_as_that(tmp_path):
    path, tree = tmp_path / "saved", {"w": Wrapping(Wrapping(PAIRS["shape"][0]))}
    with pytest.warns(UserWarning, match=r"w\.inner: a leaf Wrapping"):
        st.save(tree, path)
    with pytest.raises(st.StateTreeError, match="like="):
        st.load(path)
    assert st.similarity(st.load(path, st.offload(tree)), tree)


def local_scales(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([2]), (1,), torch.float32))
    local = [Wrapping(torch.ones(2), scale) for scale in (0.5, 1.0, 0.5)]
    new, base, same = ({"w": DTensor(tensor, spec, requires_grad=False)} for tensor in local)
    assert not st.similarity(new, base)
    assert st.similarity(new, same)
    with pytest.raises(st.TreeMismatch, match="metadata differs at w"):
        st.copy_into(new, base)
    st.copy_into(new, same)
    held = [distribute_tensor(torch.ones(2, 2), mesh, [kind]) for kind in (Shard(0), Shard(1))]
    assert not st.similarity({"o": Holder(held[0])}, {"o": Holder(held[1])})
    saved_as(directory / "saved", new, {"w": DTensor(Wrapping(torch.zeros(2), 1.0), spec, requires_grad=False)}, same)
    nested = [Wrapping(Wrapping(torch.ones(2), scale)) for scale in (0.5, 1.0, 0.5)]
    saved_as(directory / "nested", *({"w": DTensor(tensor, spec, requires_grad=False)} for tensor in nested))


def test_local_tensors_differ_if_the_wrappers_do(tmp_path):
    run_ranks(1, local_scales, tmp_path)
