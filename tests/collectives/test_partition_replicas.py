"""partition_replicas: of every chunk that several ranks hold, exactly one keeps it, and the bytes are balanced."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import check_equal, group_of, locals_of
from tests.collectives.models import state_of, whole
from tests.collectives.test_models import distributed
from tests.trees.plans import TensorPlan, build

RANKS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def kept_by_rank(tree):
    """Return, for every path, which ranks keep elements there. What is kept is what was there."""
    found = statetree.partition_replicas(tree)
    flat, before = statetree.to_flat(found)[0], statetree.to_flat(tree)[0]
    assert flat.keys() == before.keys()
    kept = {}
    for key, leaf in flat.items():
        assert type(leaf) is type(before[key]), key
        if isinstance(leaf, torch.Tensor):
            assert (leaf.shape, leaf.dtype) == (before[key].shape, before[key].dtype), key
        tensors = locals_of(leaf)
        on_meta = {tensor.is_meta for tensor in tensors}
        assert len(on_meta) <= 1, key
        kept[key] = on_meta != {True}
        if kept[key]:
            assert leaf is before[key], key
    return kept


def keep_of_copies():
    """Return who keeps what of tensors that every rank has."""
    tied = torch.arange(12.0)
    tree = {
        "large": torch.zeros(1000),
        **{f"small{number}": torch.zeros(50 + number) for number in range(40)},
        "tied": [tied, tied[2:], tied],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "number": 3,
        "object": build(TensorPlan((2,))),
        "sparse": torch.eye(3).to_sparse(),
    }
    return kept_by_rank(tree)


@RANKS
def test_each_copy_is_kept_once(world_size):
    rows = run_ranks(world_size, keep_of_copies)
    for key in rows[0]:
        holders = [rank for rank, row in enumerate(rows) if row[key]]
        assert len(holders) == (world_size if key == "number" else 1), (key, holders)
    assert len({tuple(row[f"tied.{number}"] for row in rows) for number in range(3)}) == 1
    sizes = {"large": 1000, **{f"small{number}": 50 + number for number in range(40)}}
    loads = [sum(size for key, size in sizes.items() if row[key]) for row in rows]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= 90  # the largest of the small ones


LAYOUTS = {
    "hsdp": Layout((5, 3), ((0, 1), (2, 3)), ("R", "S0")),
    "copies": Layout((4,), (0, 1, 2, 3), ("R",)),
    "shards": Layout((6,), (0, 1, 2, 3), ("S0",)),
    "inside": Layout((6,), (1, 2), ("R",)),
    "strided": Layout((9, 2), ((0, 1), (2, 3)), ("S0/2", "S0")),
    "transposed": Layout((5, 4), ((0, 2), (1, 3)), ("S1", "R"), geometry="transposed"),
    "partials": Layout((4,), ((0, 1), (2, 3)), ("R", "P")),
}


def keep_of_layouts():
    tree = {key: layout.build() for key, layout in LAYOUTS.items()}
    tree["again"] = tree["hsdp"]
    before = statetree.offload(tree)
    found = kept_by_rank(tree)
    check_equal(tree, before)
    return found


@pytest.mark.slow
def test_each_chunk_is_kept_once():
    rows = run_ranks(4, keep_of_layouts)
    for key, layout in LAYOUTS.items():
        kept = [
            layout.indices(rank).flatten() for rank in range(4) if rows[rank][key] and layout.local(rank) is not None
        ]
        elements = torch.cat(kept)
        if "P" in layout.placements:  # both partials of every element, each once
            assert elements.sort().values.tolist() == sorted([*range(4), *range(4)])
        else:
            assert elements.sort().values.tolist() == list(range(layout.full().numel())), key
    assert [row["again"] for row in rows] == [row["hsdp"] for row in rows]


def keep_of_models():
    """Check that what the ranks keep makes up the whole state, and each element comes from one rank."""
    counts = {}
    for kind in ("ddp", "hsdp", "fsdp2", "fsdp1", "fsdp1_hybrid", "tp", "fsdp2_tp"):
        state = state_of(kind)
        found = statetree.partition_replicas(state)
        flat = statetree.to_flat(found)[0]
        own = {
            key: sum(tensor.numel() for tensor in locals_of(leaf) if not tensor.is_meta) for key, leaf in flat.items()
        }
        counts[kind] = own
        assert distributed(found).keys() == distributed(state).keys()
    return counts


@pytest.mark.parametrize("world_size", [2, 4])
def test_models_are_kept_once(world_size):
    rows = run_ranks(world_size, keep_of_models)
    expected = {key: leaf.numel() for key, leaf in statetree.to_flat(whole())[0].items()}
    for kind in rows[0]:
        totals = {key: sum(row[kind][key] for row in rows) for key in expected}
        assert totals == expected, kind


def keep_in_group():
    """Take a group of two of four ranks."""
    group = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}[dist.get_rank()]
    groups = {ranks: group_of(*ranks) for ranks in ((1, 3), (0, 2))}
    tree = {"a": torch.ones(4), "b": Layout((3,), (0, 1, 2, 3), ("R",)).build()}
    found = statetree.partition_replicas(tree, group=groups[group])
    assert type(found["b"]) is DTensor
    return found["a"].is_meta, found["b"]._local_tensor.is_meta


@pytest.mark.slow
def test_a_group_shares_among_itself():
    rows = run_ranks(4, keep_in_group)
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    for first, second in zip(rows[0], rows[2], strict=True):
        assert first != second


def keep_jagged():
    tree = {"j": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "w": torch.ones(2)}
    found = statetree.partition_replicas(tree)
    return [found[key].values().is_meta if key == "j" else found[key].is_meta for key in tree]


def test_a_jagged_tensor_is_kept_by_one():
    first, second = run_ranks(2, keep_jagged)
    assert [a is not b for a, b in zip(first, second, strict=True)] == [True, True]


def keep_beside_empty():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    empty = DTensor.from_local(torch.empty(0, 3, dtype=torch.float64), mesh, [Replicate()])
    return kept_by_rank({"empty": empty, **{f"w{number}": torch.zeros(()).half() for number in range(5)}})


def test_what_is_empty_on_meshes_that_differ_changes_nothing_else():
    rows = run_ranks(2, keep_beside_empty)
    assert [sum(row[key] for row in rows) for key in rows[0] if key != "empty"] == [1] * 5


def keep_empty():
    two = (0, 2)
    made = {kind: Layout((0, 3), two, (kind,)).build() for kind in ("R", "S0", "S1")}
    return kept_by_rank({**made, "plain": torch.empty(0)})


def test_what_is_empty_is_kept_by_one_as_well():
    rows = run_ranks(3, keep_empty)
    assert [sum(row[key] for row in rows) for key in rows[0]] == [1] * 4
    assert not any(rows[1][key] for key in ("R", "S0", "S1"))
