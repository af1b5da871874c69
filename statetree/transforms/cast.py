"""``cast``: a tree with its floating-point tensors in another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from typing import cast as typing_cast

import torch

from statetree.leaves.recasting import converted
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from statetree.tree.selection import Where

T = TypeVar("T")


def cast(tree: T, dtype: torch.dtype, *, where: Where | None = None, missing_ok: bool = False) -> T:
    """Convert the floating-point tensors of a tree.

    Shapes, strides, ties, classes, layouts and ``requires_grad`` are kept. Integers, complex numbers and plain values
    stay as they are, and so do opaque objects, with tensors inside that are tied to converted ones. Meta tensors stay
    meta. A stored tensor (of ``statetree.files``) that is contiguous, and tied to none, is converted when it is read,
    which raises ``CheckpointError`` if a value is too large; others are read now.

    Args:
        tree: Any tree.
        dtype: What the tensors become.
        where: Which leaves are converted, as for ``select``. By default all floating-point tensors.
        missing_ok: Whether a glob or path may match nothing.

    Returns:
        A tree with fresh containers.

    Aliasing:
        Leaves that are not converted are the tree's own.

    Raises:
        TreeMismatch: If a conversion is one that ``copy_into(cast=True)`` refuses (to an integer type, say; or of a
            value that is too large), if a tensor shares elements with one that is not converted, or if a glob or path
            matches nothing.
        UnsupportedLeaf: If a leaf is made of several tensors (sparse, quantized), or its storage was freed.
        CyclicTree: If a container holds itself.
        TypeError: If ``dtype`` is no ``torch.dtype``.

    Example:
        >>> import statetree as st, torch
        >>> st.cast({"w": torch.ones(2), "ids": torch.arange(2)}, torch.bfloat16)
        {'w': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """
    given: object = dtype
    if not isinstance(given, torch.dtype):
        raise TypeError(f"cast: dtype is no torch.dtype: expected one such as torch.bfloat16, got {given!r}.")
    leaves, spec = flatten_for("cast", tree)
    mask = [True] * len(leaves)
    if where is not None:
        mask = selected(where, spec, leaves, verb="cast", missing_ok=missing_ok)
    return typing_cast("T", unflatten(spec, converted("cast", spec, leaves, mask, dtype)))
