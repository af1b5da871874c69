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


def shards_of(mesh, count, first=None, placement=None):
    """Return so many DTensors, of which one is made otherwise."""
    locals_ = [torch.arange(8.0).view(4, 2) + number for number in range(count)]
    locals_[0] = locals_[0] if first is None else first
    return {
        f"w{number}": DTensor.from_local(local, mesh, [placement if placement and not number else Shard(0)])
        for number, local in enumerate(locals_)
    }


def noted(tensor):
    tensor.note = "kept"
    return tensor


def freed_local(mesh, count):
    tree = shards_of(mesh, count)
    tree["w0"]._local_tensor.untyped_storage().resize_(0)
    return tree


def twice(mesh, count):
    tree = shards_of(mesh, count)
    return {**tree, "w1": tree["w0"], "view": tree["w0"]._local_tensor[1:], "step": 3}


def waiting(mesh, count):
    tree = shards_of(mesh, count)
    tree["w0"]._local_tensor = collectives.all_reduce(tree["w0"]._local_tensor, "sum", dist.group.WORLD)
    return tree


ONE_IS_OTHERWISE = {
    "none": shards_of,
    "other numbers": lambda mesh, count: shards_of(mesh, count, torch.full((4, 2), -0.0)),
    "transposed": lambda mesh, count: shards_of(mesh, count, torch.arange(8.0).view(2, 4).t()),
    "overlaps itself": lambda mesh, count: shards_of(mesh, count, torch.ones(1, 2).expand(4, 2)),
    "dtype": lambda mesh, count: shards_of(mesh, count, torch.ones(4, 2, dtype=torch.int16)),
    "shape": lambda mesh, count: shards_of(mesh, count, torch.ones(3, 2)),
    "empty": lambda mesh, count: shards_of(mesh, count, torch.ones(0, 2)),
    "placement": lambda mesh, count: shards_of(mesh, count, placement=Replicate()),
    "partial": lambda mesh, count: shards_of(mesh, count, placement=Partial()),
    "conjugated": lambda mesh, count: shards_of(mesh, count, torch.ones(4, 2, dtype=torch.complex64).conj()),
    "on meta": lambda mesh, count: shards_of(mesh, count, torch.ones(4, 2, device="meta")),
    "freed": freed_local,
    "attribute": lambda mesh, count: shards_of(mesh, count, noted(torch.ones(4, 2))),
    "sparse beside": lambda mesh, count: {**shards_of(mesh, count), "sparse": torch.eye(2).to_sparse()},
    "twice": twice,
    "async": waiting,
}


def shown(leaf):
    """Return the elements of a leaf as text; torch does not survive printing memory that was freed."""
    local = getattr(leaf, "_local_tensor", leaf)
    if not isinstance(local, torch.Tensor) or local.is_meta or local.layout != torch.strided:
        return str(leaf)
    return str(local) if local.untyped_storage().nbytes() else "freed"


def told(verb, *args):
    """Return what a verb does with trees: its result, or its error, and what the last tree holds then."""
    try:
        result = verb(*args)
    except st.StateTreeError as error:
        result = error
    # Of two that are tied, either may be named first.
    said = [*map(shown, result.values())] if isinstance(result, dict) else str(result).replace("w1", "w0")
    return said, [*map(shown, args[-1].values())]


class Odd(Shard):
    raises = False  # torch compares it when a tensor is made

    def __eq__(self, other):
        if self.raises:
            raise ValueError("not to be compared")
        return super().__eq__(other)

    def __hash__(self):
        return super().__hash__()


def test_placements_that_cannot_be_compared_are_another_layout(mesh, monkeypatch):
    trees = [{"a": DTensor.from_local(torch.ones(2), mesh, [Odd(0)], run_check=False)} for _ in range(2)]
    monkeypatch.setattr(Odd, "raises", True)
    with pytest.raises(st.TreeMismatch, match="placements differs at a"):
        st.copy_into(*trees)
    assert "placements differs at a" in str(st.similarity(*trees))


def test_a_freed_local_tensor_beside_a_target_that_overlaps_itself_is_an_error(mesh):
    target = shards_of(mesh, 1, torch.ones(1, 2).expand(4, 2))
    with pytest.raises(st.UnsupportedLeaf, match="w0"):  # nothing reads the memory that is not there
        st.copy_into(freed_local(mesh, 1), target)


@pytest.mark.parametrize(
    ("one", "other"),
    [pair for name in ONE_IS_OTHERWISE for pair in [(name, "none"), ("none", name), (name, name), ("freed", name)]],
)
def test_many_together_come_to_the_same_as_one_by_one(mesh, monkeypatch, one, other):
    verbs = [st.similarity, st.copy_into, lambda a, b: st.copy_into(a, b, cast=True)]

    def tell():
        sides = ONE_IS_OTHERWISE[one], ONE_IS_OTHERWISE[other]
        return [told(verb, *(make(mesh, 70) for make in sides)) for verb in verbs for _ in range(3)]

    together = tell()
    monkeypatch.setattr(type(DTENSOR), "local_pair", lambda *_: None)
    monkeypatch.setattr("statetree.leaves.parts._local_views", lambda _: ())
    assert together == tell()
