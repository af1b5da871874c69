"""Trees are taken apart and put together again, exactly."""

import pickle
import re
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import statetree as st
from statetree.tree.flatten import flatten_for_copy, unflatten_copy
from statetree.tree.traversal import MAX_DEPTH
from tests.judge import assert_trees_equal, tree_differences
from tests.pace import units
from tests.trees import TREES, Ramp
from tests.trees.containers import DictWithAttributes, ListWithAttributes, ListWithSlots, Point, TupleWithAttributes
from tests.trees.corpus import Held
from tests.trees.fields import Frozen, KnownToOptree, Numbered, Rebuilt, Registered, Slotted, State
from tests.trees.objects import Network, trained

every_tree = pytest.mark.parametrize("tree", TREES, ids=str)
MUTABLE = (dict, list, deque, State, Slotted, Numbered)


def containers_in(value):
    """Yield every container that is reached through items, fields and attributes."""
    pending, seen = [value], set()
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, MUTABLE):
            yield found
        if isinstance(found, dict):
            pending += dict.values(found)
        elif isinstance(found, (list, tuple)):
            base = list if isinstance(found, list) else tuple
            pending += base.__iter__(found)
        if isinstance(found, (*MUTABLE, Frozen, tuple)):
            pending += getattr(found, "__dict__", {}).values()


# Round trips


@every_tree
def test_unflatten_gives_the_tree_again(tree):
    made = tree.make()
    assert_trees_equal(st.unflatten(*reversed(st.flatten(made))), made)


@every_tree
def test_from_flat_gives_the_tree_again(tree):
    made = tree.make()
    assert_trees_equal(st.from_flat(*st.to_flat(made)), made)


@every_tree
def test_leaves_are_the_trees_own_and_containers_are_fresh(tree):
    made = tree.make()
    leaves, spec = st.flatten(made)
    again = st.unflatten(spec, leaves)
    assert all(map(lambda a, b: a is b, leaves, st.flatten(again)[0]))
    old = {id(container) for container in containers_in(made)} - {id(leaf) for leaf in leaves}
    assert not [container for container in containers_in(again) if id(container) in old]


@every_tree
def test_two_rebuilt_trees_share_no_container(tree):
    leaves, spec = st.flatten(tree.make())
    first, second = st.unflatten(spec, leaves), st.unflatten(spec, leaves)
    old = {id(container) for container in containers_in(first)} - {id(leaf) for leaf in leaves}
    assert not [container for container in containers_in(second) if id(container) in old]


@every_tree
def test_flattening_changes_nothing(tree):
    made = tree.make()
    st.flatten(made), st.to_flat(made), st.paths(made), st.map_leaves(lambda leaf: leaf, made)
    assert_trees_equal(made, tree.make(), containers=True)


@every_tree
def test_paths_and_flat_keys_are_one_for_every_leaf(tree):
    made = tree.make()
    leaves, spec = st.flatten(made)
    paths, keys = spec.paths(), spec.flat_keys()
    assert len(leaves) == len(paths) == len(keys) == len(set(keys)) == spec.num_leaves == len(spec)
    assert all(type(path) is st.Path for path in paths)
    assert all(isinstance(key, str) for key in keys)
    assert st.paths(made) == paths
    plain = Counter(map(str, paths))
    assert [str(path) for path in paths if plain[str(path)] == 1] == [
        key for key, path in zip(keys, paths, strict=True) if plain[str(path)] == 1
    ]


@every_tree
def test_map_leaves_keeps_the_structure(tree):
    made = tree.make()
    assert_trees_equal(st.map_leaves(lambda leaf: leaf, made), made)
    assert_trees_equal(st.map_with_path(lambda path, leaf: leaf, made), made)


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.keyed_by_identity], ids=str)
def test_a_tree_matches_one_made_alike(tree):
    made, other = tree.make(), tree.make()
    pairs = []
    st.map_leaves(lambda a, b: pairs.append((a, b)), made, other)
    assert len(pairs) == len(st.paths(made))
    assert [difference for a, b in pairs for difference in tree_differences(a, b)] == []


def test_leaves_come_in_the_order_of_the_containers():
    tree = {"b": [1, {"z": 2, "a": 3}], "a": (4, deque([5])), 0: State(6, 7, {1: 8})}
    assert st.flatten(tree)[0] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_leaves_may_be_any_iterable_of_any_values():
    spec = st.flatten({"a": 1, "b": [2]})[1]
    assert st.unflatten(spec, iter(["x", {"y": 1}])) == {"a": "x", "b": [{"y": 1}]}


def test_attributes_without_tensors_are_structure_and_others_are_leaves():
    tree = OrderedDict(weight=1)
    tree._metadata, tree.scale = {"version": 1}, {"a": 2, "t": torch.zeros(1)}
    assert list(map(str, st.paths(tree))) == ["weight", "scale.a", "scale.t"]


def test_attributes_are_structure_however_their_plain_values_are_held():
    for value in ([1, (2, None)], {1: [2]}, Point(1, {"a": 2})):
        tree = DictWithAttributes({"a": 5})
        tree.note = value
        leaves, spec = st.flatten(tree)
        assert leaves == [5]
        assert st.unflatten(spec, [6]).note == value


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_lists_of_any_length(count):
    tree = list(range(count))
    leaves, spec = st.flatten(tree)
    assert st.unflatten(spec, leaves) == tree
    assert [path[0] for path in spec.paths()] == tree


def test_an_attribute_is_rebuilt_afresh_every_time():
    tree = OrderedDict()
    tree._metadata = {"version": [1]}
    leaves, spec = st.flatten(tree)
    first = st.unflatten(spec, leaves)
    first._metadata["version"].append(2)
    tree._metadata["version"].append(3)
    assert st.unflatten(spec, leaves)._metadata == {"version": [1]}


def test_no_constructor_runs():
    tree = [Rebuilt(1), Rebuilt([2])]
    before = Rebuilt.made
    assert_trees_equal(st.map_leaves(lambda leaf: leaf, tree), tree)
    assert Rebuilt.made == before


@pytest.mark.parametrize("value", [{1, 2}, UserDict(a=1), MappingProxyType({}), Held(), "text", range(3)])
def test_other_values_are_leaves(value):
    leaves, spec = st.flatten(value)
    assert leaves == [value]
    assert st.unflatten(spec, leaves) is value
    assert st.paths(value) == [st.Path()]


def test_shared_containers_become_separate():
    shared = {"a": 1}
    rebuilt = st.unflatten(*reversed(st.flatten([shared, shared])))
    assert rebuilt[0] is not rebuilt[1]


# Depth and cycles


def nested(depth, wrap, inner=1):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


WRAPS = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner, "b": 1},
    "tuple": lambda inner: (0, inner),
    "deque": lambda inner: deque([inner]),
    "dataclass": lambda inner: Frozen(inner),
    "slotted": lambda inner: Slotted(inner),
    "namedtuple": lambda inner: Point(inner, 1),
    "subclass": lambda inner: ListWithAttributes([inner]),
    "registered": lambda inner: Numbered(inner),
}


def with_attribute(inner, value=0):
    outer = ListWithAttributes([value])
    outer.inner = inner
    return outer


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_depth_of_900_works(wrap):
    tree = nested(900, wrap, torch.zeros(1))
    assert_trees_equal(st.unflatten(*reversed(st.flatten(tree))), tree)
    assert_trees_equal(st.from_flat(*st.to_flat(tree)), tree)
    assert_trees_equal(st.map_leaves(lambda a, b: a, tree, tree), tree)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_limit_of_depth_is_a_typed_error(wrap):
    assert st.flatten(nested(MAX_DEPTH - 1, wrap))[1].num_leaves >= 1
    with pytest.raises(st.TreeTooDeep, match=rf"flatten: containers are nested deeper than {MAX_DEPTH}") as caught:
        st.flatten(nested(MAX_DEPTH + 2, wrap))
    assert len(caught.value.path) == MAX_DEPTH
    assert len(str(caught.value)) < 1000
    assert isinstance(caught.value, RecursionError)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [1, torch.zeros(1)], ids=["plain", "tensor"])
def test_attributes_of_attributes_of_attributes_are_taken_apart(inner):
    tree = nested(900, with_attribute, ListWithAttributes([inner]))
    assert_trees_equal(st.unflatten(*reversed(st.flatten(tree))), tree)


def called_from(depth, function):
    return function() if depth == 0 else called_from(depth - 1, function)


@pytest.mark.parametrize("inner", [1, torch.zeros(1)], ids=["plain", "tensor"])
@pytest.mark.parametrize("depth", [10, 50, 100, 200, 400])
def test_a_spec_does_not_depend_on_how_deep_the_caller_is(inner, depth):
    tree = nested(depth, with_attribute, ListWithAttributes([inner]))
    assert st.flatten(tree)[1] == called_from(400, lambda: st.flatten(tree))[1]


def cyclic_list():
    tree = [1]
    tree.append({"a": (tree,)})
    return {"x": tree}


def cyclic_dict():
    tree = {"b": 1}
    tree["a"] = tree
    return tree


def cyclic_dataclass():
    tree = State(1)
    tree.nested = [Frozen(tree)]
    return [tree]


def cyclic_attribute():
    tree = ListWithAttributes([1])
    tree.me = tree
    return {"x": tree}


def cyclic_attribute_in_a_dict():
    tree = DictWithAttributes(a=1)
    tree.held = {"deep": [tree, torch.zeros(1)]}
    return tree


def cyclic_dict_as_attribute():
    tree = DictWithAttributes(a=1)
    tree.held = {"b": 1}
    tree.held["me"] = tree.held
    return tree


def cyclic_tuple_attribute():
    tree = TupleWithAttributes((1, 2))
    tree.me = (tree,)
    return [tree]


def cyclic_slot():
    tree = ListWithSlots([1])
    tree.extra = [tree]
    return [tree]


def cyclic_registered():
    tree = Registered(1, 2, "note")
    tree.left = {"again": tree}
    return tree


def cyclic_attributes_of_two():
    first, second = DictWithAttributes(a=1), DictWithAttributes(a=2)
    first.other, second.other = second, first
    return [first, second]


CYCLES = {
    cyclic_list: "x.1.a.0",
    cyclic_dict: "a",
    cyclic_dataclass: "0.nested.0.weight",
    cyclic_attribute: "x.me",
    cyclic_attribute_in_a_dict: "held.deep.0",
    cyclic_dict_as_attribute: "held.me",
    cyclic_tuple_attribute: "0.me.0",
    cyclic_slot: "0.extra.0",
    cyclic_registered: "left.again",
    cyclic_attributes_of_two: "0.other.other",
}


@pytest.mark.parametrize(("make", "path"), CYCLES.items(), ids=[make.__name__ for make in CYCLES])
def test_a_cycle_is_an_error_that_names_the_path(make, path):
    with pytest.raises(st.CyclicTree, match=rf"flatten: the container at {re.escape(path)} is the one at ") as caught:
        st.flatten(make())
    assert type(caught.value.path) is st.Path
    assert str(caught.value.path) == path
    assert "got a cycle" in str(caught.value)


@pytest.mark.parametrize(
    "verb", [st.to_flat, st.paths, lambda tree: st.map_leaves(id, tree)], ids=["flat", "paths", "map"]
)
def test_every_verb_of_the_tree_engine_notices_a_cycle(verb):
    with pytest.raises(st.CyclicTree, match=r"x\.1\.a\.0"):
        verb(cyclic_list())


@pytest.mark.parametrize("cls", [dict, DictWithAttributes], ids=["dict", "subclass"])
def test_a_cycle_in_a_dense_graph_is_found_at_once(cls):
    graph = [cls() for _ in range(200)]
    for node in graph:
        for index, other in enumerate(graph):
            dict.__setitem__(node, index, other)
    started = time.process_time()
    with pytest.raises(st.CyclicTree, match="got a cycle"):
        st.flatten(graph)
    assert time.process_time() - started < units(3)


def test_a_cycle_through_many_attributes_is_found_at_once():
    graph = [ListWithAttributes([number]) for number in range(60)]
    for node in graph:
        for index, other in enumerate(graph):
            setattr(node, f"to{index}", other)
    started = time.process_time()
    with pytest.raises(st.CyclicTree, match="got a cycle"):
        st.flatten(graph)
    assert time.process_time() - started < units(3)


def test_a_container_that_appears_twice_is_no_cycle():
    shared = [1]
    assert st.flatten([shared, {"a": shared}, (shared, shared)])[0] == [1, 1, 1, 1]


# Flat dicts


def test_flat_keys_that_collide_are_written_out():
    flat, spec = st.to_flat({0: 1, "0": 2, "a": {"b": 3}, "a.b": 4, "c": 5})
    assert flat == {"[0]": 1, "['0']": 2, "['a']['b']": 3, "['a.b']": 4, "c": 5}
    assert st.from_flat(flat, spec) == {0: 1, "0": 2, "a": {"b": 3}, "a.b": 4, "c": 5}


def test_written_out_keys_that_are_taken_are_numbered():
    flat, _ = st.to_flat({0: 1, "0": 2, "[0]": 3, "[0]~2": 4})
    assert sorted(flat.values()) == [1, 2, 3, 4]
    assert flat["[0]"] == 3
    assert flat["[0]~2"] == 4


def test_an_attribute_and_a_key_of_one_name_have_two_keys():
    tree = DictWithAttributes(tensor=1)
    tree.tensor = torch.zeros(1)
    flat, spec = st.to_flat({"x": tree})
    assert len(flat) == 2
    assert_trees_equal(st.from_flat(flat, spec), {"x": tree})


def test_the_flat_key_of_a_lone_leaf_is_empty():
    assert st.to_flat(5)[0] == {"": 5}


def test_from_flat_takes_any_order():
    tree = {"a": [1, 2], "b": {"c": 3}}
    flat, spec = st.to_flat(tree)
    assert st.from_flat(dict(reversed(flat.items())), spec) == tree


def test_from_flat_takes_any_mapping_and_leaves_it_alone():
    tree = {"a": [1, 2], "b": {"c": 3}}
    flat, spec = st.to_flat(tree)
    assert st.from_flat(MappingProxyType(flat), spec) == tree
    missing = defaultdict(int, flat)
    del missing["b.c"]
    with pytest.raises(st.TreeMismatch, match=r"missing at b\.c"):
        st.from_flat(missing, spec)
    assert "b.c" not in missing


def test_from_flat_names_every_key_that_is_missing_or_unexpected():
    flat, spec = st.to_flat({"a": [1, 2], "b": 3})
    del flat["a.1"], flat["b"]
    flat["z"], flat["a"] = 1, 2
    with pytest.raises(st.TreeMismatch, match=r"from_flat: the trees differ in 4 places") as caught:
        st.from_flat(flat, spec)
    for place in ("missing at a.1: expected", "missing at b: expected", "unexpected at z: expected nothing"):
        assert place in str(caught.value)
    assert {str(difference.path) for difference in caught.value.differences} == {"a.1", "b", "z", "a"}


@pytest.mark.parametrize("count", [1, 3, 0])
def test_from_flat_of_an_empty_structure(count):
    flat = {str(index): index for index in range(count)}
    spec = st.flatten({"a": [], "b": ()})[1]
    if count == 0:
        assert st.from_flat(flat, spec) == {"a": [], "b": ()}
        return
    with pytest.raises(st.TreeMismatch, match="from_flat"):
        st.from_flat(flat, spec)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.layers = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
        self.norm = torch.nn.ModuleDict({"bn": torch.nn.BatchNorm1d(4)})
        self.rnn = torch.nn.LSTM(4, 3)
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def stepped(optimizer_class, **options):
    model = Model()
    optimizer = optimizer_class(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "history": {"loss": [torch.zeros(()), torch.ones(())], "names": ["a", "b"], "mixed": [1, {"x": torch.ones(1)}]},
    }


STATES = {
    "sgd": lambda: stepped(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": lambda: stepped(torch.optim.AdamW, amsgrad=True),
    "adagrad": lambda: stepped(torch.optim.Adagrad),
    "rmsprop": lambda: stepped(torch.optim.RMSprop, centered=True),
    "network": lambda: Network(Ramp()).state_dict(),
    "trained": lambda: {"optimizer": trained(Ramp())[1].state_dict()},
    "empty": dict,
    "int_keys": lambda: {0: {1: torch.ones(1)}, "a": {None: 1}},
    "empty_containers": lambda: {"a": {}, "b": [], "c": {"d": {}, "e": torch.ones(1)}},
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_flat_keys_are_those_of_distributed_checkpoint(make):
    state = make()
    ours, _ = st.to_flat(state)
    theirs, _ = flatten_state_dict(state)
    tensors = {key: value for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert all(ours[key] is value for key, value in tensors.items())
    assert {key for key, value in ours.items() if isinstance(value, torch.Tensor)} == tensors.keys()
    below = [key for key, value in theirs.items() if isinstance(value, (list, tuple, dict))]
    for key, value in theirs.items():
        if key not in below:
            assert ours[key] is value
    assert all(key in theirs or any(key.startswith(f"{above}.") for above in below) for key in ours)


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_flat_state_dicts_come_back(make):
    state = make()
    assert_trees_equal(st.from_flat(*st.to_flat(state)), state)


# Errors


@pytest.mark.parametrize("leaves", [[], [1], [1, 2, 3]], ids=len)
def test_a_wrong_number_of_leaves_is_an_error(leaves):
    spec = st.flatten({"a": 1, "b": [2]})[1]
    with pytest.raises(st.TreeMismatch, match=rf"unflatten: the number of leaves .* expected 2, got {len(leaves)}\."):
        st.unflatten(spec, leaves)


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrong_number_of_leaves_for_a_lone_leaf(count):
    with pytest.raises(st.TreeMismatch, match=rf"expected 1, got {count}"):
        st.unflatten(st.flatten(5)[1], range(count))


def test_leaves_for_a_tree_without_any():
    with pytest.raises(st.TreeMismatch, match="expected 0, got 1"):
        st.unflatten(st.flatten({})[1], [1])


def test_swapped_arguments_are_named():
    with pytest.raises(TypeError, match=r"unflatten: expected the TreeSpec that flatten returned, got list"):
        st.unflatten(*st.flatten([1, 2]))


def fails(*values):
    msg = "mine"
    raise ZeroDivisionError(msg)


def test_what_a_mapped_function_raises_gains_a_note():
    tree = {"a": [1, torch.zeros(2, 3, dtype=torch.float16)], "b": 2}

    def fails_on_tensors(leaf):
        return fails() if isinstance(leaf, torch.Tensor) else leaf

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        st.map_leaves(fails_on_tensors, tree)
    (note,) = caught.value.__notes__
    for part in ("a.1", "torch.float16", "(2, 3)", "cpu"):
        assert part in note


def test_what_a_function_mapped_with_paths_raises_gains_a_note():
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        st.map_with_path(fails, {"a": [torch.zeros(2)]}, {"a": [1]})
    (note,) = caught.value.__notes__
    assert "a.0" in note
    assert "torch.float32" in note


def test_the_note_for_a_lone_leaf_names_the_root():
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        st.map_leaves(fails, 5)
    assert "<root>" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "leaf",
    [torch.nn.UninitializedParameter(), torch.nested.nested_tensor([torch.ones(2)])],
    ids=["uninitialized", "nested"],
)
def test_a_leaf_that_refuses_to_be_described_is_noted_all_the_same(leaf):
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        st.map_leaves(fails, {"x": leaf})
    assert "x" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, GeneratorExit, SystemExit])
def test_any_exception_of_a_mapped_function_comes_out_as_it_is(error):
    def raises(leaf):
        raise error

    with pytest.raises(error, match=r"^$|statetree: at 0"):
        st.map_leaves(raises, [1])


def test_functions_are_called_once_a_leaf_in_order():
    called = []
    st.map_leaves(called.append, {"b": [1, None], "a": (2,)})
    assert called == [1, None, 2]


def test_nothing_is_called_where_structures_differ():
    with pytest.raises(st.TreeMismatch, match="map_leaves: "):
        st.map_leaves(fails, {"a": 1}, {"b": 1})


def test_what_a_function_returns_is_one_leaf():
    assert st.map_leaves(lambda leaf: [leaf, leaf], {"a": 1}) == {"a": [1, 1]}


def test_rest_trees_are_matched_by_key():
    assert st.map_leaves(lambda a, b, c: (a, b, c), {"x": 1, "y": 2}, OrderedDict(y=3, x=4), {"y": 5, "x": 6}) == {
        "x": (1, 4, 6),
        "y": (2, 3, 5),
    }


def test_paths_are_given_to_the_function():
    assert st.map_with_path(lambda path, leaf, other: (path, leaf, other), {"a": [1]}, {"a": [2]}) == {
        "a": [(st.Path(("a", 0)), 1, 2)]
    }


@pytest.mark.parametrize("verb", [st.map_leaves, st.map_with_path], ids=["map_leaves", "map_with_path"])
def test_trees_that_differ_in_many_places_are_told_all_of_them(verb):
    tree = {"same": 1, "list": [1, 2], "leaf": 1, "kind": (1,), "gone": {"deep": 2}, **{f"k{i}": i for i in range(5)}}
    other = {"same": 1, "list": [1], "leaf": [1], "kind": [1], "new": 3, **{f"K{i}": i for i in range(5)}}
    with pytest.raises(st.TreeMismatch, match=rf"{verb.__name__}: the trees differ in 15 places") as caught:
        verb(fails, tree, other)
    places = {(str(difference.path), difference.kind) for difference in caught.value.differences}
    assert places == {
        ("list", "length"),
        ("leaf", "structure"),
        ("kind", "structure"),
        ("gone", "missing"),
        ("new", "missing"),
        *((f"k{i}", "missing") for i in range(5)),
        *((f"K{i}", "missing") for i in range(5)),
    }
    assert isinstance(caught.value, ValueError)


def test_a_long_report_is_capped_and_counted():
    with pytest.raises(st.TreeMismatch, match="differ in 500 places") as caught:
        st.map_leaves(fails, {i: i for i in range(500)}, {})
    assert "and 480 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 25
    assert len(caught.value.differences) == 500


def test_keys_that_differ_in_type_do_not_match():
    with pytest.raises(st.TreeMismatch, match="differ in 2 places"):
        st.map_leaves(fails, {1: 0}, {True: 0})
    with pytest.raises(st.TreeMismatch, match="differ in 2 places"):
        st.map_leaves(fails, {(1,): 0}, {(1.0,): 0})


def test_the_second_tree_may_not_be_deeper():
    with pytest.raises(st.TreeMismatch, match=r"structure differs at a: expected a leaf \(int\), got list of 1"):
        st.map_leaves(fails, {"a": 1}, {"a": [1]})


def test_none_is_a_leaf_and_no_empty_container():
    with pytest.raises(st.TreeMismatch, match=r"structure differs at a"):
        st.map_leaves(fails, {"a": None}, {"a": []})
    assert st.map_leaves(lambda a, b: (a, b), [None], [1]) == [(None, 1)]


# What optree does otherwise


def test_classes_known_to_optree_are_containers():
    leaves, spec = st.flatten({"a": KnownToOptree(1, [2])})
    assert leaves == [1, 2]
    assert list(map(str, spec.paths())) == ["a.0", "a.1.0"]
    assert_trees_equal(st.unflatten(spec, leaves), {"a": KnownToOptree(1, [2])})


def test_specs_can_be_carried_to_another_process():
    tree = {"a": [Frozen(torch.ones(2)), deque([1], 3)], "b": defaultdict(list, {1: 2})}
    leaves, spec = st.flatten(tree)
    assert_trees_equal(st.unflatten(pickle.loads(pickle.dumps(spec)), leaves), tree)


def test_containers_that_appear_again_are_one_container_again():
    inner, empty = {"a": [1]}, []
    tree = [inner, inner, (inner, [2, inner], empty), empty, 3]
    leaves, spec = flatten_for_copy(tree, lambda _: False, shared=True)
    result = unflatten_copy(spec, leaves)
    assert result == tree
    assert result[0] is not inner
    assert all(found is result[0] for found in (result[1], result[2][0], result[2][1][1]))
    assert result[3] is result[2][2]
    assert result[3] is not empty


def test_a_tree_with_a_cycle_is_one_leaf_of_a_copy():
    tree = cyclic_list()
    leaves, spec = flatten_for_copy(tree, lambda _: False, shared=True)
    assert len(leaves) == 1
    assert leaves[0] is tree
    assert spec == st.flatten(0)[1]


def test_only_mappings_with_tensors_in_their_keys_are_leaves_of_a_copy():
    leaves, _ = flatten_for_copy([{(1,): 2}, {(3,): 4}, {"x": 5}], lambda key: key == (1,))
    assert leaves == [{(1,): 2}, 4, 5]


def test_a_spec_is_what_flatten_returned():
    with pytest.raises(TypeError, match=r"from_optree: expected an optree.PyTreeSpec, got list"):
        st.TreeSpec.from_optree([1])
    with pytest.raises(TypeError, match=r"unflatten: expected the TreeSpec that flatten returned, got list"):
        st.unflatten([1], [2])
    with pytest.raises(TypeError, match=r"from_flat: expected the TreeSpec that to_flat returned, got bool"):
        st.from_flat({}, False)
    with pytest.raises(TypeError, match=r"then: expected a Delta, got dict"):
        st.delta({}, {}).then({})


VERBS = {
    "paths": st.paths,
    "to_flat": st.to_flat,
    "map_leaves": lambda tree: st.map_leaves(id, tree),
    "map_with_path": lambda tree: st.map_with_path(print, tree),
    "offload": st.offload,
    "allocate_like": st.allocate_like,
    "copy_into": lambda tree: st.copy_into(tree, {}),
    "similarity": lambda tree: st.similarity({}, tree, values=False),
    "gather": st.gather,
    "broadcast": st.broadcast,
    "distribute": lambda tree: st.distribute(tree, {}),
    "reshard": lambda tree: st.reshard(tree, {}),
    "partition_replicas": st.partition_replicas,
    "stream": lambda tree: list(st.stream(tree, st.offload)),
    "chain": st.chain(st.offload, st.offload),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_cycle_is_refused_in_the_name_of_the_verb(verb):
    tree = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(st.CyclicTree, match=rf"^{verb}: the container at a\.0 is the one at <root>") as caught:
        VERBS[verb](tree)
    assert caught.value.path == st.Path(("a", 0))


@pytest.mark.parametrize("verb", [st.offload, st.allocate_like, lambda tree: st.Stager().stage(tree)])
@pytest.mark.parametrize(
    "whole", [torch.nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)])], ids=["module", "optimizer"]
)
def test_a_whole_object_as_a_tree_is_warned_of(verb, whole):
    with pytest.warns(
        UserWarning, match=rf"the tree is a whole object, a {type(whole).__name__}.*Pass its state_dict"
    ) as caught:
        verb(whole)
    assert caught[0].filename == __file__


def test_an_object_inside_a_container_is_meant():
    assert isinstance(st.offload([torch.nn.Linear(2, 2)])[0], torch.nn.Linear)


class Longer(namedtuple("Longer", "x y")):
    """A namedtuple that has more items than fields."""

    def __new__(cls, *items):
        return tuple.__new__(cls, items)


def test_items_of_a_namedtuple_beyond_its_fields_are_kept():
    tree = {"a": Longer(0, 1, 2)}
    flat, spec = st.to_flat(tree)
    assert flat == {"a.x": 0, "a.y": 1, "a.2": 2}
    again = st.from_flat(flat, spec)
    assert (type(again["a"]), tuple(again["a"])) == (Longer, (0, 1, 2))
