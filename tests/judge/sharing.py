"""What two trees have in common: memory, history of autograd, and objects that can be changed."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import torch

from tests.judge.messages import place
from tests.judge.objects import is_sharded
from tests.judge.pickled_state import reduced
from tests.judge.regions import Region, crossing, region_of, storage_of
from tests.judge.walk import inner_tensors, walk_with_paths

if TYPE_CHECKING:
    from collections.abc import Iterator


class Holdings:
    """Everything that a tree holds, gradients included, and what pickle leaves out of objects."""

    def __init__(self, tree: Any) -> None:
        found = list(walk_with_paths(tree, gradients=True, common=False))
        self.values = {id(value): value for _, value in found}
        self.paths = {id(value): place(path) for path, value in found}
        regions = [(_region(value), place(path)) for path, value in found]
        self.regions = [(region, path) for region, path in regions if region is not None]


def _region(value: Any) -> Region | None:
    """Return the memory of a tensor, a storage, or whatever else lets others write into its memory."""
    if isinstance(value, torch.Tensor):
        is_plain_meta = not is_sharded(value) and value.is_meta and not inner_tensors(value)
        return region_of(value) if is_plain_meta or storage_of(value) is not None else None
    if isinstance(value, torch.UntypedStorage):
        return Region(value._cdata, value.data_ptr(), 0, value.nbytes())
    return buffer_region(value)


def shared_memory(one: Holdings, other: Holdings) -> Iterator[str]:
    """Name what lies on one storage, or in the same memory: each place of the second tree with one of the first."""
    storages = {region.storage: path for region, path in one.regions if region.storage}
    for region, path in other.regions:
        if region.storage in storages:
            yield f"{path} lies on the storage of {storages[region.storage]}"
    ranges = [
        [
            (region.address + region.start, region.length, (path, region.storage))
            for region, path in side.regions
            if region.address
        ]
        for side in (one, other)
    ]
    for (mine, its_storage), (path, storage) in crossing(*ranges):
        if not (storage and storage == its_storage):
            yield f"{path} lies in the memory of {mine}"


def shared_objects(one: Holdings, other: Holdings) -> Iterator[str]:
    """Name the objects of the second tree that are the very ones of the first, and can be changed."""
    # What pickle would make of an object holds its ``__dict__``, which is no object of its own.
    insides = {id(getattr(value, "__dict__", None)) for value in other.values.values()}
    for identity, path in other.paths.items():
        if identity in one.paths and identity not in insides and is_changeable(other.values[identity]):
            yield f"{path} is the object at {one.paths[identity]}"


def shared_graphs(one: Holdings, other: Holdings) -> Iterator[str]:
    """Name tensors that have operations of autograd in common: what is done with one changes the other's gradient."""
    mine, theirs = _graph(one, other), _graph(other, one)
    met = {path: mine[identity][1] for identity, (_, path) in theirs.items() if identity in mine}
    for path, its in met.items():
        yield f"{path} has operations of autograd in common with {its}"


def _graph(holdings: Holdings, others: Holdings) -> dict[int, tuple[Any, str]]:
    """Return the operations that made a tree's tensors and the leaves that they started from, with the first's path.

    Not those of tensors that are in the other tree as well: these are named as such.
    """
    found: dict[int, tuple[Any, str]] = {}
    for identity, path in holdings.paths.items():
        tensor = holdings.values[identity]
        if identity in others.paths or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        pending = [tensor if tensor.is_leaf else tensor.grad_fn]
        while pending:
            step = pending.pop()
            if step is not None and id(step) not in found:
                found[id(step)] = step, path
                pending += [node for node, _ in getattr(step, "next_functions", ())]
                pending.append(getattr(step, "variable", None))  # the leaf below an AccumulateGrad
    return found


def is_changeable(value: Any) -> bool:
    """Whether an object may change.

    All may but those with a hash of their value, which promises that they do not, and those that pickle takes by name.
    """
    if isinstance(value, torch.Tensor):  # whose hash, a function of its own, is that of its identity
        return True
    cls: Any = type(value)
    return cls.__hash__ in (None, object.__hash__) and not isinstance(reduced(value), str)


def buffer_region(value: Any) -> Region | None:
    """Return the memory of an array or any other object that lets others write into it; ``None`` if it does not."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        bounds = getattr(numpy, "byte_bounds", None) or numpy.lib.array_utils.byte_bounds  # before 2.0, and since
        low, high = bounds(value)
        return Region(0, low, 0, high - low)
    if isinstance(value, memoryview):
        return buffer_region(value.obj)
    try:
        with memoryview(value) as view:
            return Region(0, ctypes.addressof(ctypes.c_char.from_buffer(value)), 0, view.nbytes)
    except (TypeError, ValueError, BufferError):  # there is none, it is empty, or it is read-only
        return None
