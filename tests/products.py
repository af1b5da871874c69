"""Products of parameters, of which `make test` runs a part that has each of them in it, and `make slow` the rest."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def product(*axes: Iterable[Any], every: int = 3, always: Callable[..., bool] | None = None) -> list[Any]:
    """Return all combinations; those are quick whose numbers along the axes add up to a multiple of ``every``.

    Args:
        axes: The values of each parameter.
        every: How many combinations there are for one that is quick.
        always: Says of further combinations that they are quick.

    Returns:
        Parameters for ``pytest.mark.parametrize``, with the values' names for ids.
    """
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        values = [value for _, value in numbered]
        quick = sum(number for number, _ in numbered) % every == 0 or (always is not None and always(*values))
        name = "-".join(map(str, values))
        cases.append(pytest.param(*values, id=name, marks=() if quick else pytest.mark.slow))
    return cases
