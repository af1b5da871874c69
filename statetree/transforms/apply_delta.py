"""``apply_delta``: a delta written into the tensors of a state, or not at all."""

from __future__ import annotations

from typing import Literal, TypeVar

from statetree.chunks.ranks import own_ranks
from statetree.leaves.delta_applying import prepared_apply
from statetree.leaves.delta_tree import Delta
from statetree.torch_internals import quietly

T = TypeVar("T")


@quietly
def apply_delta(delta: Delta, tree: T, *, verify: Literal["written", "all"] = "written") -> T:
    """Write a delta into a tree's tensors, all of it or nothing.

    Everything is validated before the first byte is written. A delta is *idempotent*: applying it to its own result
    does nothing, and applying it again after an interrupted call completes that call. (A process that is killed within
    the one call of torch that writes a tensor, in memory that outlives it, may leave this tensor with neither its old
    nor its new elements: it is then refused.)

    Args:
        delta: From ``delta``, of two trees with the same structure, dtypes, shapes and layouts as ``tree``. It may have
            been offloaded, staged, saved or sent meanwhile.
        tree: The tree, with the elements that the base had. Strides and devices may differ.
        verify: With ``"written"``, it must hold what the base held wherever something is written; with ``"all"``
            everywhere. Checksums decide this: they miss an accidental difference with a chance of at most 2⁻³³, and do
            not protect against forgers.

    Returns:
        A tree with ``tree``'s tensors and the delta's plain values, in fresh containers.

    Aliasing:
        The result's leaves are those of ``tree``, but for values that the delta brings, which are copies. Those
        that have other sizes than before (a sparse tensor with more elements) are fresh.

    Raises:
        TreeMismatch: If ``tree`` is not the base, as far as that is verified; if a tensor cannot be written, or shares
            memory with another one, which it did not in the base; or if the delta is damaged (its positions do not
            ascend, lie outside of the tensor, or its sizes, sums or values do not fit; opaque objects that it brings
            are not looked into). It names the path. Nothing is written.
        UnsupportedLeaf: If a leaf cannot be taken apart.
        CyclicTree: If a container holds itself.
        ValueError: If ``verify`` is something else.
        TypeError: If ``delta`` is no ``Delta``.

    Example:
        >>> import statetree as st, torch
        >>> base, new = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 1.0, 0.0])}
        >>> replica = st.offload(base)
        >>> st.apply_delta(st.delta(new, base), replica)
        {'w': tensor([0., 1., 0.])}
    """
    if verify not in ("written", "all"):
        msg = f'apply_delta: verify must be "written" or "all", got {verify!r}.'
        raise ValueError(msg)
    given: object = delta
    if not isinstance(given, Delta):
        msg = (
            f"apply_delta: the first argument is no delta: expected a Delta, got a {type(given).__qualname__}. "
            "Pass the delta first, and then the tree."
        )
        raise TypeError(msg)
    result, writes = prepared_apply("apply_delta", delta, tree, own_ranks(), everything=verify == "all")
    for write in writes:
        write()
    return result
