"""What tests of collectives do on the ranks, and look at there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import statetree
from statetree.exchange.group import Group
from tests.judge import tree_differences


def attempt(call: Callable[[], Any]) -> tuple[str, str]:
    """Make a call, and return the name of the exception's class and its message; two empty texts if there is none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def sent_by(call: Callable[[], Any]) -> tuple[Any, int]:
    """Make a call; return its result, and how many bytes of elements this rank sends: of what is broadcast, once."""
    exchange, broadcast, sent = Group.exchange, Group.broadcast, []

    def counted_exchange(group: Group, outgoing: Any, incoming: Any) -> Any:
        sent.extend(data.numel() for _, data in outgoing)
        return exchange(group, outgoing, incoming)

    def counted_broadcast(group: Group, tensors: Any, source: int) -> Any:
        sent.extend(tensor.numel() for tensor in tensors if group.rank == source)
        return broadcast(group, tensors, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "exchange", counted_exchange)
        patch.setattr(Group, "broadcast", counted_broadcast)
        return call(), sum(sent)


def check_in_step(group: Any = None) -> None:
    """Check that the group is in step: the next collective is right."""
    rank = torch.tensor([dist.get_rank(group) + 1])
    dist.all_reduce(rank, group=group)
    size = dist.get_world_size(group)
    assert rank.item() == size * (size + 1) // 2


@functools.cache
def group_of(*ranks: int) -> Any:
    """Return a group of some ranks. All ranks call it, in the same order; it is made once in a process."""
    return dist.new_group(list(ranks))


def locals_of(leaf: Any) -> list[torch.Tensor]:
    """Return the plain tensors in which this rank holds a leaf."""
    if isinstance(leaf, DTensor):
        return [leaf._local_tensor]
    if isinstance(leaf, ShardedTensor):
        return [shard.tensor for shard in leaf.local_shards()]
    return [leaf.detach()] if isinstance(leaf, torch.Tensor) else []


def blank(tree: Any) -> Any:
    """Return a tree like another one, on tensors of its own, with zeros in all of them."""
    fresh = statetree.offload(tree)
    for leaf in statetree.flatten(fresh)[0]:
        for tensor in locals_of(leaf):
            tensor.zero_()
    return fresh


def check_same(found: Any, expected: Any) -> None:
    """Check that two trees hold the same, bit by bit, whatever the types of their mappings."""
    report = statetree.similarity(found, expected, values=True)
    assert report, str(report)


def check_equal(found: Any, expected: Any) -> None:
    """Check that two trees are equal in everything."""
    differences = tree_differences(found, expected)
    assert not differences, "\n".join(map(str, differences))
