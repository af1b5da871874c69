"""What the assertions accept, what they refuse, and how they say it."""

import ast
import copy
import dataclasses
import struct
from array import array
from collections import OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import statetree as st
from tests.judge import (
    assert_independent,
    assert_pure,
    assert_structure_preserved,
    assert_trees_equal,
    tree_differences,
)
from tests.judge.messages import brief
from tests.trees import DISTRIBUTED_TREES, TREES, Ramp
from tests.trees.corpus import Held
from tests.trees.fields import Frozen, State


def values(*shape, dtype=torch.float32):
    return Ramp()(*shape, dtype=dtype)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_is_the_same_as_itself_and_as_one_made_alike(tree):
    made = tree.make()
    assert_trees_equal(made, made, containers=True)
    assert_trees_equal(made, tree.make(), containers=True)


def test_containers_are_compared_by_identity_only_if_asked_to():
    shared = [1]
    left, right = [shared, shared], [[1], [1]]
    assert_trees_equal(left, right)
    with pytest.raises(AssertionError, match=r"object of 0 and 1 is one on the left, two on the right"):
        assert_trees_equal(left, right, containers=True)


def test_ties_are_compared_only_if_asked_to():
    base = values(4)
    assert_trees_equal([base, base], [base.clone(), base.clone()], ties=False)


def test_pieces_of_a_slab_are_accepted_only_if_asked_to():
    slab = torch.cat([values(4), values(4)])
    left, right = [values(4), values(4)], [slab[:4], slab[4:]]
    assert_trees_equal(left, right, storages=False)
    with pytest.raises(AssertionError, match="storage of"):
        assert_trees_equal(left, right)


@pytest.mark.parametrize("strides", [False, True])
def test_overlap_in_a_slab_is_noticed(strides):
    slab, alone = torch.zeros(6), [torch.zeros(4), torch.zeros(4)]
    for left, right, which in ((alone, [slab[:4], slab[2:]], "right"), ([slab[:4], slab[2:]], alone, "left")):
        other = "left" if which == "right" else "right"
        assert tree_differences(left, right, strides=strides, storages=False) == [
            f"overlap differs: 0 and 1 overlap on the {which}, not on the {other}"
        ]


def test_overlap_is_compared_whatever_the_distances():
    left, right = torch.zeros(9), torch.zeros(9)
    assert_trees_equal([left[:2], left[1:3]], [right[4:6], right[3:5]], strides=False)
    assert tree_differences([left[:6], left[1:3], left[5:8]], [right[:6], right[1:3], right[6:]], strides=False) == [
        "overlap differs: 0 and 2 overlap on the left, not on the right"
    ]
    rows = torch.zeros(2, 2)  # in one tree the columns lie between each other
    columns = torch.zeros(2, 2).t()
    assert_trees_equal([rows[:, 0], rows[:, 1]], [columns[:, 0], columns[:, 1]], strides=False)


def test_circles_and_depth_end():
    def nested():
        result = [1]
        result.append(result)
        for _ in range(5000):
            result = [result]
        return result

    assert_trees_equal(nested(), nested(), containers=True)


def test_a_report_names_the_places_and_counts_the_rest():
    with pytest.raises(AssertionError, match=r"differ in 30 places:\n  value differs at k0: 0 against 1"):
        assert_trees_equal({f"k{i}": i for i in range(30)}, {f"k{i}": i + 1 for i in range(30)})
    with pytest.raises(AssertionError, match=r"and 10 more"):
        assert_trees_equal({f"k{i}": i for i in range(30)}, {f"k{i}": i + 1 for i in range(30)})


def test_a_lost_key_is_one_difference_however_many_there_are():
    whole = {f"layer{index}.weight": index for index in range(10_000)}
    lost = {key: index for key, index in whole.items() if index != 17}
    assert tree_differences(whole, lost) == ["1 key is only on the left at <root>: 'layer17.weight'"]
    assert tree_differences(lost, whole) == ["1 key is only on the right at <root>: 'layer17.weight'"]
    with pytest.raises(AssertionError, match=r"in 1 place:\n  1 key is only on the left at <root>: 'layer17.weight'$"):
        assert_structure_preserved(lambda _: lost, whole)
    assert tree_differences(dict.fromkeys(range(9)), {}) == [
        "9 keys are only on the left at <root>: 0, 1, 2, 3, 4, ..."
    ]


def test_keys_that_hold_tensors_are_compared_in_their_order():
    left, right = ({torch.arange(3.0) + step: step for step in steps} for steps in ((0, 1), (0, 2)))
    assert tree_differences(left, right) == [
        "elements differ at <key 1>, 3 of 3, the first at index (0,): 1.0 against 2.0",
        f"value differs at {brief(list(left)[1])}: 1 against 2",
    ]
    with pytest.raises(AssertionError, match="elements differ at <key 1>, 3 of 3"):
        assert_structure_preserved(lambda _: right, left)
    assert len(tree_differences(left, {next(iter(right)): 0})) == 1


def test_long_keys_are_named_in_full():
    one, other = ({f"model.{80 * 'x'}.{name}": number for number, name in enumerate(names)} for names in ("ab", "ba"))
    assert tree_differences(one, dict(sorted(other.items()))) == [
        f"value differs at model.{80 * 'x'}.a: 0 against 1",
        f"value differs at model.{80 * 'x'}.b: 1 against 0",
    ]


def test_values_are_compared_by_key_whatever_the_order():
    assert tree_differences({"a": 1, "b": 2, "c": 3}, {"b": 2, "a": 4, "c": 3}) == [
        "order of keys differs at <root>: 'a' against 'b'",
        "value differs at a: 1 against 4",
    ]


def test_sets_of_many_elements_are_compared():
    assert tree_differences(set(range(100_000)), set(range(1, 100_001))) == [
        "1 element is only on the left at <root>: 0",
        "1 element is only on the right at <root>: 100000",
    ]
    objects = [Held() for _ in range(100)]
    for index, one in enumerate(objects):
        one.index = index
    assert tree_differences(set(objects), set(copy.deepcopy(objects))) == []


NAN = {bits: torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)}


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        pytest.param(*NAN.values(), r"index \(0,\): nan of bytes 0000c07f against nan of bytes 0100c07f", id="nan"),
        pytest.param(
            torch.tensor([0, 1], dtype=torch.uint8).view(torch.bool),
            torch.tensor([0, 2], dtype=torch.uint8).view(torch.bool),
            r"index \(1,\): True of bytes 01 against True of bytes 02",
            id="bool",
        ),
        pytest.param(
            *(struct.unpack("<d", bytes([low, *[0] * 5, 248, 127]))[0] for low in (0, 1)),
            "nan against nan, of bytes 000000000000f87f0000000000000000 against 010000000000f87f0000000000000000",
            id="number",
        ),
        pytest.param("x" * 500 + "abc", "x" * 500 + "abd", r"\.\.\.x+abc'\.\.\. against \.\.\.x+abd'\.\.\.", id="text"),
        pytest.param(
            np.arange(100_000).reshape(10, -1),
            np.arange(100_000).reshape(10, -1) + (np.arange(100_000) == 20_003).reshape(10, -1),
            r"1 of 100000, the first at index \(2, 3\): 20003 against 20004",
            id="array",
        ),
    ],
)
def test_what_is_shown_of_two_sides_differs(left, right, shown):
    with pytest.raises(AssertionError, match=shown):
        assert_trees_equal([left], [right])


def test_paths_read_as_in_every_other_message():
    left, right = ({"model": [{"w": torch.full((2,), number)}]} for number in (1, 2))
    with pytest.raises(AssertionError, match=r"elements differ at model\.0\.w, 2 of 2"):
        assert_trees_equal(left, right)
    assert str(st.similarity(left, right, values=True)).count("model.0.w") == 1


def test_attributes_of_an_object_are_named_as_such():
    left, right = Held(), Held()
    left.w, right.w = {"a": 1}, {"a": 2}
    assert tree_differences([left], [right]) == ["value differs at 0.w.a: 1 against 2"]


def test_what_is_at_the_root_is_called_so():
    shared = torch.arange(3.0)
    left, right = torch.arange(3.0), torch.arange(3.0)
    left.note, right.note = left.view(3), shared
    assert any("storage of <root> and note is one on the left" in line for line in tree_differences(left, right))


def test_the_first_differing_element_is_named():
    right = values(2, 3)
    right[1, 2] = 0
    assert tree_differences([values(2, 3)], [right]) == [
        "elements differ at 0, 1 of 6, the first at index (1, 2): 6.0 against 0.0"
    ]
    assert tree_differences({"s": torch.UntypedStorage([1, 2, 3])}, {"s": torch.UntypedStorage([1, 5, 6])}) == [
        "elements differ at s, 2 of 3, the first at index (1,): 2 against 5"
    ]
    conjugated = values(2, dtype=torch.complex64).conj()
    other = values(2, dtype=torch.complex64)
    other[1] = 5
    assert tree_differences(conjugated, other.conj()) == [
        "elements differ at <root>, 1 of 2, the first at index (1,): (2-2.5j) against (5-0j)"
    ]


def test_independence():
    base, listed = values(4), [1]
    held = Held()
    held.inner = listed
    array = np.arange(3.0)
    assert_independent([base], [base.clone()])
    for one, other in (([base], [base[2:]]), ([base[:2]], [base[2:]]), ([base], [base.untyped_storage()])):
        with pytest.raises(AssertionError, match="lies on the storage of"):
            assert_independent(one, other)
    with pytest.raises(AssertionError, match="lies in the memory of"):
        assert_independent([base], [torch.from_numpy(base.numpy())])
    with pytest.raises(AssertionError, match="is the object at"):
        assert_independent([held], {"a": listed})
    with pytest.raises(AssertionError, match="lies in the memory of"):
        assert_independent([array], [array[1:]])


def test_what_raises_gains_a_note():
    class Odd:
        def __reduce_ex__(self, protocol):
            return 1, 2, 3, 4, 5

    with pytest.raises(TypeError, match="not iterable") as caught:
        assert_trees_equal([Odd()], [Odd()])
    assert caught.value.__notes__ == ["statetree.testing: while comparing what is at 0"]


def test_dataclasses_are_judged_without_their_equality():
    @dataclasses.dataclass
    class Vague:
        weight: object

        def __eq__(self, other):
            return True

    with pytest.raises(AssertionError, match="value differs at weight"):
        assert_trees_equal(Vague(1), Vague(2))


# Options


def test_strides_are_compared_unless_asked_not_to():
    left, right = values(2, 3).t(), values(2, 3).t().contiguous()
    assert_trees_equal([left, left[1:]], [right, right[1:]], strides=False)
    with pytest.raises(AssertionError, match=r"strides differ at 0: \(1, 3\) against \(2, 1\)"):
        assert_trees_equal([left], [right])
    other = right.clone()
    other[2, 1] = 9
    with pytest.raises(AssertionError, match=r"first at index \(2, 1\): 6.0 against 9.0"):
        assert_trees_equal([left], [other], strides=False)


def test_ties_are_compared_whatever_the_strides():
    left, right = values(2, 3).t(), values(2, 3).t().contiguous()
    with pytest.raises(AssertionError, match="is one on the left, two on the right"):
        assert_trees_equal([left, left[1:]], [right, right[1:].clone()], strides=False)


def test_devices_are_compared_if_asked_to():
    with FakeTensorMode():  # the only devices that every machine has
        left, right = torch.empty(2), torch.empty(2, device="cuda")
    assert_trees_equal([left], [right])
    with pytest.raises(AssertionError, match=r"device differs at 0: device\(type='cpu'\) against"):
        assert_trees_equal([left], [right], device=True)


# Transforms


def test_pure_transforms_pass_and_return():
    tree = {"w": values(3), "n": [1, {"a": None}]}
    result = assert_pure(st.offload, tree)
    assert_trees_equal(result, tree)


def add_in_place(tree):
    tree["w"].add_(1)


def set_and_reset(tree):
    tree["w"].add_(1).sub_(1)


def through_numpy(tree):
    tree["w"].detach().numpy()[1] = 7


def replace_item(tree):
    tree["n"][0] = 2


def reorder(tree):
    tree["n"] = tree.pop("n")
    tree["w"] = tree.pop("w")


def swap_for_equal(tree):
    tree["n"][1] = {"a": None}


def add_attribute(tree):
    tree["w"].note = 1


def require_grad(tree):
    tree["w"].requires_grad_()


def resize(tree):
    tree["w"].untyped_storage().resize_(64)


def resize_view(tree):
    tree["w"].resize_(2)


def set_data(tree):
    tree["w"].data = tree["w"].clone()


def give_gradient(tree):
    tree["w"].grad = torch.ones(3)


def change_metadata(tree):
    tree["o"]._metadata["version"] = 2


def change_object(tree):
    tree["held"].inner.append(1)


def raise_after(tree):
    tree["w"].add_(1)
    raise ValueError("after the fact")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (add_in_place, r"the version of the tensor at w changed from 0 to 1"),
        (set_and_reset, r"the version of the tensor at w changed from 0 to 2"),
        (through_numpy, r"bytes below w changed"),
        (replace_item, r"n\.0 changed: 1 against 2"),
        (reorder, r"the order or the keys of the dict at <root> changed"),
        (swap_for_equal, r"n\.1 is another object"),
        (add_attribute, r"w\.note is new"),
        (require_grad, r"the requires_grad of the tensor at w changed from False to True"),
        (resize, r"changed"),
        (resize_view, r"the shape of the tensor at w changed from \(3,\) to \(2,\)"),
        (set_data, r"the pointer of the tensor at w changed$"),
        (give_gradient, r"the grad of the tensor at w changed$"),
        (change_metadata, r"o\._metadata\.version changed: 1 against 2"),
        (change_object, r"held\.inner\.0 is new"),
        (raise_after, r"the version of the tensor at w changed from 0 to 1"),
    ],
)
def test_impure_transforms_are_noticed(change, where):
    tree = {"w": values(3), "n": [1, {"a": None}], "o": OrderedDict(), "held": Held()}
    tree["o"]._metadata = {"version": 1}
    tree["held"].inner = []
    with pytest.raises(AssertionError, match=where):
        assert_pure(change, tree)


def test_what_a_pure_transform_raises_comes_through():
    with pytest.raises(KeyError, match="missing"):
        assert_pure(lambda tree: tree["missing"], {"w": values(3)})


def test_structure_is_preserved_whatever_becomes_of_the_leaves():
    tree = {"w": [values(3), None], 1: (Frozen(1, State(2, "x")), deque([values(2)], 4)), "s": torch.Size([1])}
    result = assert_structure_preserved(partial(st.map_leaves, repr), tree)
    assert result["w"][1] == "None"


@pytest.mark.parametrize(
    ("transform", "where"),
    [
        (lambda tree: [tree], "type differs at <root>"),
        (lambda tree: {**tree, "more": 1}, "1 key is only on the right at <root>: 'more'"),
        (lambda tree: dict(reversed(tree.items())), "order of keys differs at <root>: 'w' against 1"),
        (lambda tree: {**tree, "n": tuple(tree["n"])}, r"type differs at n"),
        (lambda tree: {**tree, "n": tree["n"][:1]}, r"length differs at n: 2 against 1"),
        (lambda tree: {**tree, "n": 1}, r"type differs at n"),
        (lambda tree: {**tree, "w": [tree["w"]]}, r"type differs at w"),
        (lambda tree: {**tree, "f": State(1, 2)}, r"type differs at f"),
        (lambda tree: {**tree, "d": defaultdict(dict)}, r"object differs at d.default_factory"),
        (lambda tree: {**tree, "o": OrderedDict()}, r"attributes differ at o"),
        (
            lambda tree: {(True if key == 1 else key): tree[key] for key in tree},
            "1 key is only on the right at <root>: True",
        ),
    ],
)
def test_changed_structures_are_noticed(transform, where):
    tree = {"w": values(3), "n": [1, {"a": None}], "f": Frozen(1, 2), "d": defaultdict(list), "o": OrderedDict(), 1: 2}
    tree["o"]._metadata = {}
    with pytest.raises(AssertionError, match=f"(?s)^assert_structure_preserved: the structures differ .*{where}"):
        assert_structure_preserved(transform, tree)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("tree", [tree for tree in DISTRIBUTED_TREES if not tree.changes], ids=str)
def test_distributed_trees_are_the_same_as_themselves(tree):
    made = tree.make()
    assert_trees_equal(made, made, containers=True)


APPLYING = {"laws"}  # which apply verbs, and leave it to others to judge what comes of it
FILES = sorted(Path(__file__).parent.glob("*.py"))
JUDGING = [file for file in FILES if not file.stem.startswith("test_") and file.stem not in APPLYING]


@pytest.mark.parametrize("file", JUDGING, ids=lambda file: file.stem)
def test_what_judges_the_engines_does_not_use_them(file):
    tree = ast.parse(file.read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if name.split(".")[0] == "statetree"} == set()


def holding(value):
    held = Held()
    held.w = value
    return held


def add_to_generator(tree):
    torch.rand(3, generator=tree[0])


OPAQUE_CHANGES = {
    "an array": (lambda: np.arange(4.0), lambda tree: tree[0].__setitem__(0, 9.0)),
    "an array of dates": (lambda: np.zeros(2, "datetime64[s]"), lambda tree: tree[0].__setitem__(0, 9)),
    "an array in an object": (lambda: holding(np.arange(4)), lambda tree: tree[0].w.__setitem__(0, 9)),
    "a bytearray": (lambda: bytearray(b"x"), lambda tree: tree[0].append(1)),
    "an array of the standard library": (lambda: array("d", [1.0]), lambda tree: tree[0].append(2.0)),
    "a set": (lambda: {1, 2}, lambda tree: tree[0].add(5)),
    "a generator": (torch.Generator, add_to_generator),
    "a generator of NumPy": (lambda: np.random.default_rng(0), lambda tree: tree[0].random()),
    "random numbers": (lambda: Random(0), lambda tree: tree[0].random()),
}


@pytest.mark.parametrize("name", OPAQUE_CHANGES)
def test_changes_inside_opaque_objects_are_noticed(name):
    make, change = OPAQUE_CHANGES[name]
    assert_pure(lambda tree: None, [make()])
    assert_pure(st.offload, [make()])
    with pytest.raises(AssertionError, match=r"^assert_pure: the argument changed in \d+ place"):
        assert_pure(change, [make()])


def test_arrays_that_share_memory_with_tensors_are_not_independent():
    numbers = np.arange(6.0)
    for one, other in (([numbers], [torch.from_numpy(numbers)]), ([torch.from_numpy(numbers)[2:]], [numbers[3:5]])):
        with pytest.raises(AssertionError, match=r"0 lies in the memory of 0"):
            assert_independent(one, other)
    assert_independent([numbers[:3]], [torch.from_numpy(numbers)[3:]])
    assert_independent([numbers], [torch.from_numpy(numbers.copy())])
