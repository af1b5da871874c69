"""``similarity``: whether two states fit each other."""

from __future__ import annotations

import ctypes
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any

import torch

import statetree as st
from benchmarks.measure import Contender, floor, ours, peer
from benchmarks.peers import check_state_dict_similarity, foreach_copy_
from benchmarks.rows import Row, faster, within
from benchmarks.states import State, few_large, many_small, training_state, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable


def similarity(state: State) -> list[Contender]:
    """Compare structure, dtypes and shapes. The peer also overwrites the second state with the first, always."""
    other = zeros_like(state)
    sources, others = state.tensors, other.tensors
    return [
        ours(lambda: st.similarity(state.tree, other.tree, values=False), _tells_apart(st.similarity, state)),
        peer(
            "_check_state_dict_similarity",
            lambda: check_state_dict_similarity(state.tree, other.tree),
            _tells_apart(check_state_dict_similarity, state),
        ),
        floor("map over shapes and dtypes", lambda: _fit(sources, others), _tells_apart(_fit_trees, state)),
    ]


def with_values(state: State) -> list[Contender]:
    """Compare the elements of equal states as well, against the C library's comparison of the same memory."""
    other = zeros_like(state)
    sources, others = state.tensors, other.tensors

    def fresh() -> None:
        foreach_copy_(others, sources)

    def right(verdict: Callable[[], Any]) -> Callable[[Any], bool]:
        """Return a check that the verdict was yes, and is no where the last element differs."""

        def check(result: Any) -> bool:
            others[-1].view(-1)[-1] += 1
            return bool(result) and not verdict()

        return check

    def compare() -> Any:
        return st.similarity(state.tree, other.tree, values=True)

    def memcmp() -> bool:
        pairs = zip(sources, others, strict=True)
        return not any(_memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) for a, b in pairs)

    def equal() -> bool:
        return all(map(torch.equal, sources, others))

    return [
        ours(lambda _: compare(), right(compare), fresh=fresh),
        peer("torch.equal", lambda _: equal(), right(equal), fresh=fresh),
        floor("memcmp", lambda _: memcmp(), right(memcmp), fresh=fresh),
    ]


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _fit(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    size, dtype = torch.Tensor.size, attrgetter("dtype")
    same_shapes = all(map(eq, map(size, left), map(size, right)))
    return same_shapes and all(map(eq, map(dtype, left), map(dtype, right)))


def _fit_trees(left: Any, right: Any) -> bool:
    return _fit(State("", left).tensors, State("", right).tensors)


def _tells_apart(verdict: Callable[[Any, Any], Any], state: State) -> Callable[[Any], bool]:
    """Return a check that the verdict was yes, and is no where one tensor has another dtype."""

    def check(result: Any) -> bool:
        other = zeros_like(state)
        last = other.tensors[-1]
        last.data = last.to(torch.float64)
        return bool(result) and not verdict(state.tree, other.tree)

    return check


ROWS = (
    Row(
        "similarity",
        "similarity",
        many_small,
        similarity,
        (faster("_check_state_dict_similarity", 2.8),),
        moves_bytes=False,
    ),
    Row("similarity", "similarity", training_state, similarity, moves_bytes=False),
    Row("similarity", "similarity of values", few_large, with_values, (within(1.3, "memcmp"),), rounds=11),
)
