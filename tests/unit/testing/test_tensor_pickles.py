import pickle

import pytest
import torch
from hypothesis import given

from statetree.testing import run_ranks, tied_trees
from statetree.testing.rank_worker import packed
from tests.judge import assert_trees_equal


def sent(value):
    return pickle.loads(packed(value))


def handed_back(value):
    return value


@given(tied_trees())
def test_tied_trees_arrive_as_they_were_sent(tree):
    assert_trees_equal(sent(tree), tree)


def test_ties_are_kept_to_the_ranks_and_back():
    weight = torch.arange(6.0)
    tree = {"w": weight, "tail": weight[2:], "again": weight, "storage": weight.untyped_storage()}
    for result in run_ranks(2, handed_back, tree):
        assert_trees_equal(result, tree)
        result["w"][2] = 9
        assert result["tail"][0] == 9
        assert torch.equal(torch.empty(0).set_(result["storage"]), result["w"])


def test_parameters_tied_in_a_module_stay_tied():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    state = Model().state_dict()
    result = sent(state)
    assert result["embed.weight"].data_ptr() == result["head.weight"].data_ptr()
    assert_trees_equal(result, state)


def test_a_storage_is_sent_once():
    weight = torch.zeros(1 << 16)
    assert len(packed([weight[row:] for row in range(100)])) < 2 * weight.nbytes


@pytest.mark.parametrize(
    "storage",
    [torch.UntypedStorage(0), torch.UntypedStorage(12, device="meta"), torch.arange(3.0).untyped_storage()],
    ids=["empty", "meta", "cpu"],
)
def test_storages(storage):
    result = sent([storage, storage])
    assert result[0] is result[1]
    assert result[0].device == storage.device
    assert result[0].nbytes() == storage.nbytes()
    if storage.device.type != "meta":
        assert result[0].tolist() == storage.tolist()


def test_storages_with_a_dtype():
    weight = torch.arange(3.0)
    typed, tensor = sent([weight._typed_storage(), weight])
    assert typed.dtype is torch.float32
    assert typed._untyped_storage.data_ptr() == tensor.data_ptr()
