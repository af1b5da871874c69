"""The transforms that allocate and copy: ``copy_into``, ``allocate_like``, ``offload``."""

from __future__ import annotations

import copy
from typing import Any

import optree
import torch

import statetree as st
from benchmarks.checks import holds_values_of, is_copy_of, is_like
from benchmarks.measure import Contender, floor, ours, peer
from benchmarks.peers import copy_state_dict, create_cpu_state_dict, foreach_clone, foreach_copy_, tensor_dict
from benchmarks.rows import Row, faster, share
from benchmarks.states import State, few_large, many_small, training_state, zeros_like


def copy_into(state: State) -> list[Contender]:
    """Copy a state into another one's tensors. The peer and the floor do not look whether they fit."""
    target, their_target, bare_target = (zeros_like(state) for _ in range(3))
    sources, targets = state.tensors, bare_target.tensors
    return [
        ours(lambda: st.copy_into(state.tree, target.tree), holds_values_of(state, target=target)),
        peer(
            "_copy_state_dict",
            lambda: copy_state_dict(state.tree, their_target.tree),
            holds_values_of(state, target=their_target),
        ),
        floor(
            "_foreach_copy_",
            lambda: foreach_copy_(targets, sources),
            holds_values_of(state, target=bare_target),
        ),
    ]


def copy_into_flat(state: State) -> list[Contender]:
    """Do so with a flat dict, which is also what tensordict's ``update_`` copies into, where that is installed."""
    target = zeros_like(state)
    source, into = tensor_dict(state.tree), tensor_dict(target.tree)
    if source is None:
        return copy_into(state)
    theirs = peer("TensorDict.update_", lambda: into.update_(source), holds_values_of(state, target=target))
    return [*copy_into(state), theirs]


def allocate_like(state: State) -> list[Contender]:
    """Allocate a state like another one."""
    sources = state.tensors
    return [
        ours(lambda: st.allocate_like(state.tree), is_like(state)),
        peer("_create_cpu_state_dict", lambda: create_cpu_state_dict(state.tree), is_like(state)),
        floor("empty_like", lambda: list(map(torch.empty_like, sources)), is_like(state)),
    ]


def offload(state: State) -> list[Contender]:
    """Copy a state. What lies on the CPU, ``_offload_state_dict_to_cpu`` does not copy: it is no peer."""
    sources = state.tensors
    return [
        ours(lambda: st.offload(state.tree), is_copy_of(state)),
        peer(
            "_create_cpu + _copy_state_dict",
            lambda: copy_state_dict(state.tree, create_cpu_state_dict(state.tree)),
            is_copy_of(state),
        ),
        peer("copy.deepcopy", lambda: copy.deepcopy(state.tree), is_copy_of(state)),
        peer("optree map of clone", lambda: optree.tree_map(_clone, state.tree), is_copy_of(state)),
        floor("_foreach_clone", lambda: foreach_clone(sources), is_copy_of(State("", sources))),
    ]


def offload_flat(state: State) -> list[Contender]:
    """Do so with a flat dict, also with tensordict, where that is installed."""
    source = tensor_dict(state.tree)
    if source is None:
        return offload(state)
    copied = is_copy_of(state)

    def holds_copy(result: Any) -> bool:
        return copied(result.to_dict())

    return [
        *offload(state),
        peer("TensorDict.clone", source.clone, holds_copy),
        peer("TensorDict.consolidate", source.consolidate, holds_copy),
    ]


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


ROWS = (
    Row(
        "copy_into",
        "copy_into",
        many_small,
        copy_into_flat,
        (faster("_copy_state_dict", 1.15),),
    ),
    Row("copy_into", "copy_into", few_large, copy_into_flat, (share(0.95, "_foreach_copy_"),)),
    Row("copy_into", "copy_into", training_state, copy_into),
    Row(
        "allocate_like",
        "allocate_like",
        many_small,
        allocate_like,
        (faster("_create_cpu_state_dict", 1.9),),
        moves_bytes=False,
    ),
    Row("allocate_like", "allocate_like", training_state, allocate_like, moves_bytes=False),
    Row("offload", "offload", many_small, offload_flat),
    Row("offload", "offload", training_state, offload),
)
