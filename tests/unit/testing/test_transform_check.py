"""``check_transform`` judges transforms that strangers might write, and what it shows of them runs and fails."""

import copy
import sys
from functools import partial
from unittest import mock

import pytest
import torch

import statetree as st
from statetree.testing import Law, check_transform, differences, laws, sources
from statetree.testing.dtensor_layout import Layout
from statetree.testing.sources import code, size, smallest
from statetree.testing.states import STATES, drawn_states
from statetree.testing.transform_check import snippet
from tests.judge import assert_trees_equal
from tests.trees import TREES
from tests.trees.plans import Node, TensorPlan, Value, source_of

#: How long a test is at most that shows a counter-example.
MAX_LINES = 15


def is_tensor(value):
    return isinstance(value, torch.Tensor)


# Five transforms as a stranger writes them: the first two are right, each of the others is wrong in one way.


def snapshot(state):
    return st.offload(state)


def doubled(state):
    seen = {}

    def double(leaf):
        if not is_tensor(leaf) or not leaf.is_floating_point() or leaf.dtype.itemsize == 1 or 0 in leaf.stride():
            return leaf
        storage = leaf.untyped_storage().data_ptr()
        if storage not in seen:
            seen[storage] = leaf
            with torch.no_grad():
                leaf.mul_(2)
        return leaf

    return st.map_leaves(double, st.offload(state))


def on_the_cpu(state):
    """``.cpu()`` of what is there already is the same tensor."""
    return st.map_leaves(lambda leaf: leaf.cpu() if is_tensor(leaf) and not leaf.is_meta else leaf, state)


def cloned(state):
    return st.map_leaves(lambda leaf: leaf.clone() if is_tensor(leaf) else leaf, state)


BUFFERS = {}


def staged(state):
    def one(path, leaf):
        if not is_tensor(leaf) or leaf.is_meta:
            return leaf
        key = str(path), leaf.dtype, leaf.shape
        buffer = BUFFERS.setdefault(key, torch.empty_like(leaf, requires_grad=False))
        with torch.no_grad():
            return buffer.copy_(leaf)

    return st.map_with_path(one, state)


def run(source):
    """Paste a test into a new module, and run it."""
    names = {"__name__": "pasted"}
    exec(source, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()


@pytest.mark.parametrize(
    ("transform", "holding", "broken"),
    [
        (snapshot, {law.name for law in laws.ALL}, set()),
        (doubled, {"pure", "independent", "stable", "structure", "geometry", "ties"}, {"values", "idempotent"}),
        (on_the_cpu, {"pure", "structure", "geometry", "values", "ties"}, {"independent", "separate"}),
        (cloned, {"pure", "stable", "structure", "values"}, {"ties", "geometry"}),
        (staged, {"pure", "structure", "values"}, {"stable", "ties"}),
    ],
    ids=["right", "right but for the values", "an alias kept", "ties lost", "a result overwritten"],
)
def test_five_transforms_are_judged_right(transform, holding, broken):
    report = check_transform(transform, examples=100)
    assert holding <= {verdict.law.name for verdict in report.verdicts if verdict.holds}
    assert broken <= set(report.broken)
    assert bool(report) == (not broken)
    for verdict in report.verdicts:
        assert verdict.law.name in str(report)
        assert verdict.source.rstrip() in str(report)
        assert verdict.examples + verdict.refused > 0
        if verdict.holds is False:
            assert len(verdict.source.splitlines()) <= MAX_LINES
            with pytest.raises(Exception, match=r"(?s).") as caught:
                run(verdict.source)
            assert isinstance(caught.value, AssertionError) or verdict.law is laws.accepts


def nothing(tree):
    return None


def without_the_last(tree):
    leaves, _ = st.flatten(tree)
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves[:-1]]


def listed_from_the_end(tree):
    return st.flatten(st.offload(tree))[0][::-1]


@pytest.mark.parametrize("transform", [nothing, without_the_last])
def test_values_that_are_nowhere_are_not_kept(transform):
    report = check_transform(transform, examples=60)
    assert "values" in report.broken
    assert "nothing has the value of" in str(report["values"].error)
    with pytest.raises(AssertionError, match=r"(?s)values does not hold.*nothing has the value of"):
        check_transform(transform, laws=["values"], examples=60)


def test_values_under_other_names_are_kept():
    assert check_transform(listed_from_the_end, laws=["values"], examples=60)


@pytest.mark.slow
def test_values_of_any_kind_are_found_under_other_names():
    for tree in TREES:
        state = tree.make()  # once: what cannot be taken apart equals itself alone
        laws.values(lambda given: {"nowhere else": given}, lambda state=state: state)


def test_many_renamed_tensors_are_looked_up():
    state = {str(number): torch.full((4, 4), float(number)) for number in range(300)}
    with mock.patch.object(differences, "similarity", side_effect=AssertionError):
        laws.values(lambda given: {f"model.{key}": leaf for key, leaf in given.items()}, lambda: state)
        with pytest.raises(AssertionError, match=r"nothing has the value of 7: tensor"):
            laws.values(
                lambda given: {f"model.{key}": leaf for key, leaf in given.items() if key != "7"}, lambda: state
            )


def test_laws_that_must_hold():
    assert check_transform(cloned, laws=["pure", laws.values], examples=60)
    with pytest.raises(AssertionError, match=r"(?s)ties does not hold.*def test_cloned_ties\(\):"):
        check_transform(cloned, laws=["pure", "ties"])
    with pytest.raises(ValueError, match=r"check_transform: laws: expected .*independent.*, got 'tied'"):
        check_transform(cloned, laws=["tied"])
    with pytest.raises(TypeError, match="check_transform: fn: expected a function of a tree, got 3"):
        check_transform(3)
    for ranks in (0, [], "2", [0], [True], True):
        with pytest.raises(ValueError, match="check_transform: ranks: expected"):
            check_transform(cloned, ranks=ranks)


def no_float(transform, state):
    assert not any(is_tensor(leaf) and leaf.is_floating_point() for leaf in st.flatten(transform(state()))[0])


def test_a_law_of_ones_own():
    law = Law("no_float", "No floating-point number comes out.", no_float)
    verdict = check_transform(snapshot, laws=[], examples=5)
    assert not verdict.verdicts
    with pytest.raises(AssertionError, match="no_float does not hold") as caught:
        check_transform(snapshot, laws=[law])
    source = str(caught.value).partition("\n\n")[2].partition("\n\n")[2]
    assert f"from {__name__} import no_float" in source
    with pytest.raises(AssertionError):
        run(source)


def test_an_inverse_is_one_more_law():
    assert check_transform(lambda tree: [tree], inverse=lambda tree: tree[0], examples=60)["round_trip"].holds
    report = check_transform(lambda tree: [tree], inverse=lambda tree: tree, examples=60)
    assert report["round_trip"].holds is False


def test_what_a_transform_raises_is_no_failure_of_other_laws():
    def only_dicts(tree):
        return dict(tree.items())

    report = check_transform(only_dicts)
    assert report["accepts"].holds is False
    assert "has no attribute 'items'" in report["accepts"].error
    assert report["stable"].refused > 10
    assert report["stable"].holds

    def nothing(tree):
        raise ValueError("no")

    assert check_transform(nothing, examples=3)["values"].holds is None


def misspelled(tree):
    return st.ofload(tree)


def unseen(transform, state):
    transform(state())
    raise st.UnsupportedLeaf("nobody can look at it")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_law_that_no_accepted_state_was_judged_by_does_not_hold(ranks):
    with pytest.raises(AssertionError, match=r"pure, ties: not judged, since the transform refused every state") as it:
        check_transform(misspelled, laws=["pure", "ties"], examples=3, ranks=ranks)
    assert str(it.value).endswith("AttributeError: module 'statetree' has no attribute 'ofload'")
    with pytest.raises(AssertionError, match="round_trip: not judged"):
        check_transform(misspelled, laws=[], inverse=misspelled, examples=3, ranks=ranks)


def test_a_law_of_which_no_state_says_anything_does_not_hold():
    assert not check_transform(misspelled, examples=3)
    assert check_transform(st.offload, examples=3)
    with st.Stager(max_snapshots=1) as stager:
        report = check_transform(stager.stage, examples=3)
        assert report["idempotent"].holds is None  # it would take two snapshots
        assert report
    with pytest.raises(AssertionError, match=r"(?s)unseen: not judged, since no result.*Leaf: nobody can look at it$"):
        check_transform(st.offload, laws=["pure", Law("unseen", "It is seen.", unseen)], examples=3)


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        *(("examples", given, ValueError) for given in (0, -1, "9", 1.5, None, True)),
        *(("ranks", given, ValueError) for given in (2.0, "2")),
        ("inverse", 3, TypeError),
    ],
)
def test_arguments_that_cannot_be_are_named(name, given, error):
    with pytest.raises(error, match=rf"^check_transform: {name}: expected .*, got {given!r}\.$"):
        check_transform(st.offload, **{"examples": 3, name: given})


def state_of(plan):
    return code(source_of(plan))


def test_a_partial_is_called_in_a_counter_example():
    one = state_of(Node("dict", (TensorPlan(),), ("w",)))
    source = snippet(laws.independent, partial(st.offload, copy=False), one)
    assert "laws.independent(partial(st.offload, copy=False), state)" in source
    with pytest.raises(AssertionError, match="the trees are not independent"):
        run(source)


def passed(tree, option):
    return tree


class Passing:
    @staticmethod
    def on(tree):
        return tree


OPTIONS = (
    *(torch.device("cpu"), torch.float16, torch.Size([1]), float("inf"), torch.ones(2), {"a": [1, None]}),
    *(passed, [passed], st.offload),
)


@pytest.mark.parametrize("option", OPTIONS, ids=range(len(OPTIONS)))
def test_the_options_of_a_partial_can_be_pasted(option):
    source = check_transform(partial(passed, option=option), examples=2)["independent"].source
    assert "def test_passed_independent():" in source
    with pytest.raises(AssertionError, match="the trees are not independent"):
        run(source)


def test_a_static_method_can_be_pasted():
    source = check_transform(Passing.on, examples=2)["independent"].source
    assert f"from {__name__} import Passing" in source
    with pytest.raises(AssertionError, match="the trees are not independent"):
        run(source)


def with_history(tree):
    return st.map_leaves(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) else leaf, st.offload(tree))


def test_results_that_are_no_leaves_of_autograd_are_found():
    report = check_transform(with_history, examples=60)
    assert "history of autograd differs" in report["geometry"].error
    assert check_transform(st.offload, laws=["geometry"], examples=60)


def keeping_the_first():
    known = {}

    def transform(tree):
        made = st.offload(tree)
        key = str(st.map_leaves(lambda leaf: getattr(leaf, "shape", leaf), made))
        return known.setdefault(key, made)

    return transform


def test_what_returns_an_earlier_result_is_found():
    assert "values" in check_transform(keeping_the_first(), examples=5).broken
    with pytest.raises(AssertionError, match="not kept in a second call"):
        laws.values(keeping_the_first(), lambda: {"w": torch.arange(3.0)})


def consuming(tree):
    made = st.offload(tree)
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.data.zero_()
    return made


def rebuilt(tree):
    def one(leaf):
        if not leaf.is_sparse:
            return leaf.clone()
        return torch.sparse_coo_tensor(
            leaf._indices().clone(), leaf._values().clone(), leaf.shape, check_invariants=True, is_coalesced=True
        )

    return st.map_leaves(one, tree)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_what_gives_up_its_input_and_what_is_sparse_keep_values():
    laws.values(consuming, lambda: {"w": torch.arange(4.0)})
    laws.values(rebuilt, lambda: {"s": torch.eye(3).to_sparse(), "w": torch.arange(4.0)})


def test_a_round_trip_may_have_a_history():
    laws.makes_again(
        lambda tree: {"w": tree["w"].float()},
        lambda tree: {"w": tree["w"].double()},
        lambda: {"w": torch.arange(3.0).requires_grad_()},
    )


def test_states_that_a_law_is_given_twice_are_left_alone():
    state = {"w": torch.arange(3.0)}
    laws.values(st.offload, lambda: state)
    assert state["w"].tolist() == [0.0, 1.0, 2.0]


def test_source_code_makes_the_state():
    for state in [*map(code, STATES), *drawn_states(None, 150, 1)]:
        names = {}
        source = snippet(laws.values, st.offload, state)
        assert len(source.splitlines()) <= MAX_LINES + 3, source
        exec(source, names)
        assert_trees_equal(names["state"](), sources.run(state))


def test_most_ordinary_states_read_as_one_would_write_them():
    assert 'return {"w": torch.arange(1.0, 3.0)}' in snippet(laws.pure, copy.copy, code(STATES[0]))


def test_examples_are_the_same_in_every_run():
    drawn_states.cache_clear()
    first = drawn_states(None, 30, 0)
    drawn_states.cache_clear()
    assert drawn_states(None, 30, 0) == first != drawn_states(None, 30, 1)


def test_a_counter_example_is_as_small_as_can_be():
    inner = Node("deque", (Value(3), TensorPlan((2, 3), torch.int8, "gaps", "buffer")))
    state = state_of(Node("list", (inner, Value("\u00e4"), Node("dict", (Value(1), Value(2)), ("\u00e4", 2)))))
    found = smallest(state, lambda smaller: any(map(is_tensor, st.flatten(sources.run(smaller))[0])))
    assert found == "return [torch.arange(2.0)]"
    assert size(found) < size(state)
    found = smallest(state, lambda smaller: {2: 2} in sources.run(smaller))
    assert found == "return [{2: 2}]"
    found = smallest(state, lambda smaller: "Buffer(" in smaller)
    assert found == "return [torch.nn.Buffer(None)]"


def test_functions_that_cannot_be_imported_are_called_by_their_names():
    def local(tree):
        return tree

    one = state_of(Value(1))
    assert "laws.pure(local, state)" in snippet(laws.pure, local, one)
    assert "laws.pure(transform, state)" in snippet(laws.pure, lambda tree: tree, one)
    assert "from copy import deepcopy" in snippet(laws.pure, copy.deepcopy, one)
    assert sys.modules[__name__].snapshot is snapshot
    assert f"from {__name__} import snapshot" in snippet(laws.pure, snapshot, one)


# On real ranks


def gathered(tree):
    return st.gather(tree)


def gathered_by_some(tree):
    import torch.distributed as dist

    return st.gather(tree) if dist.get_rank() else tree


def shards_only(tree):
    from torch.distributed.tensor import DTensor

    return st.map_leaves(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, tree)


def shards_as(dtype, *others):
    """Return a gather that sends shards of some dtypes as ones of another."""
    from torch.distributed.tensor import DTensor

    def gather(tree):
        def narrow(leaf):
            if not isinstance(leaf, DTensor) or leaf.dtype not in others:
                return leaf
            local = leaf.to_local().to(dtype)
            return DTensor.from_local(
                local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
            )

        whole = st.gather(st.map_leaves(narrow, tree))
        return st.map_leaves(lambda made, leaf: made.to(leaf.dtype) if isinstance(leaf, DTensor) else made, whole, tree)

    return gather


def through_bfloat16(tree):
    return shards_as(torch.bfloat16, torch.float32)(tree)


def through_int8(tree):
    return shards_as(torch.int8, torch.int64)(tree)


def of_shards(change, tree):
    """Gather, and change what was distributed, of floating point."""
    from torch.distributed.tensor import DTensor

    def one(leaf, whole):
        return change(whole) if isinstance(leaf, DTensor) and leaf.is_floating_point() else whole

    return st.map_leaves(one, tree, st.gather(tree))


def without_signs_of_zero(tree):
    return of_shards(lambda whole: whole + 0, tree)


def without_payloads(tree):
    return of_shards(lambda whole: whole.nan_to_num(float("nan"), float("inf"), float("-inf")), tree)


def summands(tree):
    from torch.distributed.tensor import DTensor

    def one(leaf, whole):
        return leaf.to_local() if isinstance(leaf, DTensor) and leaf.placements[0].is_partial() else whole

    return st.map_leaves(one, tree, st.gather(tree))


def each_by_itself(tree):
    from torch.distributed.tensor import DTensor

    return st.map_leaves(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "law"),
    [
        *((made, "global_values") for made in (through_bfloat16, through_int8, without_signs_of_zero, summands)),
        (without_payloads, "global_values"),
        (each_by_itself, "ties"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_gather_that_loses_something_is_found(gather, law):
    with pytest.raises(AssertionError, match=f"{law} does not hold"):
        check_transform(gather, laws=[law], ranks=2, examples=20)


@pytest.mark.slow
def test_a_collective_is_called_on_real_ranks():
    report = check_transform(gathered, ranks=(1, 2), examples=12)
    assert report, str(report)
    assert report["global_values"].examples == 24
    report = check_transform(shards_only, ranks=(1, 2), examples=12)
    assert report.broken == ["global_values", "ties"]
    source = report["global_values"].source
    assert "run_ranks(2, laws.global_values, shards_only, state)" in source
    assert "Layout(shape=(" in source
    assert len(source.splitlines()) <= MAX_LINES


def test_a_single_world_size_needs_no_tuple():
    report = check_transform(gathered, laws=["global_values"], ranks=2, examples=2)
    assert report["global_values"].examples == 2


@pytest.mark.slow
def test_ranks_that_leave_each_other_are_noticed():
    report = check_transform(gathered_by_some, ranks=(2,), examples=2)
    assert report["accepts"].holds is False
    assert "did not make the same collectives" in report["accepts"].error


def test_a_layout_is_a_leaf_of_a_plan():
    assert "Layout(shape=(2,), mesh=(0,), placements=('R',), dtype=torch.float32" in snippet(
        laws.pure, gathered, state_of(Node("dict", (Layout((2,), (0,), ("R",)),), ("w",))), 1
    )
