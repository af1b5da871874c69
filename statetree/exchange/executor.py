"""Executors: what moving elements comes down to, done at once, or recorded and done as often as one likes.

A plan only says copy, communicate, wait and call. An ``Executor`` does so. A ``Recorder`` keeps each with its tensors,
in this order, as a CUDA graph does: doing it again takes no planning, no cutting and no layout of buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from statetree.torch_internals import copy_all, copy_each, plain_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: Something to do.
Action = Callable[[], None]


class Executor:
    """Moves elements at once."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors into others of the same shapes."""
        copy_each(targets, sources)

    def start(self, communicate: Callable[[], Action]) -> Action:
        """Start to communicate, and return the function that waits for it.

        Args:
            communicate: Starts it, with tensors that stay the same, and returns that function.
        """
        return communicate()

    def call(self, function: Action) -> None:
        """Call a function that does not communicate."""
        function()

    def catch_up(self) -> None:
        """Do what was only recorded so far."""

    def before_each(self, check: Action) -> None:
        """Have what depends on elements checked again whenever they move again. It raises if it does not hold."""

    def with_each(self, make: Callable[[], Action]) -> None:
        """Have something done again whenever elements move again, which was done for the first time already."""


class Recorder(Executor):
    """Records what moves elements. Nothing is done before ``replay``."""

    def __init__(self) -> None:
        self._operations: list[Action] = []
        self._checks: list[Action] = []
        self._under_way: dict[int, Action] = {}

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Record a copy."""
        if not targets:
            return
        if all(target.dtype == source.dtype for target, source in zip(targets, sources, strict=True)):
            targets, sources = plain_pairs(targets, sources)
            self._operations.append(partial(copy_all, targets, sources))
        else:  # of some sources a converted copy is made first: each time anew
            self._operations.append(partial(copy_each, targets, sources))

    def start(self, communicate: Callable[[], Action]) -> Action:
        """Record that communication starts. The function that is returned records waiting for it."""
        number = len(self._operations)

        def begin() -> None:
            self._under_way[number] = communicate()

        def end() -> None:
            self._under_way.pop(number)()

        self._operations.append(begin)
        return partial(self._operations.append, end)

    def call(self, function: Action) -> None:
        """Record a call."""
        self._operations.append(function)

    def catch_up(self) -> None:
        """Do what was recorded so far, and keep it."""
        self.replay()

    def before_each(self, check: Action) -> None:
        """Record a check."""
        self._checks.append(check)

    def with_each(self, make: Callable[[], Action]) -> None:
        """Record what a function returns."""
        self._operations.append(make())

    def check(self) -> None:
        """Do all recorded checks."""
        for check in self._checks:
            check()

    def replay(self) -> None:
        """Do everything else that was recorded."""
        self._under_way.clear()  # of a replay that failed
        for operation in self._operations:
            operation()
