"""``offload``: an independent copy of a state on the CPU, or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.declare import leafwise
from statetree.leaves.replicas import moved, replicated
from statetree.spans.memory import memory_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@leafwise
def offload(
    tree: T,
    *,
    device: torch.device | str | int = "cpu",
    pin_memory: bool = False,
    share_memory: bool = False,
    copy: bool = True,
) -> T:
    """Copy a tree's tensors to the CPU, or to another device.

    Every tensor comes out bit-identical, with its dtype, strides, ties, class, attributes and ``requires_grad``;
    gradients are not copied. Only the bytes that the tree's tensors cover are copied: a small view of a large
    storage costs what the view does. Meta tensors stay meta, fake tensors stay fake.

    Args:
        tree: Any tree.
        device: Where the copies lie.
        pin_memory: Take page-locked memory. Without an accelerator this warns once and is ignored.
        share_memory: Take memory that other processes can map.
        copy: With ``False``, leaves whose tensors are all on ``device`` already are passed through.

    Returns:
        A tree of the same structure with every tensor on ``device``.

    Aliasing:
        None by default. With ``copy=False``, leaves that are passed through are the tree's own.

    Raises:
        UnsupportedLeaf: If a leaf cannot be copied exactly, among others because its storage was freed.
        CyclicTree: If a container holds itself.
        ValueError: If pinned or shared memory is asked for on a device other than the CPU.

    Example:
        >>> import statetree as st, torch
        >>> state = {"w": torch.ones(2), "step": 3}
        >>> snapshot = st.offload(state)
        >>> state["w"].zero_()
        tensor([0., 0.])
        >>> snapshot
        {'w': tensor([1., 1.]), 'step': 3}
    """
    memory = memory_of(device, pin_memory=pin_memory, share_memory=share_memory)
    if copy:
        return replicated("offload", tree, memory, copy=True)
    return moved("offload", tree, memory)
