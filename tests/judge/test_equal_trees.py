"""No false alarms: trees that are equal by construction are accepted by every assertion, in both orders."""

import array
import copy
import dataclasses
import datetime
import decimal
import functools
import io
import random
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import statetree as st
from tests.judge import assert_independent, assert_trees_equal, tree_differences
from tests.trees import Ramp
from tests.trees.classes import SlottedSubclass, TwoTensors, Unflattened, subclassed
from tests.trees.containers import DictWithAttributes, ListWithSlots, Point
from tests.trees.corpus import Held
from tests.trees.fields import Defined, Failure, Frozen, Slotted, State

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # said once

EQUALS = []
FAKE = FakeTensorMode()
FAR = 3 << 20


def equal(make):
    """Add a function that returns one and the same tree, made anew by every call."""
    EQUALS.append(pytest.param(make, id=make.__name__))
    return make


def values(*shape, dtype=torch.float32):
    return Ramp()(*shape, dtype=dtype)


def number(bits):
    return torch.tensor([bits]).view(torch.float64).item()


@equal
def empty_containers():
    return [{}, [], (), deque(), set(), OrderedDict(), None]


@equal
def keys_of_many_types():
    return {1: 0, "1": 1, 1.5: 2, (1, "a"): 3, None: 4, float("nan"): 5, b"1": 6, frozenset({1}): 7}


@equal
def bool_and_int_keys():
    return [{True: 1}, {1: 1}]


@equal
def metadata():
    tree = OrderedDict(a=1)
    tree._metadata = OrderedDict({"": {"version": 1}})
    return tree


@equal
def defaults_and_counts():
    return [defaultdict(list, a=[1]), Counter("aab"), deque([1, True], 3)]


@equal
def subclasses_with_attributes():
    tree, slotted = DictWithAttributes(a=1), ListWithSlots([1])
    tree.extra, slotted.extra = [values(2)], 1.5
    return [tree, slotted, Point(1, 2)]


@equal
def dataclasses_and_attrs():
    return [State(values(2), 1), Frozen(1, Slotted(2, 3)), Defined(values(1), None)]


@equal
def dataclass_that_is_an_error():
    error = Failure("text")
    error.args = ("text", 1)
    return [error]


@equal
def a_list_in_itself():
    tree = [1]
    tree.append({"again": tree})
    return tree


@equal
def objects_in_a_circle():
    first, second = Held(), Held()
    first.other, second.other, first.tensor = second, first, values(2)
    return [first, second]


@equal
def containers_that_occur_twice():
    shared = [values(2)]
    return {"a": shared, "b": (shared, shared)}


@equal
def numbers():
    return [True, 1, 1.0, -0.0, 1j, complex(-0.0, float("nan")), 1 << 100, float("inf")]


@equal
def payloads_of_nan():
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    return [bits.view(torch.float32), number(0x7FF8000000000001), float("nan"), np.array([np.nan, 1.0])]


@equal
def slices_and_ranges():
    return [slice(0, 1), slice(-0.0, None, values(1)), range(0, 4, 2)]


@equal
def sets():
    return [{1, "a", None, (1.0, "b")}, frozenset({float("nan"), 2})]


@equal
def sets_of_equal_tensors():
    """In the order of their addresses, so that their places in the set say nothing."""
    tensors = [torch.nn.Parameter(torch.zeros(2)) for _ in range(12)]
    held = [Held() for _ in tensors]
    for one, tensor in zip(held, tensors, strict=True):
        one.tensor = tensor
    return {"before": set(tensors), "listed": tensors, "after": {*tensors[:5]}, "inside": [{*held}, {*held[:4]}]}


@equal
def sets_of_equal_tensors_that_are_nowhere_else():
    tensors = [torch.zeros(2) for _ in range(12)]
    return [set(tensors), set(tensors[:8]), {(tensor,) for tensor in tensors}, frozenset(tensors[6:])]


@equal
def library_objects():
    return [
        datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        decimal.Decimal("1.50"),
        types.SimpleNamespace(tensor=values(2)),
        UserDict(a=values(1)),
        ChainMap({1: 2}, {3: 4}),
        io.BytesIO(b"a"),
        functools.partial(len, values(2), a=1),
        iter([1, 2]),
        ValueError("text", 1),
    ]


@equal
def random_numbers():
    return [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]


@equal
def buffers():
    return [bytearray(b"a"), array.array("d", [1.0]), memoryview(b"abc"), memoryview(bytearray(b"abc"))[::2]]


@equal
def read_only_mapping():
    return [types.MappingProxyType({"a": values(2)})]


@equal
def module_and_optimizer():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    return [module, torch.optim.Adam(module.parameters(), lr=0.1)]


@equal
def arrays():
    return [
        *(np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2)), np.array(1.0)),
        np.array(["2020"], dtype="M8[s]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.float32("nan"),
        np.dtype("i4"),
    ]


@equal
def arrays_of_objects():
    held = np.empty(3, dtype=object)
    held[:] = [float("nan"), {"a": 1}, values(2)]
    return [held]


@equal
def masked_arrays():
    return [np.ma.array([1, 2], mask=[0, 1])]


@equal
def tensors_of_every_width():
    dtypes = (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn)
    return [values(3, dtype=dtype) for dtype in dtypes]


@equal
def tensors_without_elements():
    return [torch.empty(0), torch.empty(0, 3), torch.empty_strided((0, 3), (7, 1))]


@equal
def views_of_something_larger():
    base = values(100)
    return [base[10:20], base[5:15], base[0:10], base[50:50]]


@equal
def expanded():
    return [values(1).expand(4), values(2, 1).expand(2, 3), values(6).unfold(0, 3, 1)]


@equal
def permuted():
    return [values(2, 3).t(), values(1, 2, 3, 4).to(memory_format=torch.channels_last), values(2, 4)[:, ::2]]


@equal
def conjugated_and_negated():
    return [values(2, dtype=torch.complex64).conj(), torch._neg_view(values(2)), values(2, dtype=torch.complex64).imag]


@equal
def parameters():
    weight = torch.nn.Parameter(values(2))
    return [weight, weight, torch.nn.Buffer(values(3)), torch.nn.Parameter(values(1), requires_grad=False)]


@equal
def gradients():
    weight = torch.nn.Parameter(values(2))
    weight.grad = values(2)
    return [weight]


@equal
def tensors_with_attributes():
    noted, slotted = values(2), subclassed(SlottedSubclass, values(3))
    noted.note = noted[:1]
    slotted.note = values(1)
    return [noted, slotted]


@equal
def storages():
    base = values(4)
    return [base, base.untyped_storage(), base.view(torch.int32)[1:]]


@equal
def meta():
    base = torch.empty(4, 2, device="meta")
    return [base, base[1:], torch.empty(0, device="meta")]


@equal
def fake():
    tensor = FAKE.from_tensor(values(2))
    with FAKE:
        return [tensor, tensor[1:]]


@equal
def sparse():
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), values(2), (3,), check_invariants=False)
    return [coo, coo.coalesce(), torch.eye(3).to_sparse_csr(), torch.eye(4).to_sparse_bsc((2, 2))]


@equal
def of_another_layout():
    return [values(3, 3).to_mkldnn() for _ in range(4)]


@equal
def nested():
    return [torch.nested.nested_tensor([values(2), values(1)])]


@equal
def jagged():
    tensor = torch.nested.nested_tensor_from_jagged(values(4), torch.tensor([0, 1, 4]))
    tensor.note = 1
    return [tensor, tensor.values()]


@equal
def quantized():
    whole = values(2, 2).to(torch.int8)
    scales, zeros = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0, 1])
    return [
        torch._make_per_tensor_quantized_tensor(whole, 0.5, 1),
        torch._make_per_channel_quantized_tensor(whole, scales, zeros, 0),
    ]


@equal
def wrappers():
    inner = values(2)
    return [TwoTensors(inner, inner), TwoTensors(values(1), values(1), [1, {"a": 2}]), Unflattened(inner)]


@equal
def freed():
    tensor = values(2)
    tensor.untyped_storage().resize_(0)
    return [tensor]


@equal
def uninitialized():
    return [torch.nn.UninitializedParameter()]


def asked(tree):
    """Ask every tensor for what torch caches."""
    for tensor in tree:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.jagged:
            assert tensor.max() is not None
            tensor.unbind(), tensor.values().sum(), repr(tensor.shape)
    return tree


@pytest.mark.parametrize("make", EQUALS)
def test_equal_trees_are_accepted(make):
    left, right = make(), make()
    for options in ({}, {"containers": True}, {"strides": False}, {"storages": False}, {"device": True}):
        assert_trees_equal(left, right, **options)
        assert_trees_equal(right, left, **options)
        assert_trees_equal(left, left, **options)
    asked(left) if make is jagged else None
    assert_trees_equal(left, right)
    assert_trees_equal(right, left)


@pytest.mark.parametrize("make", EQUALS)
def test_trees_made_twice_are_independent(make):
    left, right = make(), make()
    assert_independent(left, right)
    assert_independent(right, left)


def far_apart(kind=torch.float32):
    big = torch.arange(FAR, dtype=kind)
    return [big[:10], big[-10:]]


COMPACT = {
    "a view of something larger": lambda: [values(100)[40:50]],
    "views that overlap": lambda: (lambda base: [base[20:40], base[30:50]])(values(100)),
    "views with a gap": lambda: (lambda base: [base[20:22], base[90:]])(values(100)),
    "views more than a mebibyte apart": far_apart,
    "three views with a wide gap": lambda: (lambda pair: [pair[1], pair[0], pair[1][2:]])(far_apart()),
    "nothing beside a wide gap": lambda: (lambda pair: [*pair, pair[0][:0]])(far_apart()),
}


@pytest.mark.parametrize("make", COMPACT.values(), ids=COMPACT)
def test_compact_copies_are_accepted_on_either_side(make):
    source = make()
    copied = st.offload(source)
    assert tree_differences(source, copied) == []
    assert tree_differences(copied, source) == []


@pytest.mark.usefixtures("one_rank_group")
def test_equal_distributed_tensors_are_accepted():
    mesh = init_device_mesh("cpu", (1,))

    def make():
        return [DTensor.from_local(values(4), mesh, [Replicate()]), torch.nn.Parameter(values(1))]

    left, right = make(), make()
    assert left[0].sum() is not None
    assert_trees_equal(left, right, containers=True)
    assert_trees_equal(right, left, containers=True)
    assert_independent(left, right)


@pytest.mark.usefixtures("one_rank_group")
def test_a_mesh_and_its_copy_are_accepted_whatever_torch_notes_on_one():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "columns"))
    copied = copy.deepcopy(mesh)
    assert_trees_equal([mesh], [copied])
    hash(mesh), mesh._flatten("all")
    assert_trees_equal([mesh], [copied])


def test_equal_frozensets_may_be_one_object_on_one_side():
    key = frozenset({1})
    assert_trees_equal([{key: 0}, {key: 1}], [{frozenset([1]): 0}, {frozenset([1]): 1}], containers=True)


def test_a_module_that_refuses_to_be_pickled_is_compared_by_its_attributes():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    copied = copy.deepcopy(module)
    assert_trees_equal([module], [copied])
    with torch.no_grad():
        copied.bias.add_(1)
    (line,) = tree_differences([module], [copied])
    assert line.startswith("elements differ at 0._parameters.bias, 2 of 2")


def test_a_dataclass_that_cannot_be_pickled_is_compared_by_its_fields():
    @dataclasses.dataclass
    class Local:
        fn: object

        def __reduce_ex__(self, protocol):
            raise TypeError("no")

    assert_trees_equal([Local(len)], [Local(len)])
