"""One call of a collective: whether the other ranks wait for this one, and what they hear if it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from statetree.chunks.ranks import ranks_named
from statetree.errors import CheckpointError, RankMismatch, StateTreeError, shown
from statetree.exchange.consensus import (
    FAILED,
    Fingerprint,
    all_repeat,
    compare_fingerprints,
    errors_on_ranks,
    tell_failure,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.exchange.consensus import Consensus
    from statetree.exchange.group import Group

T = TypeVar("T")


class Call:
    """A call of a collective, as a context manager. ``options`` are what every rank must have passed alike, by name.

    Wherever the ranks are about to agree, an exception that leaves the block (an interrupt, too) is told to the others
    in their place of agreement, so that every rank raises and the group stays usable.
    """

    def __init__(self, verb: str, group: Group, **options: Any) -> None:
        self.verb = verb
        self.options = options
        self.group = group
        self._awaited = True  # by the other ranks, in an agreement

    def __enter__(self) -> Self:
        try:
            self.group.check_usable()
            self.check_options()
        except BaseException as error:
            self._tell(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._tell(error)
        elif self._awaited:
            msg = f"{self.verb}: the block ended without an agreement: expected it to move something, got nothing."
            failure = StateTreeError(msg)
            self._tell(failure)
            raise failure

    def _tell(self, error: BaseException) -> None:
        if self._awaited:
            self._awaited = False
            tell_failure(self.group, error)

    def check_options(self) -> None:
        """Raise if an option cannot be. By default any can."""

    def expect(self) -> None:
        """Say that an agreement comes next: until it is reached, whatever fails is told to the other ranks."""
        self._awaited = True

    def hand_over(self) -> None:
        """Say that another call begins here, in the place of this one: that one tells the others what fails."""
        self._awaited = False

    def agree(self, fingerprint: Fingerprint) -> Consensus:
        """Make sure that all ranks have one fingerprint; otherwise, or if one failed, all raise ``RankMismatch``."""
        message = fingerprint.message()
        self._awaited = False
        return compare_fingerprints(self.verb, self.group, fingerprint, message)

    def all_repeat(self, number: int) -> bool:
        """Do as ``agree`` where this rank keeps a call that it could make once more; return whether all ranks do so.

        Otherwise an agreement comes next.
        """
        self._awaited = False
        self._awaited = not all_repeat(self.verb, self.group, number)
        return not self._awaited

    def ready(self) -> None:
        """Wait until all ranks are here; raise ``RankMismatch`` if one of them failed."""
        self.agree(Fingerprint(self.verb))

    def described(self) -> str:
        """Return the call with its options, as messages show it."""
        return f"{self.verb}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def check_rank(self, name: str) -> None:
        """Raise ``RankMismatch`` unless an option is a rank of the group."""
        rank, size = self.options[name], self.group.size
        if not is_rank(rank, size):
            msg = f"{self.verb}: {name} must be a rank of the group: {self.group.expected_ranks('one')}, got {rank!r}."
            raise RankMismatch(msg)


def on_all_ranks(verb: str, group: Group, action: Callable[[], T]) -> T:
    """Act on every rank of a group, wait for the others, and raise on every rank if it failed on one.

    The action communicates over other groups, if at all, and alike on every rank.

    Raises:
        StateTreeError: What the first rank raised, with a note that says which ranks did; what this one raised, if it
            is not of this library or an interrupt; or a ``CheckpointError`` with what others did, which has
            ``failed_elsewhere``.
        RankMismatch: If other ranks make another call.
    """
    result: Any = None
    own: BaseException | None = None
    fingerprint, message = Fingerprint(verb), list(FAILED)
    try:
        ready = fingerprint.message()
        result = action()
        message = ready
    except BaseException as error:  # noqa: BLE001 - also an interrupt: the others must not be left waiting
        own = error
    errors: dict[int, BaseException] = {}
    try:
        errors = errors_on_ranks(verb, group, fingerprint, message, own)
        if not errors:
            return result  # type: ignore[no-any-return]
        if own is not None and not isinstance(own, StateTreeError):
            raise own
        raise _of_ranks(verb, group, own, errors)
    finally:
        del result, own, errors  # tracebacks hold this frame: what they hold, too, would last until it is collected


def _of_ranks(verb: str, group: Group, own: BaseException | None, errors: dict[int, BaseException]) -> BaseException:
    """Return what every rank raises where some failed: the first one's error, or one that names all."""
    ranks = sorted(errors)
    if all(isinstance(error, StateTreeError) for error in errors.values()):
        first: BaseException = own if own is not None and ranks[0] == group.rank else errors[ranks[0]]
        if ranks != [0]:
            first.add_note(f"statetree: raised on {ranks_named(ranks)}")
        return first
    # What is of this library was raised because of the others, if it comes from an action within this one.
    foreign = {rank: error for rank, error in errors.items() if not isinstance(error, StateTreeError)}
    lines = [f"rank {rank}: {type(foreign[rank]).__name__}: {foreign[rank]}".rstrip(": ") for rank in sorted(foreign)]
    failure = CheckpointError(f"{verb}: it failed on other ranks: {shown(lines)}")
    failure.__cause__, failure.failed_elsewhere = own, True
    return failure


def is_rank(value: Any, size: int) -> bool:
    """Whether a value is a rank of a group of a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
