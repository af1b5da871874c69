"""What ``assert_structure_preserved`` must notice: planted faults, made in a copy and in the argument itself."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

from tests.judge import assert_structure_preserved
from tests.trees.containers import DictWithAttributes, ListWithAttributes, ListWithSlots, Point, TypedPoint
from tests.trees.fields import Failure, Frozen, Slotted, State


def tree():
    named = OrderedDict(a=1)
    named._metadata = OrderedDict({"": {"version": 1}})
    noted, slotted = ListWithAttributes([1]), ListWithSlots([1])
    noted.extra, slotted.extra = torch.zeros(2), "note"
    return {
        "dict": {"a": 1, "b": [2]},
        "list": [1, {"c": None}],
        "deque": deque([1], 3),
        "tuple": (1, Point(1, 2)),
        "factory": defaultdict(list, a=1),
        "named": named,
        "noted": noted,
        "slotted": slotted,
        "field": State(1, 2),
        "leaf": torch.zeros(2),
        "size": torch.Size([1]),
        "set": {1},
        1: None,
    }


def replace(name, made):
    return lambda tree: tree.__setitem__(name, made(tree[name]))


def move_to_the_end(mapping, key):
    mapping[key] = mapping.pop(key)


def swap_key(tree):
    items = list(tree.items())
    tree.clear()
    tree.update({True if key == 1 and type(key) is int else key: item for key, item in items})


def add_beside_the_fields(tree):
    tree["field"].more = 1


FAULTS = {
    "a key taken": lambda tree: tree["dict"].pop("a"),
    "a key added": lambda tree: tree["dict"].update(more=1),
    "a key renamed": lambda tree: tree["dict"].update(c=tree["dict"].pop("b")),
    "the order of keys": lambda tree: move_to_the_end(tree["dict"], "a"),
    "the type of a key": swap_key,
    "an item taken": lambda tree: tree["list"].pop(),
    "a list cleared": lambda tree: tree["list"].clear(),
    "an item added": lambda tree: tree["deque"].append(1),
    "a list made a tuple": replace("list", tuple),
    "a tuple made a list": replace("tuple", list),
    "a namedtuple made another": replace("tuple", lambda held: (1, TypedPoint(1, 2))),
    "a deque without a bound": replace("deque", lambda held: deque(held)),
    "another default factory": replace("factory", lambda held: defaultdict(dict, held)),
    "the default factory set": lambda tree: setattr(tree["factory"], "default_factory", dict),
    "a mapping made a dict": replace("factory", dict),
    "a mapping made a counter": replace("dict", Counter),
    "a subclass lost": replace("noted", list),
    "the class set": lambda tree: setattr(tree["noted"], "__class__", type("Other", (ListWithAttributes,), {})),
    "metadata dropped": lambda tree: delattr(tree["named"], "_metadata"),
    "metadata of another class": lambda tree: setattr(tree["named"], "_metadata", {"": {"version": 1}}),
    "a value in metadata": lambda tree: tree["named"]._metadata[""].update(version=2),
    "the type of a value in metadata": lambda tree: tree["named"]._metadata[""].update(version=True),
    "a key in metadata": lambda tree: tree["named"]._metadata.update(more={}),
    "a plain attribute": lambda tree: setattr(tree["slotted"], "extra", "other"),
    "a plain attribute made a tensor": lambda tree: setattr(tree["slotted"], "extra", torch.zeros(1)),
    "an attribute dropped": lambda tree: delattr(tree["noted"], "extra"),
    "an attribute added": lambda tree: setattr(tree["noted"], "more", 1),
    "a leaf in an attribute made a list": lambda tree: setattr(tree["noted"], "extra", [1]),
    "a dataclass made another": replace("field", lambda held: Frozen(1, 2)),
    "a dataclass made a dict": replace("field", lambda held: dict(vars(held))),
    "an attribute beside the fields": add_beside_the_fields,
    "a field unset": lambda tree: delattr(tree["field"], "weight"),
    "a leaf made a list": replace("leaf", lambda held: [held]),
    "a leaf made an empty dict": replace("leaf", lambda held: {}),
    "a list made a leaf": replace("list", lambda held: 1),
    "a size made a tuple": replace("size", tuple),
    "a set made a list": replace("set", list),
    "none made a list": replace(1, lambda held: []),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("where", ["in the argument", "in a copy"])
def test_a_planted_fault_is_noticed(name, where):
    def transform(given):
        result = given if where == "in the argument" else copy.deepcopy(given)
        FAULTS[name](result)
        return result

    with pytest.raises(AssertionError, match=r"^assert_structure_preserved: the structures differ in "):
        assert_structure_preserved(transform, tree())


@pytest.mark.parametrize("name", FAULTS)
def test_what_becomes_of_the_argument_alone_is_not_the_question(name):
    def transform(given):
        result = copy.deepcopy(given)
        FAULTS[name](given)
        return result

    assert_structure_preserved(transform, tree())


# The other way round, a leaf becomes another leaf.
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "a plain attribute made a tensor"])
def test_a_planted_fault_is_noticed_where_it_is_mended(name):
    faulty = tree()
    FAULTS[name](faulty)
    with pytest.raises(AssertionError, match=r"^assert_structure_preserved: the structures differ in "):
        assert_structure_preserved(lambda given: tree(), faulty)


def other_leaves(given):
    given["dict"]["a"], given["list"][0] = "other", torch.ones(3)
    given["leaf"], given["set"], given["size"], given[1] = None, {2, 3}, "size", 0
    given["noted"].extra = "another leaf"
    given["field"].weight = b""
    return given


LEAVES = {
    "in the argument": other_leaves,
    "in a copy": lambda given: other_leaves(copy.deepcopy(given)),
    "an equal copy": copy.deepcopy,
    "the argument": lambda given: given,
}


@pytest.mark.parametrize("transform", LEAVES.values(), ids=LEAVES)
def test_leaves_may_become_others(transform):
    assert_structure_preserved(transform, tree())


def test_attributes_that_hold_a_leaf_may_get_another():
    def noted(extra):
        result = DictWithAttributes(a=1)
        result.extra = extra
        return result

    assert_structure_preserved(lambda given: noted(["1", "w"]), noted([1, torch.zeros(2)]))
    with pytest.raises(AssertionError, match=r"value differs at extra\.0: 1 against 2"):
        assert_structure_preserved(lambda given: noted([2, "w"]), noted([1, "w"]))


def test_slots_that_are_fields_hold_leaves():
    assert_structure_preserved(lambda given: Slotted("1", ["2"]), Slotted(1, [2]))


def test_a_dataclass_that_is_an_error_is_a_leaf():
    assert_structure_preserved(lambda given: ["error"], [Failure("text")])


def test_structures_in_circles_and_deep_ones_are_compared():
    def circle(end):
        result = [1]
        result.append({"again": result, "end": end})
        for _ in range(5000):
            result = [result]
        return result

    assert_structure_preserved(lambda given: circle(2), circle(1))
    with pytest.raises(AssertionError, match="type differs"):
        assert_structure_preserved(lambda given: circle([]), circle(1))


def test_every_place_is_named():
    with pytest.raises(AssertionError, match=r"(?s)in 2 places:.* a: <class 'list'>.* b: <class 'dict'>"):
        assert_structure_preserved(lambda given: {"a": (), "b": ()}, {"a": [], "b": {}})
