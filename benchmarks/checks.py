"""Whether a contender did its work. Written without statetree, which is one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.states import State, leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def is_copy_of(state: State) -> Callable[[Any], bool]:
    """Return a check that a tree holds the state's values as they are now, in memory of its own."""

    def check(result: Any) -> bool:
        got, expected = list(leaves(result)), list(leaves(state.tree))
        return len(got) == len(expected) and all(map(_is_copy, got, expected))

    return check


def holds_values_of(state: State, *, target: State) -> Callable[[Any], bool]:
    """Return a check that the target's own tensors hold the state's values as they are now."""
    copied = is_copy_of(state)
    return lambda _: copied(target.tree)


def is_like(state: State) -> Callable[[Any], bool]:
    """Return a check that a tree's tensors have the dtypes and shapes of the state's, and their own memory."""

    def check(result: Any) -> bool:
        got = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        expected = state.tensors
        return len(got) == len(expected) and all(map(_is_like, got, expected))

    return check


def has_leaves_of(state: State) -> Callable[[Any], bool]:
    """Return a check that a tree is the state's, put together from the same leaves in fresh containers."""

    def check(result: Any) -> bool:
        got, expected = list(leaves(result)), list(leaves(state.tree))
        return result is not state.tree and len(got) == len(expected) and all(map(_is_same, got, expected))

    return check


def _is_copy(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return bool(type(a) is type(b) and a == b)
    return _is_like(a, b) and torch.equal(a, b)


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.data_ptr() != b.data_ptr()


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(b, torch.Tensor) and a == b)
