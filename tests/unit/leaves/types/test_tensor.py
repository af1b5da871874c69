"""Tensors of torch itself: what is beside their elements, and the layouts that are not one view on a storage."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import statetree as st
from statetree.leaves.types.fake import FAKE, UNINITIALIZED
from statetree.leaves.types.storage import STORAGE
from statetree.leaves.types.tensor import TENSOR
from tests.judge import assert_trees_equal
from tests.pace import units
from tests.repack import repacked, unpacked
from tests.trees import TREES, Ramp
from tests.trees.classes import PlainSubclass, SlottedSubclass, subclassed
from tests.trees.corpus import Held
from tests.trees.layouts import coordinates
from tests.trees.tensors import DTYPES, of_bytes

TENSOR_TREES = [
    tree
    for tree in TREES
    if not tree.refused
    and tree.name
    in {
        "strides",
        "conj_and_neg",
        "requires_grad",
        "inference_tensors",
        "on_meta",
        "fake",
        "uninitialized",
        "tied",
        "tied_across_dtypes",
        "parameters_and_buffers",
        "tensor_subclasses",
        "tensors_with_attributes",
        "sparse_coo",
        "sparse_compressed",
        "nested_strided",
        "nested_jagged",
        "quantized",
        "storages",
        "wrappers",
    }
]


def alone(tensor):
    return repacked([tensor])[0]


# Whatever is switched on around it


def on_default_device(device):
    return lambda: torch.device(device)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default_device_meta": on_default_device("meta"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "sparse_checks": lambda: torch.sparse.check_sparse_tensor_invariants(True),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("tree", TENSOR_TREES, ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_modes_of_torch_change_nothing(tree, context):
    made = tree.make()
    with context():
        again = st.offload(made)
    assert_trees_equal(again, made)


def test_the_default_dtype_changes_nothing():
    made = next(tree for tree in TREES if tree.name == "quantized").make()
    torch.set_default_dtype(torch.float64)
    try:
        again = repacked(made)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_trees_equal(again, made)


def test_another_thread_may_put_leaves_together():
    tree = next(tree for tree in TREES if tree.name == "sparse_compressed").make()
    results = []
    thread = threading.Thread(target=lambda: results.append(repacked(tree)))
    thread.start()
    thread.join(units(15))
    assert_trees_equal(results[0], tree)


# What is beside the elements


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_of_every_dtype(dtype):
    parameter = torch.nn.Parameter(of_bytes(dtype, (3, 2)), requires_grad=False)
    assert_trees_equal(alone(parameter), parameter)


def test_results_are_leaves_of_autograd():
    weight = torch.ones(2, requires_grad=True)
    for tensor in (weight, weight * 2, torch.nn.Parameter(torch.ones(2)), weight[1:], (weight * 2).to_sparse()):
        again = alone(tensor)
        assert again.is_leaf
        assert again.requires_grad
        assert again.grad_fn is None


def test_gradients_and_hooks_are_not_copied():
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    weight.register_hook(lambda grad: grad)
    again = alone(weight)
    assert again.grad is None
    assert not again._backward_hooks
    assert weight.grad is not None


def test_version_counters_do_not_move():
    weight, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    weight.add_(1)
    before = (weight._version, parameter._version)
    st.offload([weight, parameter, weight[1:]])
    assert (weight._version, parameter._version) == before


def test_the_constructor_of_a_subclass_does_not_run():
    class Strict(torch.Tensor):
        def __new__(cls, *args):
            msg = "this must not be called"
            raise RuntimeError(msg)

        def __init__(self, *args):
            msg = "this must not be called"
            raise RuntimeError(msg)

    tensor = subclassed(Strict, torch.arange(3.0))
    tensor.note = "note"
    assert_trees_equal(alone(tensor), tensor)


def test_overridden_torch_functions_do_not_run():
    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if guarding:
                msg = f"{func} must not be called"
                raise RuntimeError(msg)
            return super().__torch_function__(func, types, args, kwargs or {})

    guarding = False
    tensor = subclassed(Guarded, torch.arange(6.0).view(2, 3).t(), grad=True)
    guarding = True
    again = st.offload({"x": [tensor]})["x"][0]
    guarding = False
    assert_trees_equal(again, tensor)


def test_overridden_attribute_setting_does_not_run():
    class Locked(torch.Tensor):
        def __setattr__(self, name, value):
            msg = "this must not be called"
            raise RuntimeError(msg)

    tensor = subclassed(Locked, torch.arange(3.0))
    vars(tensor)["note"] = [1, torch.ones(1)]
    assert_trees_equal(alone(tensor), tensor)


def test_attributes_are_fresh():
    tensor = torch.ones(2)
    tensor.note, tensor.held = {"a": [1]}, Held()
    again = alone(tensor)
    again.note["a"].append(2)
    again.held.new = 1
    assert tensor.note == {"a": [1]}
    assert not vars(tensor.held)


def test_one_attribute_object_of_two_tensors_is_one_again():
    one, other, shared = torch.ones(2), torch.zeros(2), torch.arange(3)
    shared.note = "shared"
    one.shared, other.shared, one.other = shared, shared[1:], other
    again = repacked([one, other])
    assert_trees_equal(again, [one, other])
    assert again[0].other is again[1]


def test_attributes_of_attributes():
    tensor = torch.ones(1)
    for number in range(50):
        outer = torch.full((2,), float(number))
        outer.inner, outer.number = tensor, number
        tensor = outer
    assert_trees_equal(alone(tensor), tensor)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: [t], lambda t: {"a": (t,)}], ids=["itself", "list", "deeper"])
def test_a_tensor_that_holds_itself_is_refused_with_its_path(make):
    tensor = torch.ones(2)
    tensor.me = make(tensor)
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x\.0 .*holds itself") as caught:
        repacked({"x": [tensor]})
    assert str(caught.value.path) == "x.0"


def test_a_tensor_that_holds_itself_through_an_object_is_refused_or_copied():
    tensor, held = torch.ones(2), Held()
    tensor.held, held.tensor = held, tensor
    for tree in ({"x": tensor}, {"x": held}):
        try:
            again = repacked(tree)
        except st.UnsupportedLeaf as error:
            assert (str(error.path), "%PATH%" in str(error)) == ("x", False)
        else:
            assert_trees_equal(again, tree, containers=True)


def test_a_cycle_in_the_attributes_of_a_tensor_names_the_path():
    tensor, cycle = torch.ones(2), []
    cycle.append(cycle)
    tensor.cycle = cycle
    with pytest.raises((st.CyclicTree, st.UnsupportedLeaf), match=r"x\.0") as caught:
        st.offload({"x": [tensor]})
    assert str(caught.value.path).startswith("x.0")


def test_an_attribute_that_cannot_be_copied_names_the_path():
    tensor = torch.ones(2)
    tensor.lock = threading.Lock()
    with pytest.raises(st.UnsupportedLeaf, match=r"offload: .*at x\.0") as caught:
        st.offload({"x": [tensor]})
    assert str(caught.value.path).startswith("x.0")


def test_slots_that_were_never_set_stay_unset():
    again = alone(subclassed(SlottedSubclass, torch.ones(1)))
    assert not hasattr(again, "unset")


# What is no view on memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2).to_mkldnn(),
        lambda: torch.nn.Parameter(torch.zeros(2).to_mkldnn(), requires_grad=False),
    ],
    ids=["mkldnn", "mkldnn_parameter"],
)
def test_tensors_without_a_storage_are_refused_with_their_path(make):
    with pytest.raises(st.UnsupportedLeaf, match=r"offload: .*at x\.1") as caught:
        st.offload({"x": [torch.ones(1), make(), torch.ones(1)]})
    assert str(caught.value.path) == "x.1"


def test_a_tensor_of_zeros_without_memory_is_refused_or_spelled_out():
    try:
        again = st.offload([torch._efficientzerotensor(3)])[0]
    except st.UnsupportedLeaf:
        return
    assert torch.equal(again, torch.zeros(3))


def test_tensors_inside_a_transformation_are_refused_with_their_path():
    caught = []

    def inside(x):
        with pytest.raises(st.UnsupportedLeaf, match="at x") as error:
            st.offload({"x": x})
        caught.append(error.value)
        return x

    torch.func.vmap(inside)(torch.ones(3, 2))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(3))
    assert [str(error.path) for error in caught] == ["x", "x"]


# Sparse, nested, quantized


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.bfloat16], ids=str)
def test_sparse_tensors_of_many_dtypes(dtype):
    values = Ramp()(3, dtype=dtype)
    tree = [
        torch.sparse_coo_tensor(coordinates(), values, (2, 3), is_coalesced=True, check_invariants=False),
        torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 2]), values, (2, 3)),
    ]
    assert_trees_equal(repacked(tree), tree)


def test_an_uncoalesced_tensor_is_not_coalesced_by_being_copied():
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=False)
    again = alone(tensor)
    assert not tensor.is_coalesced()
    assert not again.is_coalesced()
    assert again._nnz() == 2


def test_sparse_tensors_that_break_their_invariants_are_copied_as_they_are():
    tensor = torch.sparse_coo_tensor(torch.tensor([[7, -1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=False)
    assert_trees_equal(alone(tensor), tensor)


def test_gradients_of_embeddings_are_sparse():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert_trees_equal(alone(embedding.weight.grad), embedding.weight.grad)


def test_copies_of_sparse_tensors_can_be_used():
    tensor = torch.eye(3).to_sparse()
    again = alone(tensor)
    assert torch.equal((again + again).to_dense(), torch.eye(3) * 2)
    csr = alone(torch.eye(3).to_sparse_csr())
    assert torch.equal(csr @ torch.ones(3), torch.ones(3))


def test_copies_of_nested_tensors_can_be_used():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert [piece.shape for piece in alone(nested).unbind()] == [(2, 3), (1, 3)]
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    again = alone(jagged)
    assert [piece.shape for piece in again.unbind()] == [(2, 3), (1, 3)]
    assert torch.equal((again * 2).values(), jagged.values() * 2)


def test_jagged_tensors_with_one_offsets_tensor_fit_together_again():
    offsets = torch.tensor([0, 2, 5])
    tree = [torch.nested.nested_tensor_from_jagged(torch.arange(5.0) + n, offsets) for n in range(2)]
    again = repacked(tree)
    assert torch.equal((again[0] + again[1]).values(), (tree[0] + tree[1]).values())


def test_a_jagged_tensor_whose_shape_was_asked_for():
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    assert jagged.dim() == 2
    assert str(jagged.shape)
    assert jagged._max_seqlen >= 3
    tree = {"x": jagged}
    assert_trees_equal(st.offload(st.offload(tree)), tree)


def test_copies_of_quantized_tensors_can_be_used():
    made = next(tree for tree in TREES if tree.name == "quantized").make()
    again = repacked(made)
    for name in ("per_tensor", "quint8", "qint32", "per_channel", "transposed"):
        assert torch.equal(again[name].dequantize(), made[name].dequantize())


# Fake and uninitialized tensors, storages


def test_fake_tensors_stay_in_their_mode():
    with FakeTensorMode() as mode:
        tensor, parameter = torch.empty(2, 3).t(), torch.nn.Parameter(torch.empty(2))
        tensor.note = "note"
    again = st.offload({"x": tensor, "p": parameter, "again": tensor})
    assert again["x"].fake_mode is mode
    assert again["x"] is again["again"]
    assert again["x"] is not tensor
    assert again["x"].note == "note"
    assert isinstance(again["p"], torch.nn.Parameter)
    assert again["p"].requires_grad


def test_nothing_of_a_fake_mode_changes():
    with FakeTensorMode() as mode:
        tree = {"x": torch.empty(2, 3), "p": torch.nn.Parameter(torch.empty(2))}
    describer = mode.fake_tensor_converter.meta_converter.describer
    before = describer.next_tensor_id, describer.next_storage_id
    for verb in (st.offload, st.allocate_like, st.Stager().stage, lambda it: st.copy_into(it, st.offload(it))):
        verb(tree)
    assert st.similarity(tree, st.offload(tree), values=True)
    assert (describer.next_tensor_id, describer.next_storage_id) == before


def test_fake_tensors_on_another_device():
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
    again = st.offload([tensor])[0]
    assert again.shape == (2,)
    assert again.device.type in {"cuda", "cpu"}


def test_uninitialized_parameters_can_be_materialised_afterwards():
    lazy = torch.nn.LazyLinear(3)
    weight = st.offload({"w": lazy.weight})["w"]
    weight.materialize((3, 2))
    assert weight.shape == (3, 2)
    assert isinstance(lazy.weight, torch.nn.UninitializedParameter)


def test_uninitialized_parameters_keep_attributes():
    parameter = torch.nn.UninitializedParameter(dtype=torch.float64)
    parameter.note, parameter.extra = ["note"], torch.ones(1)
    again = alone(parameter)
    assert (type(again), again.dtype, again.note) == (torch.nn.UninitializedParameter, torch.float64, ["note"])
    assert_trees_equal(again.extra, parameter.extra)


def test_a_storage_and_a_tensor_on_it_are_tied():
    tensor = torch.arange(4.0)
    again = repacked({"storage": tensor.untyped_storage(), "tensor": tensor})
    again["tensor"][0] = 9
    assert again["storage"].data_ptr() == again["tensor"].data_ptr()
    assert tensor[0] == 0


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_a_storage_offloaded_beside_others_holds_its_own_bytes_only(shared):
    tree = [torch.UntypedStorage([number] * 3) for number in range(5)]
    again = st.offload(tree, share_memory=shared)
    assert [list(storage) for storage in again] == [list(storage) for storage in tree]


# What must agree


def facts_of(tensor, leaf_type=TENSOR):
    return leaf_type.describe(tensor)


def test_facts_differ_where_bytes_do_not_fit():
    pairs = [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2), torch.ones(2, device="meta")),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc()),
        (torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsr((1, 1))),
        (torch.nested.nested_tensor([torch.ones(2)]), torch.nested.nested_tensor([torch.ones(3)])),
        (
            torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
            torch.quantize_per_tensor(torch.ones(2), 0.25, 0, torch.qint8),
        ),
        (
            torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2).int(), 0, torch.qint8),
            torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2).int(), 1, torch.qint8),
        ),
    ]
    for one, other in pairs:
        assert facts_of(one) != facts_of(other), (one, other)
        assert facts_of(one) == facts_of(one.clone() if not one.is_meta else one)
    assert facts_of(torch.UntypedStorage(2), STORAGE) != facts_of(torch.UntypedStorage(3), STORAGE)
    assert facts_of(torch.nn.UninitializedParameter(), UNINITIALIZED) != facts_of(
        torch.nn.UninitializedParameter(dtype=torch.float64), UNINITIALIZED
    )
    with FakeTensorMode():
        assert facts_of(torch.empty(2), FAKE) != facts_of(torch.empty(3), FAKE)


def test_facts_do_not_depend_on_strides_class_or_gradient():
    base = torch.ones(2, 2)
    for other in (base.t(), torch.nn.Parameter(base), base.as_subclass(PlainSubclass), base.expand(2, 2)):
        assert facts_of(other) == facts_of(base)


def test_parts_of_a_parameter_and_its_data_are_two_views_of_one_storage():
    parameter = torch.nn.Parameter(torch.ones(2))
    apart = unpacked([parameter, parameter.data])
    assert len(apart.parts) == 2
    assert len(set(apart.columns.storage_keys)) == 1


def zeros_without_memory(*shape):
    return torch._efficientzerotensor(shape)


@pytest.mark.parametrize("count", [1, 70], ids=["few", "many"])
def test_zeros_that_autograd_keeps_without_memory_come_out_as_zeros(count):
    tree = {"ones": torch.ones(2), **{f"z{n}": zeros_without_memory(3) for n in range(count)}}
    expected = {"ones": torch.ones(2), **{f"z{n}": torch.zeros(3) for n in range(count)}}
    for verb in (st.offload, st.broadcast, lambda tree: st.distribute(tree, expected, src=0)):
        for _ in range(3):  # the last times, ordinary tensors would be recognised
            assert_trees_equal(verb(tree), expected)
    with st.Stager() as stager:
        assert_trees_equal(stager.stage(tree), expected)
    assert not st.similarity(expected, tree, values=False)
    with pytest.raises(st.TreeMismatch, match="memory differs at z0"):
        st.copy_into(expected, tree)


def quantized(per_channel):
    values = torch.arange(6.0).view(2, 3)
    if per_channel:
        return torch.quantize_per_channel(values, torch.ones(2), torch.zeros(2, dtype=torch.long), 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.5, 1, torch.quint8)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
def test_quantized_tensors_on_meta_have_a_dtype_and_a_shape(per_channel):
    tree = {"q": quantized(per_channel)}
    for verb in (st.allocate_like, st.offload):
        found = verb(tree, device="meta")
        assert found["q"].is_meta
        assert (found["q"].dtype, found["q"].shape) == (tree["q"].dtype, tree["q"].shape)
        assert st.offload(found, device="meta")["q"].dtype == tree["q"].dtype
        assert st.similarity(found, found, values=False)
        assert not st.similarity(found, tree, values=False)
        assert not st.similarity(tree, found, values=False)
        with pytest.raises(st.UnsupportedLeaf, match="allocate_like: the leaf at q is quantized and on meta") as caught:
            st.allocate_like(found)
        assert len(str(caught.value)) < 200


def test_a_quantized_tensor_without_a_scale_is_refused():
    with pytest.raises(st.UnsupportedLeaf, match="offload: the leaf at w is quantized, and has no scale"):
        st.offload({"w": torch.zeros(3, dtype=torch.int8).view(torch.qint8)})
