"""What tests of transforms need: trees made by hypothesis, strict assertions, and real ranks.

Only the strategies need hypothesis (the extra ``testing``), and load it when one of them is first asked for.

Example:
    A transform of your own, held to what statetree's keep, on any tree:

    >>> import statetree as st
    >>> import torch
    >>> from hypothesis import given, settings
    >>> from statetree.testing import assert_independent, assert_pure, assert_structure_preserved, state_trees
    >>> def halved(leaf):
    ...     is_float = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    ...     return leaf.detach().half() if is_float else leaf
    >>> def to_half(tree):
    ...     return st.map_leaves(halved, st.offload(tree))
    >>> @settings(max_examples=20)
    ... @given(tree=state_trees())
    ... def test_to_half(tree):
    ...     result = assert_pure(to_half, tree)
    ...     assert_structure_preserved(to_half, tree)
    ...     assert_independent(tree, result)
    >>> test_to_half()
"""

from typing import TYPE_CHECKING, Any

from statetree.testing.assertions import (
    assert_independent,
    assert_pure,
    assert_structure_preserved,
    assert_trees_equal,
    tree_differences,
)
from statetree.testing.container_plan import Again, Node, Value
from statetree.testing.layout import Layout
from statetree.testing.optimizer_plan import OptimizerPlan
from statetree.testing.plans import Plan, build
from statetree.testing.ranks import Outcome, close_ranks, rank_outcomes, run_ranks
from statetree.testing.tensor_plan import TensorPlan, ViewPlan
from statetree.testing.watch import Watch

if TYPE_CHECKING:
    from statetree.testing.strategies import (
        layouts,
        optimizer_plans,
        optimizer_states,
        state_trees,
        tensor_plans,
        tensors,
        tied_plans,
        tied_trees,
        tree_plans,
    )

_STRATEGIES = (
    "layouts",
    "optimizer_plans",
    "optimizer_states",
    "state_trees",
    "tensor_plans",
    "tensors",
    "tied_plans",
    "tied_trees",
    "tree_plans",
)

__all__ = [
    "Again",
    "Layout",
    "Node",
    "OptimizerPlan",
    "Outcome",
    "Plan",
    "TensorPlan",
    "Value",
    "ViewPlan",
    "Watch",
    "assert_independent",
    "assert_pure",
    "assert_structure_preserved",
    "assert_trees_equal",
    "build",
    "close_ranks",
    "layouts",
    "optimizer_plans",
    "optimizer_states",
    "rank_outcomes",
    "run_ranks",
    "state_trees",
    "tensor_plans",
    "tensors",
    "tied_plans",
    "tied_trees",
    "tree_differences",
    "tree_plans",
]


if not TYPE_CHECKING:  # a type checker is to know which names there are

    def __getattr__(name: str) -> Any:
        """Load the strategies, and hypothesis with them, when one is first asked for."""
        if name not in _STRATEGIES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        try:
            from statetree.testing import strategies
        except ModuleNotFoundError as error:
            if error.name != "hypothesis":
                raise
            msg = f"statetree.testing.{name} needs hypothesis: pip install statetree[testing]"
            raise ModuleNotFoundError(msg, name="hypothesis") from error
        return getattr(strategies, name)
