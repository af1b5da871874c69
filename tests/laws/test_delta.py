"""The laws of ``delta``: what it makes, what it costs, and that it is applied to its base alone."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from tests.judge import assert_trees_equal
from tests.judge.regions import raw_bytes, storage_of
from tests.judge.watch import Watch
from tests.laws.table import DoesNotApply, Table
from tests.trees.plans import build, tied_plans, tree_plans

plans = hyp.one_of(tree_plans(max_leaves=8), tied_plans(max_leaves=8))
laws = Table()


def ordinary(leaf):
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.is_meta:
        return False
    return (
        leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized and storage_of(leaf) is not None
    )


def changed(tree, seed, share):
    """Return a tree with other bytes in some storages, and other numbers in some plain leaves."""
    chance = random.Random(seed)
    leaves = st.flatten(tree)[0]
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in leaves if ordinary(leaf)}
    for storage in storages.values():
        memory = raw_bytes(storage)
        for position in range(len(memory)):
            if chance.random() < share:
                memory[position] ^= 1 << chance.randrange(8)
    return st.map_leaves(lambda leaf: leaf + 1 if type(leaf) is int and chance.random() < share else leaf, tree)


def between(new, base):
    """Return a delta; a law says nothing of objects whose tensors are leaves, too, and change."""
    try:
        return st.delta(new, base)
    except st.TreeMismatch as error:
        assert "memory that it shares with" in str(error) or ": a view on " in str(error)
        raise DoesNotApply from error


def three(plan, seed, share):
    """Return three states of one plan; a law says nothing of trees that cannot be written to."""
    trees = [build(plan), changed(build(plan), seed, share), changed(build(plan), seed + 1, share)]
    if any(torch._debug_has_internal_overlap(leaf) for leaf in st.flatten(trees[0])[0] if ordinary(leaf)):
        raise DoesNotApply
    try:
        st.copy_into(trees[0], build(plan))
    except st.TreeMismatch as error:
        raise DoesNotApply from error
    return trees


@laws
def a_delta_makes_the_new_tree(plan, seed, share):
    base, new, _ = three(plan, seed, share)
    watches = Watch(base), Watch(new)
    change = between(new, base)
    for watch in watches:
        watch.check()
    target = st.offload(base)
    result = st.apply_delta(change, target)
    assert st.similarity(result, new, values=True), st.similarity(result, new, values=True)
    again = st.apply_delta(change, result)
    assert st.similarity(again, new, values=True)
    assert not between(again, new)


@laws
def nothing_changed(plan, seed, share):
    base, *_ = three(plan, seed, share)
    empty = between(base, st.offload(base))
    assert not empty
    assert (empty.nbytes, empty.changed) == (0, {})
    watch = Watch(base)
    st.apply_delta(empty, base)
    watch.check()


@laws
def it_takes_no_more_bytes_than_all_of_it(plan, seed, share):
    base, new, _ = three(plan, seed, share)
    change = between(new, base)
    for name, found in change.tensors.items():
        whole = st.to_flat(new)[0].get(name)
        if whole is None:  # of a leaf that has several
            continue
        assert found.gaps.nbytes + found.values.nbytes <= whole.numel() * whole.itemsize


@laws
def two_in_a_row_are_one(plan, seed, share):
    a, b, c = three(plan, seed, share)
    d = changed(build(plan), seed + 2, share)
    first, second, third = between(b, a), between(c, b), between(d, c)
    both = first.then(second)
    assert st.similarity(st.apply_delta(both, st.offload(a)), c, values=True)
    left, right = both.then(third), first.then(second.then(third))
    for found in (left, right):
        assert st.similarity(st.apply_delta(found, st.offload(a)), d, values=True)
    assert_trees_equal(left, right, ties=False)


@laws
def the_inverse_undoes_it(plan, seed, share):
    base, new, _ = three(plan, seed, share)
    change = between(new, base)
    back = change.inverse(base)
    target = st.offload(base)
    result = st.apply_delta(back, st.apply_delta(change, target))
    assert st.similarity(result, base, values=True)


@laws
def a_wrong_base_is_left_alone(plan, seed, share):
    base, new, _ = three(plan, seed, share)
    change = between(new, base)
    for name, found in change.tensors.items():
        wrong = st.offload(base)
        leaf = st.to_flat(wrong)[0].get(name)
        if (
            not ordinary(leaf)
            or not leaf.is_contiguous()
            or leaf.is_neg()
            or leaf.is_conj()
            or set(leaf.stride()[-1:]) - {1}
        ):
            continue
        place = 0 if found.is_whole else int(found.positions()[seed % found.gaps.numel()])
        memory = leaf.detach().view(-1).view(torch.uint8).view(leaf.numel(), leaf.itemsize)
        expected = st.to_flat(new)[0][name].detach().contiguous().view(-1).view(torch.uint8).view(memory.shape)
        before = memory[place].clone()
        memory[place] += 1
        if memory[place].equal(expected[place]):
            memory[place] = before - 1
        watch = Watch(wrong)
        with pytest.raises(st.TreeMismatch, match="the delta was made for another tree at"):
            st.apply_delta(change, wrong)
        watch.check()


@laws
def it_is_a_tree_that_can_be_copied_and_taken_apart(plan, seed, share):
    base, new, _ = three(plan, seed, share)
    change = between(new, base)
    with st.Stager() as stager:
        for copy in (st.offload(change), st.from_flat(*st.to_flat(change)), stager.stage(change)):
            assert copy.changed == change.changed
            assert st.similarity(st.apply_delta(copy, st.offload(base)), new, values=True)


@given(plan=plans, seed=hyp.integers(0, 1000), share=hyp.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_of_a_delta(**drawn):
    laws.check(**drawn)
