"""The law of defaults: what torch does unless told otherwise is no concern of a transform."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from tests.contract.verbs import VERBS
from tests.judge import assert_trees_equal
from tests.laws.table import Table
from tests.trees.optimizers import optimizer_plans
from tests.trees.plans import build, tied_plans, tree_plans

exact = hyp.sampled_from([verb for verb in VERBS if verb.copies and verb.prepare is None])
plans = hyp.one_of(tree_plans(), tied_plans(), optimizer_plans())
dtypes = hyp.sampled_from([torch.float64, torch.float16, torch.bfloat16])


@contextlib.contextmanager
def defaults(dtype, device):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


laws = Table()


@laws
def copies_are_exact_whatever_the_default_dtype_device_and_grad_mode(plan, verb, dtype, inference):
    tree = build(plan)
    with defaults(dtype, "meta"), torch.inference_mode(inference):
        result = verb.apply(tree)
    assert_trees_equal(result, tree, storages=not verb.slabs)


@laws
def allocation(plan, dtype):
    tree = build(plan)
    expected = st.allocate_like(tree)
    with defaults(dtype, "meta"):
        result = st.allocate_like(tree)
    assert st.similarity(result, expected, values=False)
    assert st.similarity(expected, result, values=False)


@given(one=plans, other=plans, dtype=dtypes, values=hyp.booleans())
def test_comparison(one, other, dtype, values):
    a, b = build(one), build(other)
    expected = st.similarity(a, b, values=values)
    with defaults(dtype, "meta"):
        found = st.similarity(a, b, values=values)
        assert str(found) == str(expected)
        assert st.similarity(a, a, values=True)


@laws
def copying_into(plan, dtype):
    source, target = build(plan), build(plan)
    with defaults(dtype, "meta"):
        try:
            result = st.copy_into(source, target)
        except st.TreeMismatch as error:
            assert {difference.kind for difference in error.differences} <= {"overlap", "writability"}
            return
    assert_trees_equal(result, source, ties=False)


@given(plan=plans, verb=exact, dtype=dtypes, inference=hyp.booleans())
def test_of_one_tree(**drawn):
    laws.check(**drawn)


def test_the_defaults_are_in_force_while_the_laws_look():
    with defaults(torch.float64, "meta"):
        assert torch.ones(1).dtype is torch.float64
        assert torch.ones(1).is_meta
    assert torch.ones(1).dtype is torch.float32
    with pytest.raises(RuntimeError, match="stop"), defaults(torch.float64, "meta"):
        raise RuntimeError("stop")
    assert not torch.ones(1).is_meta
