"""The elements of two stored tensors, compared a bucket at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statetree.spans.element_differences import ElementComparison, Tolerance, Unequal, different_places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statetree.files.stored import StoredTensor


def compare_elements(left: StoredTensor, right: StoredTensor, tolerance: Tolerance) -> Unequal | None:
    """Compare tensors of one shape. Returns ``None`` if they are equal."""
    if left.location() == right.location():
        return None
    if left.is_repetitive != right.is_repetitive or (left.is_repetitive and left.stride() != right.stride()):
        return Unequal(left.numel, (0,) * len(left.shape), "elements that are repeated", "others", None, None)
    # Nearly all tensors are equal, or soon seen not to be: only those that differ are measured, from the start.
    if all(_is_same(a, b, tolerance) for a, b in _blocks(left, right)):
        return None
    comparison = ElementComparison(tolerance)
    for a, b in _blocks(left, right):
        comparison.add(a, b)
    return comparison.result(left.shape)


def _blocks(left: StoredTensor, right: StoredTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    wider = left if left.dtype.itemsize >= right.dtype.itemsize else right
    for index in wider.boxes():
        yield left.read(index).flatten(), right.read(index).flatten()


def _is_same(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> bool:
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return True
    return not len(different_places(a, b, tolerance))
