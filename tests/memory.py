"""The memory below a tree: storages, bytes, and who shares them, seen without statetree's engines."""

from __future__ import annotations

from typing import Any

import torch

from tests.judge.regions import crossing, raw_bytes, region_of, storage_of
from tests.judge.walk import walk


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages with bytes of their own that a tree's tensors lie on, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for value in walk(tree):
        storage = storage_of(value)
        if storage is not None:
            found[storage._cdata] = storage
    return list(found.values())


def scribble(tree: Any) -> int:
    """Turn over every bit of every storage of a tree, in place. Returns how many bytes there were."""
    count = 0
    for storage in storages(tree):
        view = raw_bytes(storage)
        view.bitwise_not_()
        count += view.numel()
    return count


def shares_memory(left: Any, right: Any) -> bool:
    """Whether any storage of one tree overlaps one of the other, by address: whoever made it."""
    mine, others = storages(left), storages(right)  # held: some are made on request, and none may take another's place
    ranges = [[(storage.data_ptr(), storage.nbytes(), True) for storage in side] for side in (mine, others)]
    return any(True for _ in crossing(*ranges))


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree that are views on host storages, each object once."""
    return [value for value in walk(tree) if isinstance(value, torch.Tensor) and storage_of(value) is not None]


def covered_bytes(tree: Any) -> int:
    """Return how many bytes a tree's tensors need: for each storage those from the first that is viewed to the last."""
    reach: dict[int, tuple[int, int]] = {}
    for value in walk(tree):
        storage = storage_of(value)
        if storage is None:
            continue
        start, stop = 0, storage.nbytes()
        if isinstance(value, torch.Tensor):
            region = region_of(value)
            if not region.length:
                continue
            start = region.start - region.start % 16  # a span begins where every dtype may
            stop = region.start + region.length
        known = reach.get(storage._cdata, (start, stop))
        reach[storage._cdata] = (min(start, known[0]), max(stop, known[1]))
    return sum(stop - start for start, stop in reach.values())
