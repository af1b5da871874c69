"""Paths: typed keys, their rendering, and one order for all."""

import copy
import itertools
import math
import os
import pickle
import random
import subprocess
import sys
import time
from enum import StrEnum

import numpy as np
import pytest
import torch

import statetree as st
from statetree.key_paths import Attr, Path, same_key, unique_keys
from tests.pace import units
from tests.trees import TREES
from tests.trees.containers import Point
from tests.trees.corpus import Color, Level, a_function
from tests.trees.fields import Frozen

NAN = float("nan")

DIFFERENT_KEYS = [
    0,
    1,
    2,
    -1,
    1 << 70,
    0.0,
    -0.0,
    1.0,
    0.5,
    NAN,
    math.inf,
    1j,
    True,
    False,
    None,
    ...,
    "",
    "0",
    "1",
    "True",
    "None",
    ".",
    "a.b",
    "[0]",
    "é",
    "e\u0301",
    "\ud800",
    "\x00",
    b"",
    b"0",
    Attr("0"),
    Attr("a.b"),
    (),
    (0,),
    (False,),
    (0.0,),
    (NAN,),
    ("0",),
    ((),),
    (0, 1),
    Point(0, 1),
    Point(False, 1),
    frozenset(),
    frozenset({0}),
    frozenset({False}),
    frozenset({"0"}),
    frozenset({frozenset()}),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    int,
    torch.float32,
    torch.device("cpu"),
    np.int64(0),
    np.float64(0.0),
    a_function,
    Frozen(1),
]
every_key = pytest.mark.parametrize("key", DIFFERENT_KEYS)


# Equality


@every_key
def test_a_path_is_equal_to_one_made_alike(key):
    made = copy.deepcopy(key) if not callable(key) else key
    assert Path((key,)) == Path((made,))
    assert not Path((key,)) != Path((made,))  # noqa: SIM202 - the operator is under test
    assert hash(Path((key,))) == hash(Path((made,)))
    assert len({Path(("x", key)), Path(("x", made))}) == 1


@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: (key,)], ids=["alone", "in_a_tuple"])
def test_keys_of_different_value_or_type_differ(wrap):
    for first, second in itertools.combinations(DIFFERENT_KEYS, 2):
        one, other = Path(("x", wrap(first))), Path(("x", wrap(second)))
        assert one != other, (first, second)
        assert not one == other, (first, second)  # noqa: SIM201 - the operator is under test
        assert not same_key(wrap(first), wrap(second))


def test_paths_of_different_length_differ():
    assert Path(("a",)) != Path(("a", "b"))
    assert Path(()) != Path(("",))
    assert Path() == Path()


@pytest.mark.parametrize("keys", [(), ("a",), ("a", 0, "b.c"), (True, 1.5, None), (NAN,), (b"x", Attr("y"))], ids=str)
def test_a_path_is_equal_to_what_it_reads_like(keys):
    path, text = Path(keys), str(Path(keys))
    assert path == text
    assert text == path
    assert not path != text  # noqa: SIM202 - the operator is under test
    assert hash(path) == hash(text)
    assert path != text + "x"
    assert {path: 1}[text] == {text: 1}[path] == 1


def test_two_paths_that_read_alike_differ():
    number, name = Path((0,)), Path(("0",))
    assert number == "0" == name
    assert number != name
    assert len({number, name}) == 2


def test_a_path_is_equal_to_nothing_else():
    for other in (("a", 0), ["a", 0], None, 1, b"a.0"):
        assert Path(("a", 0)) != other
        assert other != Path(("a", 0))


class Caseless:
    """Equal keys that read differently."""

    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name.lower())

    def __eq__(self, other):
        return isinstance(other, Caseless) and self.name.lower() == other.name.lower()

    def __str__(self):
        return self.name


def test_equal_things_have_equal_hashes():
    one, other = Path((Caseless("A"),)), Path((Caseless("a"),))
    assert one == other
    assert hash(one) == hash(other)
    assert one != "A"


@every_key
def test_no_path_is_equal_to_a_string_with_another_hash(key):
    path = Path(("x", key))
    assert path != str(path) or hash(path) == hash(str(path))


def test_paths_with_tensors_as_keys():
    tensor = torch.arange(3)
    assert Path((tensor,)) == Path((tensor,))
    assert Path((tensor,)) != Path((tensor.clone(),))
    assert hash(Path((tensor,))) == hash(Path((tensor,)))
    assert len({Path((tensor,)), Path((tensor.clone(),))}) == 2


class Unfriendly:
    """Its comparison, representation and text all fail."""

    def __eq__(self, other):
        msg = "not to be compared"
        raise RuntimeError(msg)

    def __hash__(self):
        return 1

    def __repr__(self):
        msg = "not to be shown"
        raise RuntimeError(msg)

    __str__ = __repr__


def test_a_key_that_refuses_everything():
    key, other = Unfriendly(), Unfriendly()
    assert Path((key,)) == Path((key,))
    assert Path((key,)) != Path((other,))
    assert "Unfriendly object at" in str(Path(("a", key)))
    assert isinstance(hash(Path((key,))), int)
    sorted([Path((key,)), Path((other,)), Path(("a",))], key=Path.sort_key)
    flat, spec = st.to_flat({key: 1, "a": {key: 3}})
    assert st.from_flat(flat, spec)[key] == 1
    assert spec == spec
    assert st.map_leaves(lambda a, b: a + b, {key: 1, "a": 2}, {key: 3, "a": 4}) == {key: 4, "a": 6}
    with pytest.raises(st.TreeMismatch) as caught:
        st.map_leaves(lambda a, b: a, {key: 1}, {other: 2})
    places = {(difference.path, difference.kind) for difference in caught.value.differences}
    assert places == {(Path((key,)), "missing"), (Path((other,)), "missing")}


# Rendering


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("model", "layers", 0, "weight"), "model.layers.0.weight"),
        ((), ""),
        (("",), ""),
        (("", ""), "."),
        ((True, 1.5, None), "True.1.5.None"),
        (((1, "a"),), "(1, 'a')"),
        ((Color.RED,), "Color.RED"),
        ((Level.LOW,), "1"),
        (("a", Attr("scale")), "a.scale"),
        ((b"x",), "b'x'"),
        ((torch.float32, torch.device("cpu")), "torch.float32.cpu"),
    ],
)
def test_a_path_reads_plainly(keys, text):
    assert str(Path(keys)) == text
    assert f"{Path(keys)}" == text


@every_key
def test_any_key_can_be_shown(key):
    assert isinstance(str(Path((key, "x"))), str)
    assert repr(Path((key,))) == f"Path({(key,)!r})"


def test_the_representation_of_a_path_makes_it_again():
    path = Path(("a", 0, True, (1, "b"), None))
    assert eval(repr(path)) == path
    assert str(path) != repr(path)


@pytest.mark.slow
def test_the_rendering_of_sets_does_not_depend_on_the_process():
    code = """
from statetree.key_paths import Path, unique_keys
import statetree as st
keys = [frozenset({"alpha", "beta", "gamma"}), frozenset({"delta", "eps"}), (frozenset({"x", "yy", "zzz"}), 1), "b",
        frozenset({"1", 1}), frozenset({("a", frozenset({"q", "r"}))})]
paths = [Path((key,)) for key in keys]
print([str(path) for path in sorted(paths, key=Path.sort_key)])
print(st.flatten({"a": {keys[0]: 1}, f"a.{paths[0]}": 2, keys[2]: 3})[1].flat_keys())
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=units(60),
        ).stdout
        for seed in range(3)
    }
    assert len(printed) == 1


def test_functions_are_rendered_by_their_names():
    assert str(Path((a_function, dict, (a_function, 1)))) == (
        "tests.trees.corpus.a_function.<class 'dict'>.(tests.trees.corpus.a_function, 1)"
    )
    assert [str(Path((key,))) for key in (len, dict.fromkeys)] == ["builtins.len", "dict.fromkeys"]
    rendered = [str(Path((key,))) for key in (len, dict.fromkeys, torch.relu, lambda: 1, torch.nn.Linear.forward)]
    assert not any("0x" in text for text in rendered), rendered
    keys = st.flatten({a_function: 1, "tests.trees.corpus.a_function": 2})[1].flat_keys()
    assert sorted(keys) == ["['tests.trees.corpus.a_function']", "[tests.trees.corpus.a_function]"]


def test_unique_keys_are_plain_where_they_are_distinct():
    assert unique_keys(["a", "b"], [("a",), ("b",)]) == ["a", "b"]


def test_unique_keys_number_what_cannot_be_told_apart():
    paths = [("same",), ("same",), ("same",)]
    assert unique_keys(["same"] * 3, paths) == ["['same']", "['same']~2", "['same']~3"]


def test_unique_keys_leave_plain_ones_alone():
    plain = ["0", "0", "[0]", "['0']~2", "['0']"]
    paths = [(0,), ("0",), ("[0]",), ("['0']~2",), ("['0']",)]
    keys = unique_keys(plain, paths)
    assert len(set(keys)) == 5
    assert keys[2:] == plain[2:]


def test_many_leaves_of_one_key_take_no_quadratic_time():
    count = 5_000
    started = time.process_time()
    keys = unique_keys(["same"] * count, [("same",)] * count)
    assert len(set(keys)) == count
    assert time.process_time() - started < units(0.5)


# Order


def test_the_order_is_total_and_does_not_depend_on_where_it_starts():
    paths = [
        Path(("x", *keys)) for keys in itertools.chain(zip(DIFFERENT_KEYS), itertools.permutations([0, "a", None]))
    ]
    expected = sorted(paths, key=Path.sort_key)
    shuffled = list(paths)
    for seed in range(20):
        random.Random(seed).shuffle(shuffled)
        assert list(map(repr, sorted(shuffled, key=Path.sort_key))) == list(map(repr, expected))


def test_different_paths_have_different_sort_keys():
    described = [key for key in DIFFERENT_KEYS if key is not a_function]
    keys = [Path((key,)).sort_key() for key in described]
    assert len({repr(key) for key in keys}) == len(described)
    for one, other in itertools.combinations(keys, 2):
        assert (one < other) != (other < one), (one, other)


def test_numbers_and_names_are_in_their_natural_order():
    paths = [Path((key,)) for key in ("b", 10, "a", 2, -1)]
    assert [path[0] for path in sorted(paths, key=Path.sort_key)] == [-1, 2, 10, "a", "b"]


def test_a_path_comes_before_those_below_it():
    assert Path(("a",)).sort_key() < Path(("a", 0)).sort_key()


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_paths_of_any_tree_can_be_sorted(tree):
    paths = st.paths(tree.make())
    assert sorted(map(Path.sort_key, reversed(paths))) == sorted(map(Path.sort_key, paths))


def test_the_order_does_not_depend_on_the_order_of_a_dict():
    keys = list(dict.fromkeys(DIFFERENT_KEYS))  # those that can be in one dict
    one = sorted(st.paths(dict.fromkeys(keys)), key=Path.sort_key)
    other = sorted(st.paths(dict.fromkeys(reversed(keys))), key=Path.sort_key)
    assert list(map(str, one)) == list(map(str, other))


# Carrying paths about


@every_key
def test_paths_can_be_pickled_and_copied(key):
    path = Path(("a", key))
    for made in (pickle.loads(pickle.dumps(path)), copy.deepcopy(path), copy.copy(path)):
        assert type(made) is Path
        assert made == path


def test_a_child_is_one_key_further_down():
    path = Path(("a",)).child(0)
    assert path == Path(("a", 0))
    assert type(path) is Path


def test_the_parent_is_one_key_further_up():
    path = Path(("a", 0))
    assert path.parent == Path(("a",))
    assert type(path.parent) is Path
    assert path.child("b").parent == path
    assert Path().parent == Path()


# Following paths


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_path_leads_to_its_leaf(tree):
    made = tree.make()
    leaves, spec = st.flatten(made)
    leaf_at = dict(zip(reversed(spec.paths()), reversed(leaves), strict=True))  # of equal keys (NaN) the first counts
    for path, leaf in leaf_at.items():
        found = path(made)
        assert found is leaf or (type(found), repr(found)) == (type(leaf), repr(leaf))  # registered: made when asked
    assert Path()(made) is made
    for visit in spec.walk():
        assert visit.cls in (None, type(visit.path(made)))


def test_a_path_that_leads_nowhere_says_where_it_ends():
    tree = {"a": [1, {"0": 2}]}
    with pytest.raises(
        st.TreeMismatch, match=r"nothing at a\.1\.0: expected the key 0 at a\.1, got dict with the keys"
    ):
        Path(("a", 1, 0))(tree)
    with pytest.raises(st.TreeMismatch, match=r"nothing at a\.0\.x: expected the key 'x' at a\.0, got int\."):
        Path(("a", 0, "x"))(tree)
    with pytest.raises(st.TreeMismatch, match=r"expected the key 'b' at <root>"):
        Path(("b",))(tree)


@pytest.mark.slow
def test_a_path_is_followed_without_anything_else_of_the_library():
    code = "import statetree as st; assert st.Path(('a', 0))({'a': [5]}) == 5"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=units(60))


def test_attribute_names_differ_from_keys():
    assert Path((Attr("a"),)) != Path(("a",))
    assert pickle.loads(pickle.dumps(Path((Attr("a"),)))) == Path((Attr("a"),))


class Mood(StrEnum):
    GOOD = "good"


def test_a_str_enum_differs_from_its_value():
    assert Path((Mood.GOOD,)) != Path(("good",))
    flat, spec = st.to_flat({Mood.GOOD: 1, "x": {"good": 2}})
    assert st.from_flat(flat, spec) == {Mood.GOOD: 1, "x": {"good": 2}}
