import itertools
import pickle
import struct
import subprocess
import sys
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as hyp

import statetree as st
import statetree.testing
from statetree.testing import samples, sources, state_trees, tensors, tied_trees
from statetree.testing.elements import DTYPES
from statetree.testing.sources import GEOMETRIES, MAPPINGS, PAIRS, SEQUENCES, SHARED, WRAPS
from statetree.testing.strategies import AWKWARD_KEYS, plain_values, sources_of
from tests.judge import assert_pure, assert_trees_equal
from tests.memory import storages
from tests.pace import units
from tests.trees.optimizers import OPTIMIZERS, OptimizerPlan, optimizer_plans
from tests.trees.plans import Again, Node, TensorPlan, Value, build, source_of, tied_plans, tree_plans

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
    assert_trees_equal(build(Value(value)), value)


@pytest.mark.parametrize("bits", [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 5, 0x7FF0 << 48, 0xFFF0 << 48, 1 << 63])
def test_odd_floats_have_code_that_makes_them(bits):
    again = build(Value(struct.unpack("<d", struct.pack("<Q", bits))[0]))
    assert struct.unpack("<Q", struct.pack("<d", again))[0] == bits


def test_what_comes_again_is_the_same_object():
    tree = build(Node("list", (Again(0), Node("list", (Again(0), Again(2))), Again(2))))
    assert tree[1][0] is tree[0]
    assert tree[2] is tree[1][1]
    assert tree[0] is not tree[2]


def test_what_can_be_pickled_has_code_that_makes_it():
    made = build(Node("list", (Value({1: (2, "a")}), Value(print))))
    assert made == [{1: (2, "a")}, print]
    assert "import pickle" in sources.module(sources.code(source_of(Value({1: 2}))))


def test_marks_in_texts_are_no_marks():
    text = "\x01\x0212;\x03base0;"
    assert build(Node("dict", (Value(text), TensorPlan()), (text, "a")))[text] == text


def test_code_reads_as_one_would_write_it():
    tied = Node("dict", (TensorPlan((2, 2), geometry="transposed"), Again(), Again()), ("a", "b", "c"))
    assert sources.module(sources.code(source_of(tied))).splitlines() == [
        "import torch",
        "",
        "",
        "def state():",
        "    one_tensor = torch.arange(5.0, 7.0)",
        '    return {"a": torch.arange(1.0, 5.0).reshape((2, 2)).t(), "b": one_tensor, "c": one_tensor}',
    ]


@given(tree=hyp.one_of(state_trees(), tied_trees()))
def test_tensors_are_leaves_of_autograd_unless_others_are_asked_for(tree):
    assert all(leaf.is_leaf for leaf in leaves_of(tree))


@given(shape=hyp.lists(hyp.integers(0, 3), max_size=3).map(tuple), dtype=hyp.sampled_from(DTYPES))
def test_computed_tensors_are_no_leaves_of_autograd(shape, dtype):
    tensor, plain = build(TensorPlan(shape, dtype, wrap="computed")), build(TensorPlan(shape, dtype))
    assert tensor.is_leaf == (not tensor.requires_grad)
    assert tensor.requires_grad == build(TensorPlan(shape, dtype, wrap="requires_grad")).requires_grad
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
        sources_of(tensors(**FLOATS)),
        tensors(**FLOATS),
        hyp.one_of(hyp.none(), tensors(**FLOATS) | hyp.booleans()),
        sources_of(state_trees(tensors(**FLOATS), max_leaves=3)),
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
        repr(build(Node("dict", (TensorPlan(shape, dtype, geometry, wrap),), ("w",))))


@given(tensor=tensors(dtypes=[torch.int64], max_dims=2, max_side=2, geometries=["gaps"], wraps=["frozen"]))
def test_options_of_tensors(tensor):
    assert tensor.dtype is torch.int64
    assert tensor.ndim <= 2
    assert max(tensor.shape, default=0) <= 2
    assert type(tensor) is torch.nn.Parameter
    assert not tensor.requires_grad


def drawn(strategy, chosen, wanted):
    """Return which of some things are not found, among those that hypothesis draws."""
    found = set()

    @settings(max_examples=2000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def look(value):
        found.add(chosen(value))

    look()
    return set(wanted) - found


def shared(tree):
    """Say what the tensors of a tree have in common, if anything."""
    leaves = leaves_of(tree)
    if len(set(map(id, leaves))) < len(leaves):
        return "object"
    return "storage" if len({leaf.untyped_storage()._cdata for leaf in leaves}) < len(leaves) else ""


def outermost(source):
    """Return how a source begins."""
    return source.partition("(")[0] if source[0] not in "{[(" else source[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "chosen", "wanted"),
    [
        (tensors(), lambda tensor: tensor.dtype, DTYPES),
        (tensors(), lambda tensor: (type(tensor), tensor.requires_grad), [(torch.nn.Parameter, False)]),
        (tensors(), lambda tensor: (tensor.is_conj(), tensor.is_neg(), tensor.is_meta), [(True, False, False)]),
        (tensors(), lambda tensor: tensor.ndim, range(4)),
        (
            tree_plans(max_leaves=9),
            outermost,
            [outermost(sources.node(kind, "ab", "ab")) for kind in (*MAPPINGS, *SEQUENCES, *PAIRS, "Thing")],
        ),
        (tied_trees(), shared, ["object", "storage"]),
        (optimizer_plans(), lambda plan: plan.name, OPTIMIZERS),
        (plain_values(), type, [type(None), bool, int, float, complex, str, bytes]),
    ],
    ids=["dtypes", "classes", "bits", "dims", "nodes", "shared", "optimizers", "values"],
)
def test_everything_comes_up(strategy, chosen, wanted):
    assert drawn(strategy, chosen, wanted) == set()


@pytest.mark.slow
def test_every_shared_object_comes_up():
    text = []
    drawn(tied_plans(), text.append, [])
    assert all(any(f"\x03{name};" in source for source in text) for name in SHARED)


# Shrinking


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "holds", "smallest"),
    [
        (sources_of(tensors()), lambda plan: build(plan).numel() > 2, TensorPlan((3,))),
        (tree_plans(), lambda plan: plan[0] == "{", Node("dict")),
        (
            tree_plans(max_leaves=3),  # larger ones shrink by themselves, and stay large
            lambda plan: plan.startswith("collections.OrderedDict("),
            Node("OrderedDict"),
        ),
        (tied_plans(), lambda plan: plan.startswith("samples.Pair("), Node("Pair", (Value(None), Value(None)))),
    ],
    ids=["three elements", "mapping", "kind", "tied children"],
)
def test_sources_shrink_to_small_ones(strategy, holds, smallest):
    found = find(strategy, holds, settings=settings(max_examples=2000, database=None), random=Random(0))
    assert found == source_of(smallest)


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
    ("code", "message"),
    [
        ("tensors(geometries=['strided'])", "geometries: expected a list or tuple of some of 'cont.*'strided'"),
        ("tensors(geometries='gaps')", "geometries: expected a list or tuple of some of 'cont.*'gaps'"),
        ("tensors(wraps=['param'])", r"wraps: expected a list or tuple of some of 'tensor', .*, got \['param'\]"),
        ("state_trees(dtypes=['float32'])", "dtypes: expected a list or tuple of some of torch.float32, .*'float32'"),
        ("tensors(dtypes=torch.float32)", "dtypes: expected a list or tuple .*, got torch.float32"),
        ("tensors(dtypes=[])", r"dtypes: expected a list or tuple of some of torch.float32, .*, got \[\]"),
    ],
)
def test_bad_arguments_are_refused_at_once(code, message):
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.slow
def test_all_but_strategies_work_without_hypothesis():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS], capture_output=True, text=True, check=False, timeout=units(60)
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told] == ["layouts", "state_trees", "tensors", "tied_trees"]
    assert all("needs hypothesis: pip install statetree[testing]" in line for line in told)


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = statetree.testing.nothing
