"""What ranks send each other: elements, counted where they leave, and what they tell each other beside."""

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.exchange import plan
from statetree.exchange.group import Group, group_of
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt
from tests.kept_calls import of_one_call

LEAVES = 40
SHAPE = (48, 16)
NBYTES = LEAVES * 48 * 16 * 4


class Counting:
    """Counts the bytes of elements that this rank sends, and those that it hears beside, in a block."""

    def __enter__(self):
        self.elements = self.heard = 0
        self._patch = pytest.MonkeyPatch()
        exchange, broadcast, gather, reduce = Group.exchange, Group.broadcast, Group.all_gather, Group.all_reduce
        tell, greatest = Group.broadcast_bytes, Group.all_reduce_max

        def count(group, sent, received):
            self.elements += sum(data.numel() for _, data in sent)
            return exchange(group, sent, received)

        def count_once(group, tensors, source):
            self.elements += sum(data.numel() for data in tensors) if group.rank == source else 0
            return broadcast(group, tensors, source)

        def hear(function, nbytes):
            def heard(group, *args):
                result = function(group, *args)
                self.heard += nbytes(result)
                return result

            return heard

        self._patch.setattr(Group, "exchange", count)
        self._patch.setattr(Group, "broadcast", count_once)
        self._patch.setattr(Group, "all_gather", hear(gather, lambda found: found.nbytes))
        self._patch.setattr(Group, "all_reduce", hear(reduce, lambda found: found.nbytes))
        self._patch.setattr(Group, "all_reduce_max", hear(greatest, lambda found: 8 * len(found)))
        self._patch.setattr(Group, "broadcast_bytes", hear(tell, len))
        return self

    def __exit__(self, *_):
        self._patch.undo()


def tree_of(*placements, mesh=(0, 1, 2, 3), leaves=LEAVES):
    return {f"leaf{number}": Layout(SHAPE, mesh, placements).build() for number in range(leaves)}


def full():
    return {f"leaf{number}": torch.arange(48.0 * 16).view(SHAPE) + number for number in range(LEAVES)}


HYBRID = ((0, 1), (2, 3))


def stages():
    """Return leaves that only some ranks have, half of them each, over two ranks."""
    trees = tree_of("S0", mesh=(0, 1), leaves=LEAVES // 2), tree_of("S0", mesh=(2, 3), leaves=LEAVES // 2)
    stage = dist.get_rank() // 2
    return {f"stage{stage}": trees[stage]}


def changed(tree):
    """Return a delta of a quarter of the elements, on each rank a quarter of its own."""
    new = statetree.offload(tree)
    for leaf in new.values():
        leaf._local_tensor[::4] += 1
    return statetree.delta(new, tree)


def send_what_is_needed():
    """Return how many bytes this rank sent in each call."""
    rank = dist.get_rank()
    sharded, hybrid = tree_of("S0"), tree_of("R", "S0", mesh=HYBRID)
    calls = {
        "gather to one": lambda: statetree.gather(sharded, dst=0),
        "gather to all": lambda: statetree.gather(sharded),
        "gather copies to all": lambda: statetree.gather(hybrid),
        "gather copies to one": lambda: statetree.gather(hybrid, dst=0),
        "distribute": lambda: statetree.distribute(full() if rank == 0 else None, sharded, src=0),
        "broadcast": lambda: statetree.broadcast(full() if rank == 0 else None),
        "reshard": lambda: statetree.reshard(sharded, tree_of("S1")),
        "reshard to copies": lambda: statetree.reshard(sharded, hybrid),
        "partition_replicas": lambda: statetree.partition_replicas(hybrid),
        "digest": lambda: statetree.digest(hybrid),
        "audit": lambda: statetree.audit(hybrid),
        "gather a union": lambda: statetree.gather(stages(), union=True, dst=0),
        "reshard a union": lambda: statetree.reshard(
            stages(), {f"stage{stage}": tree_of("S0", leaves=LEAVES // 2) for stage in range(2)}, union=True
        ),
        "reshard a delta": lambda: statetree.reshard(changed(sharded), tree_of("S1")),
    }
    like = tree_of("S1"), tree_of("S0")
    sent = {}
    for name, call in calls.items():
        with Counting() as counted:
            call()
        sent[name] = counted.elements
    whole = full() if rank == 0 else None
    with Counting() as counted:  # what is recorded goes on being counted
        prepared = {
            "prepared gather": statetree.prepare(statetree.gather, sharded),
            "prepared distribute": statetree.prepare(statetree.distribute, whole, like[1], src=0, in_place=True),
            "prepared broadcast": statetree.prepare(statetree.broadcast, full()),
            "prepared reshard": statetree.prepare(statetree.reshard, sharded, like=like[0], in_place=True),
        }
    for name, again in prepared.items():
        before = counted.elements
        again()
        sent[name] = counted.elements - before
        again.close()
    return sent


@pytest.mark.slow
def test_no_more_is_sent_than_is_lacking():
    ideal = {
        "gather to one": 3 / 4,
        "gather to all": 3,
        "gather copies to all": 4 / 2,
        "gather copies to one": 1 / 2,
        "distribute": 3 / 4,
        "broadcast": 1,
        "reshard": 3 / 4,
        "reshard to copies": 1 / 4 * (1 + 1 + 2 + 2),
        "partition_replicas": 0,
        "digest": 0,
        "audit": 0,
        "gather a union": 3 / 4,
        "reshard a union": 3 / 4,
        # A position with each of the values, and for each leaf and pair of ranks what there is.
        "reshard a delta": 1 / 4 * 3 / 4 * (8 + 4) / 4 + 12 * (24 * LEAVES + 16) / NBYTES,
        "prepared gather": 3,
        "prepared distribute": 3 / 4,
        "prepared broadcast": 1,
        "prepared reshard": 3 / 4,
    }
    rows = run_ranks(4, send_what_is_needed)
    for name, models in ideal.items():
        total = sum(row[name] for row in rows)
        assert models * NBYTES <= total <= 1.02 * models * NBYTES, (name, total / NBYTES)


def gather_by_one_collective():
    """Gather to all as very many ranks do: by all-gathers of the buckets."""
    size, found = dist.get_world_size(), []
    all_gather_into = Group.all_gather_into

    def counted(group, received, sent):
        found.append((received.numel(), sent.numel()))
        return all_gather_into(group, received, sent)

    layouts = {kind: Layout((6 * size, 4 * size), tuple(range(size)), (kind,)) for kind in ("S0", "S1")}
    tree = {kind: layout.build() for kind, layout in layouts.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MANY_RANKS", 2)
        patch.setattr(Group, "all_gather_into", counted)
        with statetree.prepare(statetree.gather, tree) as again:
            for call in (lambda: statetree.gather(tree), again, again):
                found.clear()
                whole = call()
                assert all(torch.equal(whole[kind], layout.full()) for kind, layout in layouts.items())
                assert found
                assert sum(sent for _, sent in found) == sum(leaf.to_local().nbytes for leaf in tree.values())
                assert all(received == size * sent for received, sent in found)
                for leaf in whole.values():
                    leaf.zero_()


@of_one_call
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_ranks_gather_to_all_by_one_collective(world_size):
    run_ranks(world_size, gather_by_one_collective, fresh=True)


def hear_of(leaves):
    """Return how many bytes this rank heard beside elements, where meshes differ, and where the trees do too."""
    trees = tree_of("S0", mesh=(0, 1), leaves=leaves), tree_of("S0", mesh=(2, 3), leaves=leaves)
    tree = trees[dist.get_rank() // 2]
    with Counting() as agreeing:
        statetree.gather(tree)
    if dist.get_rank() == 3:
        tree["leaf3"] = torch.zeros(3)
    with Counting() as disagreeing:
        name, message = attempt(lambda: statetree.gather(tree))
    assert name == "RankMismatch"
    assert "at leaf3: " in message
    return agreeing.heard, disagreeing.heard


def test_what_ranks_tell_each_other_hardly_grows_with_the_leaves():
    few, many = run_ranks(4, hear_of, 20)[0], run_ranks(4, hear_of, 200)[0]
    assert many[0] <= few[0] + 200
    assert many[1] <= few[1] + 4 * 64  # as bisection takes a few steps more


def tell():
    """Return how many bytes this rank hears where all say the same, and where one says something else."""
    rank = dist.get_rank()
    group = group_of("tell", None, None)
    with Counting() as alike:
        assert group.told_once(b"same" * 50) == [(b"same" * 50, [0, 1, 2, 3])]
    assert group.told_once(None) == []
    assert group.told_once(b"") == [(b"", [0, 1, 2, 3])]
    assert group.told_once(str(rank).encode(), alike=b"the same") == [(b"0", [0, 1, 2, 3])]
    assert group.told_once(None if rank == 0 else b"same") == [(b"same", [1, 2, 3])]
    with Counting() as different:
        assert group.told_once(b"odd" if rank == 2 else b"same") == [(b"same", [0, 1, 3]), (b"odd", [2])]
    return alike.heard, different.heard


def test_what_all_say_is_not_told():
    marks = 4 * 24
    for alike, different in run_ranks(4, tell):
        assert alike < marks < different
