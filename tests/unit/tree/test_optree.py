"""Structures and optree's: what is registered with either is seen by both, and each becomes the other."""

import functools
import itertools
from collections import Counter, OrderedDict, defaultdict, deque

import optree
import pytest
import torch

import statetree as st
from statetree.tree.registry import NAMESPACE
from statetree.tree.spec import TreeSpec
from tests.judge import assert_trees_equal
from tests.trees import TREES
from tests.trees.containers import (
    AttrDict,
    BarePoint,
    DictWithAttributes,
    DictWithRequiredArguments,
    ListWithAttributes,
    ListWithSlots,
    Point,
    PointWithAttributes,
    TupleWithAttributes,
    TypedPoint,
)
from tests.trees.corpus import a_function
from tests.trees.fields import Defined, Frozen, KnownToOptree, Numbered, Registered, Slotted, State


def spec_of(tree):
    return st.flatten(tree)[1]


def attributed(container, **attributes):
    for name, value in attributes.items():
        setattr(container, name, value)
    return container


def as_optree(function, *args):
    with optree.dict_insertion_ordered(True, namespace=NAMESPACE):
        return function(*args, none_is_leaf=True, namespace=NAMESPACE)


#: What is awkward to keep, with every leaf a number.
AWKWARD = {
    "a bare leaf": 5,
    "None": None,
    "nothing": [(), [], {}, deque(), OrderedDict(), defaultdict(list), Counter()],
    "insertion order": {"z": 1, "a": {"y": 2, "b": 3}},
    "keys of several types": {1: "a", "1": "b", None: "c", (1, True): "d"},
    "a bool key": {True: 1},
    "an int key": {1: 1},
    "NaN keys": {float("nan"): 1, float("-inf"): 2},
    "OrderedDict": OrderedDict(b=1, a=2),
    "defaultdict": defaultdict(list, b=[1], a=2),
    "defaultdict of a function": defaultdict(a_function, b=1),
    "defaultdict of nothing": defaultdict(None, b=1),
    "Counter": Counter("abracadabra"),
    "a Counter of one": Counter("a"),
    "deque": deque([1, 2]),
    "a bounded deque": deque([1, 2], maxlen=2),
    "a deque with room": deque([1], maxlen=5),
    "a deque without": deque(maxlen=0),
    "namedtuple": Point(1, TypedPoint(2)),
    "a class of a namedtuple": BarePoint(1, 2),
    "a namedtuple with attributes": attributed(PointWithAttributes(1), note="x", more=[1, 2]),
    "structseq": torch.max(torch.eye(2), 0),
    "dataclass": State(1, 2, {"a": State(None)}),
    "a frozen dataclass": Frozen(1, Frozen(2)),
    "a slotted dataclass": Slotted(1),
    "attrs class": Defined(1, [2]),
    "a dict with attributes": attributed(DictWithAttributes(b=1, a=2), note={"x": [1]}),
    "a dict of another constructor": attributed(DictWithRequiredArguments(4), more=1),
    "a dict that is its attributes": AttrDict(b=1, a=AttrDict()),
    "a list with attributes": attributed(ListWithAttributes([1]), note=(1, 2.0, None)),
    "a list with slots": attributed(ListWithSlots([1]), extra=2),
    "a tuple with attributes": attributed(TupleWithAttributes((1, 2)), note=1),
    "registered": Registered(1, [2], "note"),
    "registered without keys": Numbered(1, Numbered()),
    "registered with optree": KnownToOptree(1, [2]),
}
awkward = pytest.mark.parametrize("tree", AWKWARD.values(), ids=AWKWARD)


@awkward
def test_a_structure_comes_back_from_optree(tree):
    leaves, spec = st.flatten(tree)
    again = TreeSpec.from_optree(spec.to_optree())
    assert again == spec
    assert_trees_equal(again.unflatten(leaves), tree)


@awkward
def test_optree_sees_the_same_leaves_in_the_same_order(tree):
    leaves, spec = st.flatten(tree)
    expected = spec.to_optree()
    found, structure = as_optree(optree.tree_flatten, tree)
    assert all(map(lambda one, other: one is other, found, leaves))
    assert len(found) == len(leaves)
    assert structure == expected
    assert_trees_equal(optree.tree_unflatten(structure, found), tree)


#: What optree drops, or sees otherwise.
LOST = {
    "ordered_dict_with_metadata",
    "ordered_dict_moved",
    "struct_sequences_of_python",
    "state_dicts",
    "module_and_optimizer",
    "torchao_quantized",
    "attributes_with_tensors",
}


@pytest.mark.parametrize("tree", [tree for tree in TREES if tree.name not in LOST], ids=str)
def test_every_tree_is_one_to_optree(tree):
    made = tree.make()
    leaves, spec = st.flatten(made)
    structure = spec.to_optree()
    assert structure.num_leaves == spec.num_leaves
    found, same = as_optree(optree.tree_flatten, made)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in leaves]
    if not tree.keyed_by_identity:
        assert same == structure
    assert TreeSpec.from_optree(structure) == spec


def test_structures_that_differ_become_structures_that_differ():
    specs = [spec_of(tree).to_optree() for name, tree in AWKWARD.items() if name not in {"a bool key", "None"}]
    for one, other in itertools.combinations(specs, 2):
        assert one != other


def test_a_bool_and_an_int_key_are_told_apart_although_optree_does_not():
    one, other = spec_of({True: 0}), spec_of({1: 0})
    assert one.to_optree() == other.to_optree()
    assert TreeSpec.from_optree(one.to_optree()) == one != other


# What is lost


def test_attributes_of_an_ordered_dict_are_lost():
    tree = attributed(OrderedDict(w=1, b=2), _metadata=OrderedDict({"": {"version": 1}}))
    again = TreeSpec.from_optree(spec_of(tree).to_optree())
    assert again == spec_of(OrderedDict(w=1, b=2))
    assert again != spec_of(tree)


@pytest.mark.parametrize(
    "tree",
    [
        attributed(OrderedDict(w=1), mean=torch.ones(1)),
        [1, attributed(OrderedDict(), metadata={"scale": torch.ones(1)})],
        defaultdict(functools.partial(int, 3), w=1),
    ],
    ids=["a tensor in an attribute", "deeper", "a default factory"],
)
def test_leaves_that_optree_would_lose_are_refused(tree):
    with pytest.raises(ValueError, match=r"to_optree: optree sees other leaves: expected [12], got [01]"):
        spec_of(tree).to_optree()


def test_tensors_in_attributes_of_other_classes_are_children():
    tree = attributed(DictWithAttributes(b=1), mean=torch.ones(1), note="x")
    leaves, spec = st.flatten(tree)
    structure = spec.to_optree()
    assert as_optree(optree.tree_leaves, tree) == leaves
    doubled = optree.tree_unflatten(structure, [leaf * 2 for leaf in leaves])
    assert_trees_equal(doubled, attributed(DictWithAttributes(b=2), mean=torch.full((1,), 2.0), note="x"))
    assert TreeSpec.from_optree(structure) == spec


# From optree


def test_a_structure_in_which_none_is_a_node_is_refused():
    with pytest.raises(ValueError, match=r"from_optree: NoneType is a node, .*none_is_leaf=True"):
        TreeSpec.from_optree(optree.tree_structure([1, None]))
    assert TreeSpec.from_optree(optree.tree_structure([1, 2])) == spec_of([1, 2])


def test_a_structure_in_which_keys_were_sorted_is_refused():
    with pytest.raises(ValueError, match=r"from_optree: the leaves come in another order: .*dict_insertion_ordered"):
        TreeSpec.from_optree(optree.tree_structure({"b": 1, "a": 2}, none_is_leaf=True))
    assert TreeSpec.from_optree(optree.tree_structure({"a": 1, "b": 2}, none_is_leaf=True)) == spec_of({"a": 1, "b": 2})


class Elsewhere:
    def __init__(self, *items):
        self.items = items


optree.register_pytree_node(
    Elsewhere, lambda value: (value.items, None), lambda _, items: Elsewhere(*items), namespace="of another library"
)


def test_a_structure_of_another_namespace_is_refused():
    structure = optree.tree_structure([Elsewhere(1, 2)], none_is_leaf=True, namespace="of another library")
    with pytest.raises(ValueError, match="from_optree: Elsewhere is a node, and to statetree a leaf"):
        TreeSpec.from_optree(structure)


def test_functions_of_optree_work_on_structures():
    spec = spec_of({"b": [1, 2], "a": OrderedDict(c=3)})
    structure = spec.to_optree()
    assert [".".join(map(str, accessor.path)) for accessor in optree.treespec_accessors(structure)] == [
        str(path) for path in spec.paths()
    ]
    composed = optree.treespec_transform(structure, None, lambda leaf: spec_of((1, 2)).to_optree())
    assert TreeSpec.from_optree(composed) == spec_of({"b": [(1, 2), (3, 4)], "a": OrderedDict(c=(5, 6))})


# One registry


class Here:
    def __init__(self, *items):
        self.items = items


class There(Here):
    pass


def test_a_class_registered_with_either_is_seen_by_both():
    st.register_container(Here, lambda value: (value.items, None), lambda _, items: Here(*items))
    optree.register_pytree_node(
        There, lambda value: (value.items, None), lambda _, items: There(*items), namespace=NAMESPACE
    )
    tree = [Here(1, There(2, 3)), There()]
    assert st.flatten(tree)[0] == as_optree(optree.tree_leaves, tree) == [1, 2, 3]


def recognised(base=dict):
    """Return a class that statetree takes for a container by itself, and optree does not."""

    class Fresh(base):
        pass

    return Fresh


def test_what_optree_was_told_of_may_still_be_registered():
    cls = recognised()
    assert spec_of([cls(a=1)]).to_optree().num_leaves == 1
    st.register_container(cls, lambda value: ([5], None, ["five"]), lambda _, children: cls(five=children))
    assert st.flatten(cls(a=1, b=2))[0] == as_optree(optree.tree_leaves, cls(a=1, b=2)) == [5]


def test_what_optree_was_told_of_may_still_become_a_leaf():
    cls = recognised(list)
    assert spec_of([cls([1])]).to_optree().num_leaves == 1
    st.register_leaf_type(cls, None)
    value = cls([1, 2])
    assert st.flatten([value])[0] == as_optree(optree.tree_leaves, [value]) == [value]
    assert spec_of([value]).to_optree().num_leaves == 1


def test_optree_is_told_of_a_class_once():
    cls = recognised()
    assert spec_of(cls(a=1)).to_optree() == spec_of(cls(a=2)).to_optree()


def test_plain_namedtuples_stay_with_optree():
    assert spec_of(TypedPoint(1, 2)).to_optree() == optree.tree_structure(TypedPoint(1, 2), none_is_leaf=True)


def test_what_is_too_deep_for_optree_is_told_so():
    tree = 1
    for _ in range(9_000):
        tree = [tree]
    _, spec = st.flatten(tree)
    with pytest.raises(st.TreeTooDeep, match="to_optree: containers are nested deeper than optree"):
        spec.to_optree()
