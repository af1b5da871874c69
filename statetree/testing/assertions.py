"""What a test says of trees and transforms. None of it uses what it judges: no flattening, no spans."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from statetree.testing.judge import Judge
from statetree.testing.regions import Region
from statetree.testing.report import Strictness
from statetree.testing.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statetree.testing.regions import View

T = TypeVar("T")
SHOWN = 20


def assert_trees_equal(
    a: Any,
    b: Any,
    *,
    ties: bool = True,
    strides: bool = True,
    device: bool = False,
    containers: bool = False,
    storages: bool = True,
) -> None:
    """Assert that two trees are the same, down to the types of containers and the bits of elements.

    Containers must be of the same types, with the same keys in the same order, and the same attributes. Numbers must
    be of the same type and bits (``nan`` is ``nan``, ``0.0`` is not ``-0.0``). Tensors must be of the same class,
    dtype, shape, layout and strides, with the same conjugate and negative bits, ``requires_grad``, attributes and
    bits of elements. Objects of unknown classes are compared by what pickle would make of them.

    Args:
        a: Any value.
        b: What should be the same.
        ties: Whether tensors must be the same objects, share storages and overlap in the same places.
        strides: Whether strides must be the same, and with ``ties`` the distances between tensors on one storage.
        device: Whether tensors must be on the same device.
        containers: Whether containers and opaque objects must be the same objects in the same places, too, as a deep
            copy keeps them.
        storages: With ``ties``, whether tensors that do not overlap must share a storage if they did. (Those that
            lie more than 1 MiB apart need not.)

    Raises:
        AssertionError: It names the places where they differ, and the first element of each tensor that does.

    Example:
        >>> import torch
        >>> from statetree.testing import assert_trees_equal
        >>> state = {"w": torch.arange(6.0).view(2, 3)}
        >>> assert_trees_equal({"w": state["w"].t().contiguous().t()}, state)
        Traceback (most recent call last):
        ...
        AssertionError: assert_trees_equal: the trees differ in 1 place:
          strides differ at ['w']: (1, 2) against (3, 1)
    """
    strictness = Strictness(ties, strides, device, containers, storages)
    _report("assert_trees_equal: the trees differ", Judge(strictness).run(a, b).found)


def tree_differences(
    a: Any,
    b: Any,
    *,
    ties: bool = True,
    strides: bool = True,
    device: bool = False,
    containers: bool = False,
    storages: bool = True,
) -> list[str]:
    """Return what ``assert_trees_equal`` would report, one line for each place."""
    return Judge(Strictness(ties, strides, device, containers, storages)).run(a, b).found


def assert_pure(transform: Callable[[Any], T], tree: Any) -> T:
    """Assert that a transform changes nothing about its argument, whether it returns or raises.

    Neither containers, attributes, bytes, versions, strides and gradients of tensors, nor what lies in opaque objects.

    Args:
        transform: A function of one tree.
        tree: Any tree.

    Returns:
        What the transform returned.

    Raises:
        AssertionError: It names what changed.
    """
    watch = Watch(tree)
    try:
        return transform(tree)
    finally:
        watch.check()


def assert_structure_preserved(transform: Callable[[Any], T], tree: Any) -> T:
    """Assert that the result of a transform has the containers of its argument.

    Of the same types, with the same keys in the same order, the same attributes and the same lengths; a leaf may have
    become any other leaf, but no container. Containers are subclasses of ``dict``, ``list``, ``tuple`` and ``deque``,
    dataclasses and attrs classes.

    Args:
        transform: A function of one tree.
        tree: Any tree.

    Returns:
        What the transform returned.

    Raises:
        AssertionError: It names the places where structures differ.
    """
    result = transform(tree)
    found = Judge(Strictness(ties=False, leaves=False)).run(tree, result).found
    _report("assert_structure_preserved: the structures differ", found)
    return result


def assert_independent(a: Any, b: Any, *, containers: bool = True) -> None:
    """Assert that two trees share no memory, so that what happens to one does not happen to the other.

    Tensors are looked for at any depth, in opaque objects too.

    Args:
        a: Any value.
        b: Another one.
        containers: Whether they may not share a dict, list, deque or set either.

    Raises:
        AssertionError: It names the places.
    """
    one, other = (Judge(Strictness(ties=False)).run(side, side) for side in (a, b))
    found = list(_shared_memory(one, other))
    if containers:
        mine = {met.left: met.path for met in one.objects}
        found += [
            f"{_name(met.path)} is the container at {_name(mine[met.left])}"
            for met in other.objects
            if met.left in mine and isinstance(other.alive[met.left], (dict, list, deque, set))
        ]
    _report("assert_independent: the trees are not independent", found)


def _shared_memory(one: Judge, other: Judge) -> Iterator[str]:
    storages: dict[int, View] = {view.left.storage: view for view in one.views}
    for view in other.views:
        if view.left.storage in storages:
            yield f"{_name(view.path)} lies on the storage of {_name(storages[view.left.storage].path)}"
    for view in other.views:
        for mine in one.views:
            if mine.left.storage != view.left.storage and mine.left.overlaps_in_memory(view.left):
                yield f"{_name(view.path)} lies in the memory of {_name(mine.path)}"
    for a, b in ((one, other), (other, one)):
        for path, array in a.arrays:
            for view in b.views:
                if view.left.overlaps_in_memory(_region_of_array(array)):
                    yield f"the array at {_name(path)} shares the memory of {_name(view.path)}"
    for path, array in other.arrays:
        for name, its in one.arrays:
            if sys.modules["numpy"].shares_memory(its, array):
                yield f"{_name(path)} shares the memory of the array at {_name(name)}"


def _region_of_array(array: Any) -> Region:
    numpy = sys.modules["numpy"]
    bounds = getattr(numpy, "byte_bounds", None) or numpy.lib.array_utils.byte_bounds  # before 2.0, and since
    low, high = bounds(array)
    return Region(0, low, 0, high - low)


def _name(path: str) -> str:
    return path or "<root>"


def _report(head: str, found: list[str]) -> None:
    if not found:
        return
    places = f"{len(found)} place{'s' if len(found) > 1 else ''}"
    more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    raise AssertionError("\n  ".join([f"{head} in {places}:", *found[:SHOWN], *more]))
