"""Trees of tensors that are not one view on a storage, and of storages."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.trees.corpus import Ramp, tree


def coordinates() -> torch.Tensor:
    return torch.tensor([[0, 1, 1], [2, 0, 2]], device="cpu")


@tree()
def sparse_coo(new: Ramp) -> Any:
    indices, values = coordinates(), new(3)
    return {
        "uncoalesced": torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), new(3), (2,)),
        "coalesced": torch.sparse_coo_tensor(indices, values, (2, 3)).coalesce(),
        "tied": [torch.sparse_coo_tensor(indices, values, (2, 3)), values[1:]],
        "hybrid": torch.sparse_coo_tensor(indices, new(3, 2), (2, 3, 2)),
        "empty": torch.sparse_coo_tensor(size=(3, 0, 2)),
        "parameter": torch.nn.Parameter(torch.sparse_coo_tensor(indices, new(3), (2, 3))),
        "grad": torch.sparse_coo_tensor(indices, new(3), (2, 3)).requires_grad_(),
        "no_dims": torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), new(1), ()),
    }


@tree()
def sparse_compressed(new: Ramp) -> Any:
    dense = new(4, 6) * (torch.arange(24) % 3 == 0).view(4, 6)
    result = {
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 3)),
        "bsc": dense.to_sparse_bsc((2, 3)),
        "batched": torch.stack([dense, dense]).to_sparse_csr(),
        "empty": torch.zeros(2, 3).to_sparse_csr(),
    }
    result["int32"] = torch.sparse_csr_tensor(
        result["csr"].crow_indices().int(), result["csr"].col_indices().int(), new(8), (4, 6)
    )
    result["csr"].note = ["attribute", new(1)]
    return result


@tree()
def nested_strided(new: Ramp) -> Any:
    result = torch.nested.nested_tensor([new(2, 3), new(1, 3)])
    return {
        "nested": result,
        "transposed": result.transpose(1, 2),
        "grad": torch.nested.nested_tensor([new(2), new(3)], requires_grad=True),
        "empty": torch.nested.nested_tensor([]),
    }


@tree()
def nested_jagged(new: Ramp) -> Any:
    values, offsets = new(6, 2), torch.tensor([0, 2, 2, 6])
    jagged = torch.nested.nested_tensor_from_jagged
    return {
        "jagged": jagged(values, offsets),
        "same_offsets": jagged(new(6), offsets),
        "with_lengths": jagged(new(6), offsets, lengths=torch.tensor([1, 0, 3])),
        "with_bounds": jagged(new(6), offsets, min_seqlen=0, max_seqlen=4),
        "made": torch.nested.nested_tensor([new(2, 3), new(1, 3)], layout=torch.jagged, requires_grad=True),
        "transposed": jagged(new(6, 2), offsets).transpose(1, 2),
    }


@tree()
def quantized(new: Ramp) -> Any:
    scales, zeros = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([1, 2, 3])
    per_tensor = torch.quantize_per_tensor(new(3, 4), 0.5, 3, torch.qint8)
    return {
        "per_tensor": per_tensor,
        "quint8": torch.quantize_per_tensor(new(5), 0.1, 10, torch.quint8),
        "qint32": torch.quantize_per_tensor(new(5), 0.01, 0, torch.qint32),
        "per_channel": torch.quantize_per_channel(new(3, 4), scales, zeros, 0, torch.qint8),
        "float_qparams": torch.quantize_per_channel(new(3, 4), scales, scales, 0, torch.quint8),
        "transposed": torch.quantize_per_tensor(new(2, 3), 0.5, 3, torch.qint8).t(),
        "tied": per_tensor[1:],
        "scales": scales,
    }


@tree(refused="quint4x2")
def quantized_below_a_byte(new: Ramp) -> Any:
    scales = torch.tensor([0.5, 0.25])
    return {"packed": torch.quantize_per_channel(new(2, 4), scales, scales, 0, torch.quint4x2)}


@tree(refused="_mkldnn")
def mkldnn(new: Ramp) -> Any:
    return {"dense": new(1), "mkldnn": new(2, 3).to_mkldnn()}


@tree()
def storages(new: Ramp) -> Any:
    base = new(4)
    storage = base.untyped_storage()
    return {
        "untyped": storage,
        "tensor": base[1:],
        "typed": torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True),
        "empty": torch.UntypedStorage(0),
        "alone": torch.UntypedStorage([1, 2, 3]),
        "again": storage,
    }


@contextmanager
def _without_warnings_in_the_log() -> Iterator[None]:
    """Silence what torchao says, when it is first imported, about libraries that are not for this machine."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def torchao_quantized(new: Ramp) -> Any:
    with _without_warnings_in_the_log():
        from torchao import quantization
    result = {}
    for name in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"):
        module = torch.nn.Linear(32, 4)
        module.weight.data.copy_(new(4, 32))
        module.bias.data.copy_(new(4))
        quantization.quantize_(module, getattr(quantization, name)())
        result[name] = module.state_dict()
    return result


if importlib.util.find_spec("torchao") is not None:
    tree()(torchao_quantized)
