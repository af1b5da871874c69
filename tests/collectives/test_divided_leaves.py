"""Leaves that are made of several distributed tensors: DTensors of wrappers, wrappers of DTensors, users' classes."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, check_in_step

A = torch.arange(70.0).view(10, 7)
B = A + 1000
RANKS = pytest.mark.parametrize("world_size", [1, 2, 4])


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))


def wrapped(mesh, placements, a=A, b=B):
    """Return a DTensor whose local tensor is a TwoTensor, cut as torch cuts."""
    pieces = [distribute_tensor(tensor, mesh, placements)._local_tensor.clone() for tensor in (a, b)]
    local = TwoTensor(*pieces)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=a.shape, stride=a.stride())


def around(mesh, placements, a=A, b=B):
    """Return a TwoTensor of DTensors."""
    return TwoTensor(distribute_tensor(a, mesh, placements), distribute_tensor(b, mesh, placements))


def locals_of(value):
    if isinstance(value, DTensor):
        return [value._local_tensor.a, value._local_tensor.b]
    return [part._local_tensor if isinstance(part, DTensor) else part for part in (value.a, value.b)]


def check_same(found, expected):
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    assert all(torch.equal(one, other) for one, other in zip(locals_of(found), locals_of(expected), strict=True))


def zeroed(value):
    made = st.offload(value)
    for part in locals_of(made):
        part.zero_()
    return made


def layouts():
    size = dist.get_world_size()
    flat = mesh_of(size)
    found = [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()])]
    if size == 4:
        square = mesh_of(2, 2)
        found += [(square, [Replicate(), Shard(0)]), (square, [Shard(1), Shard(0)]), (square, [Shard(0), Shard(0)])]
    return found


def move_everywhere():
    rank = dist.get_rank()
    full = TwoTensor(A.clone(), B.clone())
    for mesh, placements in layouts():
        for make in (wrapped, around):
            value = make(mesh, placements)
            tree = {"w": value, "plain": torch.ones(3), "again": value, "step": 7}
            for bucket_bytes in (100, 64 << 20):
                whole = st.gather(tree, bucket_bytes=bucket_bytes)
                check_same(whole["w"], full)
                assert whole["plain"] is tree["plain"]
                assert whole["again"].a.data_ptr() == whole["w"].a.data_ptr()
            there = st.gather(tree, dst=0)["w"]
            assert (there.shape, there.a.is_meta, there.b.is_meta) == (A.shape, rank != 0, rank != 0)
            streamed = st.chain(functools.partial(st.gather, dst=0), st.offload)(tree)["w"]
            assert streamed.a.is_meta if rank else torch.equal(streamed.a, A)
            for src in (None, 0, dist.get_world_size() - 1):
                given = {"w": full, "step": 8} if src is None or src == rank else None
                like = {"w": zeroed(value), "step": 0}
                made = st.distribute(given, like, src=src)
                check_same(made["w"], value)
                assert made["step"] == 8
                assert not any(part.any() for part in locals_of(like["w"]))
                written = st.distribute(given, like, src=src, in_place=True)
                assert written["w"] is like["w"]
                check_same(like["w"], value)
            check_same(st.broadcast(tree)["w"], value)
            assert st.digest({"w": value}) == st.digest({"w": full})
            for other_mesh, others in layouts():
                for other in (wrapped, around):
                    like = zeroed(other(other_mesh, others))
                    check_same(st.reshard({"w": value}, {"w": like})["w"], other(other_mesh, others))
                    assert st.reshard({"w": value}, {"w": like}, in_place=True)["w"] is like
                    check_same(like, other(other_mesh, others))


@RANKS
def test_every_verb_moves_them(world_size):
    run_ranks(world_size, move_everywhere)


def prepare_and_change():
    mesh = mesh_of(dist.get_world_size())
    value, like = wrapped(mesh, [Shard(0)]), zeroed(around(mesh, [Shard(1)]))
    with (
        st.prepare(st.gather, {"w": value}) as gathered,
        st.prepare(st.reshard, {"w": value}, {"w": like}, in_place=True) as moved,
    ):
        for step in range(3):
            value._local_tensor.a.add_(step)
            assert torch.equal(gathered()["w"].a, A + sum(range(step + 1)))
            moved()
            check_same(like, around(mesh, [Shard(1)], A + sum(range(step + 1))))
        value._local_tensor.a = value._local_tensor.a.clone()
        for call in (gathered, moved):
            name, message = attempt(call)
            assert name == "RankMismatch"
            assert "is not what it was" in message


@RANKS
def test_prepared_calls_move_them(world_size):
    run_ranks(world_size, prepare_and_change)


def prepare_from_one_rank():
    mesh, is_source = mesh_of(dist.get_world_size()), dist.get_rank() == 0
    for make in (wrapped, around):
        like, full = zeroed(make(mesh, [Shard(0)])), TwoTensor(A.clone(), A + 1)
        with st.prepare(st.distribute, {"w": full} if is_source else None, {"w": like}, src=0, in_place=True) as sync:
            for step in range(3):
                full.a.add_(step)
                sync()
                assert torch.equal(st.gather({"w": like})["w"].a, A + sum(range(step + 1)))


@RANKS
def test_prepared_calls_move_what_one_rank_holds_whole(world_size):
    run_ranks(world_size, prepare_from_one_rank)


def keep_replicas():
    value = wrapped(mesh_of(dist.get_world_size()), [Replicate()])
    kept = st.partition_replicas({"w": value})["w"]
    return [part.is_meta for part in locals_of(kept)]


def test_parts_of_a_replica_are_kept_together():
    rows = run_ranks(2, keep_replicas)
    assert sorted(rows) == [[False, False], [True, True]]


class Scaled(torch.Tensor):
    """A quantized tensor: integers, and one scale for all, or one for each row."""

    @staticmethod
    def __new__(cls, values, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, values, scale, shape):
        self.values, self.scale = values, scale
        self.kept_shape = shape

    def __tensor_flatten__(self):
        return ["values", "scale"], {"shape": self.kept_shape}

    @staticmethod
    def __tensor_unflatten__(inner, metadata, outer_size, outer_stride):
        return Scaled(inner["values"], inner["scale"], metadata["shape"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Scaled(args[0].values, args[0].scale, args[0].kept_shape)
        raise NotImplementedError(func)


def scaled(mesh, scale):
    placements = [Shard(0)]
    values = distribute_tensor(A.to(torch.int8), mesh, placements)._local_tensor.clone()
    if scale.dim() == 2:
        scale = distribute_tensor(scale, mesh, placements)._local_tensor.clone()
    local = Scaled(values, scale, tuple(values.shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=A.shape, stride=A.stride())


def quantize():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(size)
    for scale in (torch.arange(10.0).view(10, 1), torch.tensor(3.0)):
        whole = st.gather({"w": scaled(mesh, scale)})["w"]
        assert whole.kept_shape == (10, 7)
        assert torch.equal(whole.values, A.to(torch.int8))
        assert torch.equal(whole.scale, scale)
    if size > 1:  # nobody could say which scale is meant
        local = scaled(mesh, torch.tensor(float(rank)))
        for call in (st.gather, st.digest, lambda tree: st.reshard(tree, {"w": scaled(mesh, torch.tensor(0.0))})):
            name, message = attempt(lambda call=call: call({"w": local}))
            assert name == "RankMismatch"
            assert "ranks hold alike" in message
            check_in_step()
        same = scaled(mesh, torch.tensor(3.0))
        with st.prepare(st.gather, {"w": same}) as gathered:
            same._local_tensor.scale.add_(1)
            assert gathered()["w"].scale == 4
            same._local_tensor.scale.add_(rank)
            assert attempt(gathered)[0] == "RankMismatch"
    partial = DTensor.from_local(TwoTensor(A.clone(), B.clone()), mesh, [Partial()], run_check=False)
    name, message = attempt(lambda: st.gather({"w": partial}))
    assert name == "UnsupportedLeaf"
    assert "expected no Partial" in message


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scales_are_cut_with_the_rows_or_must_agree(world_size):
    run_ranks(world_size, quantize)


def outside_of_the_mesh():
    mesh, group = DeviceMesh("cpu", [0]), dist.new_group([0])
    for whole in (A, A[0, 0]):
        placements = [Shard(0) if whole.ndim else Replicate()]
        value = distribute_tensor(TwoTensor(whole, whole + 1), mesh, placements, src_data_rank=None)
        for verb in (st.gather, st.digest, st.partition_replicas):
            _, message = attempt(functools.partial(verb, {"w": value}))
            assert "the leaf at w lies on other ranks: expected a mesh with this rank" in message
            check_in_step()
        if dist.get_rank() == 0:  # as the message advises
            assert st.gather({"w": value}, group=group)["w"].a.equal(whole)


def test_wrappers_on_a_mesh_without_a_rank_are_refused_on_every_rank():
    run_ranks(2, outside_of_the_mesh)


class Rows:
    """A user's quantized tensor: the rows that this rank has, and a table that every rank has."""

    def __init__(self, codes, table, name):
        self.codes, self.table, self.name = codes, table, name


class RowsType(st.LeafType):
    def unpack(self, value):
        return [value.codes, value.table], value.name

    def pack(self, context, parts):
        return Rows(*parts, context)

    def describe(self, value):
        return {"name": value.name}

    def layout(self, value):
        first = 0 if len(value.codes) == 10 else bounds()[0]
        return [((10, 7), [(first, 0)]), None]


def bounds():
    rank, size = dist.get_rank(), dist.get_world_size()
    return 10 * rank // size, 10 * (rank + 1) // size


def move_rows():
    st.register_leaf_type(Rows, RowsType())
    rank, (first, last) = dist.get_rank(), bounds()
    table = torch.arange(4.0)
    value = Rows(A[first:last].clone(), table.clone(), "q")
    whole = st.gather({"w": value})["w"]
    assert torch.equal(whole.codes, A)
    assert torch.equal(whole.table, table)
    for src in (None, 0):
        given = {"w": Rows(A, table, "q")} if src is None or rank == src else None
        like = {"w": Rows(torch.zeros(last - first, 7), torch.zeros(4), "q")}
        found = st.distribute(given, like, src=src, in_place=True)["w"]
        assert found is like["w"]
        assert torch.equal(found.codes, A[first:last])
        assert torch.equal(found.table, table)
    assert st.digest({"w": value}) == st.digest({"w": whole})
    copy = st.offload({"w": value})["w"]
    assert torch.equal(copy.codes, value.codes)
    other = {"w": Rows(torch.zeros(last - first, 7), torch.zeros(4), "other")}
    assert attempt(lambda: st.reshard({"w": value}, other))[0] == "TreeMismatch"
    check_in_step()


@RANKS
def test_classes_of_users_with_several_parts_are_moved(world_size):
    run_ranks(world_size, move_rows)


def low_bit():
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(size)
    rows, columns = 5 * size - 2, 1024
    step = -(-rows // size)
    first, last = min(rank * step, rows), min((rank + 1) * step, rows)
    options = {OptimState8bit: {"signed": True}, OptimState4bit: {"signed": False}, OptimStateFp8: {}}
    for cls, given in options.items():
        block = 128 if cls is OptimState4bit else 256
        whole = cls.zeros((rows, columns), **given, block_size=block)
        whole.codes.copy_(torch.arange(whole.codes.numel()).view(whole.codes.shape) % 251 % 16)
        whole.scale.copy_(torch.arange(whole.scale.numel()))
        local = cls.zeros((last - first, columns), **given, block_size=block)
        flat = whole.codes.numel() // rows
        local.codes.view(-1).copy_(whole.codes.view(-1)[first * flat : last * flat])
        scales = whole.scale.numel() // rows
        local.scale.copy_(whole.scale[first * scales : last * scales])
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows, columns), stride=(columns, 1))
        found = st.gather({"w": value})["w"]
        assert (type(found), found.shape, found.block_size) == (cls, (rows, columns), block)
        assert torch.equal(found.codes.view(torch.uint8), whole.codes.view(torch.uint8))
        assert torch.equal(found.scale, whole.scale)
        assert torch.equal(found.dequantize(), whole.dequantize())
        like = st.allocate_like({"w": value})
        made = st.distribute({"w": whole} if rank == 0 else None, like, src=0, in_place=True)["w"]
        assert torch.equal(made._local_tensor.dequantize(), local.dequantize())
    odd = DTensor.from_local(
        OptimState8bit.zeros((4, 64), block_size=256),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=(4 * size, 64),
        stride=(64, 1),
    )
    assert st.gather({"w": odd})["w"].shape == (4 * size, 64)
    across = DTensor.from_local(
        OptimState8bit.zeros((4, 64), block_size=256),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=(4, 64 * size),
        stride=(64 * size, 1),
    )
    assert attempt(lambda: st.gather({"w": across}))[0] == "UnsupportedLeaf"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_low_bit_optimizer_states_are_moved(world_size):
    run_ranks(world_size, low_bit)


def choose_and_carry():
    mesh = mesh_of(dist.get_world_size())
    value = wrapped(mesh, [Shard(0)])
    like = {"w": zeroed(around(mesh, [Shard(1)])), "z": torch.zeros(1)}
    moved = st.reshard({"w": value, "z": torch.ones(1)}, like, where="w")
    check_same(moved["w"], around(mesh, [Shard(1)]))
    assert moved["z"] == 0
    one = DTensor.from_local(value._local_tensor.a, mesh, [Shard(0)], run_check=False, shape=A.shape, stride=A.stride())
    whole = st.gather({"w": value, "a": one})
    assert whole["w"].a.data_ptr() == whole["a"].data_ptr()  # they are tied
    value.note = torch.ones(2)
    carried = st.gather({"w": value})["w"].note
    assert carried.equal(value.note)
    assert carried is not value.note


@RANKS
def test_where_ties_and_attributes_reach_their_parts(world_size):
    run_ranks(world_size, choose_and_carry)


def compare_layouts():
    mesh, other = mesh_of(dist.get_world_size()), mesh_of(1, dist.get_world_size())
    summands = TwoTensor(
        DTensor.from_local(A.clone(), mesh, [Partial()], run_check=False), distribute_tensor(B, mesh, [Replicate()])
    )
    values = around(mesh, [Replicate()])
    elsewhere = around(other, [Replicate(), Replicate()])
    plain = TwoTensor(A.clone(), B.clone())
    for one, two in ((summands, values), (values, elsewhere), (plain, values)):
        for left, right in ((one, two), (two, one)):
            before = [part.clone() for part in locals_of(right)]
            assert not st.similarity({"w": left}, {"w": right})
            name, message = attempt(lambda left=left, right=right: st.copy_into({"w": left}, {"w": right}))
            assert name == "TreeMismatch"
            assert "differs at w" in message
            assert all(map(torch.equal, locals_of(right), before))
    assert st.similarity({"w": values}, {"w": around(mesh, [Replicate()])})
    assert st.similarity({"w": summands}, {"w": summands})


def test_layouts_inside_of_wrappers_are_compared():
    run_ranks(2, compare_layouts)


class PlacedRows(Rows):
    def __init__(self, codes, table, first):
        super().__init__(codes, table, "")
        self.first = first


class PlacedRowsType(st.LeafType):
    def unpack(self, value):
        return [value.codes, value.table], value.first

    def pack(self, context, parts):
        return PlacedRows(*parts, 0 if len(parts[0]) == 10 else context)

    def describe(self, value):
        return {}

    def layout(self, value):
        return [((10, 7), [(value.first, 0)]), None]


def place_rows():
    st.register_leaf_type(PlacedRows, PlacedRowsType())
    first, last = bounds()
    here = {"w": PlacedRows(A[first:last].clone(), torch.arange(4.0), first)}
    there = {"w": PlacedRows(torch.zeros(last - first, 7), torch.zeros(4), 10 - (last - first) - first)}
    assert not st.similarity(here, there, values=False)
    name, message = attempt(lambda: st.copy_into(here, there))
    assert name == "TreeMismatch"
    assert "layout differs at w" in message
    assert not there["w"].codes.any()
    assert st.similarity(here, st.offload(here))
    # A part that is whole on every rank has to be the same on all: nobody could say which one is meant.
    like = {"w": PlacedRows(torch.zeros(last - first, 7), torch.zeros(4), first)}
    assert torch.equal(st.reshard(here, like)["w"].table, torch.arange(4.0))
    with st.prepare(st.gather, here) as gathered:
        assert torch.equal(gathered()["w"].table, torch.arange(4.0))
    # From a rank that says of all that it has where it is, beside a leaf that is cut.
    mesh = mesh_of(dist.get_world_size())
    given = {"w": PlacedRows(A.clone(), torch.arange(4.0), 0), "x": TwoTensor(A.clone(), B.clone())}
    both = {**like, "x": zeroed(around(mesh, [Shard(0)]))}
    made = st.distribute(None if dist.get_rank() else given, both, src=0)
    assert torch.equal(made["w"].codes, A[first:last])
    check_same(made["x"], around(mesh, [Shard(0)]))
    # Of a part without elements there are no chunks.
    empty = {"w": PlacedRows(A[first:last].clone(), torch.empty(0), first)}
    again = st.distribute(st.gather(empty), empty)["w"]
    assert torch.equal(again.codes, A[first:last])
    assert again.table.shape == (0,)
    here["w"].table += dist.get_rank()
    for call in (st.gather, st.digest, lambda tree: st.reshard(tree, like, in_place=True)):
        name, message = attempt(lambda call=call: call(here))
        assert name == "RankMismatch"
        assert "ranks hold alike" in message
        check_in_step()
    assert not like["w"].codes.any()


def test_classes_of_users_say_where_their_chunks_are_and_agree_on_the_rest():
    run_ranks(2, place_rows)


def tell_in_words():
    mesh = mesh_of(dist.get_world_size())
    value = wrapped(mesh, [Shard(0)])
    double = wrapped(mesh, [Shard(0)], A.double(), B.double())
    messages = [
        attempt(lambda: st.reshard({"w": value}, {"w": double}, cast=True)),
        attempt(lambda: st.reshard({"w": value}, {"w": torch.zeros(10, 7)})),
        attempt(lambda: st.reshard({"w": value}, {"v": value})),
        attempt(
            lambda: st.gather({"w": value, "only": value} if dist.get_rank() else {"w": 1, "only": value}, union=True)
        ),
    ]
    missing = []
    st.reshard({"w": value, "z": value}, {"w": value, "y": value}, strict=False, on_missing=missing.append)
    assert sorted({str(found.path) for found in missing}) == ["y.a", "y.b", "z.a", "z.b"]
    text = f"{messages} {[str(found) for found in missing]}"
    assert "expected a leaf (TwoTensor dtype torch.float64, metadata None) made of a, b" in messages[0][1]
    assert "got a leaf (TwoTensor dtype torch.float32, metadata None) made of a, b" in messages[0][1]
    assert not any(name in text for name in ("DividedLeaf", "MeshPart", "ListedPart")), text


def test_messages_name_the_leaf_and_not_what_stands_for_it():
    run_ranks(2, tell_in_words)
