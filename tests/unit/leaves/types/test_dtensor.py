"""DTensors keep mesh and placements; results of collectives are waited for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import statetree as st
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.types.async_collective import ASYNC_COLLECTIVE
from statetree.leaves.types.dtensor import DTENSOR
from tests.judge import assert_independent, assert_trees_equal
from tests.repack import repacked, unpacked
from tests.trees import DISTRIBUTED_TREES

pytestmark = pytest.mark.usefixtures("one_rank_group")


@pytest.fixture(scope="module")
def mesh(one_rank_group):
    return init_device_mesh("cpu", (1,))


def alone(tensor):
    return repacked([tensor])[0]


def sharded(mesh, *shape):
    return DTensor.from_local(torch.arange(float(torch.Size(shape).numel())).view(shape), mesh, [Shard(0)])


def test_the_leaf_type_is_found_by_name(mesh):
    assert leaf_type_of(DTensor) is DTENSOR
    assert leaf_type_of(collectives.AsyncCollectiveTensor) is ASYNC_COLLECTIVE


def test_mesh_and_placements_are_kept_and_the_mesh_is_the_same_object(mesh):
    tensor = sharded(mesh, 4, 2)
    again = alone(tensor)
    assert again.device_mesh is mesh
    assert again.placements == tensor.placements
    assert again.shape == tensor.shape
    assert torch.equal(again.to_local(), tensor.to_local())
    assert again.to_local().data_ptr() != tensor.to_local().data_ptr()


@pytest.mark.parametrize("tree", DISTRIBUTED_TREES, ids=str)
@pytest.mark.parametrize(
    "verb",
    [st.offload, st.allocate_like, lambda tree: st.Stager().stage(tree)],
    ids=["offload", "allocate_like", "stage"],
)
def test_verbs_take_distributed_tensors(tree, verb):
    made = tree.make()
    again = verb(made)
    assert_independent(made, again, containers=False)
    if verb is not st.allocate_like and not tree.changes:
        assert_trees_equal(again, made)
    if not tree.changes:
        assert_trees_equal(made, tree.make())


def test_only_the_local_tensor_is_a_part(mesh):
    tensor = sharded(mesh, 4)
    apart = unpacked({"x": tensor, "y": [tensor, tensor.to_local()]})
    assert {part.data_ptr() for part in apart.parts} == {tensor.to_local().data_ptr()}
    assert len(apart.parts) <= 2


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_every_placement(mesh, placement):
    tensor = DTensor.from_local(torch.arange(6.0).view(2, 3).t(), mesh, [placement])
    assert_trees_equal(alone(tensor), tensor)


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_stay_parameters(mesh, grad):
    parameter = torch.nn.Parameter(sharded(mesh, 3), requires_grad=grad)
    again = alone(parameter)
    assert isinstance(again, torch.nn.Parameter)
    assert again.requires_grad == grad
    assert again.is_leaf


def test_copies_can_be_used(mesh):
    tensor = sharded(mesh, 4)
    assert torch.equal((alone(tensor) + alone(tensor)).full_tensor(), tensor.full_tensor() * 2)


def test_uneven_global_shapes_are_kept(mesh):
    tensor = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], shape=torch.Size([3, 2]), stride=(2, 1))
    assert_trees_equal(alone(tensor), tensor)


def test_facts_tell_layout_and_shape(mesh):
    facts = DTENSOR.describe(sharded(mesh, 4))
    assert facts["placements"] == (Shard(0),)
    assert facts["shape"] == (4,)
    assert facts["mesh"] == mesh
    assert facts != DTENSOR.describe(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))


def test_a_collective_is_waited_for():
    waiting = collectives.all_reduce(torch.arange(3.0), "sum", dist.group.WORLD)
    assert isinstance(waiting, collectives.AsyncCollectiveTensor)
    again = alone(waiting)
    assert type(again) is torch.Tensor
    assert torch.equal(again, torch.arange(3.0))


def test_a_collective_inside_a_dtensor_is_waited_for(mesh):
    waiting = collectives.all_reduce(torch.arange(3.0), "sum", dist.group.WORLD)
    tensor = DTensor.from_local(waiting, mesh, [Replicate()], run_check=False)
    again = alone(tensor)
    assert type(again._local_tensor) is torch.Tensor
    assert torch.equal(again.to_local(), torch.arange(3.0))


def test_a_collective_met_twice_is_one_tensor_again():
    waiting = collectives.all_reduce(torch.arange(3.0), "sum", dist.group.WORLD)
    again = repacked([waiting, waiting])
    assert again[0] is again[1]
    assert_trees_equal(repacked(again), again)
