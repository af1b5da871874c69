"""Deltas of tensors that lie inside opaque objects, too: objects are replaced, and tensors written."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from tests.trees.corpus import Held


def held(tensor):
    holder = Held()
    holder.w = tensor
    return holder


def tied(values, *, part=slice(None), extra=0):
    memory = torch.tensor(values)
    holder = held(memory[part])
    holder.extra = extra
    return {"a": memory, "b": holder}


def check(new, base):
    change = st.delta(new, base)
    target = st.offload(base)
    result = st.apply_delta(change, target)
    assert st.similarity(result, new, values=True), st.similarity(result, new, values=True)
    again = st.apply_delta(change, {**target, "b": result["b"]})
    assert st.similarity(again, new, values=True)
    return change


@pytest.mark.parametrize("part", [slice(None), slice(0, 2), slice(1, 3)], ids=str)
@pytest.mark.parametrize("extra", [0, 1])
def test_an_object_that_changes_and_is_tied_to_a_leaf_is_refused(part, extra):
    """The delta brings a copy of it, which would be tied to nothing."""
    new = tied([7.0, 8.0, 9.0] if not extra else [1.0, 2.0, 3.0], part=part, extra=extra)
    with pytest.raises(st.TreeMismatch, match=r"delta: ties at b: a view on a cannot go into a copy.*state_dict"):
        st.delta(new, tied([1.0, 2.0, 3.0], part=part))


@pytest.mark.parametrize("changes", ["b", "c"])
def test_objects_with_one_tensor_go_together_where_one_changes(changes):
    memory = torch.ones(2)
    base = {"b": held(memory), "c": held(memory), "d": 0}
    new = st.offload(base)
    new[changes].extra = 1
    result = check(new, base) and st.apply_delta(st.delta(new, base), st.offload(base))
    assert result["b"].w.data_ptr() == result["c"].w.data_ptr()


@pytest.mark.parametrize("changes", ["first", "second", "shared"])
def test_objects_that_share_an_object_do_so_afterwards(changes):
    def make(**values):
        parts = {name: Held() for name in ("first", "second", "shared")}
        for name, part in parts.items():
            part.value = values.get(name, 0)
            part.shared = parts["shared"]
        return {"x": parts["first"], "y": parts["second"], "n": 1}

    new, base = make(**{changes: 1}), make()
    change = st.delta(new, base)
    target = make()
    result = st.apply_delta(change, target)
    assert result["x"].shared is result["y"].shared
    again = st.apply_delta(change, result)
    assert again["x"] is result["x"]
    assert again["x"].shared is again["y"].shared
    undone = st.apply_delta(change.inverse(target), result)
    assert undone["x"].shared is undone["y"].shared
    assert [undone[key].value for key in "xy"] == [0, 0]
    twice = change.then(st.delta(make(second=5), new))
    assert st.apply_delta(twice, make())["x"].shared is not base["x"].shared
    both = st.apply_delta(twice, make())
    assert both["x"].shared is both["y"].shared
    assert [both["y"].value, both["x"].value] == [5, 0]


def test_a_scheduler_drives_the_optimizer_that_a_delta_brings():
    def make(seed):
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.5)
        return {"opt": optimizer, "sched": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    new, base = make(1), make(2)
    change = st.delta(new, base)
    for made in (st.apply_delta(change, base), st.apply_delta(change.inverse(base), st.apply_delta(change, make(2)))):
        assert made["sched"].optimizer is made["opt"]


def test_an_inverse_that_would_bring_an_object_without_its_ties_is_refused():
    base, new = tied([1.0, 2.0]), {"a": torch.tensor([1.0, 2.0]), "b": held(torch.zeros(2))}
    change = st.delta(new, base)
    with pytest.raises(st.TreeMismatch, match="inverse: ties at b: a view on a cannot go into a copy"):
        change.inverse(base)


def test_an_object_that_stays_as_it_is_may_be_tied():
    new = {**tied([1.0, 2.0]), "c": torch.ones(2)}
    assert set(check(new, {**tied([1.0, 2.0]), "c": torch.zeros(2)}).changed) == {"c"}


def test_an_object_may_change_alone():
    new, base = ({"a": torch.tensor([1.0, 2.0]), "b": held(torch.tensor([extra]))} for extra in (1.0, 0.0))
    assert set(check(new, base).changed) == {"b"}


def test_an_object_that_changes_may_hold_other_values_by_then():
    new = {"a": torch.tensor([5.0, 6.0]), "b": tied([8.0, 9.0])["b"]}
    check(new, tied([1.0, 2.0]))


def test_an_object_is_not_changed_by_what_is_written_over_a_tensor():
    new = {"a": torch.tensor([5.0, 2.0, 3.0]), "b": tied([1.0, 2.0, 3.0], part=slice(2))["b"]}
    base = tied([1.0, 2.0, 3.0], part=slice(2))
    with pytest.raises(st.TreeMismatch, match="ties"):
        st.delta(new, base)
    change = st.delta(new, {"a": torch.tensor([1.0, 2.0, 3.0]), "b": new["b"]})
    with pytest.raises(st.TreeMismatch, match="memory that it shares with b"):
        st.apply_delta(change, base)
    assert st.similarity(base, tied([1.0, 2.0, 3.0], part=slice(2)), values=True)


def test_two_objects_with_one_tensor_change_together():
    def two(first, second):
        memory = torch.tensor([1.0, 2.0])
        trees = {"b": held(memory), "c": held(memory)}
        trees["b"].extra, trees["c"].extra = first, second
        return trees

    new, base = two(1, 2), two(0, 0)
    assert st.similarity(st.apply_delta(st.delta(new, base), st.offload(base)), new, values=True)


@pytest.mark.parametrize("changes", ["outer", "inner"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_object_may_hold_one_that_is_a_leaf_itself(changes, order):
    def make(**values):
        inner, outer = Held(), Held()
        inner.value, outer.value, outer.held = values.get("inner", 0), values.get("outer", 0), inner
        leaves = {"a": outer, "b": inner}
        return {key: leaves[key] for key in order}

    new, base = make(**{changes: 1}), make()
    made = st.apply_delta(st.delta(new, base), base)
    assert made["a"].held is made["b"]
    assert [made["a"].value, made["b"].value] == [new["a"].value, new["b"].value]


def test_a_collective_that_is_waited_for_is_what_it_wraps():
    waiting = {"k": held(AsyncCollectiveTensor(torch.arange(3.0)))}
    copy = st.offload(waiting)
    assert st.similarity(waiting, copy)
    assert st.digest(waiting) == st.digest(copy)
    assert not st.delta(waiting, copy).changed
    assert st.digest(waiting) != st.digest({"k": held(torch.arange(3.0) + 1)})


def test_which_tensor_in_an_object_is_made_of_several_counts():
    x, y, z = (torch.arange(3.0) + start for start in (0, 10, 20))
    one, other = ({"k": held(parts)} for parts in ([x, TwoTensor(y, z)], [TwoTensor(x, y), z]))
    assert not st.similarity(one, other)
    assert st.digest(one) != st.digest(other)
    assert type(st.apply_delta(st.delta(one, other), other)["k"].w[0]) is torch.Tensor
