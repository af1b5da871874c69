"""What a type checker knows of ``statetree.testing``."""

from typing import Any, assert_type

import torch
from hypothesis import given
from hypothesis.strategies import SearchStrategy

import statetree as st
from statetree import testing


def assertions(a: object, b: object) -> None:
    testing.assert_trees_equal(a, b, ties=True, strides=True, device=False, containers=False, storages=True)
    testing.assert_independent(a, b, containers=True)
    assert_type(testing.tree_differences(a, b), list[str])
    assert_type(testing.assert_pure(st.paths, a), list[st.Path])
    assert_type(testing.assert_structure_preserved(st.offload, a), Any)
    watch = testing.Watch(a)
    watch.check()


def rank(base: int, *, by: int = 1) -> int:
    return base + by


def ranks() -> None:
    assert_type(testing.run_ranks(2, rank, 1, timeout=60.0), list[int])
    outcomes = testing.rank_outcomes(2, rank, 1)
    assert_type(outcomes, list[testing.Outcome])
    assert_type(outcomes[0].value, Any)
    assert_type(outcomes[0].report, str)
    testing.close_ranks()


def strategies() -> None:
    assert_type(testing.tensors(max_dims=2), SearchStrategy[torch.Tensor])
    assert_type(testing.state_trees(max_leaves=3, opaque=False), SearchStrategy[Any])
    assert_type(testing.tied_trees(max_leaves=3), SearchStrategy[Any])
    assert_type(testing.optimizer_states(names=["SGD"]), SearchStrategy[dict[str, Any]])
    assert_type(testing.layouts(2, partial=True), SearchStrategy[testing.Layout])
    assert_type(testing.tensor_plans(), SearchStrategy[testing.TensorPlan])
    assert_type(testing.optimizer_plans(), SearchStrategy[testing.OptimizerPlan])
    assert_type(testing.tree_plans(), SearchStrategy[Any])
    assert_type(testing.tied_plans(), SearchStrategy[Any])


def plans(layout: testing.Layout) -> None:
    plan: testing.Plan = testing.TensorPlan(shape=(2, 3), dtype=torch.float32)
    assert_type(testing.build(plan), Any)
    made: list[testing.Plan] = [testing.Value(1), testing.ViewPlan(0), testing.Again(0)]
    assert_type(testing.build(testing.Node("list", tuple(made))), Any)
    assert_type(layout.full(), torch.Tensor)
    assert_type(layout.local(0), torch.Tensor | None)


@given(testing.state_trees())
def test_of_a_user(tree: Any) -> None:
    testing.assert_pure(st.offload, tree)
