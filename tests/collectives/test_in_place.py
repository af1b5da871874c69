"""``distribute`` of one rank's plain tensors into those that each rank has: elements arrive where they belong."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree
from statetree.exchange.group import Group
from statetree.leaves import copying
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, sent_by
from tests.kept_calls import of_one_call

LARGE = (1 << 20) // 4  # elements of float32 that travel by themselves


def numbers(count, start=0.0, dtype=torch.float32):
    return (torch.arange(float(count)) + start).to(dtype)


def received_at(call):
    """Make a call; return its result, and where what is broadcast is received on this rank."""
    broadcast, places = Group.broadcast, []

    def noted(group, tensors, source):
        places.extend(tensor.data_ptr() for tensor in tensors if group.rank != source)
        return broadcast(group, tensors, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "broadcast", noted)
        return call(), places


def copied_here(call):
    """Make a call, and return how many tensors this rank copies once everything has arrived."""
    copy, counts = copying.copy_together, []

    def counted(targets, sources, nbytes, **options):
        counts.append(len(targets))
        copy(targets, sources, nbytes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "copy_together", counted)
        call()
    return sum(counts)


def source_of(tree):
    return tree if dist.get_rank() == 0 else None


def arrive_in_place():
    full = {"w": numbers(LARGE), "b": numbers(5), "step": 3}
    like = {"w": torch.nn.Parameter(torch.zeros(LARGE)), "b": torch.zeros(5), "step": 0}
    view = like["w"].detach().view(2, -1)
    for _ in range(4):  # the third is recorded, the fourth repeated
        version = like["b"]._version
        result, places = received_at(lambda: statetree.distribute(source_of(full), like, src=0, in_place=True))
        assert result["w"] is like["w"]
        assert result["step"] == 3
        assert torch.equal(like["w"], full["w"])
        assert torch.equal(like["b"], full["b"])
        assert torch.equal(view.flatten(), full["w"])
        assert dist.get_rank() == 0 or like["w"].data_ptr() in places
        assert like["b"]._version > version
        for key in ("w", "b"):
            full[key] += 1


@of_one_call
def test_elements_are_received_where_they_belong():
    run_ranks(2, arrive_in_place)


def copy_nothing():
    tree = {"w": numbers(LARGE), "b": numbers(5), "m": numbers(9).view(3, 3)}
    like = tree if dist.get_rank() == 0 else {key: torch.zeros_like(leaf) for key, leaf in tree.items()}
    sync = statetree.prepare(statetree.distribute, source_of(tree), like, src=0, in_place=True)
    assert copied_here(sync) == 0
    for _ in range(2):
        tree["w"] += 1  # on rank 0 that of the source and of the result
        expected = {key: leaf.clone() for key, leaf in tree.items()}
        sync()
        assert all(torch.equal(like[key], leaf) for key, leaf in expected.items())


def test_a_rank_that_sends_its_tree_into_itself_copies_nothing():
    run_ranks(2, copy_nothing)


def swapped(how):
    x, y = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32) + 10
    own = {"torch": torch.from_numpy, "numpy": lambda array: torch.from_numpy(array.view())}[how]
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    full = {"a": a, "b": b}
    there = {"a": b, "b": a} if how == "torch" else {"a": own(y), "b": own(x)}  # two storages on one memory
    like = there if dist.get_rank() == 0 else {"a": torch.zeros(6), "b": torch.zeros(6)}
    statetree.distribute(source_of(full), like, src=0, in_place=True)
    assert like["a"].tolist() == [*range(6)]
    assert like["b"].tolist() == [*range(10, 16)]


@of_one_call
@pytest.mark.parametrize("how", ["torch", "numpy"])
def test_a_source_that_is_written_elsewhere_is_sent_before(how):
    run_ranks(2, swapped, how)


def in_one_buffer():
    flat = numbers(12)
    full = {"a": flat[:4], "b": flat[4:8], "c": flat[6:10]}
    like = {key: torch.zeros(4) for key in full}
    if dist.get_rank() == 0:
        like["a"] = flat[8:]  # over a part of what is sent as c
    statetree.distribute(source_of(full), like, src=0, in_place=True)
    assert [like[key].tolist() for key in "abc"] == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]


@of_one_call
def test_views_on_one_buffer_come_as_they_were():
    run_ranks(2, in_one_buffer)


def one_object_in_two_places():
    weight = numbers(4)
    full = {"a": weight, "b": weight, "c": [weight, numbers(3)]}
    like = {"a": torch.zeros(4), "b": torch.zeros(4), "c": [torch.zeros(4), torch.zeros(3)]}
    for _ in range(3):
        statetree.distribute(source_of(full), like, src=0, in_place=True)
        for leaf in (like["a"], like["b"], like["c"][0]):
            assert leaf.tolist() == [0, 1, 2, 3]
            leaf.zero_()


def test_a_tensor_that_is_several_leaves_arrives_in_each():
    run_ranks(2, one_object_in_two_places)


def with_bits_on_both_sides():
    full = {
        "conj": torch.complex(numbers(4), numbers(4, 9)).conj(),
        "neg": torch.complex(numbers(1), numbers(1, 9)).conj().imag,
    }
    like = {
        "conj": torch.zeros(4, dtype=torch.complex64).conj(),
        "neg": torch.zeros(1, dtype=torch.complex64).conj().imag,
    }
    statetree.distribute(source_of(full), like, src=0, in_place=True)
    assert torch.equal(like["conj"], full["conj"])
    assert torch.equal(like["neg"], full["neg"])


def test_what_lies_conjugated_on_both_sides_arrives():
    run_ranks(2, with_bits_on_both_sides)


def over_what_goes_into_shards():
    mesh, memory = DeviceMesh("cpu", [0, 1]), numbers(8)
    full = {"a": memory, "b": numbers(8, 50)}
    like = {"a": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "b": torch.zeros(8)}
    if dist.get_rank() == 0:
        like["b"] = memory  # which is sent as a
    statetree.distribute(source_of(full), like, src=0, in_place=True)
    assert like["a"].full_tensor().tolist() == [*range(8)]
    assert like["b"].tolist() == [*range(50, 58)]


@of_one_call
def test_what_is_sent_into_shards_is_sent_before_it_is_written():
    run_ranks(2, over_what_goes_into_shards)


def one_object_where_one_rank_has_a_strided_tensor():
    weight = numbers(4)
    like = {"a": torch.zeros(4), "b": torch.zeros(4) if dist.get_rank() == 0 else torch.zeros(8)[::2]}
    statetree.distribute(source_of({"a": weight, "b": weight}), like, src=0, in_place=True)
    assert like["a"].tolist() == like["b"].tolist() == [0, 1, 2, 3]


def test_ranks_may_receive_in_other_ways():
    run_ranks(2, one_object_where_one_rank_has_a_strided_tensor)


class Box:
    """An opaque object."""

    def __init__(self, tensor):
        self.tensor = tensor


def with_an_object():
    for part in (slice(None), slice(2, None)):
        weight = numbers(6)
        full = {"w": weight, "o": Box(weight if part.start is None else weight[part])}
        like = {"w": torch.zeros(6), "o": None}
        result = statetree.distribute(source_of(full), like, src=0, in_place=True)
        assert like["w"].tolist() == [*range(6)]
        assert result["o"].tensor.tolist() == [*range(6)][part]
        result["o"].tensor.fill_(9)
        assert like["w"][part].eq(9).all()


def test_a_tie_to_an_object_is_kept():
    run_ranks(2, with_an_object)


def of_all_kinds(of_several):
    mesh = DeviceMesh("cpu", [0, 1])
    values = torch.complex(numbers(4), numbers(4, 9))
    full = {
        "shard": numbers(8).view(4, 2),
        "conj": values.conj(),
        "neg": values.conj().imag,
        "turned": numbers(6).view(2, 3).t(),
        "turned alike": numbers(6).view(2, 3).t(),
        "turned there": numbers(6).view(2, 3),
        "gaps alike": numbers(8)[::2],
        "spread": numbers(1).expand(3),
        "tied": [weight := numbers(4), weight, weight.view(2, 2)],
        "none": torch.zeros(0, 3),
        "one": torch.tensor(7),
        "small": numbers(5, dtype=torch.float8_e4m3fn),
    }
    blank = {
        "shard": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]),
        "conj": torch.zeros(4, dtype=torch.complex64),
        "neg": torch.zeros(4),
        "turned": torch.zeros(3, 2),
        "turned alike": torch.zeros(2, 3).t(),
        "turned there": torch.zeros(3, 2).t(),
        "gaps alike": torch.zeros(8)[::2],
        "spread": torch.zeros(3),
        "tied": [torch.zeros(4), torch.zeros(4), torch.zeros(2, 2)],
        "none": torch.zeros(0, 3),
        "one": torch.tensor(0),
        "small": torch.zeros(5, dtype=torch.float8_e4m3fn),
    }
    if of_several:  # such a leaf is packed of its elements, so that all that is described comes first
        full["sparse"], blank["sparse"] = torch.eye(3).to_sparse(), torch.eye(3).to_sparse() * 2
    expected = statetree.distribute(full, statetree.offload(blank))
    places = {key: leaf.data_ptr() for key, leaf in blank.items() if type(leaf) is torch.Tensor and not leaf.is_sparse}
    for _ in range(4):
        statetree.distribute(source_of(full), blank, src=0, in_place=True)
        statetree.testing.assert_trees_equal(statetree.gather(blank), statetree.gather(expected), ties=False)
        assert all(blank[key].data_ptr() == place for key, place in places.items())
        for leaf in (blank["one"], blank["turned"], *blank["tied"]):
            leaf.zero_()


@pytest.mark.parametrize("of_several", [True, False])
def test_tensors_of_all_kinds_arrive(of_several):
    run_ranks(2, of_all_kinds, of_several)


def refuse_first():
    like = {"a": torch.zeros(4), "b": torch.zeros(3)}
    kind, message = attempt(
        lambda: statetree.distribute(source_of({"a": numbers(4), "b": numbers(4)}), like, src=0, in_place=True)
    )
    assert kind == "TreeMismatch"
    assert "at b" in message
    assert not like["a"].any()
    freed = {"a": torch.zeros(4), "b": torch.zeros(4)}
    if dist.get_rank() == 1:
        freed["b"].untyped_storage().resize_(0)
    kind, message = attempt(
        lambda: statetree.distribute(source_of({"a": numbers(4), "b": numbers(4)}), freed, src=0, in_place=True)
    )
    assert kind in ("RankMismatch", "TreeMismatch", "UnsupportedLeaf")
    assert " b" in message
    assert not freed["a"].any()


def test_nothing_is_written_where_something_does_not_fit():
    run_ranks(2, refuse_first)


def one_model_is_sent():
    full = {"w": numbers(LARGE), "b": numbers(5)}
    like = {"w": torch.zeros(LARGE), "b": torch.zeros(5)}
    sent = sent_by(lambda: statetree.distribute(source_of(full), like, src=0, in_place=True))[1]
    assert sent == (4 * LARGE + 20 if dist.get_rank() == 0 else 0)


@of_one_call
def test_one_model_is_sent():
    run_ranks(2, one_model_is_sent)
