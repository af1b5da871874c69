"""What a test says of trees and transforms. None of it uses what it judges: no flattening, no spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tests.judge.findings import Strictness
from tests.judge.judge import Judge
from tests.judge.messages import raise_for
from tests.judge.recorded_structure import recorded_structure, structure_differences
from tests.judge.sharing import Holdings, shared_graphs, shared_memory, shared_objects
from tests.judge.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.judge.findings import Finding

T = TypeVar("T")


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
    bits of elements. Objects of unknown classes are compared by what pickle would make of them. Not compared are the
    gradients and hooks of tensors, whether these are leaves of autograd or were made in inference mode, which arrays of
    NumPy share memory, and the ties of those elements of a set that are equal to each other.

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
    """
    found = tree_differences(a, b, ties=ties, strides=strides, device=device, containers=containers, storages=storages)
    raise_for("assert_trees_equal: the trees differ", found)


def tree_differences(a: Any, b: Any, **strictness: bool) -> list[Finding]:
    """Return what ``assert_trees_equal`` would report with the same options, one line for each place."""
    return Judge(Strictness(**strictness)).run(a, b).found


def assert_pure(transform: Callable[[Any], T], tree: Any) -> T:
    """Assert that a transform changes nothing about its argument, whether it returns or raises.

    Neither containers, attributes, bytes, versions, strides and gradients of tensors, nor what lies in opaque objects.

    Args:
        transform: A function of one tree.
        tree: Any tree.

    Returns:
        What the transform returned.

    Raises:
        AssertionError: It names what changed, and where.
    """
    watch = Watch(tree)
    try:
        return transform(tree)
    finally:
        raise_for("assert_pure: the argument changed", watch.changes())


def assert_structure_preserved(transform: Callable[[Any], T], tree: Any) -> T:
    """Assert that the result of a transform has the containers that its argument had before the call.

    Of the same types, with the same keys in the same order, the same attributes and the same lengths; a leaf may have
    become any other leaf, but no container. Containers are subclasses of ``dict``, ``list``, ``tuple`` and ``deque``,
    dataclasses and attrs classes. Of their attributes, other than fields, those that hold nothing but containers and
    plain values (as the ``_metadata`` of a state dict does) must have the same values; in others there are leaves.

    Args:
        transform: A function of one tree.
        tree: Any tree.

    Returns:
        What the transform returned.

    Raises:
        AssertionError: It names the places where structures differ.
    """
    before = recorded_structure(tree, leaves=False)
    result = transform(tree)
    found = structure_differences(before, recorded_structure(result, leaves=True))
    raise_for("assert_structure_preserved: the structures differ", found)
    return result


def assert_independent(a: Any, b: Any, *, containers: bool = True) -> None:
    """Assert that two trees share nothing, so that what happens to one does not happen to the other.

    They share memory if tensors or storages lie on one storage, or if the ranges of bytes from the first to the last
    overlap of tensors, gradients, arrays of NumPy, and whatever else lets others write into its memory (``bytearray``,
    ``array.array``, a ``memoryview``). They share what autograd has recorded of their tensors if a gradient would flow
    through it into leaves of both. They share an object if the very same one is in both, and it can be changed:
    containers, tensors, instances of dataclasses and of any other class, random generators. What has a hash of its
    value promises not to change and may be in both: numbers, strings, tuples, frozen dataclasses (but not what lies in
    these); so may functions, classes, modules, enums and loggers. All this is looked for at any depth, in opaque
    objects too: in what pickle would make of them, and in attributes that it leaves out.

    Args:
        a: Any value.
        b: Another one.
        containers: Whether they may not share an object either. (A transform that does not copy what it cannot look
            into, as ``map_leaves``, passes opaque objects on: these then are in both.)

    Raises:
        AssertionError: It names the places.
    """
    one, other = Holdings(a), Holdings(b)
    found = [*shared_memory(one, other), *shared_graphs(one, other)]
    if containers:
        found += shared_objects(one, other)
    raise_for("assert_independent: the trees are not independent", found)
