"""Laws: what may hold of a transform, each as an object that ``check_transform`` takes, and that tests call.

A law is called with a transform and a function that makes a state, and raises ``AssertionError`` if it does not hold::

    from statetree.testing import laws

    laws.ties(my_transform, lambda: {"a": base, "b": base[1:]})
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from statetree import compose
from statetree.errors import TreeMismatch
from statetree.testing.assertions import Watch, assert_independent, assert_pure, assert_trees_equal
from statetree.testing.contents import GEOMETRY, STRUCTURE, TIES, VALUES, entries, shown
from statetree.testing.differences import differences, lost, raise_for
from statetree.transforms.offload import offload
from statetree.tree.mapping import map_leaves

Transform = Callable[[Any], Any]
Make = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Law:
    """What may hold of a transform.

    Attributes:
        name: One word or a few, as they may stand in the name of a test.
        statement: What holds, in one line.
        check: A function of a transform and of a function that makes a state, an equal one on new memory every time.
            It raises ``AssertionError`` if the law does not hold.

    Example:
        >>> import statetree as st
        >>> from statetree.testing import Law, check_transform
        >>> def check(transform, state):
        ...     assert len(st.paths(transform(state()))) == len(st.paths(state()))
        >>> as_many = Law("as_many", "A result has as many leaves as the state.", check)
        >>> check_transform(st.offload, laws=[as_many], examples=20)["as_many"].holds
        True
    """

    name: str
    statement: str
    check: Callable[[Transform, Make], None] = dataclasses.field(repr=False)

    def __reduce__(self) -> str | tuple[Any, ...]:
        is_ours = globals().get(self.name) is self  # pickled by name, since its function's name is that of the law
        return self.name if is_ours else (Law, (self.name, self.statement, self.check))

    def __call__(self, transform: Transform, state: Make) -> None:
        """Raise ``AssertionError`` unless the law holds for what ``state()`` makes."""
        self.check(transform, state)


def _law(check: Callable[[Transform, Make], None]) -> Law:
    """Make a law of a function, under its name."""
    return Law(check.__name__, str(check.__doc__), check)


def _filled(tree: Any) -> Any:
    """Return a copy of a tree whose elements are ones, as far as that can be done."""
    tree = offload(tree)
    for place in entries(tree).values():
        numbers = place.elements  # of other dtypes some are indices, in a sparse tensor
        if numbers is not None and (numbers.is_floating_point() or numbers.is_complex()):
            with contextlib.suppress(RuntimeError):
                numbers.fill_(1)
    return tree


def _keeps(name: str, statement: str, aspect: str) -> Law:
    """Return the law that one aspect of a result is what it was in the state."""

    def check(transform: Transform, state: Make) -> None:
        result, given = transform(state()), state()
        raise_for(f"{name}: not kept", _not_kept(aspect, given, result))

    return Law(name, statement, check)


def _not_kept(aspect: str, given: Any, result: Any) -> list[str]:
    found = [text for of, text in differences(given, result, ties=aspect == TIES) if of == aspect]
    return found + (lost(given, result) if aspect == VALUES else [])


def _keep_values(name: str, transform: Transform, state: Make, seen: Callable[[Any], Any]) -> None:
    """Compare what is seen of results, of two calls: a transform may cache elements of the first and return them."""
    result, given = transform(state()), state()
    raise_for(f"{name}: not kept", _not_kept(VALUES, seen(given), seen(result)))
    del result, given  # a stager may have memory for one
    try:
        result, given = transform(_filled(state())), _filled(state())
    except Exception:  # it may refuse a state of ones
        return
    raise_for(f"{name}: not kept in a second call", _not_kept(VALUES, seen(given), seen(result)))


@_law
def accepts(transform: Transform, state: Make) -> None:
    """Every state is accepted."""
    transform(state())


@_law
def pure(transform: Transform, state: Make) -> None:
    """The state that is given does not change."""
    assert_pure(transform, state())


@_law
def independent(transform: Transform, state: Make) -> None:
    """A result shares no memory with the state."""
    given = state()
    assert_independent(given, transform(given), containers=False)


@_law
def separate(transform: Transform, state: Make) -> None:
    """A result shares no object with the state."""
    given = state()
    assert_independent(given, transform(given))


@_law
def stable(transform: Transform, state: Make) -> None:
    """A result is not changed by later calls."""
    first = transform(state())
    watch = Watch(first)
    with contextlib.suppress(Exception):  # it may refuse a state of ones
        transform(_filled(state()))
    second = transform(state())
    raise_for("stable: a later call changed an earlier result", watch.changes())
    assert_independent(first, second, containers=False)


structure = _keeps("structure", "Containers keep types, keys, order and attributes.", STRUCTURE)
ties = _keeps("ties", "Leaves share storages exactly if they did.", TIES)


@_law
def geometry(transform: Transform, state: Make) -> None:
    """Tensors keep class, dtype, shape, strides and flags, and stay leaves of autograd."""
    result, given = transform(state()), state()
    left, right = ({path: place.value for path, place in entries(tree).items()} for tree in (given, result))
    tensors = [path for path, value in right.items() if isinstance(value, torch.Tensor) and path in left]
    found = [shown(path) for path in tensors if getattr(left[path], "is_leaf", True) and not right[path].is_leaf]
    computed = [f"history of autograd differs at {path}: a leaf against none" for path in found]
    raise_for("geometry: not kept", _not_kept(GEOMETRY, given, result) + computed)


@_law
def values(transform: Transform, state: Make) -> None:
    """Every value is kept, to the bit."""
    _keep_values("values", transform, state, lambda tree: tree)


@_law
def idempotent(transform: Transform, state: Make) -> None:
    """A second time changes nothing more."""
    twice = transform(transform(state()))
    assert_trees_equal(transform(state()), twice, storages=False)


@_law
def commutes_with_offload(transform: Transform, state: Make) -> None:
    """The order of it and of offload does not matter."""
    assert_trees_equal(offload(transform(state())), transform(offload(state())), storages=False)


@_law
def streams(transform: Transform, state: Make) -> None:
    """Leaf by leaf, the result is the same."""
    whole = transform(state())
    try:
        with mock.patch.object(compose, "BUCKET_BYTES", 1):
            streamed = compose._apply_by_bucket(state(), compose.chain(transform).steps)
    except TreeMismatch as error:
        raise AssertionError(str(error)) from error
    assert_trees_equal(whole, streamed, storages=False)


def _whole(leaf: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


@_law
def global_values(transform: Transform, state: Make) -> None:
    """Distributed tensors keep their elements, however they are distributed."""
    _keep_values("global_values", transform, state, functools.partial(map_leaves, _whole))


#: What ``check_transform`` looks at unless it is told otherwise.
ALL = (
    *(accepts, pure, independent, separate, stable),
    *(structure, geometry, values, ties),
    *(idempotent, commutes_with_offload, streams),
)
#: What it looks at with ranks.
COLLECTIVE = (accepts, pure, stable, structure, global_values, ties, streams)


def round_trip(inverse: Transform) -> Law:
    """Return the law that another function makes of a result the state again."""
    return Law("round_trip", "The inverse makes the state again.", functools.partial(makes_again, inverse))


def makes_again(inverse: Transform, transform: Transform, state: Make) -> None:
    """Raise ``AssertionError`` unless an inverse makes of a result what ``state()`` makes."""
    assert_trees_equal(state(), inverse(transform(state())), storages=False)
