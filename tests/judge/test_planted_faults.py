"""The judge of all other tests, judged: it must notice every one of a list of planted faults."""

import copy
import dataclasses
import functools
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.judge import assert_trees_equal, tree_differences
from tests.trees import Ramp
from tests.trees.classes import SlottedSubclass, TwoTensors, Unflattened, subclassed
from tests.trees.containers import (
    DictWithAttributes,
    ListWithAttributes,
    ListWithSlots,
    Point,
    TypedPoint,
)
from tests.trees.corpus import Color, Held
from tests.trees.fields import Failure, Frozen, Slotted, State

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # said once

FAULTS = []
KEPT = []  # what is referred to weakly


def fault(make):
    """Add a function that returns two trees which are not the same."""
    FAULTS.append(pytest.param(make, id=make.__name__))
    return make


class Named:
    """Is pickled by its name alone."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


def values(*shape, dtype=torch.float32):
    return Ramp()(*shape, dtype=dtype)


@fault
def key_order():
    return {"a": 1, "b": 2}, {"b": 2, "a": 1}


@fault
def key_order_of_an_ordered_dict_alone():
    left, right = OrderedDict(a=1, b=2), OrderedDict(a=1, b=2)
    right.move_to_end("a")
    return left, right


@fault
def key_missing():
    return {"a": 1, "b": 2}, {"a": 1}


@fault
def key_type():
    return {1: "x"}, {True: "x"}


@fault
def key_sign():
    return {0.0: 1}, {-0.0: 1}


@fault
def type_inside_a_key():
    return {(1, "a"): 2}, {(1.0, "a"): 2}


@fault
def container_type():
    return OrderedDict(a=1), {"a": 1}


@fault
def subclass_lost():
    return [ListWithAttributes([1])], [[1]]


@fault
def tuple_turned_into_list():
    return {"a": (1, 2)}, {"a": [1, 2]}


@fault
def namedtuple_turned_into_another():
    return Point(1, 2), TypedPoint(1, 2)


@fault
def item_lost():
    return [1, 2, 3], [1, 2]


@fault
def items_swapped():
    return deque([1, 2]), deque([2, 1])


@fault
def metadata_dropped():
    left = OrderedDict(a=1)
    left._metadata = {"": {"version": 1}}
    return left, OrderedDict(a=1)


@fault
def metadata_changed():
    left, right = OrderedDict(a=1), OrderedDict(a=1)
    left._metadata, right._metadata = {"": {"version": 1}}, {"": {"version": True}}
    return left, right


@fault
def default_factory():
    return defaultdict(list), defaultdict(dict)


@fault
def maxlen():
    return deque([1], 2), deque([1], 3)


@fault
def counter_turned_into_dict():
    return Counter("ab"), {"a": 1, "b": 1}


@fault
def attribute_added():
    right = DictWithAttributes(a=1)
    right.extra = None
    return DictWithAttributes(a=1), right


@fault
def slot_unset():
    left, right = ListWithSlots([1]), ListWithSlots([1])
    left.extra = 1
    return left, right


@fault
def field_changed():
    return Frozen(1, State(2, 3)), Frozen(1, State(2, 4))


@fault
def field_unset():
    right = Slotted(1, 2)
    del right.inner
    return Slotted(1, 2), right


@fault
def none_vanished():
    return [None, 1], [1]


@fault
def number_type():
    return [1], [1.0]


@fault
def bool_for_int():
    return [1], [True]


@fault
def sign_of_zero():
    return [0.0], [-0.0]


@fault
def nan_lost():
    return [float("nan")], [0.0]


@fault
def enum_for_its_value():
    return [Color.RED], ["red"]


@fault
def function_copied():
    code = tree_differences.__code__
    return [tree_differences], [types.FunctionType(code, tree_differences.__globals__, "differences")]


@fault
def one_byte_flipped():
    right = values(4)
    right.view(torch.uint8)[13] ^= 1
    return [values(4)], [right]


@fault
def nan_payload():
    left, right = (torch.tensor([0x7FC00000 + n], dtype=torch.int32).view(torch.float32) for n in (1, 2))
    return [left], [right]


@fault
def zero_bit_pattern():
    return [torch.tensor([0.0])], [torch.tensor([-0.0])]


@fault
def dtype_of_the_same_bytes():
    return [values(4)], [values(4).view(torch.int32)]


@fault
def dtype_of_nothing():
    return [torch.empty(0)], [torch.empty(0, dtype=torch.float64)]


@fault
def shape():
    return [values(2, 3)], [values(6)]


@fault
def shape_of_nothing():
    return [torch.empty(0, 2)], [torch.empty(0, 3)]


@fault
def scalar_turned_into_vector():
    return [values()], [values(1)]


@fault
def stride_lost():
    return [values(2, 3).t()], [values(2, 3).t().contiguous()]


@fault
def memory_format_lost():
    left = values(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [left], [left.contiguous()]


@fault
def expansion_lost():
    return [values(1).expand(3)], [values(1).expand(3).contiguous()]


@fault
def stride_of_size_one():
    return [values(4).as_strided((1, 4), (9, 1))], [values(4).as_strided((1, 4), (4, 1))]


@fault
def conj_bit_cleared():
    left = values(3, dtype=torch.complex64)
    return [left.conj()], [left.conj().resolve_conj()]


@fault
def conj_bit_cleared_and_bytes_kept():
    left = values(3, dtype=torch.complex64)
    return [left.conj()], [left.clone()]


@fault
def neg_bit_cleared():
    return [torch._neg_view(values(3))], [-values(3)]


@fault
def requires_grad_lost():
    return [values(3).requires_grad_()], [values(3)]


@fault
def parameter_turned_into_tensor():
    return [torch.nn.Parameter(values(3), requires_grad=False)], [values(3)]


@fault
def tensor_subclass_lost():
    return [subclassed(SlottedSubclass, values(3))], [values(3)]


@fault
def tensor_attribute_lost():
    left = values(3)
    left.note = "note"
    return [left], [values(3)]


@fault
def tensor_in_a_slot_changed():
    left, right = (subclassed(SlottedSubclass, values(3)) for _ in range(2))
    left.note, right.note = values(2), values(2) + 1
    return [left], [right]


@fault
def moved_to_meta():
    return [values(3)], [values(3).to("meta")]


@fault
def tie_broken():
    base = values(4)
    return [base, base[1:]], [values(4), values(4)[1:]]


@fault
def tie_of_one_object_broken():
    base = values(4)
    return [base, base], [values(4), values(4)]


@fault
def one_object_turned_into_two_on_one_storage():
    left, right = values(4), values(4)
    return [left, left], [right, right.view(4)]


@fault
def tie_made():
    return [torch.zeros(2), torch.zeros(2)], [torch.zeros(2)] * 2


@fault
def storage_shared_without_overlap():
    base = values(6)
    return [base[:2], base[3:]], [base[:2].clone(), base[3:].clone()]


@fault
def overlap_shifted():
    left, right = torch.zeros(6), torch.zeros(6)
    return [left[:4], left[2:]], [right[:4], right[1:5]]


@fault
def gap_closed():
    left, right = torch.zeros(6), torch.zeros(6)
    return [left[:2], left[4:]], [right[:2], right[2:4]]


@fault
def tie_of_meta_tensors_broken():
    left, right = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    return [left, left[1:]], [right, torch.empty(3, device="meta")]


@fault
def tie_of_fake_tensors_broken():
    with FakeTensorMode():
        left, right = torch.empty(4), torch.empty(4)
        return [left, left[1:]], [right, torch.empty(3)]


@fault
def tie_into_an_object_broken():
    left, right = Held(), Held()
    left.tensor, right.tensor = values(2), values(2)
    return [left, left.tensor[1:]], [right, right.tensor[1:].clone()]


@fault
def tie_with_a_storage_broken():
    left, right = values(2), values(2)
    return [left, left.untyped_storage()], [right, right.untyped_storage().clone()]


@fault
def storage_bytes():
    return [torch.UntypedStorage([1, 2])], [torch.UntypedStorage([1, 3])]


def coo(numbers, *, coalesced=False):
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.tensor(numbers), (3,), is_coalesced=coalesced, check_invariants=False
    )


@fault
def sparse_value():
    return [coo([1.0, 2.0])], [coo([1.0, 3.0])]


@fault
def sparse_coalesced():
    return [coo([1.0, 2.0])], [coo([1.0, 2.0], coalesced=True)]


@fault
def sparse_layout():
    dense = torch.eye(3)
    return [dense.to_sparse_csr()], [dense.to_sparse_csc()]


@fault
def value_of_another_layout():
    return [values(3, 3).to_mkldnn()], [(values(3, 3) + 1).to_mkldnn()]


@fault
def sparse_explicit_zero():
    return [coo([1.0, 0.0])], [torch.tensor([1.0, 0.0, 0.0]).to_sparse()]


@fault
def nested_sizes():
    left = torch.nested.nested_tensor([values(2), values(1)])
    return [left], [torch.nested.nested_tensor([values(1), torch.tensor([2.0, 1.0])])]


@fault
def jagged_offsets():
    jagged = torch.nested.nested_tensor_from_jagged
    return [jagged(values(4), torch.tensor([0, 1, 4]))], [jagged(values(4), torch.tensor([0, 2, 4]))]


@fault
def quantized_scale():
    left, right = (torch._make_per_tensor_quantized_tensor(values(3).to(torch.int8), scale, 0) for scale in (0.5, 1.0))
    return [left], [right]


@fault
def wrapper_inner():
    return [TwoTensors(values(2), values(2))], [TwoTensors(values(2), values(2) + 1)]


@fault
def wrapper_context():
    return [TwoTensors(values(2), values(2), [1])], [TwoTensors(values(2), values(2), [2])]


@fault
def wrapper_tie():
    left, right = values(2), values(2)
    return [TwoTensors(left, left)], [TwoTensors(right, right.clone())]


@fault
def tensor_below_a_wrapper_without_memory():
    return [Unflattened(values(2))], [Unflattened(values(2) + 1)]


@fault
def shape_of_a_wrapper_without_memory():
    left, right = Unflattened(values(2)), Unflattened(values(1))
    right.inner = values(2)
    return [left], [right]


@fault
def array_element():
    return [np.array([1.0, 2.0])], [np.array([1.0, 3.0])]


@fault
def array_dtype():
    return [np.zeros(2, "i4")], [np.zeros(2, "f4")]


@fault
def set_element():
    return [{1, 2}], [{1, 3}]


@fault
def set_element_type():
    return [{1, 2}], [{True, 2}]


@fault
def set_of_others_than_the_list():
    tensors = [torch.full((2,), at % 2) for at in range(4)]
    return [set(tensors[:2]), tensors[:2]], [set(tensors[:2]), tensors[2:]]


@fault
def set_of_others_than_the_other_set():
    tensors = [torch.full((2,), at % 2) for at in range(4)]
    return [set(tensors[:2]), set(tensors[:2])], [set(tensors[:2]), set(tensors[1:3])]


@fault
def object_attribute():
    left, right = Held(), Held()
    left.deep, right.deep = [{"a": 1}], [{"a": 2}]
    return {"held": left}, {"held": right}


@fault
def object_in_a_circle():
    left, right = Held(), Held()
    left.me, left.number, right.me, right.number = left, 1, right, 2
    return [left], [right]


@fault
def partial_argument():
    return [functools.partial(len, values(2))], [functools.partial(len, values(2) + 1)]


@fault
def generator_state():
    return [torch.Generator().manual_seed(1)], [torch.Generator().manual_seed(2)]


@fault
def module_weight():
    left = torch.nn.Linear(2, 2)
    right = copy.deepcopy(left)
    right.weight.data[1, 1] += 1
    return [left], [right]


@fault
def optimizer_state():
    module = torch.nn.Linear(2, 2)
    left = torch.optim.SGD(module.parameters(), lr=0.1)
    right = copy.deepcopy(left)
    right.param_groups[0]["lr"] = 0.2
    return [left], [right]


@fault
def weak_referent():
    left, right = Held(), Held()
    KEPT.extend([left, right])
    return [weakref.ref(left)], [weakref.ref(right)]


@fault
def set_size():
    return [{1, 2}], [{1, 2, 3}]


@fault
def object_that_reduces_to_a_name():
    return [Named("a")], [Named("b")]


@fault
def object_that_cannot_be_looked_into():
    return [threading.Lock()], [threading.Lock()]


@fault
def fake_mode():
    left, right = FakeTensorMode(), FakeTensorMode()
    return [left.from_tensor(values(2))], [right.from_tensor(values(2))]


@fault
def freed_storage():
    left, right = values(2), values(2)
    right.untyped_storage().resize_(0)
    return [left], [right]


@fault
def nested_number():
    left, right = ([values(1) for _ in range(count)] for count in (1, 2))
    return [torch.nested.nested_tensor(left)], [torch.nested.nested_tensor(right)]


@fault
def slice_bounds():
    return [slice(0, 1)], [slice(0, True)]


@fault
def sign_in_a_slice():
    return [slice(0.0, 1)], [slice(-0.0, 1)]


@fault
def range_of_the_same_numbers():
    return [range(0, 3, 2)], [range(0, 4, 2)]


@fault
def bytes_of_a_bytearray():
    return [bytearray(b"a")], [bytearray(b"b")]


@fault
def bytearray_turned_into_bytes():
    return [bytearray(b"a")], [b"a"]


@dataclasses.dataclass(init=False)
class FloatData(float):
    note: int = 0


@dataclasses.dataclass(init=False)
class BytesData(bytearray):
    note: int = 0


@fault
def number_below_a_dataclass():
    return [FloatData(1.0)], [FloatData(2.0)]


@fault
def bytes_below_a_dataclass():
    return [BytesData(b"a")], [BytesData(b"b")]


@fault
def arguments_of_a_dataclass_that_is_an_error():
    left, right = Failure("text"), Failure("text")
    right.args = ("other",)
    return [left], [right]


@fault
def order_of_an_array():
    left = np.arange(4.0).reshape(2, 2).T
    return [left], [np.ascontiguousarray(left)]


@fault
def mask_of_an_array():
    return [np.ma.array([1, 2], mask=[0, 1])], [np.ma.array([1, 2], mask=[0, 0])]


@fault
def masked_value_of_an_array():
    return [np.ma.array([1, 2], mask=[0, 1])], [np.ma.array([1, 3], mask=[0, 1])]


class NotedArray(np.ndarray):
    """An array with attributes."""


@fault
def attribute_of_an_array():
    left, right = (np.zeros(2).view(NotedArray) for _ in range(2))
    left.note, right.note = 1, True
    return [left], [right]


@fault
def object_in_an_array():
    return [np.array([1, None], dtype=object)], [np.array([True, None], dtype=object)]


@fault
def item_of_a_read_only_mapping():
    return [types.MappingProxyType({"a": 1})], [types.MappingProxyType({"a": True})]


@fault
def bytes_of_a_memoryview():
    return [memoryview(b"ab")], [memoryview(b"ac")]


@fault
def shape_of_a_memoryview():
    return [memoryview(b"abcd")], [memoryview(b"abcd").cast("B", (2, 2))]


@fault
def gap_opened():
    left, right = torch.zeros(6), torch.zeros(3 << 20)
    return [left[:2], left[4:]], [right[:2], right[-2:]]


@fault
def gap_moved_far_away():
    left, right = torch.zeros(3 << 20), torch.zeros(3 << 20)
    return [left[:2], left[2:4], left[-2:]], [right[:2], right[-4:-2], right[-2:]]


def wrapper_with(name):
    """Return two wrappers with different values in an attribute that torch's own classes keep for themselves."""
    left, right = (TwoTensors(values(2), values(2)) for _ in range(2))
    setattr(left, name, 1)
    setattr(right, name, 2)
    return [left], [right]


FAULTS += [
    pytest.param(functools.partial(wrapper_with, own), id=f"wrapper_attribute{own}")
    for own in ("_spec", "_size", "_strides", "_metadata_cache", "_ragged_idx", "_sym_sizes", "_dynamo_note")
]


@fault
def jagged_attribute():
    left, right = (torch.nested.nested_tensor_from_jagged(values(4), torch.tensor([0, 1, 4])) for _ in range(2))
    left.note, right.note = 1, True
    return [left], [right]


@pytest.mark.parametrize("make", FAULTS)
def test_a_planted_fault_is_noticed(make):
    left, right = make()
    with pytest.raises(AssertionError, match="the trees differ in"):
        assert_trees_equal(left, right)
    with pytest.raises(AssertionError, match="the trees differ in"):
        assert_trees_equal(right, left)


def test_there_are_enough_faults():
    assert len(FAULTS) >= 100


@pytest.mark.usefixtures("one_rank_group")
def test_another_mesh_is_noticed():
    meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in "ab"]
    left, right = ([DTensor.from_local(values(2), mesh, [Replicate()])] for mesh in meshes)
    assert_trees_equal(left, left)
    with pytest.raises(AssertionError, match=r"mesh differs at 0"):
        assert_trees_equal(left, right)


def test_bits_are_compared_on_the_cpu(monkeypatch):
    """Trees may lie on different devices: without a GPU, all that can be seen is that both sides are brought."""
    brought, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: brought.append(tensor) or cpu(tensor))
    assert_trees_equal([values(3)], [values(3)])
    assert len(brought) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_faults_are_noticed_across_devices():
    right = values(3).cuda()
    for one, other in (([values(3)], [right]), ([right], [values(3)])):
        assert_trees_equal(one, other)
        with pytest.raises(AssertionError, match=r"device differs at 0"):
            assert_trees_equal(one, other, device=True)
    right[1] = 7
    for one, other in (([values(3)], [right]), ([right], [values(3)])):
        with pytest.raises(AssertionError, match=r"elements differ at 0, 1 of 3, the first at index \(1,\)"):
            assert_trees_equal(one, other)


@pytest.mark.parametrize("device", [False, True])
def test_meta_tensors_are_told_from_real_ones_and_compared_by_geometry(device):
    assert_trees_equal([values(3).to("meta")], [values(3).to("meta")], device=device)
    for one, other in (([values(3)], [values(3).to("meta")]), ([values(3).to("meta")], [values(3)])):
        with pytest.raises(AssertionError, match=r"is_meta differs at 0"):
            assert_trees_equal(one, other, device=device)
