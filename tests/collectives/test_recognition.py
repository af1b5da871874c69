"""Collectives that know a call again: the result is that of any other, or it is not known; nothing is kept alive."""

import contextlib
import functools
import gc
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import statetree
from statetree import torch_internals
from statetree.exchange import recognition, sighting
from statetree.exchange.group import Group
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same
from tests.kept_calls import MODE

pytestmark = pytest.mark.skipif(MODE != "", reason="these tests choose themselves what is known")


@contextlib.contextmanager
def recognition_with(**constants):
    """Start with nothing known, and set constants; by default every call is kept."""
    constants = {"FEWEST": 0, "_SEEN_BEFORE": 0, **constants}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(recognition if name.startswith("_") else sighting, name, value)
        recognition._KEPT.clear()
        recognition._SEEN.clear()
        yield
        recognition._KEPT.clear()


@contextlib.contextmanager
def repeats():
    """Give a list that has an entry for each call that was known on this rank: whether it was on all."""
    found, repeat = [], recognition.KeptCall.repeat

    def watched(kept, *given):
        found.append(repeat(kept, *given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition.KeptCall, "repeat", watched)
        yield found


def anew(call):
    """Make a call that nobody knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "sighted", lambda *_: None)
        return call()


def sharded(rows, first, placement=None):
    """Return rows of unique numbers that are distributed over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = placement or Shard(0)
    full = torch.arange(first, first + rows * 4.0).view(rows, 4)
    each = -(-rows // mesh.size())
    local = full[dist.get_rank() * each :][:each].clone() if placement == Shard(0) else full.clone()
    shape = full.shape
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=full.stride())


def state():
    """Return a tree with ties, a parameter, plain tensors and values, uneven shards and a partial sum."""
    weight, plain = sharded(5, 100), torch.arange(6.0)
    return {
        "weight": weight,
        "tied": weight,
        "even": sharded(4, 200),
        "small": sharded(1, 300),
        "everywhere": sharded(2, 400, Replicate()),
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "plain": plain,
        "part": plain[2:],
        "step": 7,
        "nested": [None, {"lr": 0.5, "name": "adam"}],
    }


def change(tree):
    """Change every element in place."""
    seen = set()
    for leaf in statetree.flatten(tree)[0]:
        tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor._is_view():
            if tensor.data_ptr() not in seen:
                tensor.data.add_(1000)
            seen.add(tensor.data_ptr())


def like_state():
    return blank({**state(), "even": torch.zeros(4, 4)})


def verbs():
    """Return what each verb is called with, by its name: trees to change, and the call."""
    tree = {**state(), "summed": sharded(2, 500, Partial())}
    like, rank = like_state(), dist.get_rank()
    target, full = blank(state()), anew(lambda: statetree.gather(state()))
    del target["part"], full["part"]  # what is written into tensors that overlap is looked at before
    given = full if rank == 1 else None
    source = state()
    return {
        "gather": ([tree], lambda: statetree.gather(tree)),
        "gather to one": ([tree], lambda: statetree.gather(tree, dst=1)),
        "reshard": ([source], lambda: statetree.reshard(source, like)),
        "reshard in place": ([source], lambda: statetree.reshard(source, like, in_place=True)),
        "distribute": ([full], lambda: statetree.distribute(given, target, src=1)),
        "distribute in place": ([full], lambda: statetree.distribute(given, target, src=1, in_place=True)),
        "broadcast": ([source], lambda: statetree.broadcast(source, src=1)),
    }


#: Leaves that every verb makes anew.
FRESH = ("weight", "tied", "even", "small", "everywhere")


def make_known(name):
    """Make calls again that are known, and compare with calls that are not."""
    trees, call = verbs()[name]
    with recognition_with(), repeats() as known:
        results = []
        for _ in range(3):
            results.append(call())
            copy = statetree.offload(results[-1])
            check_same(copy, anew(call))
            for tree in trees:
                change(tree)
            if "in place" not in name:  # nobody else has the memory of what is fresh
                check_same({key: results[-1][key] for key in FRESH}, {key: copy[key] for key in FRESH})
        assert known == [True, True], known
        places = [
            {leaf.data_ptr() for leaf in statetree.flatten(tree)[0] if type(leaf) is torch.Tensor} for tree in results
        ]
        if name == "broadcast":
            assert not places[0] & places[1]
    check_in_step()


@pytest.mark.parametrize(
    "name",
    ["gather", "gather to one", "reshard", "reshard in place", "distribute", "distribute in place", "broadcast"],
)
def test_a_call_that_is_known_has_the_same_result(name):
    run_ranks(2, make_known, name)


def write_known():
    """Writing into tensors is noted in their versions, although an alias is written."""
    source, like = state(), like_state()
    with recognition_with(), repeats() as known:
        for _ in range(3):
            before = like["weight"]._local_tensor._version
            found = statetree.reshard(source, like, in_place=True)
            assert found["weight"] is like["weight"]
            assert like["weight"]._local_tensor._version > before
        assert known == [True, True]


def test_tensors_that_are_written_say_so():
    run_ranks(2, write_known)


def other_memory(tree):
    tree["even"]._local_tensor = tree["even"]._local_tensor + 1


def other_strides(tree):
    local = tree["even"]._local_tensor
    tree["even"]._local_tensor = local.as_strided(local.shape, (1, local.shape[0]))


def smaller_storage(tree):
    tree["even"]._local_tensor.untyped_storage().resize_(tree["even"]._local_tensor.nbytes + 64)


def other_ties(tree):
    tree["tied"] = sharded(5, 900)


def one_object_less(tree):
    local, mesh = tree["weight"]._local_tensor, tree["weight"].device_mesh
    tree["tied"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1))


def requires_grad(tree):
    tree["even"].requires_grad_()


def attribute(tree):
    tree["even"].note = 1


def other_class(tree):
    tree["plain"] = torch.nn.Parameter(tree["plain"])


def renamed(tree, key):
    """Give a leaf another key, in the same place."""
    rows = [(key if name == "even" else name, leaf) for name, leaf in tree.items()]
    tree.clear()
    tree.update(rows)


def other_key(tree):
    renamed(tree, "renamed")


def other_key_type(tree):
    renamed(tree, 1)


def other_placement(tree):
    tree["everywhere"] = DTensor.from_local(
        tree["everywhere"]._local_tensor, tree["everywhere"].device_mesh, [Partial()], run_check=False
    )


CHANGES = [
    other_memory, other_strides, smaller_storage, other_ties, one_object_less, requires_grad, attribute, other_class,
    other_key, other_key_type, other_placement,
]  # fmt: skip


def gather_changed(changed):
    """Gather a tree that is known, changed it, gather it again."""
    tree = state()
    with recognition_with(), repeats() as known:
        statetree.gather(tree)
        statetree.gather(tree)
        assert known == [True]
        changed(tree)
        found = statetree.gather(tree)
        assert known == [True], "it was taken for what it was"
        expected = anew(lambda: statetree.gather(tree))
        check_same(found, expected)
        leaves = zip(statetree.flatten(found)[0], statetree.flatten(expected)[0], strict=True)
        for one, other in leaves:
            assert type(one) is type(other)
            assert getattr(one, "requires_grad", None) == getattr(other, "requires_grad", None)
            assert getattr(one, "__dict__", None) == getattr(other, "__dict__", None)
        assert (found["tied"] is found["weight"]) == (tree["tied"] is tree["weight"])
    check_in_step()


@pytest.mark.parametrize("changed", CHANGES, ids=lambda changed: changed.__name__)
def test_what_changed_is_not_known(changed):
    run_ranks(2, gather_changed, changed)


def gather_freed():
    """A storage that was freed is refused, though all else is as it was."""
    tree = state()
    with recognition_with():
        for _ in range(2):
            statetree.gather(tree)
        if dist.get_rank() == 1:
            tree["even"]._local_tensor.untyped_storage().resize_(0)
        name, _ = attempt(lambda: statetree.gather(tree))
        assert name == ("UnsupportedLeaf" if dist.get_rank() == 1 else "RankMismatch")
    check_in_step()


def test_freed_memory_is_not_read():
    run_ranks(2, gather_freed)


def change_values_and_options():
    tree, full, target = state(), anew(lambda: statetree.gather(state())), blank(state())
    rank = dist.get_rank()
    with recognition_with(), repeats() as known:
        for step in range(3):  # what is passed through may be another value
            tree["step"] = step
            assert statetree.gather(tree)["step"] == step
        assert known == [True, True]
        for number, value in enumerate((7, 7, 8, 8, 8.0, -0.0, 0.0)):  # what is sent may not
            full["step"] = value
            found = statetree.distribute(full if rank == 0 else None, target, src=0, in_place=True)["step"]
            assert repr(found) == repr(value), number
        del known[:]
        other = dist.new_group([0, 1])
        calls = [
            functools.partial(statetree.gather, tree, dst=0),
            functools.partial(statetree.gather, tree, dst=1),
            functools.partial(statetree.gather, tree, bucket_bytes=64),
            functools.partial(statetree.gather, tree, group=other),
            functools.partial(statetree.gather, tree, timeout=77),
        ]
        for call in calls:
            check_same(call(), anew(call))
        assert not known
        name, _ = attempt(lambda: statetree.gather(tree, dst=True))
        assert name == "RankMismatch"
    check_in_step()


def test_other_values_and_options_are_not_known():
    run_ranks(2, change_values_and_options)


def know_alone(directory):
    """Know a call on one rank only, or another one on each."""
    one, other = state(), state()
    statetree.save(one, directory / "saved")
    change(other)
    rank = dist.get_rank()
    with recognition_with(), repeats() as known:
        for tree in (one, other, one, other):
            statetree.gather(tree)
        assert known == [True, True]
        if rank == 1:
            recognition._KEPT.clear()
        change(one)
        check_same(statetree.gather(one), anew(lambda: statetree.gather(one)))
        check_same(statetree.gather(one), anew(lambda: statetree.gather(one)))
        assert known == ([True, True, False, True] if rank == 0 else [True, True, True])
        for tree in (one, other):
            statetree.gather(tree)
        del known[:]
        mine = one if rank == 0 else other  # of one structure, so that nobody minds: each has a part of the result
        check_same(statetree.gather(mine), anew(lambda: statetree.gather(mine)))
        assert known == [False]
        name, message = attempt(lambda: statetree.gather(one, dst=0) if rank == 0 else statetree.gather(one))
        assert name == "RankMismatch"
        assert "the ranks do not call the same" in message
        name, message = attempt(
            lambda: statetree.gather(one) if rank == 0 else statetree.load(directory / "saved", state())
        )
        assert name == "RankMismatch"
        assert "load on rank 1" in message
        name, message = attempt(lambda: statetree.gather(one if rank == 0 else {"other": 1}))
        assert name == "RankMismatch", message
        name, message = attempt(lambda: statetree.gather(one if rank == 0 else {"lock": threading.Lock()}))
        assert name in ("RankMismatch", "UnsupportedLeaf"), message
        check_same(statetree.gather(one), anew(lambda: statetree.gather(one)))
    check_in_step()


def test_ranks_that_do_not_know_a_call_are_joined(tmp_path):
    run_ranks(2, know_alone, tmp_path)


def fail_in_vain():
    """Calls that never are made again are not recorded for ever."""
    tree, recorded = state(), []
    record = recognition.KeptCall.__init__

    def watched(kept, *args, **options):
        recorded.append(None)
        record(kept, *args, **options)

    with recognition_with(_SEEN_BEFORE=1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition.KeptCall, "__init__", watched)
        for _ in range(10):
            if dist.get_rank() == 1:
                other_memory(tree)
            statetree.gather(tree)
    assert len(recorded) == (recognition._MOST_VAIN if dist.get_rank() == 0 else 0)


def test_calls_that_are_in_vain_are_given_up():
    run_ranks(2, fail_in_vain)


def let_go():
    """Tensors, and a process group that was destroyed, are not kept."""
    with recognition_with():
        tree = state()
        statetree.gather(tree)
        statetree.gather(tree)
        assert recognition._KEPT
        storages = [weakref.ref(leaf._local_tensor) for leaf in tree.values() if isinstance(leaf, DTensor)]
        del tree
        gc.collect()
        assert not any(reference() for reference in storages)
        tree, group = state(), dist.new_group([0, 1])
        for _ in range(2):
            found = statetree.gather(tree, group=group)
        dist.destroy_process_group(group)
        name, _ = attempt(lambda: statetree.gather(tree, group=group))
        assert name == "RankMismatch"
        check_same(statetree.gather(tree), found)
        assert all(kept.is_alive for kept in recognition._KEPT.values())
        for number in range(3 * recognition._KEPT_CALLS):
            statetree.gather(tree, bucket_bytes=1000 + number)
        assert len(recognition._KEPT) == recognition._KEPT_CALLS
        assert len(recognition._SEEN) <= recognition._SEEN_CALLS
    check_in_step()


def test_nothing_is_kept_alive():
    run_ranks(2, let_go, fresh=True)


def gather_in_threads():
    """Gather one tree in several threads, each with a group of its own."""
    tree = state()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    expected = anew(lambda: statetree.gather(tree))
    wrong = []

    def work(group):
        for _ in range(5):
            found = statetree.gather(tree, group=group)
            if not statetree.similarity(found, expected, values=True):
                wrong.append(group)

    with recognition_with():
        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    check_in_step()


def test_threads_have_results_of_their_own():
    run_ranks(2, gather_in_threads)


def see_twice():
    """By default a call is kept that is made for the second time, of so many leaves."""
    tree = {f"layer{number}": sharded(4, number) for number in range(20)}
    with recognition_with(FEWEST=16, _SEEN_BEFORE=1), repeats() as known:
        for _ in range(4):
            check_same(statetree.gather(tree), anew(lambda: statetree.gather(tree)))
        assert known == [True, True]
        for _ in range(4):
            statetree.gather({"few": tree["layer1"]})
        assert known == [True, True]
    with recognition_with(MOST_BYTES=100), repeats() as known:
        for _ in range(4):
            statetree.gather(tree)
        assert not known


def test_few_leaves_and_many_bytes_are_not_kept():
    run_ranks(2, see_twice)


@pytest.mark.parametrize(
    ("error", "is_held"),
    [(KeyboardInterrupt(), True), (statetree.RankMismatch("late"), True), (statetree.TreeMismatch("no", []), False)],
    ids=["interrupt", "timeout", "refused"],
)
def test_what_a_backend_may_still_write_into_is_held(error, is_held, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(recognition, "_LOST", [])
    with pytest.raises(type(error)):
        recognition._moved(fail, "the tensors")
    held = recognition._LOST
    assert held == (["the tensors"] if is_held else [])


class Late(Exception):
    """What the handler of an alarm raises."""


#: What is interrupted on the first rank, and which rank does not know the call before, if one does not.
LOOKS = {
    "sighting": (sighting, "traverse", None),
    "comparing": (torch_internals, "_while_recording", None),
    "guarding": (torch_internals, "_while_recording", 0),
    "aliasing": (sighting.Sighting, "aliases", 0),
    "aliasing once others do not know": (sighting.Sighting, "aliases", 1),
}


def interrupt_looking(place, error):
    """Let a signal arrive on one rank while it looks at what a call is given."""
    tree, rank = state(), dist.get_rank()
    owner, name, forgetful = LOOKS[place]

    def handle(*_):
        raise error

    with recognition_with():
        for _ in range(2):
            statetree.gather(tree)
        if rank == forgetful:
            recognition._KEPT.clear()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                before = signal.signal(signal.SIGALRM, handle)
                patch.setattr(owner, name, lambda *_, **__: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(statetree.RankMismatch if rank else error, match="rank 0 failed" if rank else None):
                statetree.gather(tree)
        if rank == 0:
            signal.signal(signal.SIGALRM, before)
        change(tree)
        check_same(statetree.gather(tree), anew(lambda: statetree.gather(tree)))
    check_in_step()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("place", LOOKS)
def test_what_interrupts_the_looking_is_raised_and_told(place, error):
    run_ranks(2, interrupt_looking, place, error)


def distribute_alone():
    """With ``src=None`` nobody waits for a rank that is interrupted."""
    full, like = anew(lambda: statetree.gather(state())), blank(state())
    with recognition_with(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "sighted", None)
        found = statetree.distribute(full, like)
    check_same(anew(lambda: statetree.gather(found)), full)
    check_in_step()


def test_a_call_without_communication_is_not_looked_at():
    run_ranks(2, distribute_alone)


def test_what_a_call_is_given_is_looked_at_without_collections(monkeypatch):
    seen = []
    monkeypatch.setattr(recognition, "Sighting", lambda *_: seen.append(gc.isenabled()))
    recognition.sighted(Group(None, 0, [0], "gather"), {"tree": {}}, ["tree"], "gather")
    assert seen == [False]
    assert gc.isenabled()
