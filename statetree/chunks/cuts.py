"""Cuts: how the dims of an inner tensor follow those of the distributed tensor around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cut(NamedTuple):
    """How one dim of an inner tensor is cut, where the tensor around it is."""

    dim: int  # along which dim of that
    times: int = 1  # into steps of how many of its own elements,
    over: int = 1  # for how many of that dim
    #: Whether it holds blocks of all elements of that in row-major order, which is then cut along no other dim.
    is_flat: bool = False


def cut_alike(shape: Sequence[int], inner: Sequence[int]) -> tuple[Cut | None, ...]:
    """Return how the dims of an inner tensor are cut: those as long as the outer's as these, the others not at all."""
    return tuple([Cut(dim) if shape[dim : dim + 1] == (size,) else None for dim, size in enumerate(inner)])
