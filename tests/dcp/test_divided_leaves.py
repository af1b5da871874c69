"""Checkpoints of leaves that are made of several distributed tensors, restored on another number of ranks."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.testing import run_ranks

A = torch.arange(70.0).view(10, 7)
B = A + 1000


def state(form, a=A, b=B):
    """Return a state with one tensor of two, in one of three forms."""
    if form == "whole":
        return {"w": TwoTensor(a.clone(), b.clone()), "step": 3}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = [distribute_tensor(tensor, mesh, [Shard(form == "columns")]) for tensor in (a, b)]
    if form == "around":
        return {"w": TwoTensor(*parts), "step": 3}
    local = TwoTensor(*[part._local_tensor.clone() for part in parts])
    placements = parts[0].placements
    wrapped = DTensor.from_local(local, mesh, placements, run_check=False, shape=a.shape, stride=a.stride())
    return {"w": wrapped, "step": 3}


FORMS = ("whole", "rows", "columns", "around")


def save(form, directory: Path) -> None:
    st.save(state(form), directory / form)


def load(directory: Path) -> None:
    for saved in FORMS:
        for form in FORMS:
            template = state(form, torch.zeros(10, 7), torch.zeros(10, 7))
            template["step"] = 0
            given = template["w"]
            loaded = st.load(directory / saved, template, in_place=True)
            assert loaded["step"] == 3
            assert type(loaded["w"]) is type(given)
            whole = st.gather({"w": loaded["w"]})["w"]
            assert torch.equal(whole.a, A), (saved, form)
            assert torch.equal(whole.b, B)
            template["w"] = state(form, torch.zeros(10, 7), torch.zeros(10, 7))["w"]
            read = st.gather(st.load(directory / saved, template))
            assert torch.equal(read["w"].a, A)
            assert torch.equal(read["w"].b, B)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_every_form_is_loaded_into_every_form_on_other_ranks(tmp_path, before, after):
    for form in FORMS:
        run_ranks(before, save, form, tmp_path)
    run_ranks(after, load, tmp_path)


def keep_optimizer(what: str, directory: Path) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = OptimState8bit.zeros((12, 256), block_size=256)
    whole.codes.copy_(torch.arange(whole.codes.numel()).view(12, 256) % 251)
    whole.scale.copy_(torch.arange(12))
    step = -(-12 // size)
    first, last = min(rank * step, 12), min((rank + 1) * step, 12)
    local = OptimState8bit.zeros((last - first, 256), block_size=256)
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(12, 256), stride=(256, 1))
    if what == "save":
        local.codes.copy_(whole.codes[first:last])
        local.scale.copy_(whole.scale[first:last])
        st.save({"exp_avg": value}, directory / "low_bit")
        return
    loaded = st.load(directory / "low_bit", {"exp_avg": value}, in_place=True)["exp_avg"]
    assert type(loaded._local_tensor) is OptimState8bit
    assert torch.equal(loaded._local_tensor.dequantize(), whole.dequantize()[first:last])


def test_low_bit_optimizer_states_are_restored_on_other_ranks(tmp_path):
    for world_size, what in ((3, "save"), (2, "load")):
        run_ranks(world_size, keep_optimizer, what, tmp_path)


def keep_scales(directory: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([3, 3]), (3, 1), torch.float32))
    parts = [torch.ones(2 - rank, 3), torch.full((5,), 1.0 + rank)]  # five: no dim of the numbers is as long

    class Scaled(torch.Tensor):
        """A tensor of numbers, and a scale of all of them, which no rank has another one of."""

        @staticmethod
        def __new__(cls, numbers, scale, label=None):
            made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
            made.numbers, made.scale, made.label = numbers, scale, label
            return made

        def __tensor_flatten__(self):
            return ["numbers", "scale"], [self.label, self.numbers.shape, torch.device("cuda", dist.get_rank())]

        @classmethod
        def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
            return cls(inner["numbers"], inner["scale"], metadata[0])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return cls(args[0].numbers, args[0].scale, args[0].label)
            raise NotImplementedError(str(func))

    state = {"w": DTensor(Scaled(*parts), spec, requires_grad=False)}
    with pytest.raises(st.CheckpointError, match=r"different elements of 'w\.scale'"):
        st.save(state, directory / "scales")
    with st.Checkpointer(directory / "run") as checkpointer:
        with pytest.raises(st.CheckpointError, match=r"different elements of 'w\.scale'"):
            checkpointer.save(1, state)
        assert checkpointer.steps() == []
        parts[1].fill_(7.0)
        checkpointer.save(2, state)
        parts[1].zero_()
        checkpointer.restore(state)
    assert parts[1].tolist() == [7.0] * 5
    for named in (DTensor(Scaled(*parts, str(rank)), spec, requires_grad=False), Scaled(*parts, str(rank))):
        with pytest.raises(st.CheckpointError, match=r"different leaves at w: .* got .*'0'.* and .*'1'"):
            st.save({"w": named}, directory / "names")


def test_parts_that_ranks_must_hold_alike_are_saved_if_they_do(tmp_path):
    run_ranks(2, keep_scales, tmp_path)


class Labelled(torch.Tensor):
    """A tensor with a label beside it."""

    @staticmethod
    def __new__(cls, inner, label):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.label = inner, label
        return made

    def __tensor_flatten__(self):
        return ["inner"], self.label

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
        return cls(inner["inner"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].label)
        raise NotImplementedError(str(func))


def keep_own(directory: Path) -> None:
    rank = dist.get_rank()

    def state(value, *, label="a"):
        own = {"stages": {(1, "own"): Labelled(torch.full((3,), value), label)}} if rank else {}
        return {"w": torch.full((2,), value), **own}

    st.save(state(5.0), directory / "own")
    loaded = st.load(directory / "own", state(0.0), strict=False)
    assert loaded["w"].tolist() == [5.0, 5.0]
    assert not rank or loaded["stages"][1, "own"].inner.tolist() == [5.0] * 3
    if rank:
        with pytest.raises(st.TreeMismatch, match="leaf type differs at stages"):
            st.load(directory / "own", state(0.0, label="b"), strict=False)
    scaled = torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2], dtype=torch.int8), 0.5, 0)
    with pytest.raises(
        st.CheckpointError, match=r"rank 1 holds a tensor of several parts that the first rank does not"
    ):
        st.save({"w": torch.ones(2), **({"q": scaled} if rank else {})}, directory / "parts")
    st.save({"w": torch.ones(2), "q": scaled} if rank == 0 else {"w": torch.ones(2)}, directory / "first")


class Several(torch.Tensor):
    """A tensor of some others, by their names."""

    @staticmethod
    def __new__(cls, **inner):
        first = inner["a"]
        made = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        made.inner = inner
        return made

    def __getattr__(self, name):
        return self.inner[name]

    def __tensor_flatten__(self):
        return [*self.inner], None

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(**args[0].inner)
        raise NotImplementedError(str(func))


def keep_together(directory: Path) -> None:
    rank = dist.get_rank()
    numbers, scale = ([2, 2, 2], 0.5) if rank == 0 else ([8, 8, 8], 0.125)  # 1.0 on both
    inner = torch._make_per_tensor_quantized_tensor(torch.tensor(numbers, dtype=torch.int8), scale, 0)
    state = {"large": torch.zeros(700), "w": Several(a=torch.full((3,), float(rank)), q=inner)}
    with warnings.catch_warnings(action="ignore"):
        st.save(state, directory / "packed")
    if rank == 0:  # which says how it is put together
        like = {"large": torch.ones(700), "w": Several(a=torch.ones(3), q=inner.clone())}
        loaded = st.load(directory / "packed", like)["w"]
        assert loaded.q.dequantize().tolist() == [1.0, 1.0, 1.0]
        assert loaded.a.tolist() == [0.0, 0.0, 0.0]
    more = {"z": torch.ones(3)} if rank else {}
    with pytest.raises(
        st.CheckpointError,
        match=r"different parts of the leaf at w\.0: .*got \['w\.0\.a'\] and \['w\.0\.a', 'w\.0\.z'\]",
    ):
        st.save({"w": [Several(a=torch.ones(3), **more)]}, directory / "parts")


def test_what_is_put_together_with_a_value_is_written_with_it(tmp_path):
    run_ranks(2, keep_together, tmp_path)


class Odd(list):
    """A key that cannot be hashed."""


def test_a_key_that_cannot_be_hashed_lies_beside_a_wrapper(tmp_path):
    class Holder:
        def __init__(self, held):
            self.held = held

    st.register_container(
        Holder, lambda holder: ([holder.held], None, [Odd([1])]), lambda _, children: Holder(*children)
    )
    with warnings.catch_warnings(action="ignore"):
        st.save({"h": Holder({"x": torch.ones(2)}), "w": Several(a=torch.ones(3))}, tmp_path / "saved")


def keep_one(directory: Path) -> None:
    rank = dist.get_rank()
    mine = [torch.full((size,), float(rank)) for size in (3, 3, 700)]
    state = {f"w{number}": TwoTensor(part, part.clone()) for number, part in enumerate(mine)}
    with warnings.catch_warnings(action="ignore"):
        st.save(state, directory / "one")
        st.save(TwoTensor(mine[0], mine[0].clone()), directory / "root")
    root = st.load(directory / "root", TwoTensor(torch.ones(3), torch.ones(3)))
    assert torch.equal(root.a, root.b)
    loaded = st.load(directory / "one", state)
    writers = [(leaf.a.unique().tolist(), leaf.b.unique().tolist()) for leaf in loaded.values()]
    assert all(one == other for one, other in writers)
    assert {one[0] for one, _ in writers} == {0.0, 1.0}  # they share the work


def test_a_wrapper_that_ranks_hold_differently_is_that_of_one_of_them(tmp_path):
    run_ranks(2, keep_one, tmp_path)


def test_what_the_first_rank_does_not_hold_is_known_to_the_load_or_refused(tmp_path):
    run_ranks(2, keep_own, tmp_path)


def keep_rows(what: str, directory: Path) -> None:
    from torchao.quantization import Float8Tensor, PerRow

    def rows(seed):
        full = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
        whole = Float8Tensor.from_hp(full, granularity=PerRow())
        rank, step = dist.get_rank(), -(-3 // dist.get_world_size())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        local = whole[rank * step : (rank + 1) * step]
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    if what == "save":
        st.save({"w": rows(0)}, directory / "rows")
        return
    loaded = st.load(directory / "rows", {"w": rows(1)})["w"]._local_tensor
    for name in ("qdata", "scale"):
        found, expected = (getattr(each, name).view(torch.uint8) for each in (loaded, rows(0)._local_tensor))
        assert torch.equal(found, expected)


def test_a_rank_may_hold_one_row_whose_shape_is_that_of_a_block(tmp_path):
    pytest.importorskip("torchao")
    for world_size, what in ((2, "save"), (1, "load"), (2, "load")):
        run_ranks(world_size, keep_rows, what, tmp_path)


class Blocks(torch.Tensor):
    """Codes, and a scale for each block of a size that a plain list says; ``sized`` makes of it the shape."""

    @staticmethod
    def __new__(cls, codes, scale, block, sized):
        shape = block if sized else codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)

    def __init__(self, codes, scale, block, sized):
        self.codes, self.scale, self.block, self.sized = codes, scale, block, sized

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.block, self.sized]

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, _shape, _stride):
        return cls(inner["codes"], inner["scale"], *metadata)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.view.default, torch.ops.aten.detach.default):  # all that DTensor calls
            given = arguments[0]
            return type(given)(given.codes, given.scale, given.block, given.sized)
        raise NotImplementedError(f"{function} of Blocks")


class Named(Blocks):
    """The same, whose metadata say by a name that they are the shape, which the class takes from elsewhere."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"orig_shape": self.block}

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, _shape, _stride):
        return cls(inner["codes"], inner["scale"], metadata["orig_shape"], sized=False)


def gather_rows(rows: int) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    codes, scale = torch.arange(rows * 4, dtype=torch.int8).view(rows, 4), torch.arange(float(rows)).view(rows, 1)
    step = -(-rows // 2)
    own = [part[rank * step : (rank + 1) * step].clone() for part in (codes, scale)]
    count = len(own[0])

    def gathered(local):
        shape, stride = torch.Size((rows, 4)), (4, 1)
        return st.gather(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride))

    assert gathered(Blocks(*own, [1, 4], sized=False)).block == [1, 4]  # of a row, also where a rank holds one
    assert gathered(Blocks(*own, [count, 4], sized=True)).block == [rows, 4]
    assert gathered(Named(*own, [count, 4], sized=False)).block == [rows, 4]
    assert torch.equal(gathered(Blocks(*own, [1, 4], sized=False)).scale, scale)


def keep_scales_of_rows(what: str, placements: list[Shard], directory: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2)) if size == 4 else init_device_mesh("cpu", (size,))
    by_rows = [placement if placement == Shard(0) else Replicate() for placement in placements]
    for scale in (torch.arange(6.0), torch.arange(6.0).view(6, 1)):
        codes, path = torch.arange(24, dtype=torch.int8).view(6, 4), directory / str(scale.dim())
        codes, scale = (
            distribute_tensor(part, mesh, cuts)._local_tensor.clone()
            for part, cuts in ((codes, placements), (scale, by_rows))
        )
        local = Blocks(codes.clone(), scale.clone(), [1, 4], sized=False)
        state = {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=(6, 4), stride=(4, 1))}
        if what == "save":
            st.save(state, path)
            local.scale.add_(rank == 3)
            with pytest.raises(st.CheckpointError, match=r"different elements of 'w\.scale'"):
                st.save(state, directory / "unlike")
        for in_place in (True, False):
            local.codes.zero_()
            local.scale.zero_()
            found = st.load(path, state, in_place=in_place)["w"]._local_tensor
            assert torch.equal(found.codes, codes)
            assert torch.equal(found.scale, scale)


def test_scales_of_rows_are_saved_where_ranks_divide_columns_too(tmp_path):
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        directory = tmp_path / str(placements[0].dim)
        directory.mkdir()
        for world_size, what in ((4, "save"), (3, "load"), (2, "load"), (1, "load"), (4, "load")):
            cuts = placements if world_size == 4 else placements[:1]
            run_ranks(world_size, keep_scales_of_rows, what, cuts, directory)


def test_a_block_of_one_row_is_not_taken_for_the_shape_of_a_rank_that_holds_one_row():
    for rows in (2, 3, 4):
        run_ranks(2, gather_rows, rows)
