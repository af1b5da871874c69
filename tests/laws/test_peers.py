"""Differential laws: where copy.deepcopy, torch.save and torch.load are right, statetree agrees with them."""

import copy
import io
import pickle

import torch
from hypothesis import assume, given
from hypothesis import strategies as hyp

import statetree as st
from statetree.testing.elements import DTYPES
from statetree.testing.strategies import plain_values
from tests.judge import assert_trees_equal, tree_differences
from tests.laws.drawn import with_shared_containers
from tests.laws.table import DoesNotApply, Table
from tests.trees.optimizers import optimizer_plans
from tests.trees.plans import Again, Value, build, tensor_plans, tied_plans, tree_plans

plans = hyp.one_of(tree_plans(), tied_plans(), optimizer_plans())
# What deepcopy copies exactly: no conjugate or negative bits, no subclasses, no parameters with gaps in their storages.
DENSE = ["contiguous", "transposed", "channels_last"]
copied_right = hyp.one_of(
    tensor_plans(geometries=[*DENSE, "gaps", "inside", "expanded"], wraps=["tensor", "requires_grad", "attribute"]),
    tensor_plans(geometries=DENSE, wraps=["parameter", "frozen", "buffer"]),
    hyp.builds(Value, plain_values()),
)
again = hyp.builds(Again, hyp.integers(0, 7))
plain_tensors = tensor_plans(
    dtypes=[dtype for dtype in DTYPES if dtype != torch.float4_e2m1fn_x2],  # of which torch makes no zeros
    geometries=["contiguous", "gaps", "inside", "transposed"],
    wraps=["tensor", "parameter"],
)


def forgotten_by_deepcopy(plan):
    """Return how the differences begin that are deepcopy's: it forgets bits, and the ties of parameters."""
    return ("conj bit", "neg bit", *(("storage of", "overlap") if "parameter" in repr(plan).lower() else ()))


@given(plan=tied_plans(opaque=False))
def test_deepcopy_agrees_with_offload(plan):
    assume("subclass" not in repr(plan).lower())  # deepcopy refuses some
    tree = build(plan)
    found = tree_differences(st.offload(tree), copy.deepcopy(tree))
    assert [line for line in found if not line.startswith(forgotten_by_deepcopy(plan))] == []


@given(plan=hyp.one_of(tree_plans(copied_right), optimizer_plans()))
def test_deepcopy_agrees_with_stage(plan):
    tree = build(plan)
    with st.Stager() as stager:
        assert_trees_equal(stager.stage(tree), copy.deepcopy(tree))


@given(plan=with_shared_containers(tree_plans(hyp.one_of(copied_right, again, again), opaque=False)))
def test_deepcopy_agrees_with_stage_on_what_is_one_and_the_same(plan):
    tree = build(plan)
    with st.Stager() as stager:
        assert_trees_equal(stager.stage(tree), copy.deepcopy(tree), containers=True)


def saved(tree):
    file = io.BytesIO()
    try:
        torch.save(tree, file)
    except RuntimeError as error:
        if "that view the same data as different types" in str(error):
            raise DoesNotApply from error  # torch.save cannot do it
        raise
    file.seek(0)
    return file


laws = Table()


@laws
def a_saved_offloaded_tree_loads_as_the_tree_itself(plan):
    tree = build(plan)
    loaded = [torch.load(saved(value), weights_only=False) for value in (st.offload(tree), tree)]
    assert_trees_equal(*loaded, storages=False)


@laws
def a_saved_staged_tree_loads_as_the_tree_itself(plan):
    tree = build(plan)
    with st.Stager() as stager:
        loaded = [torch.load(saved(value), weights_only=False) for value in (stager.stage(tree), tree)]
    assert_trees_equal(*loaded, storages=False)


@laws
def a_file_of_an_offloaded_tree_is_no_larger(plan):
    """torch.save writes whole storages: offloading leaves behind what no view needs."""
    tree = build(plan)
    slack = 1024 + 128 * tree_size(tree)  # names and alignment may differ a little
    assert len(saved(st.offload(tree)).getbuffer()) <= len(saved(tree).getbuffer()) + slack


@given(plan=plans)
def test_of_saved_trees(**drawn):
    laws.check(**drawn)


def tree_size(tree):
    return len(st.flatten(tree)[0])


@given(tree=hyp.recursive(plain_values(), lambda inner: hyp.lists(inner, max_size=3) | hyp.tuples(inner, inner)))
def test_trees_without_tensors_come_out_as_deepcopy_and_pickle_have_them(tree):
    assert_trees_equal(st.offload(tree), copy.deepcopy(tree))
    assert_trees_equal(st.offload(tree), pickle.loads(pickle.dumps(tree)))


@given(plan=tree_plans(plain_tensors, opaque=False))
def test_state_dicts_load_into_modules_as_torch_loads_them(plan):
    """copy_into writes what load_state_dict would have written."""
    tensors = [leaf for leaf in st.flatten(build(plan))[0] if isinstance(leaf, torch.Tensor)]
    values = {f"t{index}": tensor.detach() for index, tensor in enumerate(tensors)}
    by_torch, by_us = (torch.nn.Module() for _ in range(2))
    for module in (by_torch, by_us):
        for name, value in values.items():
            module.register_buffer(name, torch.zeros_like(value))
    by_torch.load_state_dict(values)
    st.copy_into(values, dict(by_us.named_buffers()))
    assert_trees_equal(dict(by_us.named_buffers()), dict(by_torch.named_buffers()))
