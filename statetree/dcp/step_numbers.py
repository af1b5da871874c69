"""What a checkpointer is given beside states: steps, metrics, metadata, and how many checkpoints are kept."""

from __future__ import annotations

import json
from operator import index
from typing import TYPE_CHECKING, Any

from statetree.errors import unsignalled

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_counts(**counts: int | None) -> None:
    """Raise if one of the numbers of checkpoints to keep cannot be."""
    for name, count in counts.items():
        if count is not None and type(count) is not int:
            raise TypeError(f"Checkpointer: {name} must be a whole number, or None: expected an int, got {count!r}.")
        if count is not None and count < 1:
            msg = f"Checkpointer: {name} must be at least 1, or None: expected a positive number, got {count}."
            raise ValueError(msg)


def as_int(step: Any) -> int:
    """Return a whole number of NumPy's or torch's as Python's; all else as it is: every rank is to hear of it."""
    try:
        return step if isinstance(step, bool) else index(step)
    except unsignalled(TypeError):
        return step  # type: ignore[no-any-return]


def check_step(verb: str, step: int) -> None:
    """Raise ``ValueError`` for what is no step."""
    if type(step) is not int or step < 0:
        raise ValueError(f"{verb}: step must be a number that is not negative: expected an int, got {step!r}.")


def as_metric(verb: str, metric: Any) -> float | None:
    """Return a metric as a number of Python's."""
    if metric is None:
        return None
    try:
        return float(metric)
    except unsignalled(TypeError, ValueError, RuntimeError, OverflowError) as error:
        msg = f"{verb}: metric must be a number, or None: expected a float, got {type(metric).__qualname__}. {error}"
        raise TypeError(msg) from None


def check_texts(value: Any) -> None:
    """Raise ``TypeError`` for a key that is no text, which JSON would make one of."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"expected texts as keys, got {key!r}")
            check_texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            check_texts(inner)


def as_metadata(verb: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as they come back: tuples as lists."""
    try:
        text = json.dumps(given := dict(metadata or {}))
        check_texts(given)
        return dict(json.loads(text))
    except unsignalled(TypeError, ValueError, RecursionError) as error:
        msg = f"{verb}: metadata must be a dict of what JSON holds (texts, numbers, lists, dicts): {error}"
        raise TypeError(msg) from None
