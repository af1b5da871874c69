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
from statetree.tree.selection import compiled_glob, selected
from statetree.tree.spec import TreeSpec


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


def partition_merge(state: State) -> list[Contender]:
    """Divide a tree by a glob and make it whole again: three structures are taken apart, and three put together."""
    in_tree = has_leaves_of(state)
    return [
        ours(lambda: st.merge(*st.partition(state.tree, "**1*", missing_ok=True)), in_tree),
        floor("flatten + unflatten", lambda: _statetree(state.tree), in_tree),
    ]


def glob_again(state: State) -> list[Contender]:
    """Find the leaves that a glob means, in a tree of a structure that it was matched against before."""
    leaves, spec = st.flatten(state.tree)
    nodes, keys = spec.nodes, spec.flat_keys()
    fits = compiled_glob("**1*").fullmatch
    expected = [fits(key) is not None for key in keys]

    def again() -> list[bool]:
        fresh = TreeSpec(nodes, len(leaves))  # as flatten makes it: without the keys that it rendered before
        return selected("**1*", fresh, leaves, verb="benchmark", missing_ok=True)

    return [
        ours(again, lambda found: found == expected),
        floor("the regular expression alone", lambda: [fits(key) is not None for key in keys], expected.__eq__),
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
        Row(
            "tree",
            "partition + merge",
            state,
            partition_merge,
            (within(4.4, "flatten + unflatten"),),
            moves_bytes=False,
        )
        for state in (many_small, nested)
    ),
    *(Row("tree", "a glob, matched again", state, glob_again, (), moves_bytes=False) for state in (many_small, nested)),
    *(
        Row("tree", "flatten + unflatten", state, contenders, (aim,), moves_bytes=False)
        for state, contenders, aim in (
            (many_small, flatten_unflatten, faster("optree", 2.5)),
            (nested, flatten_unflatten, within(1.5, "optree")),
            (optimizer_state, flatten_unflatten, within(1.5, "optree")),
            (model_state, flatten_unflatten_module, within(1.5, "optree")),
            (training_state, flatten_unflatten_module, within(1.5, "optree")),
        )
    ),
    *(
        Row(
            "flat",
            "to_flat + from_flat",
            state,
            to_flat_from_flat,
            (faster("_flatten + _unflatten_state_dict", times),),
            moves_bytes=False,
        )
        for state, times in ((many_small, 4), (nested, 2.5), (optimizer_state, 2), (training_state, 2))
    ),
)
