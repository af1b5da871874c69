"""What a type checker knows of ``statetree.testing``."""

from typing import Any, assert_type

import torch
from hypothesis import given
from hypothesis.strategies import SearchStrategy

import statetree as st
from statetree import testing


def assertions(a: object, b: object) -> None:
    testing.assert_trees_equal(a, b, ties=True, storages=True)
    testing.assert_independent(a, b, containers=True)
    assert_type(testing.assert_pure(st.paths, a), list[st.Path])
    assert_type(testing.assert_structure_preserved(st.offload, a), Any)


def laws(a: object) -> None:
    report = testing.check_transform(st.offload, laws=["pure", testing.laws.ties], ranks=(1, 2), examples=3)
    assert_type(report["pure"].holds, bool | None)
    assert_type(testing.conformance(copy=st.offload)["alias_kept"].outcome, str)
    testing.Law("mine", "What holds.", lambda transform, state: None)(st.offload, lambda: a)


def rank(base: int, *, by: int = 1) -> int:
    return base + by


def ranks() -> None:
    assert_type(testing.run_ranks(2, rank, 1, timeout=60.0), list[int])


def strategies() -> None:
    assert_type(testing.tensors(max_dims=2), SearchStrategy[torch.Tensor])
    assert_type(testing.state_trees(dtypes="training", max_leaves=3, opaque=False), SearchStrategy[Any])
    assert_type(testing.tied_trees(max_leaves=3), SearchStrategy[Any])
    assert_type(testing.layouts(partial=True), SearchStrategy[testing.Layout])
    assert_type(testing.layouts(2), SearchStrategy[testing.Layout])


def layout(layout: testing.Layout) -> None:
    assert_type(layout.full(), torch.Tensor)
    assert_type(layout.local(0), torch.Tensor | None)


@given(testing.state_trees())
def test_of_a_user(tree: Any) -> None:
    testing.assert_pure(st.offload, tree)
