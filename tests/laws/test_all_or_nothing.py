"""The law of ``copy_into``: it does everything or nothing, and it does it wherever the result is beyond doubt."""

from itertools import permutations

import torch
from hypothesis import example, given
from hypothesis import strategies as hyp

import statetree as st
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch
from tests.laws.drawn import near
from tests.laws.table import Table
from tests.trees.plans import Node, TensorPlan, build, tied_plans, tree_plans

plans = hyp.one_of(tree_plans(max_leaves=8), tied_plans(max_leaves=8))
pairs_of_plans = hyp.one_of(near(), hyp.tuples(plans, plans))
CELLS = 8
LATE_MISMATCH = Node("list", (TensorPlan(), TensorPlan((3,))))


@given(pair=pairs_of_plans, cast=hyp.booleans())
@example(pair=(TensorPlan(), TensorPlan(dtype=torch.float64)), cast=True)
@example(pair=(TensorPlan(dtype=torch.float8_e4m3fn), TensorPlan(geometry="negated")), cast=True)
@example(pair=(TensorPlan(), TensorPlan(dtype=torch.complex64, geometry="conjugated")), cast=True)
@example(pair=(LATE_MISMATCH, Node("list", (TensorPlan(), TensorPlan()))), cast=False)
def test_any_two_trees(pair, cast):
    source, target = map(build, pair)
    watch = Watch(target)
    try:
        result = st.copy_into(source, target, cast=cast)
    except st.TreeMismatch as error:
        assert error.differences
        watch.check()
    else:
        report = st.similarity(source, result, values=not cast)
        assert {found.kind for found in report.differences} <= ({"dtype"} if cast else set()), report


laws = Table()


@laws
def two_trees_of_one_plan(plan):
    source, target = build(plan), build(plan)
    unchanged, watch = Watch(source), Watch(target)
    try:
        result = st.copy_into(source, target)
    except st.TreeMismatch as error:
        assert {difference.kind for difference in error.differences} == {"overlap"}
        watch.check()
    else:
        assert_trees_equal(result, source, ties=False)
    unchanged.check()


@laws
def what_was_allocated_can_be_filled(plan):
    tree = build(plan)
    target = st.offload(tree) if _has_meta(tree) else st.allocate_like(tree)
    result = st.copy_into(tree, target)
    assert st.similarity(result, tree, values=True)  # not the attributes of tensors, which are the target's


@given(plan=plans)
def test_of_one_tree(**drawn):
    laws.check(**drawn)


def _has_meta(tree):
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in st.flatten(tree)[0])


views = hyp.tuples(hyp.integers(0, CELLS - 1), hyp.integers(1, 4), hyp.integers(1, 3))


def view_of(base, view):
    start, count, step = view
    return base[start::step][:count]


@given(
    targets=hyp.lists(views, min_size=1, max_size=4),
    contents=hyp.lists(hyp.lists(hyp.integers(0, 2), min_size=4, max_size=4), min_size=4, max_size=4),
)
def test_overlapping_targets_are_written_only_if_their_order_does_not_matter(targets, contents):
    def fresh():
        base = torch.arange(10.0, 10.0 + CELLS)
        return base, [view_of(base, view) for view in targets]

    sources = [torch.tensor(row[: len(target)]).float() for row, target in zip(contents, fresh()[1], strict=False)]
    orders_agree = True
    for order in permutations(range(len(targets))):
        _, trial = fresh()
        for index in order:
            trial[index].copy_(sources[index])
        orders_agree &= all(torch.equal(trial[index], sources[index]) for index in range(len(targets)))
    base, writable = fresh()
    try:
        st.copy_into(sources, writable)
    except st.TreeMismatch:
        places = [(target.data_ptr(), target.shape, target.stride()) for target in writable]
        assert not orders_agree or len(set(places)) > 1  # one view, however often, may receive equal values
        assert torch.equal(base, fresh()[0])
    else:
        assert orders_agree
        assert all(map(torch.equal, writable, sources))


@given(pairs=hyp.lists(hyp.tuples(views, views), min_size=1, max_size=3), numpy=hyp.booleans())
def test_sources_and_targets_on_one_memory_are_read_before_anything_is_written(pairs, numpy):
    base = torch.arange(float(CELLS))
    other = torch.from_numpy(base.numpy()) if numpy else base
    sources, targets = [], []
    for a, b in pairs:
        source, target = view_of(base, a), view_of(other, b)
        count = min(len(source), len(target))
        sources.append(source[:count])
        targets.append(target[:count])
    expected = [source.clone() for source in sources]
    before = base.clone()
    try:
        st.copy_into(sources, targets)
    except st.TreeMismatch as error:
        assert {difference.kind for difference in error.differences} == {"overlap"}
        assert torch.equal(base, before)
    else:
        assert all(map(torch.equal, targets, expected))
