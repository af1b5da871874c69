"""What ``assert_independent`` must notice: planted pairs of trees that have something in common."""

import copy
import itertools
import logging
import random
import sys
from array import array
from collections import OrderedDict, UserDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import statetree as st
from tests.judge import assert_independent
from tests.trees import DISTRIBUTED_TREES, TREES, Ramp
from tests.trees.classes import TwoTensors, Unflattened
from tests.trees.containers import ListWithAttributes
from tests.trees.corpus import Color, Held
from tests.trees.fields import Defined, Failure, Frozen, Slotted, State

pytestmark = [  # torch says these once
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

MEMORY, OBJECTS, HISTORY, ALLOWED = {}, {}, {}, {}


def planted(into):
    """Add a function that returns two trees."""

    def add(make):
        into[make.__name__] = make
        return make

    return add


def values(*shape, dtype=torch.float32):
    return Ramp()(*shape, dtype=dtype)


def held(**attributes):
    result = Held()
    vars(result).update(attributes)
    return result


def with_attribute(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


# Memory: noticed with containers=False, too


@planted(MEMORY)
def one_tensor():
    base = values(4)
    return [base], {"a": base}


@planted(MEMORY)
def a_view():
    base = values(4)
    return [base], [base[2:]]


@planted(MEMORY)
def views_that_do_not_overlap():
    base = values(4)
    return [base[:2]], [base[2:]]


@planted(MEMORY)
def a_view_without_elements():
    base = values(4)
    return [base[:0]], [base[2:]]


@planted(MEMORY)
def detached():
    base = torch.nn.Parameter(values(4))
    return [base], [base.detach()]


@planted(MEMORY)
def a_storage():
    base = values(4)
    return [base.untyped_storage()], [base]


@planted(MEMORY)
def a_tensor_in_an_object():
    base = values(4)
    return [held(deep=[base])], [base]


@planted(MEMORY)
def a_tensor_below_wrappers_without_memory():
    base = values(4)
    return [Unflattened(base)], [Unflattened(base)]


@planted(MEMORY)
def a_tensor_in_an_attribute():
    base = values(4)
    return [with_attribute(values(1), note=base)], [base[1:]]


@planted(MEMORY)
def a_tensor_as_a_key():
    base = values(4)
    return {base: 1}, [base]


@planted(MEMORY)
def a_tensor_in_a_partial():
    base = values(4)
    return [partial(print, base)], [base]


@planted(MEMORY)
def a_tensor_in_an_array():
    base = values(4)
    return [np.array([base, None], dtype=object)], [base]


@planted(MEMORY)
def a_tensor_in_a_default_factory():
    base = values(4)
    return [defaultdict(partial(values, base))], [base]


@planted(MEMORY)
def a_tensor_in_metadata():
    base, tree = values(4), OrderedDict(a=1)
    tree._metadata = {"": base}
    return tree, [base]


class Forgetful:
    """Leaves what it holds out of what pickle takes."""

    def __getstate__(self):
        return {}


class Rebuilt(Forgetful):
    """Leaves it out, too."""

    def __reduce__(self):
        return Rebuilt, ()


@planted(MEMORY)
def a_tensor_that_pickle_leaves_out():
    left, right = Forgetful(), Rebuilt()
    left.cached, right.cached = [values(4)], Forgetful()
    right.cached.deep = left.cached[0][1:]
    return [left], [right]


@planted(MEMORY)
def a_gradient_that_pickle_leaves_out():
    left = Rebuilt()
    left.me, left.cached = left, with_attribute(values(4).requires_grad_(), grad=values(4))
    return [left], [left.cached.grad]


@planted(MEMORY)
def a_gradient():
    base = values(4)
    return [with_attribute(values(4).requires_grad_(), grad=base)], [base]


@planted(MEMORY)
def gradients_on_one_storage():
    base = values(4)
    return tuple([with_attribute(values(2).requires_grad_(), grad=half)] for half in (base[:2], base[2:]))


@planted(MEMORY)
def a_gradient_in_an_object():
    base = values(4)
    return [held(deep=[with_attribute(values(4).requires_grad_(), grad=base)])], [base]


@planted(MEMORY)
def sparse_values():
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values(2), (3,), check_invariants=False)
    return [tensor], [tensor._values()]


@planted(MEMORY)
def offsets():
    tensor = torch.nested.nested_tensor_from_jagged(values(4), torch.tensor([0, 1, 4]))
    return [tensor], [tensor.offsets()]


@planted(MEMORY)
def scales():
    numbers, zeros = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0, 1])
    tensor = torch._make_per_channel_quantized_tensor(values(2, 2).to(torch.int8), numbers, zeros, 0)
    return [tensor], [tensor.q_per_channel_scales()]


@planted(MEMORY)
def an_inner_tensor():
    base = values(4)
    return [TwoTensors(values(4), base)], [base]


@planted(MEMORY)
def meta_tensors_on_one_storage():
    base = torch.empty(4, device="meta")
    return [base], [base[1:]]


@planted(MEMORY)
def memory_of_numpy():
    base = values(4)
    return [base], [torch.from_numpy(base.numpy())]


@planted(MEMORY)
def an_array_on_a_tensor():
    base = values(4)
    return [base], [base.numpy()[3:]]


@planted(MEMORY)
def one_array():
    numbers = np.arange(4.0)
    return [numbers], [numbers]


@planted(MEMORY)
def arrays_that_overlap():
    numbers = np.arange(4.0)
    return [numbers[:3]], [numbers[2:]]


@planted(MEMORY)
def a_long_array_over_short_ones():
    numbers = np.arange(9.0)
    return [numbers[:2], torch.from_numpy(numbers), numbers[4:5]], [numbers[7:]]


@planted(MEMORY)
def a_bytearray():
    memory = bytearray(b"abcd")
    return [memory], [memory]


@planted(MEMORY)
def a_tensor_on_a_bytearray():
    memory = bytearray(b"abcd")
    return [memory], [torch.frombuffer(memory, dtype=torch.uint8)]


@planted(MEMORY)
def a_tensor_on_an_array_of_the_library():
    memory = array("f", [1.0, 2.0])
    return [memory], [torch.frombuffer(memory, dtype=torch.float32)]


@planted(MEMORY)
def a_memoryview_of_a_tensor():
    base = values(4)
    return [memoryview(base.numpy())], [base]


@planted(MEMORY)
def memoryviews_of_a_bytearray():
    memory = bytearray(b"abcd")
    return [memoryview(memory)], [memoryview(memory).toreadonly()]


# Objects


def sharing(name, make):
    def both():
        made = make()
        return [made], {"a": (made,)}

    OBJECTS[name] = both


SHARED = {
    "a dict": lambda: {"a": 1},
    "an empty list": list,
    "an ordered dict": lambda: OrderedDict(a=1),
    "a deque": deque,
    "a set": lambda: {1},
    "a subclass of list": lambda: ListWithAttributes([1]),
    "a user dict": lambda: UserDict(a=1),
    "a dataclass": lambda: State(1),
    "a dataclass with slots": lambda: Slotted(1),
    "an attrs class": lambda: Defined(1),
    "a dataclass that is an error": lambda: Failure("text"),
    "an object": Held,
    "a namespace": lambda: SimpleNamespace(a=1),
    "an error": lambda: ValueError("text"),
    "a module": lambda: torch.nn.ReLU(),
    "a generator": torch.Generator,
    "a generator of NumPy": lambda: np.random.default_rng(0),
    "random numbers": lambda: random.Random(0),
    "an iterator": lambda: iter([1, 2]),
    "a partial": lambda: partial(print, 1),
    "an empty array": lambda: np.zeros(0),
    "a fake tensor": lambda: FakeTensorMode().from_tensor(values(2)),
    "a wrapper": lambda: TwoTensors(torch.empty(0), torch.empty(0)),
    "a list in a tuple": lambda: (1, [2]),
    "a list in a frozen dataclass": lambda: Frozen([1]),
}
for name, make in SHARED.items():
    sharing(name, make)


@planted(OBJECTS)
def metadata():
    left, right = OrderedDict(a=1), OrderedDict(a=1)
    left._metadata = right._metadata = {"": {}}
    return left, right


@planted(OBJECTS)
def a_list_in_an_object():
    shared = [1]
    return [held(a=shared)], [shared]


@planted(OBJECTS)
def a_list_in_an_attribute_of_a_tensor():
    shared = [1]
    return tuple([with_attribute(values(1), note=shared)] for _ in "ab")


@planted(OBJECTS)
def a_list_in_arrays():
    shared = [1]
    return tuple([np.array([shared, None], dtype=object)] for _ in "ab")


# What autograd has recorded: noticed with containers=False, too


@planted(HISTORY)
def a_leaf_of_autograd():
    base = values(4).requires_grad_()
    return [base], [base * 2]


@planted(HISTORY)
def an_operation_of_autograd():
    middle = values(4).requires_grad_().exp()
    return [middle + 1], {"a": middle.detach(), "b": (middle * 2).sum()}


# What may be in both


def allowing(name, shared):
    ALLOWED[name] = lambda: ([shared], {"a": shared})


IMMUTABLE = {
    "numbers": (1, 1.5, 1j, True, None, "text", b"bytes"),
    "a tuple": (1, ("a", 2)),
    "a frozen set": frozenset({1}),
    "a frozen dataclass": Frozen(1, "a"),
    "a function": assert_independent,
    "a class": Held,
    "an enum": Color.RED,
    "a python module": np,
    "values of torch": (torch.float32, torch.device("cpu"), torch.Size([1]), torch.finfo(torch.float32)),
    "a scalar of NumPy": np.float32(1),
}
for name, shared in IMMUTABLE.items():
    allowing(name, shared)


@planted(ALLOWED)
def clones():
    base = values(4)
    return [base], [base.clone()]


@planted(OBJECTS)
def a_retained_gradient():
    left, right = values(4).requires_grad_() * 2, values(4).requires_grad_() * 3
    left.retain_grad()
    left.sum().backward()
    right.held = left.grad
    return [left], [right]


@planted(ALLOWED)
def computed_with_gradients_apart():
    return [values(4).requires_grad_() * 2], [(values(4).requires_grad_() * 2).detach().requires_grad_()]


@planted(ALLOWED)
def a_logger():
    return [held(log=logging.getLogger("shared"))], copy.deepcopy([held(log=logging.getLogger("shared"))])


@planted(ALLOWED)
def tensors_without_elements():
    return [torch.empty(0)], [torch.empty(0)]


@planted(ALLOWED)
def meta_tensors():
    left, right = torch.empty(9, device="meta"), torch.empty(9, device="meta")
    return [left[1:]], [right[1:]]


@planted(ALLOWED)
def arrays_side_by_side():
    numbers = np.arange(6.0)
    return [numbers[:3]], [torch.from_numpy(numbers)[3:]]


@planted(ALLOWED)
def mixed_places_in_one_array():
    numbers = np.arange(9.0)
    return [numbers[:2], numbers[4:5]], [torch.from_numpy(numbers)[2:4], numbers[5:]]


@planted(ALLOWED)
def views_of_bytes():
    memory = b"abcd"
    return [memoryview(memory)], [memoryview(memory)]


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("containers", [True, False], ids=["objects", "memory"])
def test_shared_memory_is_noticed(make, containers):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=r"(?s)^assert_independent: .* lies (on the storage|in the memory) of"):
            assert_independent(one, other, containers=containers)


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_shared_objects_are_noticed(make):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=r"(?s)^assert_independent: .* is the object at"):
            assert_independent(one, other)


@pytest.mark.parametrize("make", HISTORY.values(), ids=HISTORY)
@pytest.mark.parametrize("containers", [True, False], ids=["objects", "memory"])
def test_shared_history_is_noticed(make, containers):
    left, right = make()
    for one, other in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match="has operations of autograd in common with"):
            assert_independent(one, other, containers=containers)


@pytest.mark.parametrize("make", ALLOWED.values(), ids=ALLOWED)
def test_what_nobody_can_change_may_be_in_both(make):
    left, right = make()
    assert_independent(left, right)
    assert_independent(right, left)


def test_objects_are_looked_at_only_if_asked_to():
    for name in ("a dict", "an object", "a list in a tuple"):
        assert_independent(*OBJECTS[name](), containers=False)


def staged(tree):
    with st.Stager() as stager:
        return stager.stage(tree)


@pytest.mark.parametrize("copied", [st.offload, staged])
@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.refused], ids=str)
def test_copies_are_independent(copied, tree):
    # Whether a class was registered as an atom is not for a judge to know that uses nothing of what it judges.
    source = tree.make()
    result = copied(source)
    containers = tree.name != "registered_as_leaf"
    assert_independent(source, result, containers=containers)
    assert_independent(result, source, containers=containers)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("copied", [st.offload, staged])
@pytest.mark.parametrize("tree", [tree for tree in DISTRIBUTED_TREES if not (tree.refused or tree.changes)], ids=str)
def test_copies_of_distributed_trees_are_independent(copied, tree):
    source = tree.make()
    containers = tree.name != "sharded_tensors"  # the metadata of shards is that of the source
    assert_independent(source, copied(source), containers=containers)


def test_the_cost_grows_with_the_number_of_tensors():
    def steps(count):
        base, other = torch.zeros(count + 3), torch.zeros(count + 3)
        trees = [[memory[i : i + 3] for i in range(count)] for memory in (base, other)]
        lines = itertools.count()

        def trace(frame, event, _):
            next(lines)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert_independent(*trees)
        finally:
            sys.settrace(before)
        return next(lines)

    assert steps(1200) < 4.5 * steps(300)
