"""Groups: the ranks that take part in a collective, and the few collectives that everything else is made of."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import defaultdict
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from statetree.chunks.ranks import Ranks
from statetree.declare import cached_property
from statetree.errors import RankMismatch, UnsupportedLeaf, suppress, unsignalled
from statetree.torch_internals import (
    device_types,
    is_functional,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_exchange,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed import ProcessGroup

#: A peer's rank within the group, and the bytes (``uint8``, contiguous) that go to it or come from it.
Message = tuple[int, torch.Tensor]

#: The types of devices that all ranks of a group have communicated from.
_OPENED: Final[WeakKeyDictionary[Any, set[str]]] = WeakKeyDictionary()

#: What a rank says of a text before it tells it: its digest, and its length.
_DIGEST_BYTES: Final = 16
_MARK_BYTES: Final = _DIGEST_BYTES + 8

#: A timeout as users give it: seconds, or a ``timedelta``, or ``None`` for the group's own.
Timeout = float | timedelta | None


class Group(Ranks):
    """The ranks of a process group, and how they talk; a single rank where there is no process group.

    Attributes:
        process_group: By which they communicate, if they do.
        timeout: How long a collective may take, once it was checked; ``None`` for as long as the group allows.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        rank: int,
        global_ranks: Sequence[int],
        verb: str,
        timeout: Timeout = None,
    ) -> None:
        super().__init__(rank, global_ranks)
        self.process_group: Any = process_group
        self._verb = verb
        self.timeout: timedelta | None = None
        self._given_timeout = timeout
        with suppress(ValueError, TypeError):  # see check_usable
            self.timeout = _timeout(verb, timeout)
        self._devices: dict[str, torch.device] = {}

    @property
    def is_alive(self) -> bool:
        """Whether the group was not destroyed."""
        if self.process_group is None:
            return True
        try:
            return bool(dist.get_process_group_ranks(self.process_group))
        except unsignalled(KeyError, ValueError):
            return False

    def alone(self) -> Group:
        """Return the group of this rank alone, which communicates with nobody."""
        return Group(None, 0, [self.global_ranks[self.rank]], self._verb, self._given_timeout)

    def expected_ranks(self, how_many: str) -> str:
        """Return the middle of a sentence that says which ranks there are."""
        if not (dist.is_available() and dist.is_initialized()):
            return "expected 0 (there is no process group: call torch.distributed.init_process_group first)"
        return f"expected {how_many} of 0 to {self.size - 1}" if self.size > 1 else "expected 0, the only one"

    def check_usable(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` if the timeout cannot be, once the other ranks can hear of it."""
        _timeout(self._verb, self._given_timeout)

    @cached_property
    def devices(self) -> list[str]:
        """The types of the devices that the group's backends communicate from, host memory first."""
        if self.process_group is None:
            return ["cpu"]
        found = {device.type for device in device_types(self.process_group)}
        return sorted(found, key=lambda name: (name != "cpu", name))

    def device(self, kind: str) -> torch.device:
        """Return the device of a type that this rank communicates from."""
        if kind == "cpu":
            return torch.device("cpu")
        if kind not in self._devices:
            bound = self.process_group.bound_device_id
            is_bound = bound is not None and bound.type == kind
            current = bound if is_bound else torch.device(kind, torch.get_device_module(kind).current_device())
            self._devices[kind] = current
        return self._devices[kind]

    def settle_on(self, device: torch.device) -> None:
        """Communicate from a device on which tensors lie, rather than from another of its type."""
        self._devices.setdefault(device.type, device)

    def number_of(self, kinds: Iterable[str]) -> int:
        """Return the number, in ``devices``, of the type that tensors on some types of devices are best sent from."""
        return max((self.devices.index(kind) for kind in set(kinds) if kind in self.devices), default=0)

    def open(self, device: torch.device) -> None:
        """Have all ranks communicate from a device once: NCCL wants that before two of them do so alone.

        The ranks have agreed through another backend, if the group has several.
        """
        if self.process_group is None or device.type not in self.devices[1:]:
            return
        opened = _OPENED.setdefault(self.process_group, set())
        if device.type not in opened:
            data = torch.zeros(1, dtype=torch.int64, device=device)
            self._wait(start_all_reduce(self.process_group, data, self.timeout))
            opened.add(device.type)

    def all_gather(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what every rank sends, as rows: ``uint8``, of one dimension, on the CPU, equally long."""
        if self.size == 1:
            return sent.unsqueeze(0)
        device = self.device(self.devices[0])
        own = sent.to(device)
        received = torch.empty(self.size * sent.numel(), dtype=torch.uint8, device=device)
        self._wait(start_all_gather(self.process_group, received, own, self.timeout))
        return received.to("cpu").view(self.size, -1)

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest number that a rank has in each place. What a rank receives does not grow with the ranks.

        The numbers have 64 bits, with signs. There are equally many on every rank.
        """
        found: list[int] = self._reduced(torch.tensor(numbers, dtype=torch.int64), greatest=True).tolist()
        return found

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks have: ``int64`` modulo 2⁶⁴, ``uint8`` modulo 2⁸, on the CPU, alike."""
        return self._reduced(own) if own.numel() else own

    def _reduced(self, own: torch.Tensor, *, greatest: bool = False) -> torch.Tensor:
        if self.size == 1:
            return own
        total = own.to(self.device(self.devices[0]), copy=True)
        self._wait(start_all_reduce(self.process_group, total, self.timeout, greatest=greatest))
        return total.to("cpu")

    def told_once(
        self, said: bytes | None, *, alike: bytes | None = None, most: int | None = None
    ) -> list[tuple[bytes, list[int]]]:
        """Return what the ranks say: each text once, with the ranks that say so, in the order of the first of these.

        If all say the same, they find that out by a digest. Otherwise each sends one to all. Then the first rank of
        each text puts that into its place among all of them: what a rank receives grows with the ranks and with the
        different texts, not with their product. Texts of one digest (``alike``) mean the same; ``None`` is nothing.
        """
        packed = zlib.compress(said or b"", 1)
        digest = blake2b((said if alike is None else alike) or b"", digest_size=_DIGEST_BYTES).digest()
        mark = bytes(_MARK_BYTES) if said is None else digest + len(packed).to_bytes(8, "little")
        if alike is None and self._is_same(mark):
            return [] if said is None else [(said, [*range(self.size)])]
        rows = [bytes(row) for row in self.all_gather(torch.frombuffer(bytearray(mark), dtype=torch.uint8)).tolist()]
        ranks: defaultdict[bytes, list[int]] = defaultdict(list)
        for rank, row in enumerate(rows):
            if any(row):
                ranks[row[:_DIGEST_BYTES]].append(rank)
        speakers = [saying[0] for saying in ranks.values()][:most]
        sizes = [int.from_bytes(rows[rank][_DIGEST_BYTES:], "little") for rank in speakers]
        stops = list(accumulate(sizes))
        together = torch.zeros(sum(sizes), dtype=torch.uint8)
        if self.rank in speakers:
            stop = stops[speakers.index(self.rank)]
            together[stop - len(packed) : stop] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        found = self.all_reduce(together)
        data = ctypes.string_at(found.data_ptr(), found.numel())
        texts = [zlib.decompress(data[stop - size : stop]) for stop, size in zip(stops, sizes, strict=True)]
        return list(zip(texts, ranks.values(), strict=False))

    def _is_same(self, mark: bytes) -> bool:
        """Whether all ranks have the same mark: the greatest, and the greatest with all bits inverted, are it."""
        words = struct.unpack("<3q", mark)
        most = self.all_reduce_max([*words, *(~word for word in words)])
        return most[:3] == [~word for word in most[3:]]

    def broadcast_bytes(self, sent: bytes, nbytes: int, source: int) -> bytes:
        """Return what one rank sends, of a length that all know."""
        if self.size == 1 or not nbytes:
            return sent
        given = bytearray(sent) if self.rank == source else bytearray(nbytes)
        data = torch.frombuffer(given, dtype=torch.uint8).to(self.device(self.devices[0]))
        self._wait(start_broadcast(self.process_group, data, source, self.timeout))
        received = data.to("cpu")
        return ctypes.string_at(received.data_ptr(), nbytes)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Callable[[], None]:
        """Start sending to peers and receiving from them, and return a function that waits until all of it is done.

        Several messages to one peer arrive in the order in which they are sent.
        """
        works = start_exchange(self.process_group, sent, received) if sent or received else ()
        return partial(self._wait, *works)

    def all_gather_into(self, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        """Start giving every rank what each sends: ``uint8``, equally much. Returns a function that waits for it."""
        return partial(self._wait, start_all_gather(self.process_group, received, sent, self.timeout))

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> Callable[[], None]:
        """Start giving every rank what one has: ``uint8``, contiguous. Returns a function that waits for it."""
        works = (start_broadcast(self.process_group, tensor, source, self.timeout) for tensor in tensors)
        return partial(self._wait, *works)

    def _wait(self, *works: Any) -> None:
        try:
            for work in works:
                work.wait(*(() if self.timeout is None else (self.timeout,)))
        except unsignalled(RuntimeError) as error:
            limit = "" if self.timeout is None else f" within {self.timeout.total_seconds():g} s"
            raise RankMismatch(
                f"{self._verb}: a rank of the group did not answer{limit}: expected all {self.size} ranks to call "
                f"{self._verb}, got: {str(error).splitlines()[0]}. The group cannot be used any more."
            ) from error


def group_of(verb: str, process_group: ProcessGroup | None, timeout: Timeout) -> Group:
    """Return the group that a collective runs on: all ranks if its caller gave ``None``.

    A timeout that cannot be is refused by the group's ``check_usable``: the other ranks must hear of it.
    """
    if is_functional(torch.empty(0, device="cpu")):
        msg = f"{verb}: called inside torch.func.functionalize: no tensor has memory there. Call {verb} outside of it."
        raise UnsupportedLeaf(msg)
    if not (dist.is_available() and dist.is_initialized()):
        return Group(None, 0, [0], verb, timeout)
    given: Any = process_group
    is_group = isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER
    if given is not None and not is_group:
        raise TypeError(f"{verb}: group cannot be {given!r}: expected a process group, or None for all ranks.")
    try:
        rank = -1 if given is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(given)
    except unsignalled(ValueError):
        msg = f"{verb}: the process group was destroyed: expected one that lasts. Make another one."
        raise RankMismatch(msg) from None
    if rank < 0:
        raise RankMismatch(
            f"{verb}: this process (global rank {dist.get_rank()}) is not in the group: expected a call from the "
            "group's ranks only. Leave the call out on other ranks."
        )
    known: Any = dist.group.WORLD if given is None else given
    return Group(known, rank, dist.get_process_group_ranks(known), verb, timeout)


def _timeout(verb: str, timeout: Any) -> timedelta | None:
    if timeout is None:
        return None
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except unsignalled(TypeError, ValueError, OverflowError):  # no number, not one, or more than there is
        limit = timedelta(0)
    if limit <= timedelta(0):
        msg = f"{verb}: the timeout must be positive: expected seconds, got {timeout!r}. Pass None for the group's own."
        raise ValueError(msg) if isinstance(timeout, (int, float, timedelta)) else TypeError(msg)
    return limit
