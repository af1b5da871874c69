"""What the local tensor of a DTensor may be made of: wrappers of wrappers, results that are waited for, or an error."""

import functools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, check_in_step
from tests.collectives.test_divided_leaves import A, Scaled, mesh_of

NUMBERS = torch.arange(20.0).view(5, 4)
VERBS = {
    "gather": st.gather,
    "digest": st.digest,
    "audit": st.audit,
    "delta": lambda tree: st.delta(tree, st.offload(tree)),
    "reshard": lambda tree: st.reshard(tree, tree),
    "reshard in place": lambda tree: st.reshard(tree, tree, in_place=True),
    "partition_replicas": st.partition_replicas,
    "broadcast": st.broadcast,
}


def quantized(numbers, scale=0.5):
    return torch._make_per_tensor_quantized_tensor(numbers.to(torch.int8), scale, 3)


def per_channel(numbers):
    scales, zeros = torch.full((len(numbers),), 0.5), torch.zeros(len(numbers), dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(numbers.to(torch.int8), scales, zeros, 0)


SPECIAL = {
    "quantized": quantized,
    "per channel": per_channel,
    "coo": lambda numbers: numbers.to_sparse(),
    "csr": lambda numbers: numbers.to_sparse_csr(),
}


def refuse_special(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spec = distribute_tensor(NUMBERS, mesh, [Shard(0)])
    for name, make in SPECIAL.items():
        local = make(spec._local_tensor)
        inside = TwoTensor(local, local.clone()) if name in ("quantized", "per channel") else local
        for held in (local, inside, TwoTensor(inside, inside) if inside is not local else local):
            tree = {"w": DTensor(held, spec._spec, requires_grad=False)}
            expected = r"the leaf at w.* is distributed, and what this rank holds is a .* tensor: expected strided ones"
            if name in ("coo", "csr"):  # which say that they are cut otherwise, if they have sizes of their own
                expected = f"({expected}|the local tensor of the leaf at w.* does not fit its placements)"
            for verb in VERBS.values():
                with pytest.raises(st.UnsupportedLeaf, match=expected):
                    verb(tree)
            with pytest.raises(st.StateTreeError, match=expected):
                st.save(tree, directory / "refused")
            assert st.similarity(st.offload(tree), tree)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_strided_is_refused_with_its_path(world_size, tmp_path):
    run_ranks(world_size, refuse_special, tmp_path)


def nested(make):
    return {"w": TwoTensor(TwoTensor(make(0), make(1)), TwoTensor(make(2), make(3)))}


def nested_in_dtensor(mesh):
    spec = distribute_tensor(NUMBERS, mesh, [Shard(0)])._spec
    local = nested(lambda number: distribute_tensor(NUMBERS + 100 * number, mesh, [Shard(0)])._local_tensor.clone())
    return {"w": DTensor(local["w"], spec, requires_grad=False)}


class Mixed(TwoTensor):
    """A wrapper whose second tensor may be anything."""

    @staticmethod
    def __new__(cls, a, b, outer_size=None, outer_stride=None):
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __init__(self, *_):
        pass

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Mixed(inner["a"], inner["b"])

    def __repr__(self, **_):
        return f"Mixed({self.a}, {self.b})"


def move_mixed() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def spread(number):
        return distribute_tensor(NUMBERS + 100 * number, mesh, [Shard(0)])

    plain = NUMBERS + 7
    seconds = {
        "wrapper": lambda: TwoTensor(plain, plain + 1),
        "wrapper of a sparse one": lambda: Mixed(plain, plain.to_sparse()),
        "wrappers": lambda: TwoTensor(TwoTensor(plain, plain + 1), TwoTensor(plain + 2, plain + 3)),
        "wrapper of a distributed one": lambda: TwoTensor(spread(1), spread(2)),
    }
    for name, second in seconds.items():
        tree = {"w": Mixed(spread(0), second())}
        whole = st.gather(tree)
        assert st.digest(whole) == st.digest(tree), name
        for source, like in ((tree, whole), (whole, tree)):
            made = st.reshard(source, st.allocate_like(like))
            assert st.digest(made) == st.digest(whole), name
            assert st.similarity(made, like), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrappers_are_divided_as_their_partners_are(world_size):
    run_ranks(world_size, move_mixed)


def move_nested(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = nested(lambda number: distribute_tensor(NUMBERS + 100 * number, mesh, [Shard(number % 2)]))
    whole = nested(lambda number: NUMBERS + 100 * number)
    forms = {"spread": spread, "whole": whole, "within": nested_in_dtensor(mesh)}
    for name, tree in forms.items():
        assert st.similarity(st.gather(tree), whole), name
        assert st.digest(tree) == st.digest(whole), name
        with warnings.catch_warnings(action="ignore"):  # it takes a template
            st.save(tree, directory / name)
        for other, like in forms.items():
            made = st.reshard(tree, st.allocate_like(like))
            assert st.digest(made) == st.digest(whole), (name, other)
            assert st.similarity(made, like), (name, other)
            loaded = st.load(directory / name, st.allocate_like(like))
            assert st.similarity(loaded, like), (name, other)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrappers_of_wrappers_are_divided_alike_wherever_they_lie(world_size, tmp_path):
    run_ranks(world_size, move_nested, tmp_path)


def wait_for_parts(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.group.WORLD

    def reduced():
        result = all_reduce(NUMBERS / dist.get_world_size(), "sum", group)
        assert isinstance(result, AsyncCollectiveTensor)
        return result

    spec = DTensor.from_local(NUMBERS, mesh, [Shard(1)], run_check=False)._spec
    for number, wrap in enumerate(
        (
            lambda part: {"w": TwoTensor(part(), part())},
            lambda part: {"w": DTensor(TwoTensor(part(), part()), spec, requires_grad=False)},
        )
    ):
        plain = wrap(NUMBERS.clone)
        assert st.similarity(wrap(reduced), plain)
        assert st.digest(wrap(reduced)) == st.digest(plain)
        assert not st.delta(wrap(reduced), plain)
        assert not st.delta(plain, wrap(reduced))
        assert st.similarity(st.gather(wrap(reduced)), st.gather(plain))
        path = directory / f"saved{number}"
        with warnings.catch_warnings(action="ignore"):
            st.save(wrap(reduced), path)
        assert st.similarity(st.load(path, wrap(lambda: NUMBERS * 0)), plain)
        assert st.similarity(st.load(path, wrap(reduced)), plain)
    if dist.get_rank() == 0:
        st.save({"w": reduced()} if dist.get_world_size() == 1 else {"w": NUMBERS}, directory / "plain.pt")
        assert st.similarity(st.load(directory / "plain.pt"), {"w": NUMBERS})


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_of_collectives_inside_are_waited_for(world_size, tmp_path):
    run_ranks(world_size, wait_for_parts, tmp_path)


def two_dims(placements, values, scale):
    """Return a DTensor over two mesh dims whose local tensor has one scale for each of the rows of this rank."""
    mesh = mesh_of(2, 2)
    rows = [Shard(0) if placement == Shard(0) else Replicate() for placement in placements]
    own = distribute_tensor(values, mesh, placements)._local_tensor.clone()
    local = Scaled(own, distribute_tensor(scale, mesh, rows)._local_tensor.clone(), tuple(own.shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=values.shape, stride=values.stride())


def cut_scales_by_rows_alone(rows_first):
    rank, codes = dist.get_rank(), A.to(torch.int8)
    placements = [Shard(0), Shard(1)] if rows_first else [Shard(1), Shard(0)]
    others = [Shard(1), Replicate()] if rows_first else [Shard(0), Shard(0)]

    def check(found, expected):
        for name in ("values", "scale"):
            assert torch.equal(getattr(found, name), getattr(expected, name))

    for scale in (torch.arange(10.0), torch.arange(10.0).view(10, 1)):
        whole = Scaled(codes, scale, (10, 7))
        value, other = two_dims(placements, codes, scale), two_dims(others, codes, scale)
        check(st.gather({"w": value})["w"], whole)
        for source, target in ((value, other), (other, value), (value, value)):
            fresh = two_dims(target.placements, codes * 0, scale * 0)
            check(st.reshard({"w": source}, {"w": fresh})["w"]._local_tensor, target._local_tensor)
            assert not fresh._local_tensor.scale.any()
            st.reshard({"w": source}, {"w": fresh}, in_place=True)
            check(fresh._local_tensor, target._local_tensor)
        fresh = two_dims(placements, codes * 0, scale * 0)
        check(st.distribute({"w": whole}, {"w": fresh})["w"]._local_tensor, value._local_tensor)
        st.distribute({"w": whole} if rank == 3 else None, {"w": fresh}, src=3, in_place=True)
        check(fresh._local_tensor, value._local_tensor)
        assert st.audit({"w": value})
        check(st.partition_replicas({"w": value})["w"]._local_tensor, value._local_tensor)
        assert st.digest({"w": value}).tree == st.digest({"w": other}).tree
        with st.prepare(st.gather, {"w": value}) as gathered:
            value._local_tensor.scale.add_(1)
            assert torch.equal(gathered()["w"].scale, scale + 1)
            value._local_tensor.scale.add_(rank == 3)
            for verb in (lambda _: gathered(), st.gather, st.digest, st.audit):
                name, message = attempt(functools.partial(verb, {"w": value}))
                assert name == "RankMismatch"
                assert "at w.scale, where ranks hold alike" in message
                assert f"on rank {2 if rows_first else 1} and on rank 3" in message
                check_in_step()


def test_scales_of_rows_are_cut_by_rows_alone_and_compared_where_ranks_hold_the_same_rows():
    for rows_first in (True, False):
        run_ranks(4, cut_scales_by_rows_alone, rows_first)


def compare_in_each_mesh():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    local = Scaled(torch.ones(4, 3, dtype=torch.int8), torch.ones(4), (4, 3))
    tree = {"w": DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(4, 6), stride=(6, 1))}
    with st.prepare(st.gather, tree) as gathered:
        for differing in ([1], [1, 2], [0, 3]):  # where two meshes differ in opposite ways, it does not cancel out
            local.scale.fill_(1 + (rank in differing))
            for call in (gathered, lambda: st.gather(tree, replicas="first"), lambda: st.digest(tree)):
                name, message = attempt(call)
                assert name == "RankMismatch"
                assert "at w.scale, where ranks hold alike" in message
                assert "on rank 0 and on rank 1." in message or differing != [1]
                check_in_step()


def test_parts_that_ranks_hold_alike_are_compared_in_each_mesh():
    run_ranks(4, compare_in_each_mesh)
