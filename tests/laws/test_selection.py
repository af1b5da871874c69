"""The laws of selection: parts that make the whole again, and nothing touched that was not meant."""

import operator
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.key_paths import Attr, literal
from tests.judge import assert_trees_equal
from tests.laws.table import DoesNotApply, Table
from tests.trees.plans import build, tied_plans, tree_plans

laws = Table()


def some_of(tree, seed):
    """Return a predicate that is true of some leaves of a tree, by their places."""
    random = Random(seed)
    chosen = {path for path in st.paths(tree) if random.random() < 0.5}
    return lambda path, _: path in chosen


def in_items(tree):
    """Return paths and leaves but for those in attributes: these are structure where they hold no tensor any more."""
    rows = zip(st.paths(tree), st.flatten(tree)[0], strict=True)
    return [(path, leaf) for path, leaf in rows if not any(type(key) is Attr for key in path)]


@laws
def merge_inverts_partition(plan, seed):
    tree = build(plan)
    left, right = st.partition(tree, some_of(tree, seed))
    for merged in (st.merge(left, right), st.merge(right, left)):
        leaves, spec = st.flatten(merged)
        assert spec == st.flatten(tree)[1]
        assert all(map(operator.is_, leaves, st.flatten(tree)[0]))
    assert_trees_equal(tree, build(plan), containers=True)


@laws
def a_glob_means_what_it_is_matched_against(plan, seed):
    tree = build(plan)
    texts = list(map(str, st.paths(tree)))
    if not texts:
        raise DoesNotApply
    meant = Random(seed).choice(texts)
    chosen, rest = st.partition(tree, literal(meant))
    rows = zip(texts, st.flatten(tree)[0], st.flatten(chosen)[0], st.flatten(rest)[0], strict=True)
    for text, leaf, *parts in rows:
        assert parts[text == meant] is st.HOLE
        assert parts[text != meant] is leaf
    assert all(leaf is st.HOLE for leaf in st.flatten(st.partition(tree, "**")[1])[0])


@laws
def select_of_everything_is_the_tree(plan):
    tree = build(plan)
    assert_trees_equal(st.select(tree, lambda *_: True), tree)


@laws
def select_keeps_what_matches_in_order(plan, seed):
    tree = build(plan)
    where = some_of(tree, seed)
    try:
        found = st.select(tree, where)
    except st.TreeMismatch as error:
        assert "cannot lack a child" in str(error)
        raise DoesNotApply from None
    if st.flatten(tree)[1].nodes:
        kept = [leaf for path, leaf in in_items(tree) if where(path, leaf)]
        again = [leaf for _, leaf in in_items(found)]
        assert all(map(operator.is_, again, kept))
        assert len(again) == len(kept)


@laws
def update_with_the_leaves_themselves_changes_nothing(plan, seed):
    tree = build(plan)
    found, spec = st.flatten(st.update(tree, some_of(tree, seed), lambda leaf: leaf))
    assert spec == st.flatten(tree)[1]
    assert all(map(operator.is_, found, st.flatten(tree)[0]))


@laws
def a_prefix_comes_and_goes(plan):
    tree = {"model": build(plan)}
    rules = st.Renaming({"model.**": "other.model.**"})
    try:
        found = st.rename(tree, rules, missing_ok=True)
        again = st.rename(found, rules.inverse, missing_ok=True)
    except st.TreeMismatch as error:  # {0: ..., "0": ...}
        assert "one path" in str(error) or "through a leaf" in str(error)
        raise DoesNotApply from None
    leaves, spec = st.flatten(again)
    assert spec == st.flatten(tree)[1]
    assert all(map(operator.is_, leaves, st.flatten(tree)[0]))


@laws
def what_is_copied_back_touches_what_matched(numbers, seed):
    tree = {"m": {f"layers.{i}.w": torch.full((2,), float(n)) for i, n in enumerate(numbers)}, "l": [torch.ones(2)]}
    target = st.map_leaves(lambda leaf: leaf + 1000, tree)
    where = some_of(tree, seed)
    expected = st.update(target, where, lambda leaf: leaf - 1000)
    st.copy_into(st.select(tree, where), target, strict=False)
    assert st.similarity(target, expected, values=True)


@laws
def a_part_copied_back_touches_what_matched(numbers, seed):
    tree = {"l": [torch.full((2,), float(n)) for n in numbers], "t": (torch.ones(1), [torch.ones(3)])}
    target = st.map_leaves(lambda leaf: leaf + 1000, tree)
    where = some_of(tree, seed)
    expected = st.update(target, where, lambda leaf: leaf - 1000)
    again = st.offload(target)
    st.copy_into(st.partition(tree, where)[0], target, strict=False)
    st.copy_into(tree, again, where=where)
    assert st.similarity(target, expected, values=True)
    assert st.similarity(again, expected, values=True)


@laws
def cast_keeps_ties_and_geometry(sizes, seed):
    base = torch.arange(64.0)
    random = Random(seed)
    starts = [random.randrange(64 - size) for size in sizes]
    tree = [base[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    found = st.cast(tree, torch.float64)
    for leaf, fresh in zip(tree, found, strict=True):
        assert torch.equal(leaf.double(), fresh)
    for a, x in zip(tree, found, strict=True):
        for b, y in zip(tree, found, strict=True):
            overlap = a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
            if overlap:
                assert (y.data_ptr() - x.data_ptr()) == 2 * (b.data_ptr() - a.data_ptr())


@given(
    plan=hyp.one_of(tree_plans(), tied_plans()),
    seed=hyp.integers(0, 2**16),
    numbers=hyp.lists(hyp.integers(0, 99), max_size=6),
    sizes=hyp.lists(hyp.integers(1, 20), max_size=5),
)
def test_selection(plan, seed, numbers, sizes):
    laws.check(plan=plan, seed=seed, numbers=numbers, sizes=sizes)
