"""The collectives: ``gather``, ``distribute`` and ``broadcast``, between processes in a gloo group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import statetree as st
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.peers import broadcast_state_dict, gather_state_dict
from benchmarks.ranks import RankRow, sends_alike, sends_one_model, takes_at_most
from benchmarks.rows import faster, within
from benchmarks.states import MB, State, size
from statetree.exchange.buckets import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Sharded(State):
    """A flat dict of DTensors, split evenly along dim 0, and what is in them.

    Attributes:
        shape: That of each tensor.
        changes: An entry for each change so far.
    """

    shape: tuple[int, ...] = ()
    changes: list[None] = field(default_factory=list)

    def change(self) -> None:
        """Add 1 to every element."""
        for tensor in self.tree.values():
            tensor.to_local().add_(1)
        self.changes.append(None)

    def whole(self, index: int) -> torch.Tensor:
        """Return the whole tensor that the DTensor with a number is a part of, as it is now."""
        return _whole(index, self.shape).add_(len(self.changes))


def sharded(number: int, rows: int, columns: int, scale: float, *, replicas: int = 1) -> Sharded:
    """Return this rank's part of float32 matrices, each split over the ranks, and replicated so often."""
    number = max(round(number * scale), 2)
    mesh, placements = _mesh(replicas)
    parts, part = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    tree = {}
    for index in range(number):
        local = _whole(index, (rows, columns)).chunk(parts)[part].clone()
        tree[f"layers.{index}.weight"] = DTensor.from_local(local, mesh, placements, run_check=False)
    kind = "DTensors" if replicas == 1 else f"DTensors in {replicas} replicas"
    return Sharded(f"{number:,} x {size(rows * columns * 4)} {kind}", tree, (rows, columns))


small = partial(sharded, 1_000, 32, 32)
large = partial(sharded, 64, 2048, 1024)
large_in_replicas = partial(large, replicas=2)


def gather(state: Sharded, *, dst: int | None = None) -> list[Contender]:
    """Make DTensors whole: on one rank, or on all. The peer takes them to all ranks, and lets go of most."""
    complete = holds_wholes(state, dst)
    ranks_only = () if dst is None else (dst,)
    sends, receives = bytes_of_gather(state, dst)
    return [
        ours(lambda: st.gather(state.tree, dst=dst), complete),
        peer("_gather_state_dict", lambda: gather_state_dict(state.tree, ranks_only=ranks_only), complete),
        all_to_all(sends, receives),
    ]


def gather_and_first(state: Sharded) -> list[Contender]:
    """Do so, and also with a tree that statetree sees for the first time, which it has to plan for."""
    numbers = count()

    def renamed() -> dict[str, Any]:
        prefix = f"model{next(numbers)}"
        return {f"{prefix}.{key}": leaf for key, leaf in state.tree.items()}

    complete = holds_wholes(state, None)
    first = variant("statetree, a tree not yet seen", st.gather, complete, fresh=renamed)
    prepared = variant("statetree, prepared", st.prepare(st.gather, state.tree), complete)
    mine, *others = gather(state)
    return [mine, prepared, first, *others]


def distribute(state: Sharded) -> list[Contender]:
    """Give each rank its part of whole tensors on rank 0. The peer sends the whole to every rank, into place."""
    target, their_target = (zeros_like(state) for _ in range(2))
    source = State("", {key: state.whole(index) for index, key in enumerate(state.tree)}).tree
    full = _follows(state, source) if dist.get_rank() == 0 else None
    sync = st.prepare(st.distribute, source if full else None, target, src=0, in_place=True)

    def synced() -> Any:
        if full:
            full()
        return sync()

    parts = holds_parts(state)
    sends, receives = bytes_of_distribute(state)
    cpu = torch.device("cpu")

    def theirs() -> Any:
        broadcast_state_dict(full() if full else {}, their_target, cpu)
        return their_target

    return [
        ours(lambda: st.distribute(full() if full else None, target, src=0), parts),
        variant(
            "statetree, in_place",
            lambda: st.distribute(full() if full else None, target, src=0, in_place=True),
            parts,
        ),
        variant("statetree, prepared, in_place", synced, parts),
        peer("_broadcast_state_dict", theirs, parts),
        all_to_all(sends, receives),
    ]


def of_4_mb(scale: float) -> State:
    """Return the same plain float32 matrices on every rank."""
    number = max(round(8 * scale), 2)
    tree = {f"layers.{index}.weight": _whole(index, (1024, 1024)) for index in range(number)}
    return State(f"{number} x {size(4 * MB)} tensors", tree)


def broadcast(state: State) -> list[Contender]:
    """Give every rank the tensors of rank 0. The peer makes one new tensor on every rank; the floor writes in place.

    What writes in place is ``distribute``: on rank 0 into the tree itself.
    """
    is_source = dist.get_rank() == 0
    tree = state.tree if is_source else None
    like = {key: tensor if is_source else torch.zeros_like(tensor) for key, tensor in state.tree.items()}
    in_place_options: dict[str, Any] = {"src": 0, "in_place": True}

    def together() -> torch.Tensor:
        return torch.cat([tensor.view(-1) for tensor in state.tensors])

    def sent() -> torch.Tensor:
        return together() if is_source else torch.zeros(state.nbytes // 4)

    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

    def anew(tensor: torch.Tensor) -> torch.Tensor:
        return in_place(tensor.clone() if is_source else torch.empty_like(tensor))

    def arrived(result: Any) -> bool:
        return list(result) == list(state.tree) and all(map(torch.equal, result.values(), state.tensors))

    def arrived_together(result: torch.Tensor) -> bool:
        return torch.equal(result, together())

    return [
        ours(lambda: st.broadcast(tree), arrived),
        variant("statetree, prepared", st.prepare(st.broadcast, tree), arrived),
        variant("statetree, in place", lambda: st.distribute(tree, like, **in_place_options), arrived),
        variant("statetree, in place, prepared", st.prepare(st.distribute, tree, like, **in_place_options), arrived),
        peer("dist.broadcast of a new tensor", anew, arrived_together, fresh=sent),
        floor("dist.broadcast", in_place, arrived_together, fresh=sent),
    ]


def all_to_all(sends: Sequence[int], receives: Sequence[int]) -> Contender:
    """Return the floor: one collective that moves as many bytes between the ranks, in memory that is there already."""
    rank = dist.get_rank()
    outgoing = torch.cat([_pattern(rank, to, nbytes) for to, nbytes in enumerate(sends)])
    incoming = torch.empty(sum(receives), dtype=torch.uint8)

    def run() -> torch.Tensor:
        dist.all_to_all_single(incoming, outgoing, list(receives), list(sends))
        return incoming

    def arrived(result: torch.Tensor) -> bool:
        expected = [_pattern(sender, rank, nbytes) for sender, nbytes in enumerate(receives)]
        right = torch.equal(result, torch.cat(expected))
        incoming.zero_()  # so that the next run has to bring it again
        return right

    return floor("all_to_all_single", run, arrived)


def bytes_of_gather(state: Sharded, dst: int | None) -> tuple[list[int], list[int]]:
    """Return how many bytes this rank must send to each and receive from each."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    receivers = range(ranks) if dst is None else [dst]
    share = state.nbytes // ranks
    sends = [share * (to in receivers and to != rank) for to in range(ranks)]
    return sends, [share * (rank in receivers and sender != rank) for sender in range(ranks)]


def bytes_of_distribute(state: Sharded) -> tuple[list[int], list[int]]:
    """Return how many bytes rank 0 must send to each, and each receive from it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = state.nbytes // ranks
    sends = [share * (rank == 0 and to != 0) for to in range(ranks)]
    return sends, [share * (rank != 0 and sender == 0) for sender in range(ranks)]


def holds_wholes(state: Sharded, dst: int | None) -> Callable[[Any], bool]:
    """Return a check that a dict holds all whole tensors on the ranks that are to have them, and no bytes elsewhere."""

    def check(result: Any) -> bool:
        tensors = list(result.values())
        if dst not in (None, dist.get_rank()):
            return all(tensor.is_meta and tensor.shape == state.shape for tensor in tensors)
        return len(tensors) == len(state.tree) and all(
            type(tensor) is torch.Tensor and torch.equal(tensor, state.whole(index))
            for index, tensor in enumerate(tensors)
        )

    return check


def holds_parts(state: Sharded) -> Callable[[Any], bool]:
    """Return a check that a dict holds DTensors with this rank's parts."""

    def check(result: Any) -> bool:
        return list(result) == list(state.tree) and all(
            isinstance(got, DTensor) and torch.equal(got.to_local(), held.to_local())
            for got, held in zip(result.values(), state.tree.values(), strict=True)
        )

    return check


@cache
def _mesh(replicas: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    if replicas == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),)), (Shard(0),)
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas)), (Replicate(), Shard(0))


def _whole(index: int, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(index, index + numel, dtype=torch.float32).view(shape)


def zeros_like(state: Sharded) -> dict[str, Any]:
    """Return DTensors like those of a state, with zeros."""
    return {key: torch.zeros_like(leaf) for key, leaf in state.tree.items()}


def _follows(state: Sharded, source: dict[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that returns whole tensors, and changes them where the state was changed."""
    seen = len(state.changes)

    def current() -> dict[str, torch.Tensor]:
        nonlocal seen
        while seen < len(state.changes):
            seen += 1
            for tensor in source.values():
                tensor.add_(1)
        return source

    return current


def _pattern(sender: int, receiver: int, nbytes: int) -> torch.Tensor:
    """Return bytes that are those of one sender and one receiver alone, and differ by position."""
    words = torch.arange(-(-nbytes // 4), dtype=torch.int32) * 64 + sender * 8 + receiver
    return words.view(torch.uint8)[:nbytes]


gather_to_one = partial(gather, dst=0)
two_buckets = takes_at_most(1, 2 * BUCKET_BYTES + 64 * MB, "≤ two buckets + 64 MB beside its shard")

ROWS = (
    RankRow("gather", "gather to all", small, gather_and_first,
            (faster("_gather_state_dict", 50), within(3, "all_to_all_single", "statetree, prepared"))),
    RankRow("gather", "gather to one", large, gather_to_one, (faster("_gather_state_dict", 2.5), two_buckets)),
    RankRow("gather", "gather to all", large, gather, (faster("_gather_state_dict", 1.2), sends_alike(1.05))),
    RankRow("gather", "gather to all", small, gather_and_first, ranks=4, rounds=7),
    RankRow("gather", "gather to one", large, gather_to_one, (two_buckets,), ranks=4, rounds=7),
    RankRow("gather", "gather to all", large_in_replicas, gather, (sends_alike(1.05),), ranks=4, rounds=7),
    RankRow("distribute", "distribute from one", small, distribute,
            (faster("_broadcast_state_dict", 40, "statetree, in_place"), sends_one_model(),
             within(3, "all_to_all_single", "statetree, prepared, in_place"))),
    RankRow("distribute", "distribute from one", small, distribute, (sends_one_model(),), ranks=4, rounds=7),
    RankRow("distribute", "distribute from one", large, distribute, (sends_one_model(),)),
    *(
        RankRow("broadcast", "broadcast", of_4_mb, broadcast,
                (within(1, "dist.broadcast of a new tensor"), within(1.2, "dist.broadcast", "statetree, in place"),
                 within(1.2, "dist.broadcast", "statetree, in place, prepared"), sends_one_model()), ranks=ranks)
        for ranks in (2, 8)
    ),
)  # fmt: skip
