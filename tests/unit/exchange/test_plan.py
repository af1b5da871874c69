"""Plans, carried out for all ranks in one process: every element arrives, in rounds of bounded size."""

import itertools
from collections import defaultdict
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from statetree.chunks.boxes import Box, in_slabs
from statetree.chunks.layouts import layout_of, whole_on
from statetree.exchange import plan as plans
from statetree.exchange.plan import ExchangePlan, Move, choose_owners, owners_of

RANKS = 4


def cut(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in zip(*box, strict=True))]


@st.composite
def layouts_of(draw, shape):
    """Layouts that hold all of a shape: slabs, each on one rank or on several."""
    whole = Box((0,) * len(shape), shape)
    ways = [[whole], in_slabs(whole, 2), in_slabs(whole, 3), in_slabs(whole, 7)]
    if shape:  # across all other slabs
        ways.append([Box((*whole.start[:-1], last), (*shape[:-1], last + 1)) for last in range(shape[-1])])
    slabs = draw(st.sampled_from(ways))
    held = defaultdict(list)
    for part in slabs:
        for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
            held[rank].append(part)
    return layout_of(shape, held)


@st.composite
def moves(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Move(draw(layouts_of(shape)), draw(layouts_of(shape)), dtype)


def elements_of(move):
    """Return a global tensor whose elements are unique, with room for the number of the rank that holds them."""
    return torch.arange(prod(move.source.shape)).view(move.source.shape) * RANKS


class Ranks:
    """What all ranks have before and after a plan."""

    def __init__(self, given, bucket_bytes, source=None):
        self.moves = given
        self.plans = [ExchangePlan(given, rank, RANKS, bucket_bytes, source=source) for rank in range(RANKS)]
        self.sources = [
            [[cut(elements_of(move), box) + rank for box in move.source.boxes_of(rank)] for move in given]
            for rank in range(RANKS)
        ]
        self.targets = [
            [[torch.full(box.sizes, -1) for box in move.target.boxes_of(rank)] for move in given]
            for rank in range(RANKS)
        ]
        self.sent, self.received, self.most_in_a_transfer = [], [], []

    def run(self):
        for shares in zip(*(list(plan.rounds()) for plan in self.plans), strict=True):
            self.sent.append([0] * RANKS)
            self.received.append([0] * RANKS)
            self.most_in_a_transfer.append(0)
            wires = defaultdict(list)
            for rank, own in enumerate(shares):
                for share in own:
                    self.send(rank, share, wires)
            for rank, own in enumerate(shares):
                for share in own:
                    self.receive(rank, share, wires)
            assert not any(wires.values())

    def send(self, rank, share, wires):
        itemsize = self.moves[share.move].dtype.itemsize
        for transfer in share.sends:
            piece = self.box(self.sources[rank][share.move][transfer.piece], transfer.cut, transfer.sizes)
            assert transfer.numel == piece.numel() > 0
            assert len(set(transfer.peers)) == len(transfer.peers)
            for peer in transfer.peers:
                wires[rank, peer].append((share.move, piece))
                self.sent[-1][rank] += transfer.numel * itemsize
            self.most_in_a_transfer[-1] = max(self.most_in_a_transfer[-1], transfer.numel)

    def receive(self, rank, share, wires):
        for transfer in share.receives:
            [peer] = transfer.peers
            move, piece = wires[peer, rank].pop(0)
            assert move == share.move
            place = self.box(self.targets[rank][share.move][transfer.piece], transfer.cut, transfer.sizes)
            assert transfer.numel == place.numel()
            self.put(place, piece)
            self.received[-1][rank] += transfer.numel * self.moves[share.move].dtype.itemsize
        for copy in share.copies:
            piece = self.box(self.sources[rank][share.move][copy.source], copy.source_cut)
            self.put(self.box(self.targets[rank][share.move][copy.target], copy.target_cut), piece)

    @staticmethod
    def box(piece, bounds, sizes=None):
        start, stop = [0] * piece.dim(), list(piece.shape)
        for dim, first, size in bounds:
            assert size < stop[dim] == piece.shape[dim], "each dim once, and only if it is cut"
            start[dim], stop[dim] = first, first + size
        found = cut(piece, (tuple(start), tuple(stop)))
        assert sizes in {None, tuple(found.shape)}
        return found

    @staticmethod
    def put(place, piece):
        assert place.shape == piece.shape
        assert (place == -1).all(), "nothing is moved twice"
        place.copy_(piece)

    def arrived(self):
        """Yield, for every box that a rank was to get: its rank, the move, the box, and what is there."""
        for rank, (number, move) in itertools.product(range(RANKS), enumerate(self.moves)):
            for box, piece in zip(move.target.boxes_of(rank), self.targets[rank][number], strict=True):
                yield rank, move, box, piece


ROWS, COLUMNS = (
    layout_of((4, 4), {rank: [Box(*bounds[number]) for number in (rank, rank + 2)] for rank in (0, 1)})
    for bounds in (
        [((number, 0), (number + 1, 4)) for number in range(4)],
        [((0, number), (4, number + 1)) for number in range(4)],
    )
)


@given(given=st.lists(moves(), max_size=4), bucket_bytes=st.sampled_from([1 << 20, 1, 24, 100]))
@example(given=[Move(ROWS, COLUMNS, torch.int64)], bucket_bytes=1 << 20)
def test_every_element_arrives_once(given, bucket_bytes):
    ranks = Ranks(given, bucket_bytes)
    ranks.run()
    for _, move, box, piece in ranks.arrived():
        assert torch.equal(piece // RANKS, cut(elements_of(move), box) // RANKS)


@given(given=st.lists(moves(), max_size=4))
def test_what_a_rank_has_stays_there(given):
    ranks = Ranks(given, 1 << 20)
    ranks.run()
    for rank, move, box, piece in ranks.arrived():
        if box in move.source.boxes_of(rank):
            assert (piece % RANKS == rank).all()


@given(
    given=st.lists(moves(), max_size=4), source=st.integers(0, RANKS - 1), bucket_bytes=st.sampled_from([1 << 20, 24])
)
def test_a_sources_elements_win(given, source, bucket_bytes):
    ranks = Ranks(given, bucket_bytes, source)
    ranks.run()
    for rank, move, box, piece in ranks.arrived():
        assert torch.equal(piece // RANKS, cut(elements_of(move), box) // RANKS)
        for mine in move.source.boxes_of(source):
            held = torch.zeros(move.source.shape, dtype=torch.bool)
            cut(held, mine).fill_(True)
            assert (piece[cut(held, box)] % RANKS == source).all(), rank


@given(given=st.lists(moves(), max_size=4), bucket_bytes=st.sampled_from([16, 24, 100, 300]))
def test_rounds_are_bounded(given, bucket_bytes):
    ranks = Ranks(given, bucket_bytes)
    ranks.run()
    for sent, received, most in zip(ranks.sent, ranks.received, ranks.most_in_a_transfer, strict=True):
        busiest = max(a + b for a, b in zip(sent, received, strict=True))
        assert busiest <= bucket_bytes or most == 1  # of which there may be one for each peer


def test_small_moves_share_a_round_and_large_ones_take_several():
    small = Move(whole_on((4,), [0]), whole_on((4,), [1]), torch.float32)
    large = Move(whole_on((64,), [0]), whole_on((64,), [1]), torch.float32)
    plan = ExchangePlan([small, small, large, small], 0, 2, 64)
    listed = [[part.move for part in batch] for batch in plan.batches]
    assert listed[0] == [0, 1]
    assert listed[-1] == [3]
    assert set(map(tuple, listed[1:-1])) == {(2,)}
    assert 4 <= len(listed[1:-1]) <= 16
    assert [len(batch) for batch in ExchangePlan([small] * 4, 0, 2, 32).batches] == [1] * 4
    assert [len(batch) for batch in ExchangePlan([small] * 5, 0, 2, 64).batches] == [2, 2, 1]
    assert [len(batch) for batch in ExchangePlan([small] * 5, 0, 2, 63).batches] == [1] * 5


def test_a_move_takes_the_room_of_what_a_rank_has_and_gets():
    first, second = Box((0,), (2,)), Box((2,), (4,))
    swap = Move(layout_of((4,), {0: [first], 1: [second]}), layout_of((4,), {0: [second], 1: [first]}), torch.float32)
    assert [len(batch) for batch in ExchangePlan([swap] * 4, 0, 2, 32).batches] == [2, 2]
    assert [len(batch) for batch in ExchangePlan([swap] * 2, 0, 2, 31).batches] == [1, 1]


def test_boxes_that_only_touch_count_for_nothing():
    first, second = Box((0,), (64,)), Box((64,), (128,))
    there, back = layout_of((128,), {0: [first], 1: [second]}), layout_of((128,), {0: [second], 1: [first]})
    assert (
        len(ExchangePlan([Move(there, back, torch.float32)], 0, 2, 256).batches) == 2
    )  # 256 bytes to send, 256 to receive


def test_nothing_to_move_is_no_round():
    assert list(ExchangePlan([], 0, 2, 64).rounds()) == []


class TestOwners:
    def test_the_largest_goes_first_and_to_the_least_loaded(self):
        held = [(whole_on((size,), [0, 1, 2]), 1) for size in (5, 9, 7, 4)]
        assert choose_owners(held, 3) == [(2,), (0,), (1,), (2,)]

    def test_bytes_are_balanced_and_not_elements(self):
        held = [(whole_on((4,), [0, 1]), 8), (whole_on((16,), [0, 1]), 1), (whole_on((16,), [0, 1]), 1)]
        assert choose_owners(held, 2) == [(0,), (1,), (1,)]

    def test_what_only_one_rank_has_counts(self):
        held = [(whole_on((9,), [0]), 1), (whole_on((4,), [0, 1]), 1), (whole_on((4,), [0, 1]), 1)]
        assert choose_owners(held, 2) == [None, (1,), (1,)]

    def test_a_source_takes_what_it_has(self):
        held = [(whole_on((size,), [0, 1, 2]), 1) for size in (5, 9, 7)] + [(whole_on((9,), [0, 2]), 1)]
        assert choose_owners(held, 3, 1) == [(1,), (1,), (1,), (0,)]
        assert choose_owners(held, 3, 2) == [(2,)] * 4

    @given(move=moves())
    def test_an_owner_has_the_box(self, move):
        layout = move.source
        [owners] = choose_owners([(layout, 1)], RANKS)
        boxes = layout.distinct
        for start, stop, owner in zip(
            boxes.starts.tolist(), boxes.stops.tolist(), owners_of(layout, owners), strict=True
        ):
            assert Box(tuple(start), tuple(stop)) in layout.boxes_of(int(owner))

    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_replicas_are_shared_out_evenly(self, size):
        held = [(whole_on((10 + number,), range(size)), 4) for number in range(40)]
        loads = [0] * size
        for (layout, _), owners in zip(held, choose_owners(held, size), strict=True):
            loads[owners[0]] += layout.numel
        assert max(loads) - min(loads) <= 50


def test_boxes_that_are_cut_in_different_dims():
    firsts = torch.tensor([[0, 0], [2, 0], [0, 1], [2, 1]])
    sizes = torch.tensor([[4, 3], [2, 3], [4, 2], [2, 2]])
    full = torch.tensor([4, 3])
    expected = [(), ((0, 2, 2),), ((1, 1, 2),), ((0, 2, 2), (1, 1, 2))]
    assert plans._bounds(firsts, sizes, sizes != full) == expected
    for row, bounds in enumerate(expected):  # and each by itself: all boxes cut in the same dims
        assert plans._bounds(firsts[row : row + 1], sizes[row : row + 1], (sizes != full)[row : row + 1]) == [bounds]
    assert plans._bounds(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)) == [(), ()]
