"""What a test says of trees and transforms."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from statetree.testing.contents import brief, elements, facts, fingerprint, gradient, is_plain, parts, reduced, walk
from statetree.testing.differences import differences, raise_for
from statetree.tree.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statetree.tree.spec import TreeSpec

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
    gradients and hooks of tensors.

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
          strides differ at w: (1, 2) against (3, 1)
    """
    found = differences(a, b, ties=ties, strides=strides, device=device, containers=containers, storages=storages)
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
        self._records = [(path or "<root>", value, *_record(value)) for path, value in walk(tree)]
        self._bytes: dict[int, tuple[str, torch.UntypedStorage, Any]] = {}  # of each storage, once
        for path, value, *_ in self._records:
            plain = elements(value)
            if plain is not None and _has_memory(plain):
                storage = plain.untyped_storage()
                if storage._cdata not in self._bytes:
                    self._bytes[storage._cdata] = path, storage, elements(storage).clone()  # type: ignore[union-attr]

    def changes(self) -> list[str]:
        """Return what is different now, one line for each place."""
        found = []
        for path, value, held, moment in self._records:
            now, now_moment = _record(value)
            if list(now) != list(held):
                found.append(f"what {path} holds changed: {brief(list(held))} against {brief(list(now))}")
            for step, part in held.items():
                if step in now and now[step] is not part and not _same_plain(now[step], part):
                    found.append(f"{path}{step} changed: {brief(part)} against {brief(now[step])}")
            found += [f"the {name} of {path} changed" for name, was in moment.items() if was != now_moment[name]]
        changed = [path for path, storage, was in self._bytes.values() if not torch.equal(elements(storage), was)]  # type: ignore[arg-type]
        return found + [f"bytes below {path} changed" for path in changed]


def _has_memory(plain: torch.Tensor) -> bool:
    return not (plain.is_meta or isinstance(plain, torch._subclasses.FakeTensor))


def _same_plain(one: Any, other: Any) -> bool:
    return is_plain(one) and fingerprint(one) == fingerprint(other)


def _record(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of an object that stay the same ones, and what may change beside them."""
    every = parts(value, everything=True)
    held = {step: part for step, part in every.items() if not step.endswith("()")}
    moment = {"class": type(value), **{name: fact for name, (_, fact) in facts(value).items()}}
    plain = elements(value)
    if isinstance(value, torch.Tensor):
        hooks = [value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)]
        moment |= {"gradient": id(gradient(value)), "hooks": [list((each or {}).values()) for each in hooks]}
        moment |= {"is_leaf": value.is_leaf, "retains_grad": value.retains_grad}
        if not value.is_inference():
            moment["version"] = value._version
    if plain is not None and _has_memory(plain):
        storage = plain.untyped_storage()
        moment["memory"] = storage.data_ptr(), storage.nbytes(), plain.storage_offset()
    elif plain is None and len(held) < len(every) and not isinstance(value, torch.Tensor):
        moment["state"] = _state(value)
    return held, moment


def _state(value: Any) -> Any:
    """Return what an object holds besides attributes: an array, a file in memory, a generator."""
    try:
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        with memoryview(value) as view:
            return view.format, view.shape, view.strides, view.readonly, view.tobytes()
    except (TypeError, ValueError, BufferError):  # it has no such memory
        pass
    try:
        return pickle.dumps(value)
    except Exception:
        return None


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

    They share memory if tensors, gradients or storages lie on one storage, and if arrays of NumPy, or anything else
    that lets others write into its memory, lie over these. They share history if a gradient would flow through what
    autograd has recorded into leaves of both. They share an object if the very same one is in both, and it can be
    changed: what has a hash of its value promises not to change and may be in both, and so may functions, classes and
    modules. All this is looked for at any depth, in opaque objects too.

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
    mine, theirs = ({id(value): (path or "<root>", value) for path, value in walk(tree)} for tree in (a, b))
    found = [*_shared_memory(mine, theirs), *_shared_history(mine, theirs)]
    if containers:
        both = [(path, value, mine[key][0]) for key, (path, value) in theirs.items() if key in mine]
        found += [f"{path} is the object at {its}" for path, value, its in both if _is_changeable(value)]
    raise_for("assert_independent: the trees are not independent", found)


_Held = dict[int, tuple[str, Any]]


def _shared_memory(mine: _Held, theirs: _Held) -> Iterator[str]:
    places = [(*memory, side, path) for side, held in enumerate((mine, theirs)) for path, memory in _memory(held)]
    reaching: dict[int, tuple[int, str]] = {}  # what reaches farthest, of each side
    for start, end, side, path in sorted(places):
        farthest, its = reaching.get(1 - side, (0, ""))
        if start < farthest:
            yield "{1} lies in the memory of {0}".format(*((path, its) if side == 0 else (its, path)))
        if end > reaching.get(side, (0, ""))[0]:
            reaching[side] = end, path


def _memory(held: _Held) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the addresses of storages, and of whatever else lets others write into its memory."""
    numpy = sys.modules.get("numpy")
    for path, value in held.values():
        plain = elements(value)
        start = end = 0
        if plain is not None:
            storage = plain.untyped_storage()
            start = storage.data_ptr() if _has_memory(plain) else storage._cdata  # its own address, which no other has
            end = start + (storage.nbytes() if _has_memory(plain) else 1)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            bounds = getattr(numpy, "byte_bounds", None) or numpy.lib.array_utils.byte_bounds  # before 2.0, and since
            start, end = bounds(value)
        else:
            buffer = value.obj if isinstance(value, memoryview) else value
            with contextlib.suppress(TypeError, ValueError, BufferError), memoryview(buffer) as view:
                start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                end = start + view.nbytes
        if start < end:
            yield path, (start, end)


def _shared_history(mine: _Held, theirs: _Held) -> Iterator[str]:
    """Name tensors that have operations of autograd in common: what is done with one changes the other's gradient."""
    graphs = [_graph(held, others) for held, others in ((mine, theirs), (theirs, mine))]
    met = {path: graphs[0][key][1] for key, (_, path) in graphs[1].items() if key in graphs[0]}
    for path, its in met.items():
        yield f"{path} has operations of autograd in common with {its}"


def _graph(held: _Held, others: _Held) -> dict[int, tuple[Any, str]]:
    """Return the operations and leaves below a tree's tensors, but for tensors that are in the other tree as well."""
    found: dict[int, tuple[Any, str]] = {}
    for key, (path, tensor) in held.items():
        if key in others or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        pending = [tensor if tensor.is_leaf else tensor.grad_fn]
        while pending:
            step = pending.pop()
            if step is not None and id(step) not in found:
                found[id(step)] = step, path
                pending += [node for node, _ in getattr(step, "next_functions", ())]
                pending.append(getattr(step, "variable", None))  # the leaf below an AccumulateGrad
    return found


def _is_changeable(value: Any) -> bool:
    """Whether an object may change: all may but those with a hash of their value, and those that pickle by name."""
    if isinstance(value, torch.Tensor):
        return True
    by_identity: tuple[Any, ...] = (None, object.__hash__)
    return type(value).__hash__ in by_identity and not isinstance(reduced(value), str)
