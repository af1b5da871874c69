"""ShardedTensors keep metadata, sharding spec and process group; their local shards are copied."""

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import statetree as st
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.types.sharded_tensor import SHARDED
from tests.judge import assert_trees_equal
from tests.repack import repacked, unpacked

pytestmark = pytest.mark.usefixtures("one_rank_group")


def made(*tensors_and_offsets, shape):
    shards = [Shard.from_tensor_and_offsets(tensor, offsets, rank=0) for tensor, offsets in tensors_and_offsets]
    return sharded_tensor.init_from_local_shards(shards, *shape)


def alone(tensor):
    return repacked([tensor])[0]


def test_the_leaf_type_is_found_by_name():
    assert leaf_type_of(ShardedTensor) is SHARDED


def test_shards_are_copied_and_metadata_is_kept():
    tensor = made((torch.arange(4.0).view(2, 2), [0, 0]), (torch.arange(4.0, 6.0).view(1, 2), [2, 0]), shape=(3, 2))
    again = alone(tensor)
    assert_trees_equal(again, tensor)
    assert again.metadata() == tensor.metadata()
    again.local_shards()[0].tensor.fill_(9)
    assert torch.equal(tensor.local_shards()[0].tensor, torch.arange(4.0).view(2, 2))


def test_a_chunk_sharding_spec_is_kept():
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    tensor = sharded_tensor.ones(spec, 4, 2)
    again = alone(tensor)
    assert again.sharding_spec() == tensor.sharding_spec()
    assert_trees_equal(again, tensor)


def test_shards_are_tied_with_other_leaves():
    base = torch.arange(4.0)
    tree = [base, made((base, [0]), shape=(4,)), base[2:]]
    assert_trees_equal(repacked(tree), tree)
    assert len(unpacked(tree).parts) == 2


def test_shards_that_require_gradients():
    tensor = made((torch.arange(4.0).requires_grad_(), [0]), shape=(4,))
    assert alone(tensor).local_shards()[0].tensor.requires_grad


@pytest.mark.parametrize("verb", [st.offload, st.allocate_like], ids=["offload", "allocate_like"])
def test_attributes_of_users_are_kept_or_refused(verb):
    tensor = made((torch.arange(4.0), [0]), shape=(4,))
    tensor.note = ["note"]
    try:
        again = verb({"x": tensor})["x"]
    except st.UnsupportedLeaf as error:
        assert str(error.path) == "x"
    else:
        assert again.note == ["note"]


def test_facts_tell_shape_and_shards():
    one = SHARDED.describe(made((torch.ones(4), [0]), shape=(4,)))
    other = SHARDED.describe(made((torch.ones(2), [0]), (torch.ones(2), [2]), shape=(4,)))
    assert one["shape"] == other["shape"] == (4,)
    assert one != other
