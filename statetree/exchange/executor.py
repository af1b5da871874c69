"""Executors: what moving elements comes down to, done at once, or recorded and done as often as one likes.

A plan only says copy, communicate, wait and call. An ``Executor`` does so. A ``Recorder`` keeps each with its tensors,
in this order, as a CUDA graph does: doing it again takes no planning, no cutting and no layout of buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from statetree.spans.bits import flat_bytes, is_flat
from statetree.spans.layout import as_bytes
from statetree.torch_internals import copy_all, copy_each, plain_pairs, storage_key

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Something to do.
Action = Callable[[], object]


class Executor:
    """Moves elements at once."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors into others of the same shapes."""
        copy_each(targets, sources)

    def start(self, communicate: Callable[[], Action]) -> Action:
        """Start to communicate, with tensors that stay the same, and return the function that waits for it."""
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
        self._done = 0
        self._checks: list[Action] = []
        self._under_way: dict[int, Action] = {}

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Record a copy."""
        if not targets:
            return
        if any(target.dtype != source.dtype for target, source in zip(targets, sources, strict=True)):
            # Of some sources a converted copy is made first: each time anew.
            self._operations.append(partial(copy_each, targets, sources))
            return
        targets, sources = plain_pairs(targets, sources)
        whole = _joined(targets) if all(tensor.is_cpu and is_flat(tensor) for tensor in (*targets, *sources)) else None
        if whole is None:
            self._operations.append(partial(copy_all, targets, sources))
        else:
            self._operations.append(partial(torch.cat, list(map(flat_bytes, sources)), out=whole))

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
        """Do what was recorded and not yet done, and keep it."""
        first, self._done = self._done, len(self._operations)
        for operation in self._operations[first:]:
            operation()

    def before_each(self, check: Action) -> None:
        """Record a check."""
        self._checks.append(check)

    def with_each(self, make: Callable[[], Action]) -> None:
        """Record what a function returns."""
        self._operations.append(make())

    def forget(self) -> None:
        """Let go of all that was recorded: operations refer to their recorder, so that nobody else would soon."""
        self._operations, self._checks = [], []
        self._under_way.clear()

    def check(self) -> None:
        """Do all recorded checks."""
        for check in self._checks:
            check()

    def replay(self) -> None:
        """Do everything else that was recorded."""
        self._under_way.clear()  # of a replay that failed
        for operation in self._operations:
            operation()


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the memory of tensors that lie one behind the other, as bytes; ``None`` if they do not.

    To put tensors together there takes less than half the time of copying each: a bucket is packed so.
    """
    first = tensors[0]
    key, position = storage_key(first.untyped_storage()), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != position or storage_key(tensor.untyped_storage()) != key:
            return None
        position += tensor.nbytes
    if len(tensors) < 2 or position == first.data_ptr():
        return None
    start = int(first.storage_offset()) * first.itemsize
    return as_bytes(first.untyped_storage(), start, start + position - first.data_ptr())
