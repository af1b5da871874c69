"""``replicate``: the public entry over tensors that are told from others."""

import pytest
import torch

import statetree as st
from statetree.spans import Columns, memory_of, replicate
from tests.trees.classes import TwoTensors


def test_overlap_geometry_and_bits_are_kept():
    base = torch.arange(12.0).view(3, 4)
    given = [base, base.t(), base[1:, ::2], base[0], torch.complex(base, base).conj(), torch.empty(0, 3)]
    fresh = replicate(given, memory_of("cpu"))
    assert all(map(torch.equal, fresh, given))
    assert [tensor.stride() for tensor in fresh] == [tensor.stride() for tensor in given]
    assert fresh[4].is_conj()
    keys = Columns(fresh).storage_keys
    assert len(set(keys[:4])) == 1
    assert keys[0] not in keys[4:]
    fresh[0][0, 0] = 50
    assert fresh[3][0] == fresh[1][0, 0] == 50
    assert base[0, 0] == 0


def test_only_covered_bytes_are_taken():
    (fresh,) = replicate([torch.zeros(1_000_000)[500:510]], memory_of("cpu"))
    assert fresh.untyped_storage().nbytes() == 40


def test_without_elements():
    given = [torch.ones(2, 3).t(), torch.ones(4, device="meta")]
    fresh = replicate(given, memory_of("cpu"), copy=False)
    assert [(tensor.shape, tensor.stride()) for tensor in fresh] == [((3, 2), (1, 3)), ((4,), (1,))]
    assert not fresh[1].is_meta
    assert replicate(given, memory_of("cpu"))[1].is_meta


def test_shared_memory():
    fresh = replicate([torch.arange(3.0)], memory_of("cpu", share_memory=True))
    assert fresh[0].is_shared()
    assert fresh[0].tolist() == [0, 1, 2]


def test_gradients_are_not_recorded():
    weight = torch.nn.Parameter(torch.ones(2))
    (fresh,) = replicate([weight], memory_of("cpu"))
    assert type(fresh) is torch.Tensor
    assert not fresh.requires_grad
    assert replicate([], memory_of("cpu")) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        TwoTensors(torch.ones(1), torch.ones(1)),
        torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8),
    ],
    ids=["sparse", "wrapper", "quantized"],
)
def test_other_tensors_are_refused(tensor):
    with pytest.raises(TypeError, match=r"replicate: tensor 1 \(.*\) is no plain one: .*take_apart"):
        replicate([torch.ones(1), tensor], memory_of("cpu"))


def test_freed_storages_are_refused():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(st.UnsupportedLeaf, match="replicate: the storage of the leaf at 1 was freed"):
        replicate([torch.ones(1), freed], memory_of("cpu"))
