"""Plans of what ``statetree.testing`` draws, for tests that build a tree twice, or send it to ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.testing import state_trees, tensors, tied_trees
from statetree.testing.strategies import plans_of

if TYPE_CHECKING:
    from hypothesis import strategies as st


def tensor_plans(**options: Any) -> st.SearchStrategy[Any]:
    """Plans of what ``tensors`` draws."""
    return plans_of(tensors(**options))


def tree_plans(leaves: st.SearchStrategy[Any] | None = None, **options: Any) -> st.SearchStrategy[Any]:
    """Plans of what ``state_trees`` draws."""
    return plans_of(state_trees(leaves, **options))


def tied_plans(**options: Any) -> st.SearchStrategy[Any]:
    """Plans of what ``tied_trees`` draws."""
    return plans_of(tied_trees(**options))
