"""``delta``: what has to be written into one state to make it another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.chunks.ranks import own_ranks
from statetree.leaves.delta_making import make_delta
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from statetree.leaves.delta_tree import Delta


@quietly
def delta(new: Any, base: Any) -> Delta:
    """Find what has to be written into a tree to make it another one, bit for bit.

    For each tensor this is nothing, the positions and values of the elements that differ, or the whole tensor:
    whichever takes the fewest bytes. NaNs are compared by their bits, and ``0.0`` differs from ``-0.0``. For everything
    else (plain values, sparse and quantized tensors, opaque objects) it is the whole leaf, if it differs. Neither tree
    changes.

    Args:
        new: Any tree.
        base: A tree of the same structure, dtypes, shapes and layouts. Distributed tensors are compared on each rank
            for itself, without communication.

    Returns:
        A ``Delta``: a tree of plain tensors, false if nothing differs. It shares no memory with either tree.

    Raises:
        TreeMismatch: If the trees differ in structure, leaf types, dtypes, shapes, layouts, meshes or placements, or if
            tensors of ``base`` share memory for which ``new`` has different values.
        UnsupportedLeaf: If a leaf cannot be taken apart, among others because its storage was freed.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> base = {"w": torch.zeros(1000), "step": 1}
        >>> new = {"w": torch.zeros(1000).index_fill(0, torch.tensor([7, 9]), 1.0), "step": 2}
        >>> change = st.delta(new, base)
        >>> change.changed, change.nbytes
        ({'w': 2, 'step': 1}, 10)
        >>> _ = st.apply_delta(change, base)
        >>> base["w"].equal(new["w"])
        True
    """
    return make_delta("delta", new, base, own_ranks())
