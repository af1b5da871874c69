"""What a gathered tensor keeps beside its elements. (On several ranks: tests/collectives.)"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree as st
from tests.trees import Ramp

pytestmark = pytest.mark.usefixtures("one_rank_group")


@pytest.fixture
def sharded(one_rank_group):
    mesh = init_device_mesh("cpu", (1,))
    return lambda: DTensor.from_local(Ramp()(4, 2), mesh, [Shard(0)])


def test_parameters_and_buffers_stay_such(sharded):
    tree = {
        "trained": torch.nn.Parameter(sharded()),
        "frozen": torch.nn.Parameter(sharded(), requires_grad=False),
        "recorded": sharded().requires_grad_(),
        "plain": sharded(),
    }
    whole = st.gather(tree)
    assert [type(leaf) for leaf in whole.values()] == [torch.nn.Parameter] * 2 + [torch.Tensor] * 2
    assert [leaf.requires_grad for leaf in whole.values()] == [True, False, True, False]
    for name, leaf in whole.items():
        assert leaf.is_leaf
        assert torch.equal(leaf.detach(), tree[name].detach().to_local())


def test_attributes_are_copied(sharded):
    leaf = sharded()
    leaf.scales, leaf.note = Ramp()(3), {"kept": [1]}
    whole = st.gather([leaf])[0]
    assert torch.equal(whole.scales, leaf.scales)
    assert whole.scales is not leaf.scales
    assert whole.note == {"kept": [1]}
    whole.note["kept"].append(2)
    whole.scales.zero_()
    assert leaf.note == {"kept": [1]}
    assert leaf.scales.any()


@pytest.mark.parametrize(("verb", "options"), [(st.gather, {"dst": 1}), (st.broadcast, {"src": 1})], ids=["dst", "src"])
def test_a_rank_without_a_process_group_is_told_to_make_one(verb, options, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    said = r"expected 0 \(there is no process group: call torch.distributed.init_process_group first\), got 1"
    with pytest.raises(st.RankMismatch, match=said):
        verb({"w": torch.zeros(1)}, **options)
