"""The laws of composition: ``chain`` is associative, has an identity, and equals applying its steps in turn."""

from functools import partial
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree import compose
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch
from tests.laws.table import Table
from tests.trees.plans import build, tied_plans, tree_plans


def double(leaf):
    plain = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_meta
    return leaf * 2 if plain and leaf.dtype.itemsize > 1 else leaf


def in_a_list(tree):
    return [tree, {"n": 1}]


STEPS = {
    "offload": st.offload,
    "shared": partial(st.offload, share_memory=True),
    "in place": partial(st.offload, copy=False),
    "double": partial(st.map_leaves, double),
    "list": in_a_list,
    "chain": st.chain(st.offload, st.offload),
}
steps = hyp.lists(hyp.sampled_from(sorted(STEPS)), max_size=4).map(lambda names: [STEPS[name] for name in names])
plans = hyp.one_of(tree_plans(max_leaves=8), tied_plans(max_leaves=8))
buckets = hyp.sampled_from([1, 50, 64 << 20])


def in_turn(tree, chosen):
    for step in chosen:
        tree = step(tree)
    return tree


laws = Table()


@laws
def a_chain_is_its_steps_in_turn(plan, first, bucket_bytes):
    tree = build(plan)
    watch = Watch(tree)
    with mock.patch.object(compose, "BUCKET_BYTES", bucket_bytes):
        result = st.chain(*first)(tree)
    watch.check()
    assert_trees_equal(result, in_turn(build(plan), first), storages=STEPS["shared"] not in first)


@laws
def associative(plan, first, second, third, bucket_bytes):
    tree = build(plan)
    with mock.patch.object(compose, "BUCKET_BYTES", bucket_bytes):
        flat = st.chain(*first, *second, *third)(tree)
        left = st.chain(st.chain(*first, *second), *third)(tree)
        right = st.chain(*first, st.chain(*second, *third))(tree)
    storages = STEPS["shared"] not in first + second + third
    assert_trees_equal(flat, left, storages=storages)
    assert_trees_equal(flat, right, storages=storages)


@laws
def the_empty_chain_is_the_identity(plan):
    tree = build(plan)
    assert st.chain()(tree) is tree
    assert_trees_equal(st.chain(st.chain(), st.offload, st.chain())(tree), tree)


@laws
def a_stream_yields_every_leaf_once_in_the_order_of_the_paths(plan, bucket_bytes):
    tree = build(plan)
    leaves, spec = st.flatten(tree)
    with mock.patch.object(compose, "BUCKET_BYTES", bucket_bytes):
        streamed = list(st.stream(tree, st.offload))
    found = [path for path, _ in streamed]
    assert found == sorted(spec.paths(), key=lambda path: path.sort_key())
    order = sorted(range(len(leaves)), key=lambda index: spec.paths()[index].sort_key())
    assert_trees_equal([leaf for _, leaf in streamed], [leaves[index] for index in order])


@laws
def the_order_of_a_stream_does_not_depend_on_that_of_dicts(plan, random):
    tree = build(plan)
    flat = dict(st.to_flat(tree)[0])
    items = list(flat.items())
    random.shuffle(items)
    one = [path for path, _ in st.stream(flat, st.offload)]
    other = [path for path, _ in st.stream(dict(items), st.offload)]
    assert one == other


@given(
    plan=plans, first=steps, second=steps, third=steps, bucket_bytes=buckets, random=hyp.randoms(use_true_random=False)
)
def test_of_one_tree(**drawn):
    laws.check(**drawn)
