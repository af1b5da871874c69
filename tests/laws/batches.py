"""Several examples for one call on the ranks, which costs more than most examples do."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as hyp

#: How many examples go to the ranks at once.
SIZE = 5


def batches(examples: hyp.SearchStrategy[Any]) -> hyp.SearchStrategy[list[Any]]:
    """Return lists of examples. One that fails is shrunk with the others, which become as small as can be."""
    return hyp.lists(examples, min_size=SIZE, max_size=SIZE)


def as_many() -> settings:
    """Return settings that make as many examples in batches as the profile makes one by one.

    Layouts of other dims are drawn again, which is a reason to reject a whole batch.
    """
    suppressed = [*settings.default.suppress_health_check, HealthCheck.filter_too_much]
    return settings(max_examples=max(1, settings.default.max_examples // SIZE), suppress_health_check=suppressed)


def each(check: Callable[..., None], batch: list[tuple[Any, ...]]) -> None:
    """Check each example, on a rank; an error names the one that it was."""
    for example in batch:
        try:
            check(*example)
        except Exception as error:
            error.add_note(f"example: {example}")
            raise
