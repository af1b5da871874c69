import itertools
import pickle
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as hyp

import statetree as st
import statetree.testing
from statetree.testing import state_trees, tensors, tied_trees
from statetree.testing.elements import DTYPES
from statetree.testing.plans import (
    GEOMETRIES,
    MAPPINGS,
    PAIRS,
    SEQUENCES,
    USUAL_WRAPS,
    VIEWS,
    WRAPS,
    Again,
    Node,
    TensorPlan,
    Value,
    build,
    code,
    code_of,
    samples,
)
from statetree.testing.strategies import AWKWARD_KEYS, plain_values
from tests.judge import assert_pure, assert_trees_equal
from tests.memory import storages
from tests.pace import units
from tests.trees.optimizers import OPTIMIZERS, OptimizerPlan, optimizer_plans
from tests.trees.plans import tensor_plans, tied_plans, tree_plans

plans = hyp.one_of(tree_plans(), tied_plans(), optimizer_plans())


def leaves_of(tree):
    return [leaf for leaf in st.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


# Plans


@given(plan=plans)
def test_a_plan_makes_the_same_tree_every_time(plan):
    assert_trees_equal(build(plan), build(plan))


@given(plan=plans)
def test_plans_can_be_pickled(plan):
    assert_trees_equal(build(pickle.loads(pickle.dumps(plan))), build(plan))


@given(value=hyp.one_of(plain_values(), hyp.sampled_from(AWKWARD_KEYS)))
def test_plain_values_have_code_that_makes_them(value):
    written = code(value)
    assert written is not None
    assert_trees_equal(eval(written, {"samples": samples, "torch": torch}), value)


@pytest.mark.parametrize("bits", [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 5, 0x7FF0 << 48, 0xFFF0 << 48, 1 << 63])
def test_odd_floats_have_code_that_makes_them(bits):
    again = eval(code(struct.unpack("<d", struct.pack("<Q", bits))[0]))
    assert struct.unpack("<Q", struct.pack("<d", again))[0] == bits


def test_what_was_made_before_comes_again():
    tree = build(Node("list", (TensorPlan(), Node("list", (Again(),)), Again(1), Again(3))))
    assert tree[1][0] is tree[0]
    assert tree[2] is tree[1]
    assert tree[3] is tree[1]  # there were two
    assert build(Node("list", (Again(5),))) == [None]


def test_what_has_no_code_is_in_a_tree_as_it_is():
    held = object()
    plan = Node("list", (Value(held), Value((held, 1))))
    assert build(plan)[0] is held
    assert build(plan)[1][0] is held
    assert "value0 = <object object" in code_of(plan).source()


def test_code_reads_as_one_would_write_it():
    tied = Node("dict", (TensorPlan((2, 2), geometry="transposed"), Again()), ("a", "b"))
    assert code_of(tied).source().splitlines() == [
        "import torch",
        "",
        "",
        "def state():",
        '    return {"a": (part0 := torch.arange(1.0, 5.0).reshape((2, 2)).t()), "b": part0}',
    ]


def test_what_is_no_plan_is_built_as_it_is():
    value = [1]
    assert build(value) is value


@given(tree=hyp.one_of(state_trees(), tied_trees()))
def test_tensors_are_leaves_of_autograd_unless_others_are_asked_for(tree):
    assert all(leaf.is_leaf for leaf in leaves_of(tree))


@given(plan=hyp.builds(replace, tensor_plans(), wrap=hyp.just("computed")))
def test_computed_tensors_are_no_leaves_of_autograd(plan):
    tensor, plain = build(plan), build(replace(plan, wrap="tensor"))
    assert tensor.is_leaf == (not tensor.requires_grad)
    assert tensor.requires_grad == build(replace(plan, wrap="requires_grad")).requires_grad
    assert_trees_equal(tensor.detach(), plain)
    copy = assert_pure(st.offload, tensor)
    assert copy.is_leaf
    assert_trees_equal(copy.detach(), st.offload(plain))


# Trees


@given(tree=state_trees())
def test_tensors_of_trees_share_nothing(tree):
    held = storages(tree)
    ranges = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in held)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


FLOATS = {"dtypes": [torch.float32], "geometries": ["contiguous"], "wraps": ["tensor"]}


@pytest.mark.parametrize(
    "leaves",
    [
        tensor_plans(**FLOATS),
        tensors(**FLOATS),
        hyp.one_of(hyp.none(), tensors(**FLOATS) | hyp.booleans()),
        tree_plans(tensors(**FLOATS), max_leaves=3),
        state_trees(tensors(**FLOATS), max_leaves=3),
    ],
    ids=["plans", "tensors", "among others", "plans of trees", "trees"],
)
@given(data=hyp.data())
def test_elements_are_unique_by_position_over_a_tree(leaves, data):
    tree = data.draw(state_trees(leaves))
    bits = [leaf.flatten().view(torch.int32) for leaf in leaves_of(tree)]
    assert all(len(each.unique()) == len(each) for each in bits)
    # Negative zeros and infinities, and what counts on from them, are unique in a tensor alone.
    special = {bit for each in bits for bit in each.tolist() if bit < 0 or 0x7F000000 <= bit <= 0x7F800000}
    counted = Counter(bit for each in bits for bit in each.tolist() if bit not in special)
    assert not counted or max(counted.values()) == 1


@given(tree=tied_trees())
def test_ties_lie_on_few_storages(tree):
    leaves = [leaf for leaf in leaves_of(tree) if leaf.untyped_storage().nbytes() == 96]
    assert len({leaf.untyped_storage()._cdata for leaf in leaves}) <= 3


@given(tree=state_trees(max_leaves=3, opaque=False))
def test_trees_are_bounded(tree):
    leaves, spec = st.flatten(tree)
    assert len(leaves) < 40
    assert max((len(path) for path in spec.paths()), default=0) < 12


@given(tree=state_trees(hyp.integers()))
def test_leaves_of_ones_own(tree):
    ours = (samples.Thing, str)  # a field of SlottedPair is a string
    assert all(type(leaf) is int for leaf in st.flatten(tree)[0] if not isinstance(leaf, ours))


# Hypothesis shows what it drew when a test fails: a value that cannot be shown would hide the failure.


@given(
    tree=hyp.one_of(state_trees(), tied_trees(), optimizer_plans().map(build), tensors(dtypes=[torch.float4_e2m1fn_x2]))
)
def test_what_is_drawn_can_be_shown(tree):
    repr([tree])


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_kind_can_be_shown(dtype, wrap):
    for shape, geometry in itertools.product([(), (1,), (2,), (0, 2), (1, 2, 2)], GEOMETRIES):
        plan = TensorPlan(shape, dtype, geometry, wrap)
        if shape or dtype is not torch.float4_e2m1fn_x2:  # torch cannot print these, and none is drawn
            repr(build(Node("dict", (plan,), ("w",))))


@given(tensor=tensors(dtypes=[torch.int64], max_dims=2, max_side=2, geometries=["gaps"], wraps=["frozen"]))
def test_options_of_tensors(tensor):
    assert tensor.dtype is torch.int64
    assert tensor.ndim <= 2
    assert max(tensor.shape, default=0) <= 2
    assert type(tensor) is torch.nn.Parameter
    assert not tensor.requires_grad


def drawn(strategy, chosen, wanted):
    """Return which of some things are found, among those that hypothesis draws."""
    found = set()

    @settings(max_examples=2000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def look(value):
        found.add(chosen(value))

    look()
    return set(wanted) - found


def shared(plan):
    """Say what the tensors of a tree have in common, if anything."""
    leaves = leaves_of(build(plan))
    if len(set(map(id, leaves))) < len(leaves):
        return "object"
    return "storage" if len({leaf.untyped_storage()._cdata for leaf in leaves}) < len(leaves) else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "chosen", "wanted"),
    [
        (tensor_plans(), lambda plan: plan.dtype, DTYPES),
        (tensor_plans(), lambda plan: plan.geometry, GEOMETRIES),
        (tensor_plans(), lambda plan: plan.wrap, USUAL_WRAPS),
        (tensor_plans(), lambda plan: len(plan.shape), range(4)),
        (tied_plans(max_leaves=1), lambda plan: getattr(plan, "kind", ""), VIEWS),
        (tree_plans(max_leaves=9), lambda plan: getattr(plan, "kind", ""), (*MAPPINGS, *SEQUENCES, *PAIRS, "Thing")),
        (tied_plans(), shared, ["object", "storage"]),
        (optimizer_plans(), lambda plan: plan.name, OPTIMIZERS),
        (plain_values(), type, [type(None), bool, int, float, complex, str, bytes]),
    ],
    ids=["dtypes", "geometries", "wraps", "dims", "views", "nodes", "shared", "optimizers", "values"],
)
def test_everything_comes_up(strategy, chosen, wanted):
    assert drawn(strategy, chosen, wanted) == set()


# Shrinking


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "holds", "smallest"),
    [
        (tree_plans(), lambda plan: isinstance(plan, TensorPlan), TensorPlan(())),
        (tensor_plans(), lambda plan: build(plan).numel() > 2, TensorPlan((3,))),
        (tree_plans(), lambda plan: getattr(plan, "kind", "") in MAPPINGS, Node("dict")),
        (
            tree_plans(max_leaves=3),  # larger ones shrink by themselves, and stay large
            lambda plan: getattr(plan, "kind", "") == "OrderedDict",
            Node("OrderedDict"),
        ),
        (
            optimizer_plans(),
            lambda plan: plan.name == "Adam" and plan.steps > 0,
            OptimizerPlan("Adam", shapes=(((),),)),
        ),
        (
            tree_plans(max_leaves=3),
            lambda plan: getattr(plan, "kind", "") == "list" and len(plan.children) == 3,
            Node("list", (Value(None), Value(None), Value(None))),
        ),
        (tied_plans(), lambda plan: getattr(plan, "kind", "") == "Pair", Node("Pair", (Value(None), Value(None)))),
    ],
    ids=["tensor", "three elements", "mapping", "kind", "optimizer", "children", "tied children"],
)
def test_plans_shrink_to_small_ones(strategy, holds, smallest):
    found = find(strategy, holds, settings=settings(max_examples=2000, database=None), random=Random(0))
    assert found == smallest


@pytest.mark.slow
@pytest.mark.parametrize(
    "trees",
    [tensors(), state_trees(), state_trees(tensors()), state_trees(hyp.none() | tensors())],
    ids=["tensors", "trees", "trees of tensors", "trees of tensors among others"],
)
def test_a_failure_shows_the_code_that_makes_its_tree(trees):
    @settings(max_examples=300, database=None, phases=[Phase.generate, Phase.shrink])
    @given(tree=trees)
    def fails(tree):
        assert all(leaf.is_contiguous() for leaf in leaves_of(tree))

    with pytest.raises(AssertionError) as caught:
        fails()
    [code] = [note for note in caught.value.__notes__ if "def state():" in note]
    made = {}
    exec(code, made)
    assert not all(leaf.is_contiguous() for leaf in leaves_of(made["state"]()))


# Arguments


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("tensors(geometries=['strided'])", ValueError, "geometries: expected one of 'contiguous', .*'meta', got 's"),
        ("tensors(geometries='gaps')", TypeError, "geometries: expected a list or tuple of some of 'cont.*'gaps'"),
        ("tensor_plans(wraps=['param'])", ValueError, "wraps: expected one of 'tensor', .*, got 'param'"),
        ("tensors(dtypes=['float32'])", ValueError, "dtypes: expected one of torch.float32, .*, got 'float32'"),
        ("tensors(dtypes=torch.float32)", TypeError, "dtypes: expected a list or tuple .*, got torch.float32"),
        ("tensors(dtypes=[])", ValueError, r"dtypes: expected a list or tuple of some of torch.float32, .*, got \[\]"),
        ("tensors(max_dims=-1)", ValueError, "max_dims: expected at least 0, got -1"),
        ("tensors(max_side=1.0)", TypeError, "max_side: expected a whole number, got 1.0"),
        ("state_trees(max_leaves=0)", ValueError, "max_leaves: expected at least 1, got 0"),
        ("state_trees([1])", TypeError, r"leaves: expected a strategy, or None, got \[1\]"),
        ("statetree.testing.layouts(True)", TypeError, "world_size: expected a whole number, got True"),
    ],
)
def test_bad_arguments_are_refused_at_once(code, error, message):
    with pytest.raises(error, match=message):
        eval(code)


# Optimizers


def test_there_are_all_of_torch():
    found = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert found - {"Optimizer"} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_over_its_usual_shapes(name):
    assert build(OptimizerPlan(name))["model"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_and_variant_steps(name):
    for variant, _ in enumerate(OPTIMIZERS[name]):
        shapes = (((2, 3), (2, 2)), ((1, 1),)) if name == "Muon" else (((2, 3), (4,)), ((1,),))
        plan = OptimizerPlan(name, variant, shapes, steps=2)
        state = build(plan)
        assert len(state["model"]) == 3
        kept = leaves_of(state["optimizer"])
        assert kept or name in {"SGD"}
        assert_trees_equal(state, build(plan))
        before = build(OptimizerPlan(name, variant, shapes, steps=0))
        assert not torch.equal(state["model"]["p0"], before["model"]["p0"])


# Imports

WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import torch
from statetree import testing
testing.assert_trees_equal({"a": torch.ones(2)}, {"a": torch.ones(2)})
testing.assert_pure(len, [1])
for name in testing.__all__:
    try:
        getattr(testing, name)
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_all_but_strategies_work_without_hypothesis():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS], capture_output=True, text=True, check=False, timeout=units(60)
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told] == ["conversions", "layouts", "state_trees", "tensors", "tied_trees"]
    assert all("needs hypothesis: pip install statetree[testing]" in line for line in told)


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = statetree.testing.nothing
