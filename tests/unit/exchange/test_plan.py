"""Plans, carried out for all ranks in one process: every element arrives, in rounds of bounded size."""

from collections import defaultdict

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from statetree.chunks.boxes import Box, in_slabs
from statetree.chunks.layouts import Split, layout_of, mesh_layout, whole_on
from statetree.exchange import plan as plans
from statetree.exchange import stacks
from statetree.exchange.plan import ExchangePlan, Move, Transport
from statetree.exchange.senders import held_for_all
from statetree.spans.bits import flat_bytes, is_flat
from tests.unit.exchange.wired_ranks import WiredRanks, cut

RANKS = 4


@st.composite
def layouts_of(draw, shape):
    """Layouts that hold all of a shape: slabs, each on one rank or on several; or over a mesh."""
    if shape and draw(st.booleans()):
        return mesh_layout(shape, *draw(st.sampled_from(meshes(len(shape)))))
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


def meshes(dims):
    """Return meshes with splits: of one dim or two, with replicas, strided, of a part of the ranks."""
    last = dims - 1
    return [
        ((RANKS,), (0, 1, 2, 3), (Split(0, 0, 1),)),
        ((RANKS,), (2, 0, 3, 1), (Split(0, last, 1),)),
        ((2, 2), (0, 1, 2, 3), (Split(1, 0, 1),)),
        ((2, 2), (0, 1, 2, 3), (Split(0, last, 1),)),
        ((2, 2), (0, 1, 2, 3), (Split(0, 0, 1), Split(1, last, 1))),
        ((2, 2), (0, 1, 2, 3), (Split(0, 0, 2), Split(1, 0, 1))),
        ((2,), (1, 3), (Split(0, 0, 1),)),
        ((3,), (-1, 2, 1), ()),
    ]


@st.composite
def moves(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.complex128]))
    found = Move(draw(layouts_of(shape)), draw(layouts_of(shape)), dtype)
    if not found.source.is_complete:
        found = found._replace(source=whole_on(shape, [draw(st.integers(0, RANKS - 1))]))
    return found


@st.composite
def many_moves(draw):
    """Moves of which some are alike: between the same layouts, of one dtype."""
    kinds = draw(st.lists(moves(), max_size=4))
    return draw(st.lists(st.sampled_from(kinds), max_size=8)) if kinds else []


def integers(given):
    """Return moves without complex numbers, which cannot be divided."""
    return [move._replace(dtype=torch.int64) if move.dtype.is_complex else move for move in given]


def columns_first(tensor):
    """Return a tensor with the same elements that is not contiguous, if it can be."""
    return tensor.mT.contiguous().mT if tensor.dim() >= 2 else tensor.clone()


ROWS, COLUMNS = (
    layout_of((4, 4), {rank: [Box(*bounds[number]) for number in (rank, rank + 2)] for rank in (0, 1)})
    for bounds in (
        [((number, 0), (number + 1, 4)) for number in range(4)],
        [((0, number), (4, number + 1)) for number in range(4)],
    )
)
BUCKETS = st.sampled_from([1 << 20, 1, 24, 100])
#: From which size on boxes travel by themselves, and from how many ranks on a collective serves all.
TRAVELS = st.sampled_from([(1 << 20, 32), (1 << 20, 2), (16, 32), (16, 2), (1, 2)])


def limit(travels):
    large, many = travels
    plans.LARGE_BYTES = stacks.LARGE_BYTES = large
    plans.MANY_RANKS = many


@pytest.fixture(autouse=True)
def _usual_limits():
    usual = plans.LARGE_BYTES, plans.MANY_RANKS
    yield
    limit(usual)


def test_one_element_travels_whatever_its_stride():
    element = torch.arange(2)[::2]
    assert is_flat(element)
    assert element.stride() == (2,)
    assert flat_bytes(element).tolist() == [0] * 8


@given(given=many_moves(), bucket_bytes=BUCKETS, travels=TRAVELS, arrange=st.sampled_from([torch.clone, columns_first]))
@example(given=[Move(ROWS, COLUMNS, torch.int64)], bucket_bytes=1 << 20, travels=(1 << 20, 32), arrange=torch.clone)
def test_every_element_arrives(given, bucket_bytes, travels, arrange):
    limit(travels)
    WiredRanks(integers(given), RANKS, bucket_bytes, arrange=arrange).run(times=2).check()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["one", "columns"])
def test_peers_of_whom_no_two_are_alike(to):
    ranks = 12
    everyone = tuple(range(ranks))
    given = []
    for rows in range(3 * ranks, 5 * ranks):  # each ends on another rank, most of them with a smaller box
        shape = (rows, 1 + rows % 3, 5)
        source = mesh_layout(shape, (ranks,), everyone, (Split(0, 0, 1),))
        target = whole_on(shape, [0]) if to == "one" else mesh_layout(shape, (ranks,), everyone, (Split(0, 2, 1),))
        given += [Move(source, target, torch.int64)] * (1 + rows % 2)
    for arrange in (torch.clone, columns_first):
        WiredRanks(given, ranks, 1 << 20, arrange=arrange).run(times=2).check()


@given(given=many_moves())
def test_what_a_rank_has_stays_there(given):
    for rank, move, box, piece in WiredRanks(integers(given), RANKS, 1 << 20).run().arrived():
        if box in move.source.boxes_of(rank):
            assert (piece % RANKS == rank).all()


@given(given=many_moves(), source=st.integers(0, RANKS - 1), bucket_bytes=BUCKETS, travels=TRAVELS)
def test_a_sources_elements_win(given, source, bucket_bytes, travels):
    limit(travels)
    given = [move._replace(source=held_for_all(move.source, source)) for move in integers(given)]
    ranks = WiredRanks(given, RANKS, bucket_bytes).run()
    ranks.check()
    for rank, move, box, piece in ranks.arrived():
        for mine in move.source.boxes_of(source):
            held = torch.zeros(move.source.shape, dtype=torch.bool)
            cut(held, mine).fill_(True)
            assert (piece[cut(held, box)] % RANKS == source).all(), rank


@given(given=many_moves())
def test_nothing_is_sent_twice(given):
    given = integers(given)
    ranks = WiredRanks(given, RANKS, 1 << 20).run()
    for rank, group in enumerate(ranks.groups):
        lacking = 0
        for move in given:
            held = torch.zeros(move.source.shape, dtype=torch.bool)
            for box in move.source.boxes_of(rank):
                cut(held, box).fill_(True)
            # (Boxes of a target may overlap: each has its elements.)
            lacking += sum(int((~cut(held, box)).sum()) for box in move.target.boxes_of(rank)) * move.dtype.itemsize
        if all(move.source.disjoint for move in given):  # otherwise two senders may have one element
            assert sum(group.received) == lacking
    assert sum(sum(group.sent) for group in ranks.groups) == sum(sum(group.received) for group in ranks.groups)


@given(given=many_moves(), bucket_bytes=st.sampled_from([16, 24, 100, 300]))
def test_rounds_are_bounded(given, bucket_bytes):
    given = integers(given)
    ranks = WiredRanks(given, RANKS, bucket_bytes).run()
    layouts = [layout for move in given for layout in (move.source, move.target)]
    boxes = max((len(layout.boxes_of(rank)) for layout in layouts for rank in range(RANKS)), default=0)
    finest = RANKS * max(boxes, 1) * max((move.dtype.itemsize for move in given), default=0)
    for group in ranks.groups:
        for packed, received in zip(group.packed, group.received, strict=True):
            assert packed + received <= max(bucket_bytes, 2 * finest)  # an element of each box from each and for each


def numbers(plan):
    """Return the moves of each round."""
    return [sorted(move for part in round_.parts for move in part.moves) for round_ in plan.rounds]


def test_small_moves_share_a_round_and_large_ones_take_several():
    small = Move(whole_on((4,), [0]), whole_on((4,), [1]), torch.float32)
    large = Move(whole_on((64,), [0]), whole_on((64,), [1]), torch.float32)
    listed = numbers(ExchangePlan([small, small, large, small], 0, 2, 64))
    assert listed[:2] == [[0, 1], [3]]
    assert set(map(tuple, listed[2:])) == {(2,)}
    assert 4 <= len(listed[2:]) <= 16
    assert list(map(len, numbers(ExchangePlan([small] * 4, 0, 2, 32)))) == [1] * 4
    assert list(map(len, numbers(ExchangePlan([small] * 5, 0, 2, 64)))) == [2, 2, 1]
    assert list(map(len, numbers(ExchangePlan([small] * 5, 0, 2, 63)))) == [1] * 5


def test_a_move_takes_the_room_of_what_a_rank_has_and_gets():
    first, second = Box((0,), (2,)), Box((2,), (4,))
    swap = Move(layout_of((4,), {0: [first], 1: [second]}), layout_of((4,), {0: [second], 1: [first]}), torch.float32)
    assert list(map(len, numbers(ExchangePlan([swap] * 4, 0, 2, 32)))) == [2, 2]
    assert list(map(len, numbers(ExchangePlan([swap] * 2, 0, 2, 31)))) == [1, 1]


def test_boxes_that_only_touch_count_for_nothing():
    first, second = Box((0,), (64,)), Box((64,), (128,))
    there, back = layout_of((128,), {0: [first], 1: [second]}), layout_of((128,), {0: [second], 1: [first]})
    plan = ExchangePlan([Move(there, back, torch.float32)], 0, 2, 256)  # 256 bytes to send, 256 to receive
    assert len(plan.rounds) == 2


def test_nothing_to_move_is_no_round():
    assert ExchangePlan([], 0, 2, 64).rounds == []


def sharded(count, *, shape=(64, 3), mesh=None, replicas=1):
    shape_of_mesh = (replicas, count // replicas)
    return mesh_layout(shape, shape_of_mesh, tuple(range(count)) if mesh is None else mesh, (Split(1, 0, 1),))


def test_alike_boxes_of_many_ranks_are_one_view():
    plan = ExchangePlan([Move(sharded(64), whole_on((64, 3), [0]), torch.float32)] * 9, 0, 64, 1 << 20)
    [round_] = plan.rounds
    [part] = round_.parts
    bounds = torch.tensor([[0, 0]]), torch.tensor([[64, 3]])
    side = stacks.lay_out_bucket([(part, part.route.incoming(part.slab), bounds)])
    [stack] = side.stacks
    [field] = stack.fields
    assert (len(stack.peers), stack.nbytes, len(field.runs), len(part.moves)) == (63, 9 * 12, 1, 9)
    ranks = WiredRanks([Move(sharded(8), whole_on((64, 3), [0]), torch.int32)] * 5, 8, 1 << 20).run()
    ranks.check()


def test_the_ranks_of_a_mesh_in_another_order_are_one_view_too():
    layout = sharded(8, mesh=(3, 1, 0, 2, 7, 6, 4, 5))
    ranks = WiredRanks([Move(layout, whole_on((64, 3), [0, 4]), torch.int32)] * 3, 8, 1 << 20).run()
    ranks.check()


class TestTransports:
    def test_from_one_to_all_is_broadcast(self):
        move = Move(whole_on((40, 3), [2]), whole_on((40, 3), range(4)), torch.int32)
        ranks = WiredRanks([move] * 3, 4, 1 << 20).run()
        ranks.check()
        assert all(group.used == {"messages", "broadcast"} for group in ranks.groups)
        assert [sum(group.sent) for group in ranks.groups] == [0, 0, 3 * 3 * 480, 0]  # the backend spreads it

    def test_from_all_to_all_is_gathered_between_many_ranks(self):
        limit((1 << 20, 8))
        for layout, used in ((sharded(8), "all-gather"), (sharded(8, shape=(63, 3)), "messages")):
            move = Move(layout, whole_on(layout.shape, range(8)), torch.int32)
            ranks = WiredRanks([move] * 3, 8, 1 << 20).run()
            ranks.check()
            assert all(used in group.used and len(group.used - {used, "messages"}) == 0 for group in ranks.groups)

    def test_what_is_not_for_all_goes_from_rank_to_rank(self):
        layout = whole_on((4,), [0])
        for target in ([1], [0, 1, 2], [1, 2, 3]):
            [round_] = ExchangePlan([Move(layout, whole_on((4,), target), torch.int32)], 0, 4, 64).rounds
            assert round_.transport is Transport.MESSAGES


class TestReplicas:
    @pytest.mark.parametrize("inner", [False, True])
    def test_a_gather_to_all_stays_within_a_replica(self, inner):
        shape = (24, 3)
        mesh = ((2, 4), tuple(range(8)))
        layout = mesh_layout(shape, *(((4, 2), mesh[1]) if inner else mesh), (Split(0 if inner else 1, 0, 1),))
        replica = (lambda rank: rank % 2) if inner else (lambda rank: rank // 4)
        for rank in range(8):
            plan = ExchangePlan([Move(layout, whole_on(shape, range(8)), torch.int32)], rank, 8, 1 << 20)
            for part in plan.rounds[0].parts:
                peers = part.route.incoming(part.slab).peer.tolist()
                assert len(peers) == 3
                assert {replica(peer) for peer in peers} == {replica(rank)}
        ranks = WiredRanks([Move(layout, whole_on(shape, range(8)), torch.int32)] * 2, 8, 1 << 20).run()
        ranks.check()
        assert len({sum(group.sent) for group in ranks.groups}) == 1

    @pytest.mark.parametrize(("replicas", "count"), [(2, 4), (2, 8), (4, 4), (4, 8)])
    def test_to_one_rank_all_holders_send_alike(self, replicas, count):
        layout = sharded(count, replicas=replicas)
        given = [Move(layout, whole_on((64, 3), [count]), torch.int32)] * 12
        ranks = WiredRanks(given, count + 1, 1 << 20).run()
        ranks.check()
        assert {sum(group.sent) for group in ranks.groups[:count]} == {12 * 64 * 12 // count}
