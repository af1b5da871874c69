"""Laws: what may hold of a transform, each as an object that ``check_transform`` takes, and that tests call.

A law is called with a transform and a function that makes a state, and raises ``AssertionError`` if it does not hold::

    from statetree.testing import laws

    laws.ties(my_transform, lambda: {"a": base, "b": base[1:]})
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from statetree import compose
from statetree.errors import TreeMismatch
from statetree.leaves.builtin import holds_tensor
from statetree.testing.assertions import (
    assert_independent,
    assert_pure,
    assert_structure_preserved,
    assert_trees_equal,
    tree_differences,
)
from statetree.testing.findings import GEOMETRY, STRUCTURE, TIES, VALUES
from statetree.testing.messages import raise_for
from statetree.testing.watch import Watch
from statetree.transforms.offload import offload
from statetree.tree.flatten import flatten_for_copy, unflatten
from statetree.tree.mapping import map_leaves

Transform = Callable[[Any], Any]
Make = Callable[[], Any]
_DOCS = "docs/concepts/laws.md#"


@dataclasses.dataclass(frozen=True)
class Law:
    """What may hold of a transform.

    Attributes:
        name: One word or a few, as they may stand in the name of a test.
        statement: What holds, in one line.
        check: A function of a transform and of a function that makes a state, an equal one on new memory every time.
            It raises ``AssertionError`` if the law does not hold.
        link: Where more is said.

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
    link: str = ""

    def __call__(self, transform: Transform, state: Make) -> None:
        """Raise ``AssertionError`` unless the law holds for what ``state()`` makes."""
        self.check(transform, state)


class NotApplicable(Exception):
    """Raised by a law that says nothing of a state."""


def _law(statement: str) -> Callable[[Callable[[Transform, Make], None]], Law]:
    """Make a law of a function, under its name."""

    def made(check: Callable[[Transform, Make], None]) -> Law:
        name = check.__name__.removeprefix("_")
        return Law(name, statement, check, _DOCS + name.replace("_", "-"))

    return made


def _accepts(transform: Transform, state: Make) -> None:
    transform(state())


def _pure(transform: Transform, state: Make) -> None:
    assert_pure(transform, state())


def _independent(transform: Transform, state: Make) -> None:
    given = state()
    assert_independent(given, transform(given), containers=False)


def _separate(transform: Transform, state: Make) -> None:
    given = state()
    assert_independent(given, transform(given))


def _stable(transform: Transform, state: Make) -> None:
    first = transform(state())
    watch = Watch(first)
    second = transform(state())
    raise_for("stable: a later call changed an earlier result", watch.changes())
    assert_independent(first, second, containers=False)


def _structure(transform: Transform, state: Make) -> None:
    assert_structure_preserved(transform, state())
    _aspect(STRUCTURE, transform, state)  # what is in opaque objects, too


def _aspect(aspect: str, transform: Transform, state: Make, *, storages: bool = True) -> None:
    """Compare one aspect of a result with what it was in the state."""
    result = transform(state())
    found = tree_differences(state(), result, storages=storages, further=True)
    raise_for(f"{aspect}: not kept", [finding for finding in found if finding.aspect == aspect])


def _geometry(transform: Transform, state: Make) -> None:
    _aspect(GEOMETRY, transform, state)


def _values(transform: Transform, state: Make) -> None:
    _aspect(VALUES, transform, state)


def _ties(transform: Transform, state: Make) -> None:
    _aspect(TIES, transform, state)


def _overlaps(transform: Transform, state: Make) -> None:
    _aspect(TIES, transform, state, storages=False)


def _exact(transform: Transform, state: Make) -> None:
    assert_trees_equal(state(), transform(state()), storages=False)


def _idempotent(transform: Transform, state: Make) -> None:
    assert_trees_equal(transform(state()), transform(transform(state())), storages=False)


def _commutes_with_offload(transform: Transform, state: Make) -> None:
    assert_trees_equal(offload(transform(state())), transform(offload(state())), storages=False)


def _streams(transform: Transform, state: Make) -> None:
    whole = transform(state())
    try:
        with mock.patch.object(compose, "BUCKET_BYTES", 1):
            streamed = leaf_by_leaf(transform, state())
    except TreeMismatch as error:
        raise AssertionError(str(error)) from error
    assert_trees_equal(whole, streamed, storages=False)


def leaf_by_leaf(transform: Transform, tree: Any) -> Any:
    """Return what ``stream`` makes of a tree, put together again."""
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    paths = spec.paths()
    order = sorted(range(len(leaves)), key=lambda index: paths[index].sort_key())
    results: list[Any] = [None] * len(leaves)
    for index, (path, leaf) in zip(order, compose.stream(tree, transform), strict=True):
        assert path == paths[index]
        results[index] = leaf
    return unflatten(spec, results)


def _round_trip(inverse: Transform, transform: Transform, state: Make) -> None:
    assert_trees_equal(state(), inverse(transform(state())), storages=False)


def _global_values(transform: Transform, state: Make) -> None:
    before, after = map_leaves(_whole, state()), map_leaves(_whole, transform(state()))
    found = tree_differences(before, after, ties=False, further=True)
    raise_for("global_values: not kept", [finding for finding in found if finding.aspect == VALUES])


def _whole(leaf: Any) -> Any:
    """Return the whole of a distributed tensor as torch itself gathers it."""
    from torch.distributed.tensor import DTensor

    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


accepts = _law("Every state is accepted.")(_accepts)
pure = _law("The state that is given does not change.")(_pure)
independent = _law("A result shares no memory with the state.")(_independent)
separate = _law("A result shares no object with the state.")(_separate)
stable = _law("A result is not changed by later calls.")(_stable)
structure = _law("Containers keep types, keys, order and attributes.")(_structure)
geometry = _law("Tensors keep class, dtype, shape, strides and flags.")(_geometry)
values = _law("Every value is kept, to the bit.")(_values)
ties = _law("Leaves share storages exactly if they did.")(_ties)
idempotent = _law("A second time changes nothing more.")(_idempotent)
commutes_with_offload = _law("The order of it and of offload does not matter.")(_commutes_with_offload)
streams = _law("Leaf by leaf, the result is the same.")(_streams)
#: Weaker than ``ties``, for transforms that put several storages into one.
overlaps = _law("Leaves overlap exactly if they did.")(_overlaps)
#: All of ``structure``, ``geometry``, ``values`` and ``overlaps``.
exact = _law("A result is the state again, in every respect.")(_exact)

#: With ranks, instead of ``geometry`` and ``values``: what is distributed may be so otherwise.
global_values = _law("Distributed tensors keep their elements.")(_global_values)

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
    check = functools.partial(_round_trip, inverse)
    return Law("round_trip", "The inverse makes the state again.", check, _DOCS + "round-trip")
