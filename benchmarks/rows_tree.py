"""The tree engine: ``flatten`` and ``unflatten``, ``to_flat`` and ``from_flat``."""

from __future__ import annotations

from typing import Any

import optree

import statetree as st
from benchmarks.checks import has_leaves_of
from benchmarks.measure import Contender, floor, ours, peer
from benchmarks.peers import flatten_state_dict, pytree_flatten, pytree_unflatten, unflatten_state_dict
from benchmarks.rows import Row, faster, within
from benchmarks.states import State, many_small, model_state, nested, optimizer_state, training_state


def flatten_unflatten(state: State) -> list[Contender]:
    """Take a tree apart and put it together."""
    return [
        ours(lambda: _statetree(state.tree), has_leaves_of(state)),
        peer("torch's pytree", lambda: _pytree(state.tree), has_leaves_of(state)),
        floor("optree", lambda: _optree(state.tree), has_leaves_of(state)),
    ]


def flatten_unflatten_module(state: State) -> list[Contender]:
    """Do so with a module's state. optree alone drops ``_metadata``, a dict for every module; statetree keeps it."""
    module = state.tree.get("model", state.tree)
    in_tree = has_leaves_of(state)
    return [
        *flatten_unflatten(state),
        floor("optree, _metadata too", lambda: _optree((state.tree, vars(module))), lambda result: in_tree(result[0])),
    ]


def to_flat_from_flat(state: State) -> list[Contender]:
    """Turn a tree into a flat dict and back. The peer turns integer keys into strings, and tuples into lists."""
    return [
        ours(lambda: _flat_statetree(state.tree), has_leaves_of(state)),
        peer("_flatten + _unflatten_state_dict", lambda: _flat_state_dict(state.tree), has_leaves_of(state)),
        floor("optree, without keys", lambda: _optree(state.tree), has_leaves_of(state)),
    ]


def _statetree(tree: Any) -> Any:
    leaves, spec = st.flatten(tree)
    return st.unflatten(spec, leaves)


def _pytree(tree: Any) -> Any:
    leaves, spec = pytree_flatten(tree)
    return pytree_unflatten(leaves, spec)


def _optree(tree: Any) -> Any:
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    return optree.tree_unflatten(spec, leaves)


def _flat_statetree(tree: Any) -> Any:
    flat, spec = st.to_flat(tree)
    return st.from_flat(flat, spec)


def _flat_state_dict(tree: Any) -> Any:
    flat, mapping = flatten_state_dict(tree)
    return unflatten_state_dict(flat, mapping)


ROWS = (
    *(
        Row("tree", "flatten + unflatten", state, contenders, (within(1.5, "optree"),), moves_bytes=False)
        for state, contenders in (
            (many_small, flatten_unflatten),
            (nested, flatten_unflatten),
            (optimizer_state, flatten_unflatten),
            (model_state, flatten_unflatten_module),
            (training_state, flatten_unflatten_module),
        )
    ),
    *(
        Row(
            "flat",
            "to_flat + from_flat",
            state,
            to_flat_from_flat,
            (faster("_flatten + _unflatten_state_dict", 2),),
            moves_bytes=False,
        )
        for state in (many_small, nested, optimizer_state, training_state)
    ),
)
