"""Groups: the ranks that take part in a collective, and the few collectives that everything else is made of."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from statetree.chunks.ranks import Ranks
from statetree.errors import RankMismatch
from statetree.torch_internals import device_types, start_all_gather, start_all_reduce, start_broadcast, start_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

#: A peer's rank within the group, and the bytes (``uint8``, contiguous) that go to it or come from it.
Message = tuple[int, torch.Tensor]

#: A timeout as users give it: seconds, or a ``timedelta``, or ``None`` for the group's own.
Timeout = float | timedelta | None


class Group(Ranks):
    """The ranks of a process group, and how they talk; a single rank where there is no process group.

    Attributes:
        timeout: How long a collective may take; ``None`` for as long as the group allows.
    """

    def __init__(self, process_group: ProcessGroup | None, rank: int, global_ranks: Sequence[int], verb: str) -> None:
        super().__init__(rank, global_ranks)
        self._process_group = process_group
        self._verb = verb
        self.timeout: timedelta | None = None
        self._refusal: Exception | None = None

    @property
    def identity(self) -> Any:
        """What groups that communicate by the same means have in common."""
        return self._process_group

    @property
    def is_alive(self) -> bool:
        """Whether the group was not destroyed."""
        if self._process_group is None:
            return True
        try:
            return bool(dist.get_process_group_ranks(self._process_group))
        except (KeyError, ValueError):
            return False

    def refuse(self, error: Exception) -> None:
        """Let ``check_usable`` raise an error, once the other ranks can hear of it."""
        self._refusal = error

    def check_usable(self) -> None:
        """Raise what was wrong with this rank's arguments for the group."""
        if self._refusal is not None:
            raise self._refusal

    @cached_property
    def devices(self) -> list[str]:
        """The types of the devices that the group's backends communicate from, host memory first."""
        found = (
            {"cpu"} if self._process_group is None else {device.type for device in device_types(self._process_group)}
        )
        return sorted(found, key=lambda name: (name != "cpu", name))

    def device(self, kind: str) -> torch.device:
        """Return the device of a type that this rank communicates from."""
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def all_gather(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what every rank sends, as rows.

        Args:
            sent: ``uint8``, of one dimension, on the CPU, of the same length on every rank.
        """
        if self.size == 1:
            return sent.unsqueeze(0)
        device = self.device(self.devices[0])
        own = sent.to(device)
        received = torch.empty(self.size * sent.numel(), dtype=torch.uint8, device=device)
        self._wait(start_all_gather(self._process_group, received, own, self.timeout))
        return received.to("cpu").view(self.size, -1)

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest number that a rank has in each place. What a rank receives does not grow with the ranks.

        Args:
            numbers: Of 64 bits, with signs; equally many on every rank.
        """
        if self.size == 1:
            return list(numbers)
        data = torch.tensor(numbers, dtype=torch.int64).to(self.device(self.devices[0]))
        self._wait(start_all_reduce(self._process_group, data, self.timeout, greatest=True))
        found: list[int] = data.tolist()
        return found

    def all_gather_bytes(self, sent: bytes) -> list[bytes]:
        """Return what every rank sends, of any length."""
        lengths = self.all_gather(torch.tensor([len(sent)], dtype=torch.int64).view(torch.uint8)).view(torch.int64)
        counts = [int(length) for length in lengths.flatten()]
        padded = torch.zeros(max(*counts, 1), dtype=torch.uint8)
        if sent:
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        rows = self.all_gather(padded)
        return [ctypes.string_at(row.data_ptr(), count) for row, count in zip(rows, counts, strict=True)]

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks have, modulo 2⁶⁴.

        Args:
            own: ``int64``, on the CPU, of the same shape on every rank.
        """
        if self.size == 1 or not own.numel():
            return own
        total = own.to(self.device(self.devices[0]), copy=True)
        self._wait(start_all_reduce(self._process_group, total, self.timeout))
        return total.to("cpu")

    def broadcast_bytes(self, sent: bytes, nbytes: int, source: int) -> bytes:
        """Return what one rank sends, of a length that all know."""
        if self.size == 1 or not nbytes:
            return sent
        device = self.device(self.devices[0])
        if self.rank == source:
            data = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(device)
        else:
            data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._wait(start_broadcast(self._process_group, data, source, self.timeout))
        received = data.to("cpu")
        return ctypes.string_at(received.data_ptr(), nbytes)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Callable[[], None]:
        """Start sending to peers and receiving from them.

        Args:
            sent: What goes to whom. Several messages to one peer arrive in this order.
            received: Where what comes from whom is put.

        Returns:
            A function that waits until all of it is done.
        """
        if not sent and not received:
            return _nothing
        works = start_exchange(self._process_group, sent, received)

        def wait() -> None:
            for work in works:
                self._wait(work)

        return wait

    def all_gather_into(self, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        """Start giving every rank what each sends: ``uint8``, equally much. Returns a function that waits for it."""
        work = start_all_gather(self._process_group, received, sent, self.timeout)
        return lambda: self._wait(work)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> Callable[[], None]:
        """Start giving every rank what one has: ``uint8``, contiguous. Returns a function that waits for it."""
        works = [start_broadcast(self._process_group, tensor, source, self.timeout) for tensor in tensors]

        def wait() -> None:
            for work in works:
                self._wait(work)

        return wait

    def _wait(self, work: Any) -> None:
        try:
            if self.timeout is None:
                work.wait()
            else:
                work.wait(self.timeout)
        except RuntimeError as error:
            limit = "" if self.timeout is None else f" within {self.timeout.total_seconds():g} s"
            msg = (
                f"{self._verb}: a rank of the group did not answer{limit}: expected all {self.size} ranks to call "
                f"{self._verb}, got: {str(error).splitlines()[0]}. The group cannot be used any more."
            )
            raise RankMismatch(msg) from error


def _nothing() -> None:
    """Wait for nothing."""


def group_of(verb: str, process_group: ProcessGroup | None, timeout: Timeout) -> Group:
    """Return the group that a collective runs on.

    Args:
        verb: The collective, for messages.
        process_group: What its caller gave; ``None`` for all ranks.
        timeout: How long each of its collectives may take.

    A timeout that cannot be is refused by the group's ``check_usable``: the other ranks must hear of it.

    Raises:
        RankMismatch: If this process is not in the group.
    """
    group = _group_of(verb, process_group)
    try:
        group.timeout = _timeout(verb, timeout)
    except (ValueError, TypeError, OverflowError) as error:
        group.refuse(error)
    return group


def _group_of(verb: str, process_group: ProcessGroup | None) -> Group:
    if not (dist.is_available() and dist.is_initialized()):
        return Group(None, 0, [0], verb)
    given: Any = process_group
    rank = -1 if given is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(given)
    if rank < 0:
        msg = (
            f"{verb}: this process (global rank {dist.get_rank()}) is not in the group: expected a call from the "
            "group's ranks only. Leave the call out on other ranks."
        )
        raise RankMismatch(msg)
    known: Any = dist.group.WORLD if given is None else given
    return Group(known, rank, dist.get_process_group_ranks(known), verb)


def _timeout(verb: str, timeout: Timeout) -> timedelta | None:
    if timeout is None:
        return None
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (ValueError, OverflowError):  # not a number, or more than there is
        limit = timedelta(0)
    if limit <= timedelta(0):
        msg = f"{verb}: the timeout must be positive: expected seconds, got {timeout!r}. Pass None for the group's own."
        raise ValueError(msg)
    return limit
