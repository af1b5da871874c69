"""The leaf-type registry: which leaf type a class has, and leaves taken apart and put together."""

import gc
import weakref

import pytest
import torch

import statetree as st
from statetree.leaves.builtin import OPAQUE, facts, is_plain, leaf_type_of
from statetree.leaves.types.fake import FAKE, UNINITIALIZED
from statetree.leaves.types.storage import STORAGE
from statetree.leaves.types.tensor import TENSOR
from statetree.leaves.types.wrapper import WRAPPER
from tests.judge import assert_independent, assert_trees_equal, tree_differences
from tests.repack import copies, repacked, unpacked
from tests.trees import DISTRIBUTED_TREES, TREES
from tests.trees.classes import PlainSubclass, SubclassOfParameter, TwoTensors
from tests.trees.corpus import Color, Held, a_function
from tests.trees.fields import SENTINEL, DictOfLeafType, Sentinel, State

COPIED = [tree for tree in TREES if not (tree.refused or tree.changes)]
REFUSED = [tree for tree in TREES if tree.refused and tree.name != "freed"]  # which spans notice


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_every_leaf_comes_back_from_copies_of_its_parts(tree):
    made = tree.make()
    again = repacked(made)
    assert_trees_equal(again, made)
    assert_independent(made, again, containers=False)


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_every_leaf_comes_back_from_copies_of_copies(tree):
    made = tree.make()
    assert_trees_equal(repacked(repacked(made)), made)


@pytest.mark.parametrize("tree", [tree for tree in DISTRIBUTED_TREES if not tree.changes], ids=str)
@pytest.mark.usefixtures("one_rank_group")
def test_every_distributed_leaf_comes_back_from_copies_of_its_parts(tree):
    made = tree.make()
    again = repacked(made)
    assert_trees_equal(again, made)
    assert_independent(made, again, containers=False)


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_taking_apart_changes_nothing(tree):
    made = tree.make()
    apart = unpacked(made)
    apart.pack(copies(apart.parts))
    assert_trees_equal(made, tree.make())


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_parts_are_plain_tensors_each_once(tree):
    apart = unpacked(tree.make())
    assert len(apart.owners) == len(apart.parts) == len(apart.columns.tensors)
    assert len(set(map(id, apart.parts))) == len(apart.parts)
    for part in apart.parts:
        assert part.layout is torch.strided
        assert not part.is_nested
        assert not part.is_quantized
        assert isinstance(part, torch.Tensor)
        assert part.untyped_storage() is not None
    assert not set(apart.plain) & set(apart.recipes)
    assert {*apart.plain, *apart.recipes} <= set(range(len(apart.leaves)))
    assert all(0 <= owner < len(apart.leaves) for owner in apart.owners)


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_every_part_belongs_to_its_owner(tree):
    apart = unpacked(tree.make())
    for part, owner in enumerate(apart.owners):
        assert part in apart.parts_of(owner)


@pytest.mark.parametrize("tree", REFUSED, ids=str)
def test_what_cannot_be_taken_apart_is_refused_with_its_path(tree):
    with pytest.raises(st.UnsupportedLeaf, match=rf"test: .*({tree.refused})") as caught:
        unpacked({"outer": [tree.make()]})
    assert isinstance(caught.value, TypeError)
    assert str(caught.value.path).startswith("outer.0")
    assert str(caught.value.path) in str(caught.value)
    assert "%PATH%" not in str(caught.value)


def test_a_lone_leaf_that_cannot_be_taken_apart_is_at_the_root():
    with pytest.raises(st.UnsupportedLeaf, match="at <root>") as caught:
        unpacked(torch.zeros(2).to_mkldnn())
    assert caught.value.path == st.Path()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(1), TENSOR),
        (torch.nn.Parameter(torch.zeros(1)), TENSOR),
        (torch.nn.Buffer(torch.zeros(1)), TENSOR),
        (torch.zeros(1).as_subclass(PlainSubclass), TENSOR),
        (SubclassOfParameter(torch.zeros(1)), TENSOR),
        (torch.nn.UninitializedParameter(), UNINITIALIZED),
        (torch.nn.UninitializedBuffer(), UNINITIALIZED),
        (TwoTensors(torch.zeros(1), torch.zeros(1)), WRAPPER),
        (torch.UntypedStorage(1), STORAGE),
        (Held(), OPAQUE),
        ({1}, OPAQUE),
        (torch.Generator(), OPAQUE),
        (torch.nn.Linear(1, 1), OPAQUE),
        (None, None),
        (1.5, None),
        (Color.RED, None),
        (State, None),
        (a_function, None),
        (torch.float32, None),
        (torch.nn, None),
        (SENTINEL, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_leaf_types_by_class(value, expected):
    assert leaf_type_of(type(value)) is expected
    assert is_plain(value) is (expected is None)


def test_a_fake_tensor_has_its_own_leaf_type():
    fake = next(tree for tree in TREES if tree.name == "fake").make()["fake"]
    assert leaf_type_of(type(fake)) is FAKE


def test_leaf_types_follow_the_protocol():
    for leaf_type in (TENSOR, FAKE, UNINITIALIZED, STORAGE, WRAPPER, OPAQUE):
        assert isinstance(leaf_type, st.LeafType)


# Registering


class Scaled:
    def __init__(self, values, scale):
        self.values, self.scale = values, scale


class ScaledType:
    name = "Scaled"

    def unpack(self, value):
        return [value.values], value.scale

    def pack(self, context, parts):
        return Scaled(parts[0], context)

    def describe(self, value):
        return {"scale": value.scale}


def fresh_class(*bases):
    return type("Fresh", bases or (), {})


def test_a_registered_class_is_taken_apart_as_its_leaf_type_says():
    st.register_leaf_type(Scaled, ScaledType())
    weight = torch.arange(6.0)
    tree = {"a": Scaled(weight, 0.5), "b": weight[2:]}
    again = repacked(tree)
    assert_trees_equal(again, tree)
    assert again["a"].values is not weight
    assert facts(tree["a"]) == {"leaf type": "Scaled", "scale": 0.5}


def test_a_leaf_type_may_be_given_as_a_class():
    cls = fresh_class(Scaled)
    st.register_leaf_type(cls, ScaledType)
    assert isinstance(leaf_type_of(cls).given, ScaledType)


def test_a_leaf_type_may_be_registered_again():
    cls = fresh_class(Scaled)
    st.register_leaf_type(cls, ScaledType())
    st.register_leaf_type(cls, None)
    assert leaf_type_of(cls) is None


def test_a_class_met_before_can_be_registered_later():
    cls = fresh_class(Scaled)
    value = cls(torch.ones(2), 1)
    assert leaf_type_of(cls) is OPAQUE
    st.register_leaf_type(cls, None)
    assert repacked([value])[0] is value


def test_a_registered_class_is_a_leaf_also_where_it_derives_from_a_container():
    value = DictOfLeafType(b=torch.ones(1), a=torch.zeros(2))
    assert st.flatten({"x": value})[0] == [value]
    assert_trees_equal(repacked({"x": value}), {"x": value})


def test_a_container_met_before_can_be_made_a_leaf():
    cls = fresh_class(dict)
    value = cls(a=1)
    assert st.flatten(value)[0] == [1]
    st.register_leaf_type(cls, None)
    assert st.flatten(value)[0] == [value]


def test_a_leaf_class_can_be_made_a_container_again():
    cls = fresh_class(dict)
    st.register_leaf_type(cls, None)
    assert st.flatten(cls(a=1))[0] == [{"a": 1}]
    st.register_container(
        cls, lambda value: (list(value.values()), list(value)), lambda keys, c: cls(zip(keys, c, strict=True))
    )
    assert st.flatten(cls(a=1))[0] == [1]


def test_subclasses_of_a_registered_class_are_not_affected():
    assert leaf_type_of(fresh_class(Sentinel)) is OPAQUE


def test_atoms_pass_by_identity():
    tree = {"a": SENTINEL, "b": [SENTINEL]}
    again = repacked(tree)
    assert again["a"] is again["b"][0] is SENTINEL


def test_a_registered_atom_in_an_attribute_is_structure():
    class Listed(list):
        pass

    tree = Listed([1])
    tree.atom = SENTINEL
    assert_trees_equal(repacked(tree), tree)
    assert repacked(tree).atom is SENTINEL


@pytest.mark.parametrize("value", [1, "x", None, Scaled(1, 2)])
def test_only_classes_can_be_registered(value):
    with pytest.raises(TypeError, match="register_leaf_type: expected a class, got"):
        st.register_leaf_type(value, None)


@pytest.mark.parametrize("leaf_type", [object(), 5, type("Half", (), {"unpack": None}), Scaled(1, 2)])
def test_a_leaf_type_must_unpack_and_pack(leaf_type):
    cls = fresh_class()
    with pytest.raises(TypeError, match=r"register_leaf_type: the leaf type for .*Fresh lacks unpack or pack"):
        st.register_leaf_type(cls, leaf_type)
    assert st.flatten([cls()])[1].num_leaves == 1
    assert leaf_type_of(cls) is OPAQUE


class Bare(st.LeafType):
    pass


class Half(st.LeafType):
    def unpack(self, value):
        return [value.values], None


@pytest.mark.parametrize("leaf_type", [Bare, Half, Bare()], ids=["bare", "half", "an instance"])
def test_the_defaults_of_a_leaf_type_say_what_is_missing(leaf_type):
    cls = fresh_class()
    with pytest.raises(TypeError, match=r"the leaf type for .*Fresh lacks unpack or pack"):
        st.register_leaf_type(cls, leaf_type)
    assert leaf_type_of(cls) is OPAQUE


def test_what_is_asked_of_a_bare_leaf_type_has_an_answer():
    with pytest.raises(st.UnsupportedLeaf, match=r"\(int\) has a leaf type without unpack.*Define both in Bare"):
        Bare().unpack(5)
    with pytest.raises(st.UnsupportedLeaf, match=r"\(Half\) has a leaf type without pack.*Define both in Half"):
        Half().pack(None, [])
    assert Bare().describe(5) == {}
    assert Half().layout(Scaled(torch.ones(1), 2)) == [None]


def test_what_lies_in_a_part_of_several_chunks_comes_back_as_a_list():
    class ListType(ScaledType):
        def unpack(self, value):
            return [list(value.values), torch.ones(1)], value.scale

        def pack(self, context, parts):
            assert isinstance(parts[0], list)
            return cls(parts[0], context)

        def layout(self, value):
            return [((4,), [(0,), (2,)]), None]

    cls = fresh_class(Scaled)
    st.register_leaf_type(cls, ListType())
    first, second = torch.arange(4.0).split(2)
    copied = st.offload({"x": cls([first, second], 2)})["x"]
    assert [part.tolist() for part in copied.values] == [[0, 1], [2, 3]]
    assert copied.values[0].untyped_storage().data_ptr() == copied.values[1].untyped_storage().data_ptr()


@pytest.mark.parametrize("has_layout", [True, False])
@pytest.mark.parametrize("verb", [st.gather, st.digest, st.audit, lambda tree: st.delta(tree, tree)])
def test_a_list_of_tensors_that_are_no_chunks_is_refused(verb, has_layout):
    class ListType(ScaledType):
        def unpack(self, value):
            return [value.values, torch.ones(1)], value.scale

    if has_layout:
        ListType.layout = lambda self, value: [None, ((1,), (0,))]
    cls = fresh_class(Scaled)
    st.register_leaf_type(cls, ListType())
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x is unpacked into a list of tensors in the place of"):
        verb({"x": cls([torch.ones(2), torch.ones(3)], 2)})


def registered_with(**functions):
    cls = fresh_class(Scaled)
    leaf_type = type("Odd", (ScaledType,), functions)()
    st.register_leaf_type(cls, leaf_type)
    return {"x": [cls(torch.ones(2), 0.5)]}


def raises(*args):
    msg = "mine"
    raise ZeroDivisionError(msg)


def test_what_unpack_raises_becomes_an_unsupported_leaf_with_its_path():
    with pytest.raises(st.UnsupportedLeaf, match=r"test: cannot take apart the leaf at x\.0 .*mine") as caught:
        repacked(registered_with(unpack=raises))
    assert str(caught.value.path) == "x.0"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("verb", ["save", "load", "digest", "gather", "offload", "delta", "reshard"])
@pytest.mark.parametrize("method", ["unpack", "layout"])
def test_what_a_leaf_type_raises_is_said_with_the_path_by_every_verb(verb, method, tmp_path):
    cls = type("Own", (), {"tensor": torch.ones(2)})
    own = {"unpack": lambda self, value: ([value.tensor], None), "pack": lambda self, context, parts: cls()}
    st.register_leaf_type(cls, type("OwnType", (st.LeafType,), {**own, method: raises})())
    tree = {"a": {"b": cls()}}
    st.save({"a": {"b": torch.ones(2)}}, tmp_path / "saved")
    calls = {
        "save": lambda: st.save(tree, tmp_path / "file"),
        "load": lambda: st.load(tmp_path / "saved", tree),
        "delta": lambda: st.delta(tree, tree),
        "reshard": lambda: st.reshard(tree, tree),
    }
    if (verb, method) == ("offload", "layout"):
        st.offload(tree)  # which need not know
        return
    with pytest.raises(st.UnsupportedLeaf, match=rf"{verb}: cannot take apart the leaf at a\.b .*mine"):
        calls.get(verb, lambda: getattr(st, verb)(tree))()


def test_what_pack_raises_becomes_an_unsupported_leaf_with_its_path():
    with pytest.raises(st.UnsupportedLeaf, match=r"test: cannot put together the leaf at x\.0 .*mine") as caught:
        repacked(registered_with(pack=raises))
    assert str(caught.value.path) == "x.0"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "functions",
    [{"unpack": raises}, {"pack": raises}, {"unpack": lambda self, value: ((part for part in [value.values]), None)}],
    ids=["unpack raises", "pack raises", "unpack returns a generator"],
)
def test_what_is_registered_is_not_to_be_registered(functions):
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x\.0 .*Error: .*, or mend or register its leaf type\.$"):
        repacked(registered_with(**functions))


@pytest.mark.parametrize("result", [None, 5, [], ([],), (5, None), ([1, 2, 3], None, None)])
def test_an_unpack_that_returns_something_else(result):
    with pytest.raises(st.UnsupportedLeaf, match=r"x\.0"):
        repacked(registered_with(unpack=lambda self, value: result))


def test_inner_values_may_be_of_any_leaf_type():
    inner = TwoTensors(torch.ones(2), torch.zeros(2))
    held = Held()
    held.tensor = torch.arange(3)
    cls = fresh_class(Scaled)

    class Mixed:
        def unpack(self, value):
            return [inner, held, 5, inner], None

        def pack(self, context, parts):
            return parts

    st.register_leaf_type(cls, Mixed())
    parts = repacked([cls(1, 2)])[0]
    assert_trees_equal(list(parts), [inner, held, 5, inner], containers=True)


def test_a_leaf_type_that_gives_the_value_itself_as_a_part():
    cls = fresh_class(torch.Tensor)

    class Itself:
        def unpack(self, value):
            return [value], "tagged"

        def pack(self, context, parts):
            return (context, parts[0])

    st.register_leaf_type(cls, Itself())
    value = torch.arange(3).as_subclass(cls)
    context, part = repacked([value])[0]
    assert context == "tagged"
    assert torch.equal(part, torch.arange(3))
    assert part.data_ptr() != value.data_ptr()


def test_a_leaf_type_whose_values_go_round_in_circles_is_refused():
    cls = fresh_class()

    class Round:
        def unpack(self, value):
            return [value.other], None

        def pack(self, context, parts):
            return parts[0]

    st.register_leaf_type(cls, Round())
    first, second = cls(), cls()
    first.other, second.other = second, first
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x .*holds itself") as caught:
        repacked({"x": first})
    assert str(caught.value.path) == "x"


def test_deep_leaf_types_are_refused_or_copied():
    value = torch.zeros(1)
    for _ in range(2000):
        outer = torch.zeros(1)
        outer.inner = value
        value = outer
    try:
        again = repacked({"x": value})
    except st.UnsupportedLeaf as error:
        assert str(error.path) == "x"
    else:
        assert_trees_equal(again, {"x": value})


# Identity and ties


def test_leaves_that_were_one_object_become_one_again():
    parameter, held = torch.nn.Parameter(torch.ones(2)), Held()
    held.parameter = parameter
    tree = [parameter, parameter, {"a": parameter}, held, TwoTensors(parameter.data, torch.zeros(2)), held]
    again = repacked(tree)
    assert again[0] is again[1] is again[2]["a"] is again[3].parameter
    assert again[3] is again[5]
    assert_trees_equal(again, tree, containers=True)


def test_two_leaves_of_one_opaque_object_inside_others():
    shared, first, second = Held(), Held(), Held()
    shared.tensor = torch.ones(2)
    first.shared = second.shared = shared
    again = repacked([first, second])
    assert again[0].shared.tensor is again[1].shared.tensor


def test_a_bare_tensor_met_before_it_is_an_attribute():
    inner, outer = torch.arange(3), torch.arange(2)
    outer.inner = inner
    for tree in ([inner, outer], [outer, inner], [outer, [inner], inner]):
        again = repacked(tree)
        assert_trees_equal(again, tree)


def test_plain_tensors_need_no_recipes():
    assert not unpacked([torch.ones(2), torch.zeros(3)[1:]]).recipes


@pytest.mark.parametrize(
    "odd",
    [
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(1, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2)]),
        torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        3,
        None,
        Held(),
        torch.ones(2).conj(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0),
        torch.empty(2, device="meta"),
    ],
    ids=lambda odd: f"{type(odd).__name__}-{getattr(odd, 'layout', '')}",
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_odd_leaf_among_plain_tensors(odd, place):
    base = torch.arange(8.0)
    tree = [base[:4], base[4:], base]
    tree.insert(place, odd)
    assert_trees_equal(repacked(tree), tree)


def test_nothing_is_kept_alive_behind_the_scenes():
    tensor = torch.ones(3)
    held = Held()
    held.tensor = tensor
    gone = [weakref.ref(tensor), weakref.ref(held)]
    tree = {"a": [tensor], "b": held, "c": torch.nn.Parameter(tensor)}
    repacked(tree)
    del tree, held, tensor
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("tree", COPIED, ids=str)
def test_facts_of_any_leaf_are_told_and_are_the_same_for_a_copy(tree):
    made = tree.make()
    again = repacked(made)
    for leaf, copied in zip(st.flatten(made)[0], st.flatten(again)[0], strict=True):
        told = facts(leaf)
        assert "leaf type" in told
        assert all(isinstance(name, str) for name in told)
        assert not tree_differences(dict(told), dict(facts(copied)), ties=False)


def test_messages_name_the_remedy():
    with pytest.raises(st.UnsupportedLeaf, match="Leave it out of the state"):
        unpacked({"x": (number for number in range(3))})


class Reading:
    def __init__(self, values):
        self.values = values


class FineReading(Reading):
    pass


class OtherReading(FineReading):
    pass


class Table(dict):
    pass


class WideTable(Table):
    pass


class ReadingType(st.LeafType):
    def unpack(self, value):
        return [value.values], type(value)

    def pack(self, context, parts):
        return context(*parts)


class TableType(st.LeafType):
    def unpack(self, value):
        return [value["x"]], type(value)

    def pack(self, context, parts):
        return context(x=parts[0])


def test_a_leaf_type_may_be_for_subclasses():
    wide = WideTable(x=torch.ones(2))
    assert st.flatten(wide)[0][0] is wide["x"]  # a container, as yet
    st.register_leaf_type(Reading, ReadingType())
    assert leaf_type_of(FineReading) is OPAQUE
    st.register_leaf_type(Reading, ReadingType(), subclasses=True)
    st.register_leaf_type(Table, TableType(), subclasses=True)
    assert leaf_type_of(FineReading).given is leaf_type_of(Reading).given
    assert st.flatten([wide])[0] == [wide]
    copied = st.offload({"a": FineReading(torch.ones(2)), "b": wide})
    assert (type(copied["a"]), type(copied["b"])) == (FineReading, WideTable)
    assert torch.equal(copied["b"]["x"], torch.ones(2))
    st.register_leaf_type(OtherReading, None)  # what is registered itself comes first
    other = OtherReading(torch.ones(2))
    assert st.offload({"a": other})["a"] is other
