"""Structures: equal exactly if they rebuild equal trees, hashable, and carried about by pickle."""

import copy
import itertools
import pickle
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

import statetree as st
from statetree.tree.spec import TreeSpec
from tests.judge import assert_trees_equal, tree_differences
from tests.trees import TREES
from tests.trees.containers import (
    BarePoint,
    DictWithAttributes,
    ListWithAttributes,
    ListWithSlots,
    Point,
    TupleWithAttributes,
    TypedPoint,
)
from tests.trees.corpus import Color, a_function
from tests.trees.fields import Defined, Frozen, Numbered, Registered, SameKeys, Slotted, State

every_tree = pytest.mark.parametrize("tree", TREES, ids=str)


def spec_of(tree):
    return st.flatten(tree)[1]


def attributed(container, **attributes):
    for name, value in attributes.items():
        setattr(container, name, value)
    return container


def unset(container, name):
    delattr(container, name)
    return container


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.keyed_by_identity], ids=str)
def test_specs_of_trees_made_alike_are_equal(tree):
    one, other = spec_of(tree.make()), spec_of(tree.make())
    assert one == other
    assert not one != other  # noqa: SIM202 - the operator is under test
    assert hash(one) == hash(other)
    assert one.paths() == other.paths()
    assert one.flat_keys() == other.flat_keys()


#: Trees that differ in structure, and in no more than one thing from some other.
DIFFERENT = [
    0,
    [],
    (),
    {},
    [0],
    (0,),
    {0: 0},
    {1: 0},
    {True: 0},
    {1.0: 0},
    {0.0: 0},
    {-0.0: 0},
    {float("nan"): 0},
    {"0": 0},
    {"": 0},
    {None: 0},
    {(1,): 0},
    {(True,): 0},
    {Point(1, 2): 0},
    {(1, 2): 0},
    {frozenset({1}): 0},
    {frozenset({True}): 0},
    {Color.RED: 0},
    [0, 0],
    [[0]],
    [[0], 0],
    [0, [0]],
    [[], 0],
    [0, []],
    [[[]], 0],
    [[], [], 0],
    [[[], 0]],
    [[0, []]],
    ([0],),
    [(0,)],
    {0: [0]},
    {"a": 0, "b": 0},
    {"b": 0, "a": 0},
    {"a": {"b": 0}},
    {"a": {"c": 0}},
    {"b": {"a": 0}},
    OrderedDict({"a": 0, "b": 0}),
    OrderedDict({"b": 0, "a": 0}),
    attributed(OrderedDict({"a": 0, "b": 0}), x=1),
    attributed(OrderedDict({"a": 0, "b": 0}), x=True),
    attributed(OrderedDict({"a": 0, "b": 0}), x=1.0),
    attributed(OrderedDict({"a": 0, "b": 0}), x=0.0),
    attributed(OrderedDict({"a": 0, "b": 0}), x=-0.0),
    attributed(OrderedDict({"a": 0, "b": 0}), x=float("nan")),
    attributed(OrderedDict({"a": 0, "b": 0}), x=None),
    attributed(OrderedDict({"a": 0, "b": 0}), y=1),
    attributed(OrderedDict({"a": 0, "b": 0}), x=[1]),
    attributed(OrderedDict({"a": 0, "b": 0}), x=[True]),
    attributed(OrderedDict({"a": 0, "b": 0}), x=(1,)),
    attributed(OrderedDict({"a": 0, "b": 0}), x={"v": 1}),
    attributed(OrderedDict({"a": 0, "b": 0}), x={"v": 1.0}),
    attributed(OrderedDict({"a": 0, "b": 0}), x="a"),
    attributed(OrderedDict({"a": 0, "b": 0}), x=Color.RED),
    attributed(OrderedDict({"a": 0, "b": 0}), x=a_function),
    attributed(OrderedDict({"a": 0, "b": 0}), x=1, y=2),
    attributed(OrderedDict({"a": 0, "b": 0}), y=2, x=1),
    attributed(OrderedDict({"a": 0, "b": 0}), x=torch.zeros(1)),
    Counter({"a": 0, "b": 0}),
    defaultdict(None, {"a": 0, "b": 0}),
    defaultdict(list, {"a": 0, "b": 0}),
    defaultdict(dict, {"a": 0, "b": 0}),
    DictWithAttributes({"a": 0, "b": 0}),
    deque([0]),
    deque([0], maxlen=1),
    deque([0], maxlen=2),
    ListWithAttributes([0]),
    ListWithSlots([0]),
    attributed(ListWithSlots([0]), extra=1),
    TupleWithAttributes((0,)),
    Point(0, 0),
    BarePoint(0, 0),
    TypedPoint(0, 0),
    State(0, 0),
    Frozen(0, 0),
    Slotted(0, 0),
    Defined(0, 0),
    unset(Slotted(0, 0), "inner"),
    unset(Slotted(0, 0), "weight"),
    attributed(State(0, 0), beside=1),
    attributed(State(0, 0), beside=torch.zeros(1)),
    Registered(0, 0, "a"),
    Registered(0, 0, "b"),
    Registered(0, [0], "a"),
    Numbered(0, 0),
    SameKeys(0, 0),
    torch.max(torch.zeros(1, 1), dim=0),
    torch.min(torch.zeros(1, 1), dim=0),
]


def test_specs_are_equal_only_if_they_rebuild_the_same_tree():
    trees = [*DIFFERENT, *(tree.make() for tree in TREES)]
    specs = [spec_of(tree) for tree in trees]
    rebuilt = [st.unflatten(spec, range(spec.num_leaves)) for spec in specs]
    for (one, first), (other, second) in itertools.combinations(zip(specs, rebuilt, strict=True), 2):
        assert (one == other) == (not tree_differences(first, second)), (one, other, first, second)
        assert one != other or hash(one) == hash(other)


def test_specs_of_different_trees_differ():
    specs = [spec_of(tree) for tree in DIFFERENT]
    for (i, one), (j, other) in itertools.combinations(enumerate(specs), 2):
        assert one != other, (DIFFERENT[i], DIFFERENT[j])
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("tree", DIFFERENT, ids=lambda tree: type(tree).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_spec_is_equal_and_rebuilds_the_same_tree(tree, protocol):
    leaves, spec = st.flatten(tree)
    loaded = pickle.loads(pickle.dumps(spec, protocol))
    assert loaded == spec
    assert hash(loaded) == hash(spec)
    assert loaded.paths() == spec.paths()
    assert_trees_equal(st.unflatten(loaded, leaves), tree)


@every_tree
def test_the_spec_of_any_tree_can_be_pickled(tree):
    if tree.keyed_by_identity or "lambda" in tree.name or tree.name in {"default_dicts"}:
        pytest.skip("its keys or its default factories cannot be pickled")
    leaves, spec = st.flatten(tree.make())
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec
    assert_trees_equal(st.unflatten(loaded, leaves), st.unflatten(spec, leaves))


@every_tree
def test_a_copied_spec_is_equal(tree):
    spec = spec_of(tree.make())
    assert copy.copy(spec) == spec
    if not tree.keyed_by_identity:
        assert copy.deepcopy(spec) == spec


def test_specs_do_not_compare_with_other_things():
    spec = spec_of([1])
    assert spec != [1]
    assert (spec == 5) is False
    assert spec.__eq__(5) is NotImplemented


@every_tree
def test_the_representation_is_short(tree):
    text = repr(spec_of(tree.make()))
    assert text.startswith("TreeSpec(")
    assert len(text) < 100_000


def test_the_representation_names_some_leaves_and_counts_the_rest():
    assert repr(spec_of({"a": [1, 2]})) == "TreeSpec(2 leaves: a.0, a.1)"
    assert repr(spec_of(list(range(20)))).endswith("6, 7, … 12 more)")


def test_a_spec_is_not_changed_through_what_it_gives_out():
    spec = spec_of({"a": [1, 2]})
    for give in (spec.flat_keys, spec.paths):
        given = give()
        given.append("more")
        given[0] = "changed"
    assert spec.flat_keys() == ["a.0", "a.1"]
    assert list(map(str, spec.paths())) == ["a.0", "a.1"]
    assert st.from_flat({"a.0": 1, "a.1": 2}, spec) == {"a": [1, 2]}


def test_a_spec_is_not_changed_by_changes_of_the_tree():
    tree = {"a": [1, 2], "b": DictWithAttributes(c=1)}
    tree["b"].note = ["x"]
    leaves, spec = st.flatten(tree)
    before = copy.deepcopy(tree)
    tree["a"].append(3)
    tree["b"]["d"] = 2
    tree["b"].note.append("y")
    tree["c"] = 4
    assert_trees_equal(st.unflatten(spec, leaves), before)


def test_links_lead_to_every_leaf_and_node_once():
    for tree in TREES:
        spec = spec_of(tree.make())
        refs = [ref for links in spec.links() for ref in links] + [spec.root()]
        leaves = [ref for ref in refs if ref >= 0]
        nodes = [~ref for ref in refs if ref < 0]
        assert sorted(leaves) == list(range(spec.num_leaves)), tree
        assert sorted(nodes) == list(range(len(spec.nodes))), tree


@pytest.mark.parametrize("depth", [1, 2, 50])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_leaves_before_between_and_behind_containers(depth, width):
    inner = []
    count = itertools.count()
    for _ in range(depth):
        inner = [*(next(count) for _ in range(width)), inner, *(next(count) for _ in range(width)), [], {}, next(count)]
    leaves, spec = st.flatten(inner)
    assert st.unflatten(spec, leaves) == inner
    assert len(leaves) == next(count)
    by_path = dict(zip(spec.paths(), leaves, strict=True))
    for path, leaf in by_path.items():
        found = inner
        for key in path:
            found = found[key]
        assert found == leaf


def test_a_wide_spec_costs_little():
    tree = {f"k{i}": [i, {"x": i}] for i in range(20_000)}
    leaves, spec = st.flatten(tree)
    assert len(leaves) == 40_000
    assert spec == spec_of(tree)
    assert len(spec.flat_keys()) == 40_000


def test_keys_that_cannot_be_hashed_do_not_keep_a_spec_from_it():
    _, spec = st.flatten({"a": 1})
    kind, _, *rest = spec.nodes[0]
    odd, again = (TreeSpec(((kind, (["a"],), *rest),), 1) for _ in range(2))
    assert hash(odd) == hash(again)
