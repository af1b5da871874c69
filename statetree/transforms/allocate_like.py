"""``allocate_like``: memory for a state, without its contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.declare import leafwise
from statetree.leaves.replicas import replicated
from statetree.spans.memory import memory_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@leafwise
def allocate_like(
    tree: T,
    *,
    device: torch.device | str | int = "cpu",
    pin_memory: bool = False,
    share_memory: bool = False,
) -> T:
    """Allocate a tree with the structure, ties and geometry of another, with undefined contents.

    Plain values are taken over; opaque objects are copied, with undefined tensors inside. Only the bytes that the
    tree's tensors cover are allocated. Meta tensors become real ones; fake tensors stay fake.

    Args:
        tree: Any tree.
        device: Where the new tensors lie.
        pin_memory: Take page-locked memory. Without an accelerator this warns once and is ignored.
        share_memory: Take memory that other processes can map.

    Returns:
        A tree of the same structure, dtypes, shapes, strides, ties, classes and attributes on ``device``, which
        shares no memory with ``tree``.

    Raises:
        UnsupportedLeaf: If a leaf cannot be taken apart and put together exactly.
        CyclicTree: If a container holds itself.
        ValueError: If pinned or shared memory is asked for on a device other than the CPU.

    Example:
        >>> import statetree as st, torch
        >>> w = torch.ones(2, 3)
        >>> fresh = st.allocate_like({"embed": w, "head": w.T})
        >>> fresh["head"].shape, fresh["head"].data_ptr() == fresh["embed"].data_ptr()
        (torch.Size([3, 2]), True)
    """
    memory = memory_of(device, pin_memory=pin_memory, share_memory=share_memory)
    return replicated("allocate_like", tree, memory, copy=False)
