"""What a checkpointer is given beside states: steps, metrics, metadata, and how many checkpoints are kept."""

from __future__ import annotations

import json
import time
from operator import index
from typing import TYPE_CHECKING, Any

from statetree.errors import warn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def check_counts(**counts: int | None) -> None:
    """Raise if one of the numbers of checkpoints to keep cannot be."""
    for name, count in counts.items():
        if count is not None and type(count) is not int:
            msg = f"Checkpointer: {name} must be a whole number, or None: expected an int, got {count!r}."
            raise TypeError(msg)
        if count is not None and count < 1:
            msg = f"Checkpointer: {name} must be at least 1, or None: expected a positive number, got {count}."
            raise ValueError(msg)


def as_int(step: Any) -> int:
    """Return a whole number of NumPy's or torch's as Python's; all else as it is: every rank is to hear of it."""
    try:
        return step if isinstance(step, bool) else index(step)
    except TypeError:
        return step  # type: ignore[no-any-return]


def check_step(verb: str, step: int) -> None:
    """Raise ``ValueError`` for what is no step."""
    if type(step) is not int or step < 0:
        msg = f"{verb}: step must be a number that is not negative: expected an int, got {step!r}."
        raise ValueError(msg)


def as_metric(verb: str, metric: Any) -> float | None:
    """Return a metric as a number of Python's."""
    if metric is None:
        return None
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{verb}: metric must be a number, or None: expected a float, got {type(metric).__qualname__}. {error}"
        raise TypeError(msg) from None


class Notes:
    """What is noted of a save: ``metric`` and ``metadata`` of its manifest, and since when its caller waits."""

    def __init__(self, metric: float | None = None, metadata: dict[str, Any] | None = None) -> None:
        self.metric, self.metadata = metric, metadata or {}
        self.since = time.monotonic()
        self._until: float | None = None

    def returned(self) -> None:
        """Note that the caller does not wait any more."""
        self._until = time.monotonic()

    def waited(self) -> float:
        """Return for how many seconds the caller has waited."""
        return (self._until or time.monotonic()) - self.since


def as_notes(verb: str, metric: Any, metadata: Mapping[str, Any] | None) -> Notes:
    """Return what is noted of a save that begins now, the metadata as they come back."""
    number = as_metric(verb, metric)
    try:
        return Notes(number, json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"{verb}: metadata must be a dict of what JSON holds (texts, numbers, lists, dicts): {error}"
        raise TypeError(msg) from None


def warn_of_step(verb: str, step: int, latest: int | None, directory: Path) -> None:
    """Warn if a step does not become the latest one."""
    if latest is not None and step <= latest:
        msg = (
            f"{verb}: step {step} is not above that of the latest checkpoint in {directory}, {latest}: expected a "
            "higher one. restore() takes the highest: after going back to an earlier step, save elsewhere, or remove "
            "the later checkpoints."
        )
        warn(msg)
