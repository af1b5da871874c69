"""Wrapper subclasses: inner tensors, context, and what users hang on them."""

import pytest
import torch

import statetree as st
from statetree.leaves.types.wrapper import WRAPPER
from tests.judge import assert_trees_equal
from tests.repack import repacked
from tests.trees.classes import TwoTensors


def alone(tensor):
    return repacked([tensor])[0]


def two(*shape, grad=False):
    return TwoTensors(torch.ones(*shape), torch.zeros(*shape)).requires_grad_(grad)


class Counting(TwoTensors):
    """Has attributes that it sets by itself and that its protocol does not carry."""

    __slots__ = ("slot",)

    def __init__(self, a, b, note=None):
        super().__init__(a, b, note)
        self.calls = 0
        self.log = []

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Counting(inner["a"], inner["b"], context)


def counting():
    return Counting(torch.ones(2), torch.zeros(2))


def test_inner_tensors_are_copied():
    tensor = two(2)
    again = alone(tensor)
    again.a.add_(5)
    assert torch.equal(tensor.a, torch.ones(2))


def test_attributes_that_a_user_adds_are_kept():
    tensor = two(2)
    tensor.number, tensor.listed, tensor.tensor = 3, [1, {"a": 2}], torch.arange(3)
    again = alone(tensor)
    assert (again.number, again.listed) == (3, [1, {"a": 2}])
    assert again.listed is not tensor.listed
    assert torch.equal(again.tensor, torch.arange(3))
    assert again.tensor is not tensor.tensor


def test_names_that_jagged_tensors_cache_under_are_a_users_elsewhere():
    tensor = two(2)
    tensor._sym_sizes = 7
    assert alone(tensor)._sym_sizes == 7


def test_attributes_that_the_class_sets_are_kept_if_they_were_changed():
    tensor = counting()
    tensor.calls, tensor.log = 5, ["called"]
    again = alone(tensor)
    assert again.calls == 5
    assert again.log == ["called"]
    again.log.append("more")
    assert tensor.log == ["called"]


def test_slots_are_kept():
    tensor = counting()
    tensor.slot = ["note", torch.ones(1)]
    assert_trees_equal(alone(tensor), tensor)


def test_attributes_are_kept_through_every_verb():
    tensor = two(2)
    tensor.note_for = "user"
    for verb in (st.offload, lambda tree: st.Stager().stage(tree), st.allocate_like):
        assert verb({"x": tensor})["x"].note_for == "user"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("inner_grad", [False, True])
def test_gradients_are_required_as_before(grad, inner_grad):
    tensor = TwoTensors(torch.ones(2, requires_grad=inner_grad), torch.zeros(2))
    tensor.requires_grad_(grad or inner_grad)
    again = alone(tensor)
    assert again.requires_grad == tensor.requires_grad
    assert again.is_leaf


def test_a_parameter_stays_one():
    parameter = torch.nn.Parameter(two(2))
    again = alone(parameter)
    assert isinstance(again, torch.nn.Parameter) == isinstance(parameter, torch.nn.Parameter)
    assert again.requires_grad
    frozen = alone(torch.nn.Parameter(two(2), requires_grad=False))
    assert isinstance(frozen, torch.nn.Parameter)
    assert not frozen.requires_grad


def test_a_module_takes_the_copy_of_a_parameter():
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(TwoTensors(torch.ones(2, 2), torch.zeros(2, 2)))
    module.register_parameter("weight", alone(module.weight))
    assert isinstance(module.state_dict()["weight"], TwoTensors)


def test_ties_of_inner_tensors_are_kept():
    base = torch.arange(6.0)
    tree = [TwoTensors(base[:3], base[3:]), base, TwoTensors(base[1:4], base[1:4]), base[2]]
    assert_trees_equal(repacked(tree), tree)


def test_the_same_wrapper_twice_is_one_again():
    tensor = two(2)
    again = repacked([tensor, [tensor], TwoTensors(tensor, tensor)])
    assert again[0] is again[1][0] is again[2].a is again[2].b


def test_deeply_nested_wrappers():
    tensor = torch.arange(3.0)
    for _ in range(20):
        tensor = TwoTensors(tensor, tensor)
    assert_trees_equal(alone(tensor), tensor)


def test_wrappers_of_every_other_layout():
    inner = torch.eye(3).to_sparse()
    tensor = TwoTensors(torch.eye(3), torch.ones(3, 3))
    tensor.b = inner
    again = alone(tensor)
    assert torch.equal(again.b.to_dense(), torch.eye(3))
    assert again.b is not inner


class Stubborn(TwoTensors):
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        msg = "mine"
        raise ZeroDivisionError(msg)


class Liar(TwoTensors):
    def __tensor_flatten__(self):
        return ["a", "missing"], None


@pytest.mark.parametrize("cls", [Stubborn, Liar], ids=lambda cls: cls.__name__)
def test_a_class_that_cannot_do_its_part_is_refused_with_its_path(cls):
    tensor = torch.Tensor._make_wrapper_subclass(cls, (2,))
    tensor.a, tensor.b, tensor.note = torch.ones(2), torch.zeros(2), None
    with pytest.raises(st.UnsupportedLeaf, match=r"offload: .*at x\.0 ") as caught:
        st.offload({"x": [tensor]})
    assert str(caught.value.path) == "x.0"
    assert "%PATH%" not in str(caught.value)


def test_facts_tell_class_shape_and_context():
    facts = WRAPPER.describe(TwoTensors(torch.ones(2, 3), torch.ones(2, 3), "note"))
    assert facts["class"] is TwoTensors
    assert facts["shape"] == (2, 3)
    assert facts["metadata"] == "note"


def test_taking_apart_does_not_change_the_wrapper():
    tensor = two(2)
    tensor.extra = [1]
    before = dict(vars(tensor))
    alone(tensor)
    assert vars(tensor) == before
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    before = set(vars(jagged))
    alone(jagged)
    assert set(vars(jagged)) == before


def test_tensors_in_the_metadata_are_copied():
    scale = torch.ones(1)
    source = TwoTensors(torch.ones(2), torch.zeros(2), {"scale": scale, "by identity": Counting})
    copied, tied = st.offload([source, scale])
    scale.fill_(5)
    assert torch.equal(copied.note["scale"], torch.ones(1))
    assert copied.note["scale"] is tied
    assert copied.note["by identity"] is Counting


def test_an_attribute_that_the_class_sets_and_the_user_changed_to_a_tensor_is_kept():
    source = counting()
    source.calls = torch.full((2,), 3.0)
    source.log = [torch.ones(1)]
    copied = alone(source)
    assert torch.equal(copied.calls, source.calls)
    assert torch.equal(copied.log[0], source.log[0])
    assert copied.calls is not source.calls


class Untraceable(torch.Tensor):
    """Wraps every result of an operation, and does not say what it is made of."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is torch.Tensor else result


def test_a_wrapper_that_does_not_say_what_it_is_made_of_is_refused():
    state = [torch.ones(3), torch.ones(3).as_subclass(Untraceable)]
    for verb in (st.offload, st.allocate_like, st.Stager().stage, lambda tree: st.copy_into(tree, tree)):
        with pytest.raises(st.UnsupportedLeaf, match=r"at 1 \(Untraceable\).*__tensor_flatten__"):
            verb(state)
    assert not st.similarity(state, state, values=False)
