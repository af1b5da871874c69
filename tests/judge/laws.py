"""The laws that the contract of every transform is made of, as the judge of our own tests sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statetree.testing import Law
from tests.judge.assertions import assert_independent, assert_pure, assert_structure_preserved, tree_differences
from tests.judge.findings import GEOMETRY, STRUCTURE, TIES, VALUES
from tests.judge.messages import raise_for


def _keeps(name: str, aspect: str, *, storages: bool = True) -> Law:
    def check(transform: Callable[[Any], Any], state: Callable[[], Any]) -> None:
        if name == "structure":
            assert_structure_preserved(transform, state())
        found = tree_differences(state(), transform(state()), storages=storages, further=True)
        raise_for(f"{name}: not kept", [finding for finding in found if finding.aspect == aspect])

    return Law(name, f"A result keeps its {name}.", check)


def _is_pure(transform: Callable[[Any], Any], state: Callable[[], Any]) -> None:
    assert_pure(transform, state())


def _is_independent(transform: Callable[[Any], Any], state: Callable[[], Any]) -> None:
    given = state()
    assert_independent(given, transform(given), containers=False)


pure = Law("pure", "The state that is given does not change.", _is_pure)
independent = Law("independent", "A result shares no memory with the state.", _is_independent)
structure, geometry, values = _keeps("structure", STRUCTURE), _keeps("geometry", GEOMETRY), _keeps("values", VALUES)
ties, overlaps = _keeps("ties", TIES), _keeps("overlaps", TIES, storages=False)
