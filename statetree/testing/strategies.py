"""The public hypothesis strategies for tensors and trees.

Each draws a plan, builds it, and notes the code that makes the tree, which hypothesis prints when a test fails.
Elements of tensors are unique by position, and many are lost by conversions: see ``elements``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import note
from hypothesis import strategies as st

from statetree.testing.arguments import check_one_of
from statetree.testing.elements import DTYPES, TRAINING_DTYPES
from statetree.testing.plan_strategies import tensor_plans, tied_plans, tree_plans
from statetree.testing.plans import GEOMETRIES, USUAL_WRAPS, code_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def tensors(
    *,
    dtypes: Sequence[torch.dtype] | str = DTYPES,
    max_dims: int = 3,
    max_side: int = 3,
    geometries: Sequence[str] = GEOMETRIES,
    wraps: Sequence[str] = USUAL_WRAPS,
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors whose elements are unique by position.

    Many of them change when they go through a narrower dtype or through arithmetic: full mantissas, whole numbers that
    a float rounds, negative zero, subnormals, infinities, and NaNs with payloads.

    Args:
        dtypes: Their dtypes, or ``"training"``: those of ordinary training states.
        max_dims: How many dims they have at most.
        max_side: How long each dim is at most; 0 is always among the sizes.
        geometries: How they lie in their storages: ``contiguous``, ``transposed``, ``gaps``, ``inside`` (of a larger
            storage), ``expanded``, ``channels_last``, ``conjugated``, ``negated``, ``meta``. What a dtype cannot be is
            contiguous.
        wraps: What they are: ``tensor``, ``requires_grad``, ``parameter``, ``frozen`` (a parameter), ``buffer``,
            ``subclass``, ``attribute`` (with an attribute that holds another tensor); not by default ``computed`` (no
            leaf of autograd, as transforms return them).
    """
    plans = tensor_plans(
        dtypes=_dtypes(dtypes), max_dims=max_dims, max_side=max_side, geometries=geometries, wraps=wraps
    )
    return _built(plans)


def state_trees(
    leaves: st.SearchStrategy[Any] | None = None,
    *,
    dtypes: Sequence[torch.dtype] | str = DTYPES,
    max_leaves: int = 12,
    opaque: bool = True,
) -> st.SearchStrategy[Any]:
    """Trees of any containers and any leaves.

    Containers of every kind that statetree knows, empty ones, and keys that are hard to tell apart; ``None`` and other
    plain values; tensors of any kind, with elements as those of ``tensors``, none of which share a storage
    (``tied_trees`` has those). Half of the trees have ten leaves or more, where so many are allowed.

    Args:
        leaves: Leaves; by default tensors and plain values. Of strategies of this module, and of ``one_of`` them and
            others, elements are unique over the tree. (What another strategy draws is put into the tree as it is: a
            tensor's elements may be those of others, and a test that changes it changes what hypothesis shows.)
        dtypes: Dtypes of the default leaves, or ``"training"``: those of ordinary training states, for all of which
            torch implements arithmetic.
        max_leaves: How many leaves a tree has at most, about. Its depth grows with the logarithm.
        opaque: Whether there are objects of unknown classes.
    """
    plans = tree_plans(leaves, dtypes=_dtypes(dtypes), max_leaves=max_leaves, opaque=opaque)
    return _built(plans)


def tied_trees(*, max_leaves: int = 12, opaque: bool = True) -> st.SearchStrategy[Any]:
    """Trees whose leaves are views that overlap in a few storages, among others.

    Tensors and containers appear in several places: the very same object.

    Args:
        max_leaves: As for ``state_trees``.
        opaque: As for ``state_trees``.
    """
    return _built(tied_plans(max_leaves=max_leaves, opaque=opaque))


def _dtypes(dtypes: Sequence[torch.dtype] | str) -> Sequence[torch.dtype]:
    if isinstance(dtypes, str):
        check_one_of("dtypes", dtypes, ["training"])
        return TRAINING_DTYPES
    return dtypes


def _built(plans: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def built(draw: st.DrawFn) -> Any:
        code = code_of(draw(plans))
        note(code.source())
        return code.run()

    strategy = built()
    vars(strategy)["plans"] = plans
    return strategy
