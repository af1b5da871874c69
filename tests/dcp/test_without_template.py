"""States with classes of users' own, restored without a template where these are known, and warned of where not."""

from __future__ import annotations

import dataclasses
import enum
import json
import warnings
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.dcp import Checkpointer
from statetree.dcp.saved_structure import Structure
from statetree.errors import StateTreeError
from tests.judge import assert_trees_equal
from tests.trees import quiet


@dataclasses.dataclass
class Progress:
    step: int
    seen: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    w: torch.Tensor
    names: Any


Pair = namedtuple("Pair", "left right")


class Tagged(OrderedDict):
    pass


class Listed(list):
    pass


class Registered:
    def __init__(self, left, right, scale):
        self.left, self.right, self.scale = left, right, scale

    def __eq__(self, other):
        return vars(self) == vars(other)


def registered_unflatten(scale, children):
    return Registered(*children, scale)


st.register_container(Registered, lambda p: ((p.left, p.right), p.scale, ("left", "right")), registered_unflatten)


def tagged():
    tree = Tagged(a=torch.arange(3.0))
    tree.tag = ["x", 1]
    return tree


def progress():
    state = Progress(3, {"a": torch.arange(4.0)})
    state.extra = ("kept", 1.5)
    return state


STATES = {
    "dataclass": progress,
    "frozen slotted dataclass": lambda: Slotted(torch.arange(4.0), ["a", "b"]),
    "namedtuple": lambda: Pair(torch.arange(2), "x"),
    "subclass of a dict": tagged,
    "subclass of a list": lambda: Listed([torch.arange(2.0)]),
    "nested": lambda: {"a": [Progress(1, Pair(1, Slotted(torch.arange(5), deque([1], 3))))], "b": progress()},
}


def classes_of(state):
    return [kind.cls for kind, *_ in st.flatten(state)[1].nodes if kind.cls.__module__ == __name__]


@pytest.mark.parametrize("make", STATES.values(), ids=list(STATES))
def test_classes_that_are_listed_come_back(make, tmp_path):
    state = make()
    with torch.serialization.safe_globals(classes_of(state)):
        st.save(state, tmp_path)
        loaded = st.load(tmp_path)
    assert_trees_equal(loaded, state)


@pytest.mark.parametrize("make", STATES.values(), ids=list(STATES))
def test_where_a_class_is_not_listed_there_is_a_warning_and_a_template_is_needed(make, tmp_path):
    state = make()
    with pytest.warns(UserWarning, match=r"save: what restore does not make by itself, at:\n  .*: a "):
        st.save(state, tmp_path)
    with pytest.raises(
        st.TreeMismatch, match=r"Pass like=, a tree like the saved one, or make the classes known: register_container"
    ):
        st.load(tmp_path)
    assert_trees_equal(st.load(tmp_path, make(), in_place=True), state)


def test_registered_containers_come_back(tmp_path):
    state = {"p": Registered(1, {"a": (2, "x")}, ("scale", 2.0))}
    with Checkpointer(tmp_path) as saved:
        saved.save(1, state)
        assert saved.restore() == state


def test_metadata_of_a_registered_container_that_is_no_plain_data_takes_a_template(tmp_path):
    with pytest.warns(UserWarning, match=r"p: a .*Registered with attributes that are no plain data"):
        st.save({"p": Registered(1, 2, object)}, tmp_path)
    with pytest.raises(st.TreeMismatch, match="no plain data"):
        st.load(tmp_path)


def test_the_listed_name_of_a_class_counts(tmp_path):
    with torch.serialization.safe_globals([Progress]):
        st.save(Progress(1, 2), tmp_path)

    @dataclasses.dataclass
    class Renamed:
        step: int
        seen: Any = None

    with torch.serialization.safe_globals([(Renamed, f"{__name__}.Progress")]):
        assert st.load(tmp_path) == Renamed(1, 2)


CHANGED = {
    "another field": lambda rows: rows.__setitem__(-1, [rows[-1][0], rows[-1][1], ["sstep", "sother"], *rows[-1][3:]]),
    "a field twice": lambda rows: rows[-1].__setitem__(4, [["step", None], ["step", None]]),
    "one field": lambda rows: rows[-1].__setitem__(4, [["step", None]]),
    "no list": lambda rows: rows[-1].__setitem__(4, 7),
    "a class that is not named": lambda rows: rows[-1].__setitem__(0, "os.system"),
    "a class that is no container": lambda rows: rows[-1].__setitem__(0, "torch.nn.modules.linear.Linear"),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=list(CHANGED))
def test_what_a_file_says_of_a_class_is_compared_with_the_class(change, tmp_path, monkeypatch):
    made = Structure.to_text

    def changed(structure):
        table = json.loads(made(structure))
        change(table["nodes"])
        return json.dumps(table)

    monkeypatch.setattr(Structure, "to_text", changed)
    with torch.serialization.safe_globals([Progress, torch.nn.Linear]):
        st.save(Progress(1, 2), tmp_path)
        with pytest.raises(st.TreeMismatch, match=r"structure differs at <root>: expected .*, got a "):
            st.load(tmp_path)


def test_a_slotted_class_gets_no_attributes_that_it_cannot_have(tmp_path, monkeypatch):
    made = Structure.to_text
    monkeypatch.setattr(
        Structure,
        "to_text",
        lambda structure: made(structure).replace('["names",null]', '["names",null],["no",["key","n"]]'),
    )
    with torch.serialization.safe_globals([Slotted]):
        st.save(Slotted(1, 2), tmp_path)
        with pytest.raises(st.TreeMismatch, match="it has other fields"):
            st.load(tmp_path)


def test_states_of_known_containers_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.save({"m": torch.nn.Linear(2, 2).state_dict(), "d": deque([1], 2)}, tmp_path)


IN_PARTS = {
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    "wrapper": lambda: TwoTensor(torch.ones(2), torch.zeros(2)),
    "storage": lambda: torch.ones(2).untyped_storage(),
}


@pytest.mark.parametrize("kind", IN_PARTS)
def test_leaves_of_several_tensors_are_warned_of(kind, tmp_path):
    with quiet():
        state = {"plain": torch.ones(2), "n": [IN_PARTS[kind]()]}
    with pytest.warns(
        UserWarning, match=r"save: what restore does not make by itself, at:\n  n\.0: a .*\nPass it a template"
    ):
        st.save(state, tmp_path)
    with pytest.raises(StateTreeError, match=r"n\.0.*like="):
        st.load(tmp_path)
    with quiet():
        assert st.similarity(st.load(tmp_path, st.offload(state)), state)


def test_deltas_are_loaded_where_only_the_base_is(tmp_path):
    base = {"w": torch.arange(9.0), "step": 1}
    new = {"w": torch.arange(9.0).index_fill(0, torch.tensor([4]), -1), "step": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.save({"delta": st.delta(new, base), "none": st.delta(base, base)}, tmp_path)
    found = st.load(tmp_path)
    assert type(found["delta"]) is st.Delta
    assert not found["none"]
    undone = found["delta"].inverse(base)
    changed = st.apply_delta(found["delta"], base)
    assert_trees_equal(changed, new)
    assert_trees_equal(st.apply_delta(undone, changed), {"w": torch.arange(9.0), "step": 1})


class Level(enum.Enum):
    LOW = 1


def test_what_is_chosen_is_loaded_beside_containers_that_are_not_known(tmp_path):
    with pytest.warns(UserWarning, match="does not make by itself"):
        st.save({"bad": {Level.LOW: torch.ones(1)}, "w": torch.ones(2)}, tmp_path / "x")
    assert st.load(tmp_path / "x", where="w")["w"].tolist() == [1, 1]
    for where in ("bad.**", "**", None):
        with pytest.raises(st.TreeMismatch, match="structure differs at bad"):
            st.load(tmp_path / "x", where=where)
