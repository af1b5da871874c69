"""Deltas on ranks: of distributed tensors, sent to replicas, and brought to other layouts."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step
from tests.collectives.test_divided_leaves import around, wrapped


def state(full, layout):
    return {"w": statetree.distribute({"w": full}, {"w": layout.build()})["w"], "b": full[0].clone(), "step": 1}


def layouts(shape):
    world = tuple(range(dist.get_world_size()))
    found = [("S0",), ("S1",), ("R",)]
    made = [Layout(shape, world, placements) for placements in found]
    if len(world) == 4:
        made.append(Layout(shape, ((0, 1), (2, 3)), ("R", "S0")))
        made.append(Layout(shape, ((0, 1), (2, 3)), ("S0", "S0")))
    return [*made, Layout(shape, world[:1], ("S0",)), Layout(shape, world, ("S0/2",)) if len(world) == 2 else made[0]]


def changes(full):
    """A full tensor with few other elements, with many, and with others everywhere."""
    few = full.clone()
    few.view(-1)[::17] += 0.5
    yield few
    many = full.clone()
    many.view(-1)[1::2] += 0.5
    yield many
    yield full + 0.5


def deltas_go_to_other_layouts():
    full = Layout((12, 5), (0,), ("R",)).full()
    for other in changes(full):
        for source in layouts((12, 5)):
            base, new = state(full, source), state(other, source)
            new["step"] = 2
            change = statetree.delta(new, base)
            applied = statetree.apply_delta(change, statetree.offload(base))
            assert statetree.similarity(applied, new, values=True)
            back = statetree.apply_delta(change.inverse(base), statetree.offload(new))
            assert statetree.similarity(back, base, values=True)
            for target in layouts((12, 5)):
                like, expected = state(full, target), {**state(other, target), "step": 2}
                moved = statetree.reshard(change, like)
                found = statetree.apply_delta(moved, like)
                assert statetree.similarity(found, expected, values=True), (source, target)
            like = {"w": full.clone(), "b": full[0].clone(), "step": 1}
            found = statetree.apply_delta(statetree.reshard(change, like), like)
            assert found["w"].equal(other)
    check_in_step()


def leaves_of_several_tensors_go_to_other_layouts():
    a = torch.arange(70.0).view(10, 7)
    few = a.clone()
    few.view(-1)[[3, 40, 69]] += 0.5
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(tensor, placements, make):
        parts = tensor.clone(), tensor + 1000
        w = TwoTensor(*parts) if placements is None else make(mesh, placements, *parts)
        return {"w": w, "w#0": 3, "plain": torch.ones(3), "again": w}

    forms = [(placements, make) for placements in ([Shard(0)], [Shard(1)], [Replicate()]) for make in (wrapped, around)]
    forms.append((None, None))
    for other in (few, a + 0.5):
        for source in forms:
            base, new = state(a, *source), state(other, *source)
            change = statetree.delta(new, base)
            target = state(a, *source)
            for _ in range(2):
                assert statetree.apply_delta(change, target)["w"] is target["w"]
                assert statetree.similarity(target, new, values=True)
            statetree.apply_delta(change.inverse(base), target)
            assert not statetree.delta(target, base)
            for form in forms:
                like = state(a, *form)
                found = statetree.apply_delta(statetree.reshard(change, like), like)
                assert statetree.similarity(found, state(other, *form), values=True), (source, form)
            wrong = state(a, [Shard(0)], wrapped)
            if dist.get_rank() == 0:
                wrong["w"]._local_tensor.b.view(-1)[3] += 1
            name, message = attempt(lambda: statetree.reshard(change, wrong))  # noqa: B023 - called at once
            assert (name, "expected the elements of the base in like" in message) == ("TreeMismatch", True), message
            check_in_step()


def two_in_a_row():
    full = Layout((12, 5), (0,), ("R",)).full()
    for source in layouts((12, 5)):
        for other in changes(full):
            for last in changes(other):
                a, b, c = state(full, source), state(other, source), state(last, source)
                both = statetree.delta(b, a).then(statetree.delta(c, b))
                assert statetree.similarity(statetree.apply_delta(both, a), c, values=True)


def another_base_is_refused_on_every_rank():
    full = Layout((12, 5), (0,), ("R",)).full()
    source, target = Layout((12, 5), (0, 1), ("S0",)), Layout((12, 5), (0, 1), ("S1",))
    other = full.clone()
    other[3, 1] = other[9, 3] = -1
    change = statetree.delta(state(other, source), state(full, source))
    wrong = full.clone()
    wrong[3, 1] += 1
    name, message = attempt(lambda: statetree.reshard(change, state(wrong, target)))
    assert (name, "at w: expected the elements of the base in like" in message) == ("TreeMismatch", True), message
    check_in_step()
    replicated = Layout((12, 5), (0, 1), ("R",)).build()
    replicated._local_tensor.copy_(wrong if dist.get_rank() == 1 else full)
    like = {**state(full, source), "w": replicated}
    name, message = attempt(lambda: statetree.reshard(change, like))
    assert (name, "at w" in message) == ("TreeMismatch", True), message
    check_in_step()
    name, message = attempt(lambda: statetree.apply_delta(change, state(full, target)))
    assert (name, "expected a leaf of the base" in message) == ("TreeMismatch", True), message


def what_like_lacks_or_has_in_another_shape_is_refused_on_every_rank():
    mesh = init_device_mesh("cpu", (2,))
    spread = lambda whole: distribute_tensor(whole.clone(), mesh, [Shard(0)])  # noqa: E731 - as a table
    zeros = torch.zeros(6, 4)
    one, all_of_it = zeros.clone(), zeros + 1
    one[3, 1] = 1
    to_pairs = statetree.Conversion([("q", "k", "(h two) m -> (two h) m")], sizes={"two": 2})
    likes = {
        "another name": {"module.k": spread(zeros)},
        "nothing": {},
        "another shape": {"k": spread(zeros.view(4, 6))},
        "another shape, plain": {"k": zeros.view(4, 6).clone()},
        "another dtype": {"k": spread(zeros.double())},
        "converted": to_pairs({"q": spread(zeros)}),
    }
    for new in (one, all_of_it):
        change = statetree.delta({"k": spread(new)}, {"k": spread(zeros)})
        for which, like in likes.items():
            name, message = attempt(lambda: statetree.reshard(change, like))  # noqa: B023 - called at once
            said = "the delta was made for another tree at k: expected " in message
            assert name in ("TreeMismatch", "RankMismatch"), (
                which,
                name,
                message,
            )  # the other rank may hold what is wrong
            assert said, (which, message)
            check_in_step()
        moved = statetree.reshard(change, {"k": zeros.clone()})
        assert statetree.apply_delta(moved, {"k": zeros.clone()})["k"].equal(new)


def damaged_deltas_are_not_moved():
    source, target = Layout((12, 5), (0, 1), ("S0",)), Layout((12, 5), (0, 1), ("S1",))
    full = torch.zeros(12, 5)  # in which a position that was damaged is not seen by what lies there
    other = full.clone()
    other[1, :2] = other[7, 2:4] = 1
    change = statetree.delta(state(other, source), state(full, source))
    first = change.tensors["w"]
    broken = []
    for bit in range(64):
        head = first.head.clone()
        head[2] ^= 1 << bit if bit < 63 else -(1 << 63)
        broken.append(replace(first, head=head))
    head = first.head + torch.eye(1, len(first.head), dtype=torch.int64)[0]
    for damaged in (*broken, replace(first, values=first.values + 1), replace(first, head=head)):
        change = replace(change, tensors={**change.tensors, "w": damaged})
        name, message = attempt(lambda: statetree.reshard(change, state(full, target)))  # noqa: B023 - called at once
        assert (name, "damaged at w" in message) == ("TreeMismatch", True), message
    check_in_step()


def partials_are_refused():
    full = Layout((4, 3), (0,), ("R",)).full()
    partial = {"a": torch.ones(2), "w": Layout((4, 3), (0, 1), ("P",)).build()}
    whole = {"a": torch.ones(2), "w": Layout((4, 3), (0, 1), ("R",)).build()}
    changed = {"a": torch.ones(2), "w": statetree.distribute({"w": full + 1}, {"w": whole["w"]})["w"]}
    change = statetree.delta(changed, whole)
    assert change.changed == {"w": 12}
    calls = {
        "delta": [lambda: statetree.delta(partial, partial), lambda: statetree.delta(partial, whole)],
        "apply_delta": [lambda: statetree.apply_delta(change, partial)],
        "reshard": [lambda: statetree.reshard(change, partial)],
        "inverse": [lambda: change.inverse(partial)],
    }
    calls["delta"].append(lambda: statetree.delta(whole, partial))
    before = partial["w"].to_local().clone()
    for verb, attempts in calls.items():
        for call in attempts:
            name, message = attempt(call)
            assert (name, f"{verb}: the leaf at w is Partial: expected elements" in message) == (
                "UnsupportedLeaf",
                True,
            ), message
            check_in_step()
    assert partial["w"].to_local().equal(before)


def deltas_are_broadcast():
    base = {"w": torch.arange(100.0), "step": 1}
    new = {"w": base["w"].clone().index_fill_(0, torch.tensor([3, 70]), -1), "step": 2}
    change = statetree.broadcast(statetree.delta(new, base) if dist.get_rank() == 0 else None, src=0)
    assert change.changed == {"w": 2, "step": 1}
    result = statetree.apply_delta(change, base)
    assert statetree.similarity(result, new, values=True)


def deltas_go_to_and_from_meshes_of_their_own():
    rank, size = dist.get_rank(), dist.get_world_size()
    both = DeviceMesh("cpu", list(range(size)))
    own = [DeviceMesh("cpu", [each]) for each in range(size)][rank]

    def placed(full, kind):
        if kind == "own":
            return {"w": DTensor.from_local(full.clone(), own, [Replicate()], run_check=False)}
        return {"w": distribute_tensor(full.clone(), both, [kind])}

    base = torch.arange(24.0).view(8, 3)
    new = base + 100
    new[1] = base[1]
    kinds = [Shard(0), Replicate(), "own"]
    for source in kinds:
        change = statetree.delta(placed(new, source), placed(base, source))
        for target in kinds:
            like = placed(base, target)
            moved = statetree.reshard(change, like)
            result = statetree.apply_delta(moved, like)["w"].to_local()
            assert torch.equal(result, placed(new, target)["w"].to_local())
    other = statetree.delta(placed(new + rank, "own"), placed(base, "own"))
    name, message = attempt(lambda: statetree.reshard(other, placed(base, Replicate())))
    assert name == "TreeMismatch", message
    assert "expected the same values from all replicas" in message
    check_in_step()


def what_a_part_of_the_ranks_holds_in_part_is_refused():
    rank, three = dist.get_rank(), DeviceMesh("cpu", [0, 1, 2])
    some = dist.new_group([0, 1])
    if rank == 2:
        return
    base, new = torch.zeros(6), torch.tensor([0.0, 0, 0, 0, 0, 1])  # the last rank's, of which no sum tells: it is 0
    like = {"w": DTensor.from_local(base.chunk(3)[rank].clone(), three, [Shard(0)], run_check=False)}
    change = statetree.delta({"w": new}, {"w": base})
    name, message = attempt(lambda: statetree.reshard(change, like, group=some))
    assert (name, "hold only a part of the leaf at w" in message) == ("UnsupportedLeaf", True)


def one_memory_in_two_layouts():
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def tree(value):
        w = distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)], src_data_rank=None)
        return {"w": w, "local": w.to_local(), "other": DTensor.from_local(w.to_local(), mesh, [Shard(1)])}

    kind, message = attempt(lambda: statetree.delta(tree(1.0), tree(0.0)))  # no delta that its base would refuse
    assert kind == "TreeMismatch"
    assert "ties at w" in message
    assert not statetree.delta(tree(1.0), tree(1.0)).changed
    whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()], src_data_rank=None)
    base, new = ({"w": held, "local": held.to_local()} for held in (whole, whole + 1))
    statetree.apply_delta(statetree.delta({"w": new["w"], "local": new["w"].to_local()}, base), base)
    assert torch.equal(base["local"], torch.arange(4.0) + 1), rank


def one_memory_as_a_replica_and_as_this_ranks_own():
    """The change of either says who else holds it: of replicas one sends."""
    mesh, rank = DeviceMesh("cpu", [1, 2]), dist.get_rank()

    def tree(value):
        own = torch.tensor([0.0, value, 0.0, 0.0])
        given = own if rank else torch.zeros(0)
        w = DTensor.from_local(given, mesh, [Replicate()], shape=(4,), stride=(1,), run_check=False)
        return {"a": w.to_local() if rank else own, "w": w}

    change = statetree.delta(tree(5.0), tree(0.0))
    like = {"a": torch.zeros(4), "w": torch.zeros(4)}
    statetree.apply_delta(statetree.reshard(change, like), like)
    assert like["a"].tolist() == like["w"].tolist() == [0, 5, 0, 0], rank


@pytest.mark.parametrize(
    ("check", "world_size"),
    [
        (deltas_go_to_and_from_meshes_of_their_own, 2),
        (what_a_part_of_the_ranks_holds_in_part_is_refused, 3),
        (one_memory_in_two_layouts, 2),
        (one_memory_as_a_replica_and_as_this_ranks_own, 3),
        (deltas_go_to_other_layouts, 2),
        pytest.param(deltas_go_to_other_layouts, 4, marks=pytest.mark.slow),
        (leaves_of_several_tensors_go_to_other_layouts, 2),
        (two_in_a_row, 2),
        (another_base_is_refused_on_every_rank, 2),
        (what_like_lacks_or_has_in_another_shape_is_refused_on_every_rank, 2),
        (damaged_deltas_are_not_moved, 2),
        (partials_are_refused, 2),
        (deltas_are_broadcast, 2),
    ],
)
def test_on_ranks(check, world_size):
    run_ranks(world_size, check)


def save_delta_of_shards(folder):
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    before, after = torch.arange(8.0), torch.arange(8.0)
    after[[0, 5, 6]] += 100
    base, new = ({"w": distribute_tensor(whole, mesh, [Shard(0)])} for whole in (before, after))
    change = statetree.delta(new, base)
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    statetree.save(change, f"{folder}/{rank}", group=alone)
    statetree.save(statetree.reshard(change, statetree.gather(base)), f"{folder}/whole")
    whole = {"w": before.clone()}
    statetree.apply_delta(statetree.load(f"{folder}/{rank}", group=alone), base)
    statetree.apply_delta(statetree.load(f"{folder}/whole"), whole)
    return bool(statetree.similarity(base, new)), torch.equal(whole["w"], after)


def test_deltas_of_shards_are_saved_as_the_page_says(tmp_path):
    assert run_ranks(2, save_delta_of_shards, str(tmp_path)) == [(True, True)] * 2
