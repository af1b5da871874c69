"""Trees of strided tensors: dtypes, geometry, and ties."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.trees.containers import ListWithAttributes
from tests.trees.corpus import TREES, Held, Ramp, Tree, made, tree
from tests.trees.fields import Frozen

FAKE_MODE = FakeTensorMode()


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any dtype, made of bytes that are unique by position."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.arange(1, size + 1, device="cpu").remainder(251).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw.remainder(2)
    return raw.view(dtype).reshape(shape)


#: Conjugate and negative bits. What is not complex has no conjugate one.
BITS = [{"conj": conj, "neg": neg} for conj in (False, True) for neg in (False, True)]


def with_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """Return a view of a tensor that is conjugated and negated by bits alone, also where torch could not read it."""
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str)


def _dtype_tree(dtype: torch.dtype) -> Tree:
    def make(new: Ramp) -> Any:
        base = of_bytes(dtype, (3, 4))
        return {"whole": base, "part": base[1:, ::2], "alone": of_bytes(dtype, (2,)), "none": of_bytes(dtype, (0,))}

    return Tree(f"dtype_{str(dtype).removeprefix('torch.')}", functools.partial(made, make))


TREES += map(_dtype_tree, DTYPES)


@tree()
def bools_of_any_bytes(new: Ramp) -> Any:
    """Whoever views other numbers as bools has bytes that are neither 0 nor 1; a copy of a bool by torch is."""
    tied, other = of_bytes(torch.uint8, (3, 4)), new(5)
    return {
        "mask": tied.view(torch.bool),
        "bytes": tied,
        "floats as bools": other.view(torch.bool),
        "floats": other,
        "alone": of_bytes(torch.uint8, (6,)).view(torch.bool),
        "part": of_bytes(torch.uint8, (4, 4)).view(torch.bool)[1:, ::2],
        "transposed": of_bytes(torch.uint8, (2, 3)).view(torch.bool).t(),
    }


@tree()
def special_numbers(new: Ramp) -> Any:
    nans = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    return [nans, torch.tensor([-0.0, 0.0, math.inf, -math.inf, 1e-45]), float("nan"), -0.0, complex(0.0, -0.0)]


@tree()
def shapes(new: Ramp) -> Any:
    sizes = [(), (0,), (1,), (2, 0, 3), (1, 1, 1), (2, 3), (1, 2, 1, 2), (1,) * 9]
    return {str(size): new(*size) for size in sizes}


@tree()
def strides(new: Ramp) -> Any:
    base = new(4, 6)
    return {
        "transposed": new(2, 3).t(),
        "permuted": new(2, 3, 4).permute(2, 0, 1),
        "channels_last": new(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels_last_3d": new(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d),
        "expanded": new(3, 1).expand(3, 4),
        "expanded_scalar": new().expand(2, 2),
        "every_other": new(8)[::2],
        "inner_box": base[1:3, 2:5],
        "diagonal": new(3, 3).diagonal(),
        "self_overlapping": new(6).as_strided((3, 3), (1, 1)),
        "strides_of_size_one": new(4).as_strided((1, 4), (17, 1)),
        "empty_with_strides": torch.empty_strided((0, 3), (7, 2)),
        "zero_stride_empty": new(2).expand(0, 2),
    }


@tree()
def views_into_larger_storages(new: Ramp) -> Any:
    return {"slice": new(1000)[500:510], "end": new(100)[99:], "scalar": new(64)[17], "nothing": new(64)[30:30]}


@tree()
def conj_and_neg(new: Ramp) -> Any:
    values = new(2, 3, dtype=torch.complex64)
    return {
        "conj": values.conj(),
        "conj_alone": new(3, dtype=torch.complex128).conj(),
        "neg": new(3, dtype=torch.complex64).conj().imag,
        "both": new(2, dtype=torch.complex64).conj()._neg_view() if hasattr(torch.Tensor, "_neg_view") else None,
        "neg_real": torch._neg_view(new(2, 2)),
        "neg_transposed": torch._neg_view(new(2, 3)).t(),
        "plain": values,
    }


@tree()
def requires_grad(new: Ramp) -> Any:
    leaf = new(2).requires_grad_()
    leaf.sum().backward()
    return {"leaf": leaf, "computed": leaf * 2, "detached": leaf.detach(), "off": new(1)}


@tree()
def inference_tensors(new: Ramp) -> Any:
    with torch.inference_mode():
        return {"made": new(3) + 1, "view": (new(4) + 1)[1:3], "parameter": torch.nn.Parameter(new(2) + 0)}


@tree()
def on_meta(new: Ramp) -> Any:
    base = torch.empty(4, 6, device="meta")
    return {
        "whole": base,
        "view": base[1:, ::2],
        "parameter": torch.nn.Parameter(torch.empty(2, device="meta")),
        "beside": new(1),
        "channels_last": torch.empty(1, 2, 3, 4, device="meta").to(memory_format=torch.channels_last),
    }


@tree()
def fake(new: Ramp) -> Any:
    with FAKE_MODE:
        return {"fake": torch.empty(2, 3).t(), "int": torch.empty(4, dtype=torch.int64)[1:], "beside": [1]}


@tree()
def uninitialized(new: Ramp) -> Any:
    parameter = torch.nn.UninitializedParameter(requires_grad=False)
    return {
        "parameter": parameter,
        "again": parameter,
        "buffer": torch.nn.UninitializedBuffer(dtype=torch.float64),
        "lazy": dict(torch.nn.LazyLinear(3).state_dict()),
    }


@tree(refused="freed")
def freed(new: Ramp) -> Any:
    result = new(4)
    result.untyped_storage().resize_(0)
    return {"beside": new(1), "freed": result}


@tree()
def tied(new: Ramp) -> Any:
    base, weight = new(4, 6), torch.nn.Parameter(new(3, 2))
    return {
        "same_object": [base, base],
        "alias": base.view(24),
        "overlapping": [base[1:3], base[2:4, 1:]],
        "transposed": base.t(),
        "embedding": {"weight": weight},
        "head": {"weight": weight},
        "data": weight.data,
        "detached": weight.detach(),
        "apart": new(2),
        "empty": base[4:],
    }


@tree()
def tied_adjacent(new: Ramp) -> Any:
    flat = new(30)
    return {"weights": flat[:12].view(3, 4), "bias": flat[12:16], "rest": flat[20:], "first": flat[0]}


@tree()
def tied_across_dtypes(new: Ramp) -> Any:
    values, pairs = new(4), new(3, dtype=torch.complex64)
    return {
        "float": values,
        "bytes": values.view(torch.uint8),
        "half": values.view(torch.float16)[3:5],
        "complex": pairs,
        "real": pairs.real,
        "imag": pairs.imag,
        "conj": pairs.conj(),
        "as_real": torch.view_as_real(pairs),
    }


@tree()
def tied_far_apart(new: Ramp) -> Any:
    base = torch.zeros(3 << 20, dtype=torch.uint8)
    base[:4], base[-4:] = new(4, dtype=torch.uint8), new(4, dtype=torch.uint8)
    return {"last": base[-3:], "first": base[:3], "second": base[2:4]}


@tree()
def tied_across_containers(new: Ramp) -> Any:
    weight = torch.nn.Parameter(new(3))
    listed = ListWithAttributes([weight])
    listed.weight = weight
    held = Held()
    held.tensor, held.part = weight, weight.detach()[1:]
    return {"listed": listed, "frozen": Frozen(weight), "opaque": held, "storage": weight.untyped_storage()}
