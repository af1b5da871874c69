"""What ``assert_pure`` and ``Watch`` must notice: a list of planted changes, each to a fresh tree."""

import copy
import dataclasses
import io
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.judge import assert_pure, assert_trees_equal, regions
from tests.judge import watch as watch_module
from tests.judge.watch import Watch
from tests.trees import Ramp
from tests.trees.classes import TwoTensors, Unflattened, subclassed
from tests.trees.containers import ListWithAttributes, ListWithSlots
from tests.trees.corpus import Held
from tests.trees.fields import Defined, Failure, Slotted, State

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # said once


def values(*shape, dtype=torch.float32):
    return Ramp()(*shape, dtype=dtype)


def put(key, value):
    return lambda tree: tree.__setitem__(key, value)


def put_in(key, value):
    return lambda tree: tree[0].__setitem__(key, value)


def set_to(name, value):
    return lambda tree: setattr(tree[0], name, value)


def ordered(**metadata):
    tree = OrderedDict(a=1)
    tree._metadata = metadata
    return tree


def held(**attributes):
    result = Held()
    vars(result).update(attributes)
    return result


def hooked():
    tensor = values(2).requires_grad_()
    tensor.register_hook(print)
    return [tensor]


def replace_hook(tree):
    tree[0]._backward_hooks.clear()
    tree[0].register_hook(repr)


def retained():
    tensor = values(2).requires_grad_() * 2
    tensor.retain_grad()
    tensor.sum().backward()
    return [tensor]


def swap_key(tree):
    tree[True] = tree.pop(1)


def swap_element(tree):
    tree[0].remove(1)
    tree[0].add(True)


def change_class(tree):
    tree[0].__class__ = type("Other", (type(tree[0]),), {})


def slotted_list():
    result = ListWithSlots([1])
    result.extra = 1
    return result


def hooked_by_a_closure():
    tensor = values(2).requires_grad_()
    tensor.register_hook(lambda gradient: gradient)
    return [tensor]


def replace_hook_where_it_lay(tree):
    [old] = map(id, tree[0]._backward_hooks.values())
    tree[0]._backward_hooks.clear()
    others = []
    while len(others) < 100 and old not in map(id, others):
        others.append(lambda gradient: gradient)
    tree[0].register_hook(others[-1])


def read_as_integers(tree):
    tree[0].data = tree[0].data.view(torch.int32)


def with_note():
    tensor = values(2)
    tensor.note = 1
    return tensor


def with_gradient():
    tensor = values(2).requires_grad_()
    tensor.grad = values(2)
    return tensor


def sparse():
    return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values(2), (3,), check_invariants=False)


class FakeQuantWeight(torch.Tensor):
    """Is no fake tensor."""


def named_file():
    file = io.BytesIO(b"abc")
    file.name = "memory"
    return file


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(values(1))], lr=1)


CHANGES = {
    # Plain values that are equal, and not the same
    "1 to True": (lambda: {"a": 1}, put("a", True)),
    "1 to 1.0": (lambda: {"a": 1}, put("a", 1.0)),
    "0 to False": (lambda: [0], put(0, False)),
    "0.0 to -0.0": (lambda: {"a": 0.0}, put("a", -0.0)),
    "0j to -0j": (lambda: [0j], put(0, complex(-0.0, 0.0))),
    "nan to 0.0": (lambda: {"a": float("nan")}, put("a", 0.0)),
    "a key from 1 to True": (lambda: {1: "x"}, swap_key),
    "an element from 1 to True": (lambda: [{1}], swap_element),
    "1 and True change places in a deque": (lambda: deque([1, True]), lambda tree: tree.rotate(1)),
    "a size to a tuple": (lambda: [torch.Size([1])], put(0, (1,))),
    "a slice": (lambda: [slice(0, 1)], put(0, slice(0, True))),
    "metadata from 1 to True": (lambda: [ordered(v=1)], lambda tree: tree[0]._metadata.update(v=True)),
    "an attribute of a tensor from 1 to True": (lambda: [with_note()], set_to("note", True)),
    "a field from 1 to True": (lambda: [State(1)], set_to("weight", True)),
    "a field of an attrs class from 1 to 1.0": (lambda: [Defined(1)], set_to("weight", 1.0)),
    "a slot from 1 to 1.0": (lambda: [Slotted(1)], set_to("weight", 1.0)),
    "a slot of a list from 1 to True": (lambda: [slotted_list()], set_to("extra", True)),
    "a list in an object from 1 to True": (lambda: [held(x=[1])], lambda tree: tree[0].x.__setitem__(0, True)),
    "an attribute of a namespace from 1 to True": (lambda: [SimpleNamespace(a=1)], set_to("a", True)),
    "a learning rate from 1 to 1.0": (
        lambda: [optimizer()],
        lambda tree: tree[0].param_groups[0].__setitem__("lr", 1.0),
    ),
    # Containers
    "an item replaced by an equal list": (lambda: [[1]], put(0, [1])),
    "an item added": (lambda: {"a": 1}, put("b", 1)),
    "an item taken": (lambda: [1, 2], lambda tree: tree.pop()),
    "the order of keys": (lambda: {"a": 1, "b": 2}, lambda tree: tree.update(a=tree.pop("a"))),
    "the order of keys of an ordered dict": (lambda: OrderedDict(a=1, b=2), lambda tree: tree.move_to_end("a")),
    "a count": (lambda: [Counter("a")], lambda tree: tree[0].update("a")),
    "an element of a set": (lambda: [{1}], lambda tree: tree[0].add(2)),
    "the default factory": (lambda: [defaultdict(list)], set_to("default_factory", dict)),
    "the class of a list": (lambda: [ListWithAttributes([1])], change_class),
    "the class of an object": (lambda: [Held()], change_class),
    "the class of a dataclass": (lambda: [State(1)], change_class),
    "an attribute added": (lambda: [ListWithAttributes([1])], set_to("extra", 1)),
    "an attribute removed": (lambda: [ordered()], lambda tree: delattr(tree[0], "_metadata")),
    "the order of attributes": (
        lambda: [held(a=1, b=1)],
        lambda tree: setattr(tree[0], "a", vars(tree[0]).pop("a")),
    ),
    # Tensors
    "an element": (lambda: [values(2)], lambda tree: tree[0].add_(1)),
    "an element through NumPy": (lambda: [values(2)], lambda tree: tree[0].numpy().__setitem__(0, 9)),
    "an element and back": (lambda: [values(2)], lambda tree: tree[0].add_(1).sub_(1)),
    "the dtype": (lambda: [values(2)], read_as_integers),
    "the memory": (lambda: [values(2)], lambda tree: setattr(tree[0], "data", tree[0].clone())),
    "the shape": (lambda: [values(2, 3)], lambda tree: tree[0].resize_(3, 2)),
    "the strides": (lambda: [values(2, 2)], lambda tree: tree[0].t_()),
    "the size of a storage": (lambda: [values(2)], lambda tree: tree[0].untyped_storage().resize_(64)),
    "requires_grad": (lambda: [values(2)], lambda tree: tree[0].requires_grad_()),
    "a gradient given": (lambda: [values(2).requires_grad_()], set_to("grad", torch.ones(2))),
    "a gradient written": (lambda: [with_gradient()], lambda tree: tree[0].grad.numpy().__setitem__(0, 9)),
    "a gradient dropped": (lambda: [with_gradient()], set_to("grad", None)),
    "a hook": (lambda: [values(2).requires_grad_()], lambda tree: tree[0].register_hook(print)),
    "a hook for another": (hooked, replace_hook),
    "a hook for another where it lay": (hooked_by_a_closure, replace_hook_where_it_lay),
    "a hook after accumulation": (
        lambda: [values(2).requires_grad_()],
        lambda tree: tree[0].register_post_accumulate_grad_hook(print),
    ),
    "a retained gradient written": (retained, lambda tree: tree[0].grad.zero_()),
    "a retained gradient dropped": (retained, set_to("grad", None)),
    "a gradient retained": (lambda: [values(2).requires_grad_() * 2], lambda tree: tree[0].retain_grad()),
    "an attribute of a tensor": (lambda: [values(2)], set_to("note", 1)),
    "shared memory": (lambda: [values(2)], lambda tree: tree[0].share_memory_()),
    "the conjugate bit": (
        lambda: [values(2, dtype=torch.complex64)],
        lambda tree: torch._C._set_conj(tree[0], True),
    ),
    "a sparse tensor coalesced": (lambda: [sparse()], lambda tree: tree[0]._coalesced_(True)),
    "a sparse tensor's values": (lambda: [sparse()], lambda tree: tree[0]._values().numpy().__setitem__(0, 9)),
    "a sparse tensor's shape": (lambda: [sparse()], lambda tree: tree[0].sparse_resize_((9,), 1, 0)),
    "an inner tensor": (lambda: [TwoTensors(values(1), values(1))], lambda tree: tree[0].a.add_(1)),
    "a tensor below a wrapper without memory": (
        lambda: [Unflattened(values(1))],
        lambda tree: tree[0].inner.numpy().__setitem__(0, 9),
    ),
    "a tensor for another below a wrapper without memory": (
        lambda: [Unflattened(values(1))],
        set_to("inner", values(1)),
    ),
    "an element of a subclass, whatever its name": (
        lambda: [subclassed(FakeQuantWeight, values(2))],
        lambda tree: tree[0].numpy().__setitem__(0, 9),
    ),
    # Objects
    "an attribute of an object": (lambda: [Held()], set_to("extra", 1)),
    "an argument of an error": (lambda: [ValueError([1])], lambda tree: tree[0].args[0].append(2)),
    "the arguments of a dataclass that is an error": (lambda: [Failure("a")], set_to("args", ("b",))),
    "an array": (lambda: [np.zeros(2)], put_in(0, -0.0)),
    "an array in an object": (lambda: [held(w=np.arange(4))], lambda tree: tree[0].w.__setitem__(0, 9)),
    "an array of dates": (lambda: [np.zeros(2, "datetime64[s]")], put_in(0, 9)),
    "an array of objects": (lambda: [np.array([1, None], dtype=object)], put_in(0, True)),
    "an array's shape": (lambda: [np.zeros((2, 3))], lambda tree: tree[0].resize(3, 2)),
    "an array that becomes read-only": (lambda: [np.zeros(2)], lambda tree: tree[0].setflags(write=False)),
    "a bytearray": (lambda: [bytearray(b"x")], lambda tree: tree[0].append(1)),
    "an array of the standard library": (lambda: [array("d", [1.0])], lambda tree: tree[0].append(2.0)),
    "a generator": (lambda: [torch.Generator()], lambda tree: torch.rand(3, generator=tree[0])),
    "a generator of NumPy": (lambda: [np.random.default_rng(0)], lambda tree: tree[0].random()),
    "random numbers": (lambda: [Random(0)], lambda tree: tree[0].random()),
    "a file in memory, with an attribute": (lambda: [named_file()], lambda tree: tree[0].write(b"z")),
    "where a file in memory is read": (lambda: [named_file()], lambda tree: tree[0].seek(1)),
    "an iterator": (lambda: [iter([1, 2])], lambda tree: next(tree[0])),
    "the mode of a module": (lambda: [torch.nn.Linear(1, 1)], lambda tree: tree[0].eval()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_change_is_noticed(name):
    make, change = CHANGES[name]
    assert_pure(lambda tree: None, make())
    with pytest.raises(AssertionError, match=r"^assert_pure: the argument changed in \d+ place"):
        assert_pure(change, make())


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_change_deep_in_a_tree_is_noticed(name):
    make, change = CHANGES[name]
    with pytest.raises(AssertionError, match=r"^assert_pure: the argument changed in \d+ place"):
        assert_pure(lambda tree: change(tree["deep"][0].content), {"deep": (SimpleNamespace(content=make()),)})


LONG = "model.layers." + 80 * "x"


class Alike:
    """Looks like every other one."""

    def __repr__(self):
        return "Alike()"


def changes(tree, change):
    watch = Watch(tree)
    change(tree)
    return watch.changes()


def test_changes_below_long_keys_are_named():
    tree = {f"{LONG}.{name}": 1 for name in "ab"}
    assert changes(tree, put(f"{LONG}.b", 2)) == [f"{LONG}.b changed: 1 against 2"]


def test_changes_below_keys_that_look_alike_are_named():
    one, other = Alike(), Alike()
    assert changes({one: 1, other: 1}, put(one, 2)) == ["Alike() changed: 1 against 2"]
    assert changes({one: 1, other: 1}, put(other, 2)) == ["Alike() changed: 1 against 2"]
    assert changes({one: 1, other: 1}, lambda tree: tree.pop(one)) == ["Alike() is gone"]


def test_changes_are_told_in_the_order_of_the_tree_bytes_first():
    base = values(9)
    tree = {"b": [base[:2], base[4:]], "a": values(2), "o": {"x": 1, "y": 1}, "l": [1, 2]}

    def change(tree):
        for tensor in (tree["a"], *tree["b"]):
            tensor.add_(1)
        tree["l"][:] = [3, 4]
        tree["o"].update(x=2, y=2)

    assert changes(tree, change) == [
        "o.x changed: 1 against 2",
        "o.y changed: 1 against 2",
        "l.0 changed: 1 against 3",
        "l.1 changed: 2 against 4",
        "bytes below b.0, b.1 changed",
        "bytes below a changed",
        "the version of the tensor at b.0 changed from 0 to 2",
        "the version of the tensor at b.1 changed from 0 to 2",
        "the version of the tensor at a changed from 0 to 1",
    ]


def test_bytes_are_named_by_where_they_were():
    def change(tree):
        tree[0].numpy()[0] = 9
        tree[0].data = values(3)

    assert "bytes below 0 changed" in changes([values(2)], change)
    assert changes(list(values(9).unbind()), lambda tree: tree[0].numpy().fill(9)) == [
        "bytes below 0, 1, 2, 3, 4, ... changed"
    ]


def test_the_cost_of_changes_grows_with_their_number(monkeypatch):
    asked = []
    storage_of = regions.storage_of
    monkeypatch.setattr(watch_module, "storage_of", lambda value: asked.append(value) or storage_of(value))

    def asks(count):
        asked.clear()
        found = changes([values(1) for _ in range(count)], lambda tree: [tensor.add_(1) for tensor in tree])
        assert len(found) == 2 * count
        return len(asked)

    assert asks(40) < 3 * asks(20)


def test_a_plain_value_replaced_by_an_equal_one_is_no_change():
    tree = {"rate": float("1.5"), "nan": float("nan"), "text": "".join(["a", "b"])}
    assert_pure(lambda tree: tree.update(rate=float("1.5"), nan=float("nan"), text="".join(["a", "b"])), tree)


def test_reading_changes_nothing():
    jagged = torch.nested.nested_tensor_from_jagged(values(4), torch.tensor([0, 1, 4]))
    tree = [jagged, values(2, 2), np.zeros(2), dataclasses.make_dataclass("Local", ["a"])(1)]
    assert_pure(lambda tree: (repr(tree), jagged.max(), jagged.unbind(), jagged * 2, tree[1].numpy().sum()), tree)


def test_looking_for_the_attributes_of_an_exception_changes_nothing():
    tree = {"last": KeyError("a")}
    copied = copy.deepcopy(tree)
    assert_pure(lambda tree: vars(tree["last"]), tree)
    assert_trees_equal(tree, copied)


@pytest.mark.usefixtures("one_rank_group")
def test_what_torch_notes_on_distributed_tensors_is_no_change():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "columns"))
    tensor = DTensor.from_local(values(4), mesh, [Shard(0), Replicate()])

    def read(tree):
        (tensor,) = tree
        mesh = tensor.device_mesh
        hash(tensor._spec), hash(mesh), mesh["rows"], mesh.get_group("columns"), mesh._flatten("all")
        return copy.deepcopy(tree), tensor + 1, tensor.full_tensor(), tensor.redistribute(placements=[Replicate()] * 2)

    assert_pure(read, [tensor])


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("change", ["element", "layout"])
def test_changes_of_distributed_tensors_are_noticed(change):
    mesh = init_device_mesh("cpu", (1,))
    tensor, other = (DTensor.from_local(values(4), mesh, [layout]) for layout in (Shard(0), Replicate()))
    watch = Watch([tensor])
    watch.check()
    if change == "element":
        tensor._local_tensor.add_(1)
    else:
        tensor._spec = other._spec
    with pytest.raises(AssertionError, match=r"^Watch: the tree changed in \d+ place"):
        watch.check()
