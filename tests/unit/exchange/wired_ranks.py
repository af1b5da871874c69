"""Ranks as threads of one process, between which a plan moves elements."""

import queue
import threading
from math import prod

import torch

from statetree.exchange.buckets import BucketedPlan, take_buckets
from statetree.exchange.executor import Executor
from statetree.exchange.plan import Chunked, Transfer
from tests.pace import units

TIMEOUT_S = units(30)


class Wires:
    """What goes from rank to rank: a queue for each pair."""

    def __init__(self, size):
        self.size = size
        self.queues = {(one, other): queue.Queue() for one in range(size) for other in range(size)}


class WiredGroup:
    """One rank's end of the wires, with what it sent at a time, and what of that was packed, once for all peers."""

    def __init__(self, rank, wires):
        self.rank, self.size, self._wires = rank, wires.size, wires
        self.sent, self.received, self.packed, self.used = [], [], [], set()

    def exchange(self, sent, received):
        self.used.add("messages")
        self.packed.append(sum({data.data_ptr(): data.numel() for _, data in sent}.values()))
        self.sent.append(sum(data.numel() for _, data in sent))
        self.received.append(sum(data.numel() for _, data in received))
        for peer, data in sent:
            assert data.dtype == torch.uint8
            assert data.is_contiguous()
            self._wires.queues[self.rank, peer].put(data.clone())

        def wait():
            for peer, place in received:
                place.copy_(self._wires.queues[peer, self.rank].get(timeout=TIMEOUT_S))

        return wait

    def all_gather_into(self, received, sent):
        wait = self.exchange([(peer, sent) for peer in range(self.size)], list(enumerate(received.chunk(self.size))))
        self.used.add("all-gather")
        return wait

    def broadcast(self, tensors, source):
        here = self.rank == source
        to = [(peer, data) for data in tensors for peer in range(self.size) if here and peer != source]
        wait = self.exchange(to, [] if here else [(source, data) for data in tensors])
        self.used.add("broadcast")
        return wait


def cut(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in zip(*box, strict=True))]


def elements_of(move, size):
    """Return a global tensor whose elements are unique, with room for the number of the rank that holds them."""
    shape = move.source.shape
    return (torch.arange(prod(shape)).view(shape) * size).to(move.dtype)


class WiredRanks:
    """What all ranks have before and after moves."""

    def __init__(self, moves, size, bucket_bytes, arrange=torch.clone):
        self.moves, self.size = moves, size
        wires = Wires(size)
        self.groups = [WiredGroup(rank, wires) for rank in range(size)]
        self.plans = [BucketedPlan(moves, group, bucket_bytes) for group in self.groups]
        self.transfers = [
            [
                Transfer(
                    Chunked(
                        move.source,
                        [arrange(cut(elements_of(move, size), box) + rank) for box in move.source.boxes_of(rank)],
                    ),
                    Chunked(
                        move.target,
                        [arrange(torch.full(box.sizes, -1, dtype=move.dtype)) for box in move.target.boxes_of(rank)],
                    ),
                    move.dtype,
                )
                for move in moves
            ]
            for rank in range(size)
        ]

    def run(self, times=1):
        """Move everything, in a thread for each rank."""
        errors = []

        def work(rank):
            try:
                host = torch.device("cpu")
                plan, transfers = self.plans[rank], self.transfers[rank]
                for _ in range(times):
                    plan.run(
                        transfers,
                        self.groups[rank],
                        Executor(),
                        take_buckets([plan.bucket_sizes(transfers, host)], host),
                    )
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not errors
        assert not any(thread.is_alive() for thread in threads)
        return self

    def arrived(self):
        """Yield, for every box that a rank was to get: its rank, the move, the box, and what is there."""
        for rank in range(self.size):
            for number, move in enumerate(self.moves):
                for box, piece in zip(
                    move.target.boxes_of(rank), self.transfers[rank][number].target.pieces, strict=True
                ):
                    yield rank, move, box, piece

    def check(self):
        """Make sure that every element is in its place."""
        for _, move, box, piece in self.arrived():
            expected = cut(elements_of(move, self.size), box)
            assert torch.equal(
                piece.div(self.size, rounding_mode="floor"), expected.div(self.size, rounding_mode="floor")
            )
