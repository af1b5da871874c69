"""What a test says of trees and transforms."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from statetree.leaves.builtin import is_plain
from statetree.leaves.types.opaque import Rest
from statetree.spans.layout import holds_memory
from statetree.testing.contents import OBJECT, TreePlace, entries, gradient, shown
from statetree.testing.differences import brief, differences, raise_for
from statetree.tree.atoms import same_value
from statetree.tree.flatten import flatten
from statetree.tree.registry import container_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statetree.tree.spec import TreeSpec

T = TypeVar("T")


def assert_trees_equal(a: Any, b: Any, *, ties: bool = True, storages: bool = True) -> None:
    """Assert that two trees are the same, down to the types of containers and the bits of elements.

    Containers must be of the same types, with the same keys in the same order, and the same attributes. Numbers must
    be of the same type and bits (``nan`` is ``nan``, ``0.0`` is not ``-0.0``). Tensors must be of the same class,
    dtype, shape, layout and strides, with the same conjugate and negative bits, ``requires_grad``, attributes and
    bits of elements. Objects of unknown classes are compared by what pickle would make of them; what cannot be taken
    apart equals itself alone. Not compared are the devices, gradients, hooks and history of tensors.

    Args:
        a: Any value.
        b: What should be the same.
        ties: Whether tensors must be the same objects, share storages and overlap in the same places.
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
          strides differ at w: (1, 2) against (3, 1)
    """
    found = differences(a, b, ties=ties, storages=storages)
    raise_for("assert_trees_equal: the trees differ", [text for _, text in found])


def assert_structure_preserved(transform: Callable[[Any], T], tree: Any) -> T:
    """Assert that the result of a transform has the containers that its argument had before the call.

    Of the same types, with the same keys in the same order, the same attributes and the same lengths; a leaf may have
    become any other leaf, but no container.

    Args:
        transform: A function of one tree.
        tree: Any tree.

    Returns:
        What the transform returned.

    Raises:
        AssertionError: It names the place where structures differ first.
    """
    before = flatten(tree)[1]
    result = transform(tree)
    after = flatten(result)[1]
    if before != after:
        raise_for("assert_structure_preserved: the structures differ", [_first_difference(before, after)])
    return result


def _first_difference(before: TreeSpec, after: TreeSpec) -> str:
    for was, now in zip(before.walk(), after.walk(), strict=False):
        sides = [f"{'a leaf' if at.cls is None else f'{at.cls.__qualname__} of {[*at.keys]}'}" for at in (was, now)]
        if sides[0] != sides[1]:
            return f"{was.path or '<root>'} was {sides[0]} and is {sides[1]}"
    return "attributes, default factories or types of keys are others"


class Watch:
    """Remembers everything about a tree that a pure transform may not change."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._entries = entries(tree, gradients=True)  # kept, so that nothing else gets their addresses
        again = _moments(entries(tree, gradients=True))  # leaf types make some tensors anew each time
        self._before = {
            path: {name: fact for name, fact in moment.items() if same_value(fact, again[path].get(name))}
            for path, moment in _moments(self._entries).items()
        }
        self._bytes: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}  # of each storage, once
        for path, entry in self._entries.items():
            if entry.elements is not None and _has_memory(entry.elements):
                storage = entry.elements.untyped_storage()
                if storage._cdata not in self._bytes:
                    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    self._bytes[storage._cdata] = shown(path), whole, whole.clone()

    def changes(self) -> list[str]:
        """Return what is different now, one line for each place."""
        now = _moments(entries(self._tree, gradients=True))
        found = [f"{shown(path)} is gone" for path in self._before if path not in now]
        found += [f"{shown(path)} is new" for path in now if path not in self._before]
        for path, was in self._before.items():
            its = now.get(path, was)
            for name in [name for name in was if not same_value(was[name], its.get(name))]:
                values = f": {brief(was[name])} against {brief(its.get(name))}" if name == "value" else ""
                found.append(f"{shown(path)} changed{values}" if values else f"the {name} of {shown(path)} changed")
        changed = [
            path
            for path, whole, was in self._bytes.values()
            if not (holds_memory(whole) and torch.equal(whole, was))  # what was freed cannot be read
        ]
        return found + [f"bytes below {path} changed" for path in changed]


def _has_memory(plain: torch.Tensor) -> bool:
    return not (plain.is_meta or isinstance(plain, torch._subclasses.FakeTensor))


def _moments(found: dict[str, TreePlace]) -> dict[str, dict[str, Any]]:
    """Return the facts about entries, with what may change beside them."""
    moments = {}
    for path, entry in found.items():
        value = entry.value
        moment: dict[str, Any] = {"class": type(value), **{name: fact for name, (_, fact) in entry.facts.items()}}
        rest = moment.get(OBJECT)
        if isinstance(rest, Rest):  # its buffers are in the memory of the object
            moment[OBJECT] = rest.skeleton, rest.kept, [buffer.copied() for buffer in rest.buffers]
        if not is_plain(value):
            moment["identity"] = id(value)
        if isinstance(value, torch.Tensor):
            hooks = [value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)]
            moment |= {"gradient": id(gradient(value)), "hooks": [list((each or {}).values()) for each in hooks]}
            moment |= {"is_leaf": value.is_leaf, "retains_grad": value.retains_grad}
            moment["version"] = None if value.is_inference() else value._version
        if entry.elements is not None and _has_memory(entry.elements):
            storage = entry.elements.untyped_storage()
            moment["memory"] = storage.data_ptr(), storage.nbytes(), entry.elements.storage_offset()
        moments[path] = moment
    return moments


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


def assert_independent(a: Any, b: Any, *, containers: bool = True) -> None:
    """Assert that two trees share nothing, so that what happens to one does not happen to the other.

    They share memory if tensors, gradients or storages lie on one storage, and if arrays of NumPy lie over these, in
    opaque objects too. They share history if a gradient would flow through what autograd has recorded into leaves of
    both. They share an object if the very same container or leaf is in both, and it can be changed: what has a hash of
    its value promises not to change and may be in both, and so may functions, classes and modules.

    Args:
        a: Any value.
        b: Another one.
        containers: Whether they may not share an object either. (A transform that does not copy what it cannot look
            into, as ``map_leaves``, passes opaque objects on: these then are in both.)

    Raises:
        AssertionError: It names the places.

    Example:
        >>> from statetree.testing import assert_independent
        >>> state = {"steps": [1]}
        >>> assert_independent(state, dict(state))
        Traceback (most recent call last):
        ...
        AssertionError: assert_independent: the trees are not independent in 1 place:
          steps is the object at steps
    """
    mine, theirs = entries(a, gradients=True), entries(b, gradients=True)
    found = [*_shared_memory(mine, theirs), *_shared_history(mine, theirs)]
    if containers:
        known = {id(value): path for path, value in _objects(mine) if _is_changeable(value)}
        both = [(path, known[id(value)]) for path, value in _objects(theirs) if id(value) in known]
        found += [f"{shown(path)} is the object at {shown(its)}" for path, its in dict(both).items()]
    raise_for("assert_independent: the trees are not independent", found)


def _objects(held: dict[str, TreePlace]) -> Iterator[tuple[str, Any]]:
    """Yield what is in a tree, and in the attributes of its containers: a state dict's ``_metadata``."""
    for path, entry in held.items():
        yield path, entry.value
        if container_of(type(entry.value)) is not None and (carried := getattr(entry.value, "__dict__", None)):
            yield from ((path + step, each.value) for step, each in entries(carried).items() if step)


def _shared_memory(mine: dict[str, TreePlace], theirs: dict[str, TreePlace]) -> Iterator[str]:
    places = [(*memory, side, path) for side, held in enumerate((mine, theirs)) for path, memory in _memory(held)]
    reaching: dict[int, tuple[int, str]] = {}  # what reaches farthest, of each side
    for start, end, side, path in sorted(places):
        farthest, its = reaching.get(1 - side, (0, ""))
        if start < farthest:
            yield "{1} lies in the memory of {0}".format(*((path, its) if side == 0 else (its, path)))
        if end > reaching.get(side, (0, ""))[0]:
            reaching[side] = end, path


def _memory(held: dict[str, TreePlace]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the addresses of storages, and of the arrays in opaque objects."""
    for path, entry in held.items():
        if entry.elements is not None:
            storage = entry.elements.untyped_storage()
            is_there = _has_memory(entry.elements)
            start = storage.data_ptr() if is_there else storage._cdata  # its own address, which no other has
            yield shown(path), (start, start + (storage.nbytes() if is_there else 1))
        for buffer in getattr(entry.facts.get(OBJECT, (None, None))[1], "buffers", ()):
            view = buffer.raw()
            if view.nbytes and not view.readonly:
                start = ctypes.addressof(ctypes.c_char.from_buffer(view))
                yield shown(path), (start, start + view.nbytes)


def _shared_history(mine: dict[str, TreePlace], theirs: dict[str, TreePlace]) -> Iterator[str]:
    """Name tensors that have operations of autograd in common: what is done with one changes the other's gradient."""
    graphs = [_graph(held) for held in (mine, theirs)]
    met = {path: graphs[0][key][1] for key, (_, path) in graphs[1].items() if key in graphs[0]}
    for path, its in met.items():
        yield f"{path} has operations of autograd in common with {its}"


def _graph(held: dict[str, TreePlace]) -> dict[int, tuple[Any, str]]:
    """Return the operations and leaves of autograd below a tree's tensors."""
    found: dict[int, tuple[Any, str]] = {}
    for path, entry in held.items():
        tensor = entry.value
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        pending = [tensor if tensor.is_leaf else tensor.grad_fn]
        while pending:
            step = pending.pop()
            if step is not None and id(step) not in found:
                found[id(step)] = step, shown(path)
                pending += [node for node, _ in getattr(step, "next_functions", ())]
                pending.append(getattr(step, "variable", None))  # the leaf below an AccumulateGrad
    return found


def _is_changeable(value: Any) -> bool:
    """Whether an object may change: all may but atoms, and those with a hash of their value."""
    by_identity: tuple[Any, ...] = (None, object.__hash__)
    return isinstance(value, torch.Tensor) or (not is_plain(value) and type(value).__hash__ in by_identity)
