"""What two trees have in common: memory, and objects that can be changed."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing.judge import Judge
from statetree.testing.objects import reduced
from statetree.testing.regions import Region, crossing
from statetree.testing.report import Strictness

if TYPE_CHECKING:
    from collections.abc import Iterator


class Holdings:
    """Everything that a tree holds, gradients included."""

    def __init__(self, tree: Any) -> None:
        judge = Judge(Strictness(ties=False)).run(tree, tree)
        for met in list(judge.tensors):
            tensor = judge.alive[met.left]
            if tensor.is_leaf and tensor.grad is not None:
                judge.run(tensor.grad, tensor.grad, f"{met.path}.grad")
        self.paths = {met.left: met.path for met in (*judge.objects, *judge.tensors)}
        self.values = judge.alive
        self.regions = [(view.left, view.path) for view in judge.views]
        for met in judge.objects:
            region = buffer_region(judge.alive[met.left])
            if region is not None:
                self.regions.append((region, met.path))


def shared_memory(one: Holdings, other: Holdings) -> Iterator[str]:
    """Name what lies on one storage, or in the same memory: each place of the second tree with one of the first."""
    storages = {region.storage: path for region, path in one.regions if region.storage}
    for region, path in other.regions:
        if region.storage in storages:
            yield f"{_name(path)} lies on the storage of {_name(storages[region.storage])}"
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
            yield f"{_name(path)} lies in the memory of {_name(mine)}"


def shared_objects(one: Holdings, other: Holdings) -> Iterator[str]:
    """Name the objects of the second tree that are the very ones of the first, and can be changed."""
    # What pickle would make of an object holds its ``__dict__``, which is no object of its own.
    insides = {id(getattr(value, "__dict__", None)) for value in other.values.values()}
    for identity, path in other.paths.items():
        if identity in one.paths and identity not in insides and is_changeable(other.values[identity]):
            yield f"{_name(path)} is the object at {_name(one.paths[identity])}"


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


def _name(path: str) -> str:
    return path or "<root>"
