"""``offload``: an independent copy of a state on the CPU, or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.declare import leafwise
from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import unpack
from statetree.leaves.replicas import replicated
from statetree.leaves.ties import tied_leaves
from statetree.spans.layout import check_memory, extents
from statetree.spans.memory import Memory, memory_of
from statetree.spans.replicate import replicate_columns
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    import torch


@leafwise
def offload(
    tree: Any,
    *,
    device: torch.device | str | int = "cpu",
    pin_memory: bool = False,
    share_memory: bool = False,
    copy: bool = True,
) -> Any:
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
    return _move(tree, memory)


@quietly
def _move(tree: Any, memory: Memory) -> Any:
    """Copy only what does not lie where it should."""
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb="offload")
    unpacked = unpack("offload", leaves, spec.paths)
    stays = [_lies_in(part, memory) for part in unpacked.parts]
    moving = [leaf for leaf in range(len(leaves)) if not all(stays[part] for part in unpacked.parts_of(leaf))]
    if moving:  # and what is tied to it
        tied = tied_leaves(unpacked)
        moving = sorted({companion for leaf in moving for companion in tied[leaf]})
    part = unpack(
        "offload", [leaves[index] for index in moving], lambda: [spec.paths()[index] for index in moving], together=True
    )
    reach = extents(part.columns)
    check_memory("offload", part.columns, lambda index: spec.paths()[moving[part.owners[index]]])
    for index, leaf in zip(moving, part.pack(replicate_columns(part.columns, reach, memory, copy=True)), strict=True):
        leaves[index] = leaf
    return unflatten(spec, leaves)


def _lies_in(part: torch.Tensor, memory: Memory) -> bool:
    if part.is_meta:
        return True
    if memory.pin_memory and not part.is_pinned():
        return False
    if memory.share_memory and not part.is_shared():
        return False
    wanted = memory.device
    return part.device.type == wanted.type and (wanted.type == "cpu" or wanted.index in (None, part.device.index))
