"""broadcast: any tree arrives on every rank as it is on the source."""

import warnings

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import statetree
from statetree.exchange.description import Description
from statetree.testing import Layout, run_ranks
from statetree.tree.registry import CONTAINERS
from tests.collectives.checks import attempt, check_equal, check_in_step, locals_of
from tests.judge import tree_differences
from tests.trees import TREES
from tests.trees.optimizers import optimizer_plans
from tests.trees.plans import build, tied_plans, tree_plans

BUCKETS = st.sampled_from([64 << 20, 1, 100])
RANKS = pytest.mark.parametrize("world_size", [2, 3])
#: Trees of the corpus whose functions have no names that another process could find them by.
UNNAMED = {"default_dicts", "module_and_optimizer", "module_with_hooks", "objects", "atoms", "fake"}


def send(plan, src, bucket_bytes, others):
    """Broadcast what a plan makes, and compare it with what the same plan makes here."""
    expected = build(plan)
    given = build(plan) if others == "equal" or dist.get_rank() == src else None
    found = statetree.broadcast(given, src=src, bucket_bytes=bucket_bytes)
    check_equal(found, expected)
    if given is not None:
        check_equal(given, expected)
        assert pointers(found).isdisjoint(pointers(given))


def pointers(tree):
    """Return the addresses of the memory of ordinary tensors."""
    leaves = statetree.flatten(tree)[0]
    tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_nested} - {0}


@RANKS
@pytest.mark.parametrize(
    "plans",
    [tree_plans(max_leaves=6), tied_plans(max_leaves=6), optimizer_plans()],
    ids=["states", "ties", "optimizers"],
)
def test_any_tree_arrives(world_size, plans):
    @hypothesis.settings(max_examples=max(1, hypothesis.settings.default.max_examples // 4))
    @hypothesis.given(plans, st.integers(0, world_size - 1), BUCKETS, st.sampled_from(["none", "equal"]))
    def holds(plan, src, bucket_bytes, others):
        run_ranks(world_size, send, plan, src, bucket_bytes, others)

    holds()


def send_corpus(others):
    """Broadcast every tree of the corpus, and return what became of them."""
    outcomes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, tree in enumerate(TREES):
            if others == "equal" and tree.keyed_by_identity:
                continue  # such trees are equal to no other
            src = number % 2
            given = tree.make() if dist.get_rank() == src or others == "equal" else None
            outcome = []
            name, message = attempt(
                lambda given=given, src=src, outcome=outcome: outcome.append(statetree.broadcast(given, src=src))
            )
            check_in_step()
            if name:
                outcomes[tree.name] = f"{name}: {message}"
            else:
                found = tree_differences(outcome[0], tree.make(), storages=tree.name != "tied_far_apart")
                outcomes[tree.name] = "\n".join(map(str, found))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("others", ["none", "equal"])
def test_awkward_trees_arrive_or_are_refused(others):
    rows = run_ranks(2, send_corpus, others)
    refused = {tree.name for tree in TREES if tree.refused}
    for outcomes in rows:
        assert len(outcomes) > 100
        for name, outcome in outcomes.items():
            if name in refused | UNNAMED:
                assert outcome.startswith(("UnsupportedLeaf: broadcast: ", "RankMismatch: broadcast: ")), (
                    name,
                    outcome,
                )
            else:
                assert not outcome, (name, outcome)


def send_modules_and_quantized():
    rank = dist.get_rank()
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    tree = {"torch": torch, "q": quantized, "w": torch.arange(3.0)}
    found = statetree.broadcast(tree if rank == 0 else None)
    assert found["torch"] is torch
    assert torch.equal(found["q"].int_repr(), quantized.int_repr())
    gathered = statetree.gather(tree, dst=0)
    assert gathered["q"].is_meta == gathered["w"].is_meta == (rank == 1)
    assert (gathered["q"].dtype, gathered["q"].shape) == (torch.qint8, (4,))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_modules_go_by_name_and_quantized_tensors_go_to_meta():
    run_ranks(2, send_modules_and_quantized)


def send_distributed():
    ranks = tuple(range(4))
    layouts = {
        "shards": Layout((5, 3), ranks, ("S0",)),
        "copies": Layout((3,), ranks, ("R",)),
        "both": Layout((7, 2), ((0, 1), (2, 3)), ("R", "S0")),
        "partials": Layout((3,), ranks, ("P",)),
        "inside": Layout((6,), (1, 2), ("S0",), geometry="inside"),
    }
    rank = dist.get_rank()
    tree = {name: layout.build() for name, layout in layouts.items()}
    tree["plain"] = torch.arange(3) + rank
    tree["both"]._local_tensor.add_(100 * rank)
    tree["copies"]._local_tensor.add_(100 * rank)
    before = statetree.offload(tree)
    found = statetree.broadcast(tree, src=3)
    check_equal(tree, before)
    assert torch.equal(found["plain"], torch.arange(3) + 3)
    # Elements are the source's wherever it has a replica of them.
    assert torch.equal(found["copies"]._local_tensor, layouts["copies"].local(3) + 300)
    origin = {0: 0, 1: 3, 2: 2, 3: 3}[rank]  # rank 3 has nothing of what 0 and 2 have
    assert torch.equal(found["both"]._local_tensor, layouts["both"].local(rank) + 100 * origin)
    for name in ("shards", "partials", "inside"):
        expected = layouts[name].local(rank)
        if expected is not None:
            assert torch.equal(found[name]._local_tensor, expected), name
    for name in layouts:
        assert type(found[name]) is DTensor
        assert found[name].placements == tree[name].placements
        held, own = found[name]._local_tensor.untyped_storage(), tree[name]._local_tensor.untyped_storage()
        assert held.data_ptr() != own.data_ptr() or not held.nbytes()
    name, message = attempt(lambda: statetree.broadcast(tree if rank == 3 else None, src=3))
    assert name == "UnsupportedLeaf"
    assert "expected the tree on every rank" in message
    check_in_step()


@pytest.mark.slow
def test_distributed_leaves_keep_their_layout():
    run_ranks(4, send_distributed)


def send_nothing():
    placed = Layout((4, 3), (0, 1), ("S0",)).build()
    found = statetree.broadcast({"w": statetree.allocate_like(placed, device="meta"), "v": placed})
    assert type(found["w"]) is DTensor
    assert found["w"].placements == placed.placements
    assert found["w"]._local_tensor.is_meta
    assert torch.equal(found["v"]._local_tensor, placed._local_tensor)
    check_in_step()


def test_distributed_leaves_without_elements_stay_so():
    run_ranks(2, send_nothing)


def a_key():
    """Be a key of a mapping."""


def send_keys():
    """Broadcast mappings that are keyed by functions and classes, in other orders on each rank."""
    keys = [a_key, DTensor, dict, torch.nn.Linear.forward, len, torch.relu, (a_key, 1), frozenset({dict})]
    keys = keys[dist.get_rank() :] + keys[: dist.get_rank()]
    tree = {key: torch.full((2,), float(dist.get_rank())) for key in keys}
    found = statetree.broadcast(tree, src=1)
    assert found.keys() == tree.keys()
    assert all(leaf.tolist() == [1, 1] for leaf in found.values())
    lambdas = {(lambda: 1): torch.zeros(1), (lambda: 2): torch.ones(1)}
    assert [leaf.item() for leaf in statetree.gather(lambdas).values()] == [0, 1]
    report = [str(path) for path in statetree.paths({a_key: 1, dict: 2})]
    assert report == [f"{__name__}.a_key", "<class 'dict'>"]


@RANKS
def test_functions_and_classes_are_keys_like_others(world_size):
    run_ranks(world_size, send_keys)


def disagree_with_the_absent():
    """Rank 2 passes another tree than the source, and the others pass None."""
    rank = dist.get_rank()
    given = {0: {"a": torch.zeros(2), "b": 1}, 2: {"a": torch.zeros(3), "b": 1}}.get(rank)
    name, message = attempt(lambda: statetree.broadcast(given))
    assert name == "RankMismatch"
    assert "at a: expected one layout" in message
    assert "(2,) on rank 0" in message
    assert "(3,) on rank 2" in message
    check_in_step()
    assert statetree.broadcast(None) is None


@pytest.mark.slow
def test_trees_other_than_the_sources_are_refused():
    run_ranks(4, disagree_with_the_absent)


CALLS = {
    "broadcast": lambda: statetree.broadcast({"w": torch.arange(4.0)}),
    "distribute": lambda: statetree.distribute({"w": torch.arange(4.0)}, {"w": torch.zeros(4)}, src=0),
}


def run_out_of_memory_at_last(verb):
    """Let one rank fail once it has all elements: the others hear of it, and do not wait."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Description, "put_together", raise_memory_error)
        found = attempt(CALLS[verb])
    check_in_step()
    return found


def raise_memory_error(*_args):
    raise MemoryError("no memory left")


@pytest.mark.parametrize("verb", CALLS)
def test_a_rank_that_fails_at_last_is_told_to_all(verb):
    (other, message), (own, _) = run_ranks(2, run_out_of_memory_at_last, verb)
    assert own == "MemoryError"
    assert other == "RankMismatch"
    assert "rank 1 failed" in message


class Summed:
    """A container whose unflatten function looks at elements."""

    def __init__(self, values):
        self.values = values
        self.total = locals_of(values)[0].sum().item()


def broadcast_sums():
    if Summed not in CONTAINERS:
        statetree.register_container(Summed, lambda summed: ((summed.values,), None), lambda _, values: Summed(*values))
    number = dist.get_rank() + 1.0
    replicas = Layout((10,), (0, 1), ("R",)).build()
    locals_of(replicas)[0].fill_(number)
    given = {"plain": Summed(torch.full((1000,), number)), "replicas": Summed(replicas)}
    found = statetree.broadcast(given)
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.scales = Summed(torch.full((1000,), number))
    inside = statetree.broadcast({"weight": weight})["weight"].scales
    check_in_step()
    return {**{name: summed.total for name, summed in found.items()}, "attribute": inside.total}


def test_unflatten_functions_of_users_are_given_elements():
    assert run_ranks(2, broadcast_sums) == [{"plain": 1000.0, "replicas": 10.0, "attribute": 1000.0}] * 2
