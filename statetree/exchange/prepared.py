"""Prepared transfers: planned, agreed on and bound to tensors once, and run as often as one likes.

While a verb is prepared, its ``Exchange`` records what it would move. All that is left to do later is to see that the
tensors still lie where they lay, to tell each other so, and to move.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from statetree.declare import renew_after_fork
from statetree.errors import RankMismatch, StateTreeError, UnsupportedLeaf
from statetree.exchange.call import Call
from statetree.exchange.consensus import Fingerprint
from statetree.exchange.executor import Action, Recorder
from statetree.leaves.held_memory import HeldMemory
from statetree.leaves.types.converted import is_copy
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from statetree.exchange.consensus import Alike
    from statetree.tree.spec import TreeSpec

T = TypeVar("T")


class Preparation:
    """A call of a collective that is recorded, and does not move anything yet.

    Attributes:
        recorder: What would move.
        call: The call, once the collective has begun.
        held: The memory that it would move from and to.
        alike: Give parts that ranks must hold alike, whenever elements move.
        number: What all ranks know this call by, once they have agreed.
        is_repeatable: Whether the call depends on nothing but what the ranks have agreed on once, before they planned.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.call: Call | None = None
        self.held: list[HeldMemory] = []
        self.alike: list[Callable[[], list[Alike]]] = []
        self.number = 0
        self.is_repeatable = True

    def begin(self, call: Call) -> Recorder:
        """Take note of the call, and return what records it."""
        if self.call is not None:
            raise TypeError(
                f"prepare: expected one collective, got {self.call.verb} and then {call.verb}. Prepare each by itself."
            )
        self.call = call
        return self.recorder

    def agreed(self, call: Call, number: int) -> None:
        """Take note that the ranks have agreed on a call. They agree once more, in ``conclude``."""
        self.number = number
        call.expect()

    def agree_again(self, agree: Action) -> None:
        """Have the ranks agree on elements that they have received, whenever they have."""
        self.recorder.call(agree)

    def hold(self, spec: TreeSpec, leaves: Sequence[Any], indices: Iterable[int], *, opaque: bool = False) -> None:
        """Hold the memory of leaves, and have it looked at before elements move again."""
        self.held.append(HeldMemory(spec, leaves, list(indices), opaque=opaque))

    def refuse_copies(self, spec: TreeSpec, leaves: Sequence[Any], indices: Iterable[int]) -> None:
        """Raise ``UnsupportedLeaf`` if one of the leaves whose elements the result has would be stale there."""
        stale = next((index for index in indices if is_copy(leaves[index])), None)
        if stale is not None:
            path = spec.paths()[stale]
            msg = (
                f"prepare: the leaf at {path or '<root>'} is a copy that a conversion made of plain tensors, and does "
                "not follow them: expected a view. Convert after every step, and call the verb without prepare."
            )
            raise UnsupportedLeaf(msg, path)

    def conclude(self, call: Call) -> None:
        """Wait until all ranks have prepared everything."""
        call.expect()
        call.ready()

    def finish(self, name: str, tree: T) -> Prepared[T]:
        """Return what was prepared: ``tree`` is what was returned by what was called, ``name`` in messages."""
        if self.call is None or not self.held:
            expected = "gather, distribute, broadcast or reshard, of a state and not of a delta"
            raise TypeError(f"prepare: expected {expected}, got {name}. Call it as it is.")
        return Prepared(self, self.call, tree)


_UNDER_WAY: Final[ContextVar[Preparation | None]] = ContextVar("preparation", default=None)


P = TypeVar("P", bound=Preparation)


@contextmanager
def preparing(preparation: P) -> Iterator[P]:
    """Have the collective that is called in the block record what it moves."""
    token = _UNDER_WAY.set(preparation)
    try:
        yield preparation
    finally:
        _UNDER_WAY.reset(token)


def preparation_under_way() -> Preparation | None:
    """Return the preparation in whose block this is called."""
    return _UNDER_WAY.get()


class Prepared(Generic[T]):
    """A transfer that is planned, agreed on and bound to its tensors. Made by ``prepare``.

    Calling it moves what the tensors hold then, and returns the same tree each time. It holds its tensors until it is
    closed; it is a context manager that closes itself. Threads of a process may share it: their calls run one after the
    other, and ``close`` waits for a call that runs.

    Collective:
        Every rank of the group calls it, whenever one does.

    Raises:
        RankMismatch: On every rank, before anything moves: if on some rank a tensor was moved, resized, freed or
            replaced since, or if the ranks call different transfers.
        StateTreeError: If it was closed.
    """

    def __init__(self, preparation: Preparation, call: Call, tree: T) -> None:
        self._verb, self._group = call.verb, call.group
        self._tree: T | None = tree
        self._recorder = preparation.recorder
        self._held = preparation.held
        self._alike = preparation.alike
        self._closed = False
        self._name = f"the {call.verb} prepared as {preparation.number:x}"
        self._fingerprint = Fingerprint(self._name)
        self._start_idle()
        renew_after_fork(self, Prepared._start_idle)

    def _start_idle(self) -> None:
        self._lock = threading.RLock()
        self._moving = 0

    def __call__(self) -> T:
        """Move the elements, and return the tree that they are in."""
        with self._lock:
            self._moving += 1
            try:
                return self._move()
            finally:
                self._moving -= 1
                if self._closed and not self._moving:  # by what interrupted it: a handler of a signal
                    self._let_go()

    @quietly
    def _move(self) -> T:
        with Call(self._verb, self._group if self._group.is_alive else self._group.alone()) as call:
            self._check()
            alike = [part for parts in self._alike for part in parts()]
            call.agree(Fingerprint(self._name, alike=alike) if alike else self._fingerprint)
            self._recorder.replay()
        return self._tree  # type: ignore[return-value]  # not closed

    def _check(self) -> None:
        verb = self._verb
        if self._closed:
            raise StateTreeError(f"prepare: this {verb} was closed: expected an open one. Prepare it again.")
        if not self._group.is_alive:
            msg = f"prepare: the process group of this {verb} was destroyed: expected one that lasts. Prepare it again."
            raise RankMismatch(msg)
        for held in self._held:
            path = held.moved()
            if path is not None:
                raise RankMismatch(
                    f"prepare: the tensor at {path or '<root>'} is not what it was when this {verb} was prepared: "
                    "expected the same memory, shape and strides, got others. Prepare it again."
                )
        self._recorder.check()

    def close(self) -> None:
        """Let go of the tensors. Later calls raise; closing again does nothing."""
        with self._lock:
            self._closed = True
            if not self._moving:
                self._let_go()

    def _let_go(self) -> None:
        self._tree = None
        self._held = []
        self._alike = []
        self._recorder.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close()
