"""Differential laws: where torch's own private helpers for state dicts are right, statetree agrees with them.

Where they are wrong, they are not compared, and the trees that are drawn here leave it out:

- ``_offload_state_dict_to_cpu`` hands out the tensors that it was given if they are on the CPU already, and unties the
  others. ``_create_cpu_state_dict`` unties tensors, and forgets strides, parameters and ``requires_grad``.
- ``_copy_state_dict`` broadcasts, converts dtypes, and has written a part when it fails.
- ``_check_state_dict_similarity`` overwrites its second argument with the first. It takes lists for tuples and anything
  for ``None``, does not look at plain values, and fails where only one of two values is a tensor or a dict.
- All of these turn namedtuples and sizes into tuples, and subclasses of dicts into dicts.
- ``StateDictStager`` forgets parameters, ``requires_grad``, and conjugate and negative bits. It writes the next state
  over the last one that it returned.
- ``flatten_state_dict`` refuses keys that collide, takes keys for strings, and forgets empty containers.
- ``_gather_state_dict`` gathers nothing on ranks outside of a mesh, and gives ranks that did not ask ``{}``.
- ``_broadcast_state_dict`` and ``_distribute_state_dict`` write into their argument, and make plain tensors of
  scalars, whatever was there. The first sends what lies between the elements of a tensor that is not contiguous, and
  not every dtype. Strided shards are right only if they are even.
"""

import dataclasses
import itertools

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as hyp
from torch.distributed.tensor import DTensor

import statetree as st
from statetree.testing import Layout, layouts, run_ranks
from statetree.testing.elements import DTYPES
from statetree.testing.strategies import plain_values
from tests.judge import assert_trees_equal
from tests.laws.batches import as_many, batches, each
from tests.trees.plans import Node, TensorPlan, Value, ViewPlan, build, tensor_plans

try:
    from torch.distributed._state_dict_utils import (
        _broadcast_state_dict,
        _check_state_dict_similarity,
        _copy_state_dict,
        _create_cpu_state_dict,
        _distribute_state_dict,
        _gather_state_dict,
        _offload_state_dict_to_cpu,
    )
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

except ImportError as error:  # they are private: tried with torch 2.11 and 2.13
    pytest.skip(f"this torch has no such helper any more: {error}", allow_module_level=True)

CPU = torch.device("cpu")
SENT = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
WITH_NUMBERS = [dtype for dtype in DTYPES if dtype != torch.float4_e2m1fn_x2]
WRITABLE = ["contiguous", "transposed", "gaps", "inside", "conjugated", "negated"]
DENSE = ["contiguous", "transposed", "gaps", "inside", "channels_last"]
REAL = ["contiguous", "transposed", "gaps", "inside", "expanded", "channels_last"]
KEPT_BY_STAGER = ["whole", "alias", "slice", "steps", "transposed", "rows", "columns", "element", "expanded", "bytes"]
keys = hyp.text("ab01.", max_size=3)
plain = plain_values()
without_sizes = plain.filter(lambda value: not isinstance(value, torch.Size))
checked_values = hyp.one_of(hyp.none(), hyp.booleans(), hyp.integers(), hyp.floats(), hyp.text(), hyp.binary())


def mappings(children, *, least=0):
    items = hyp.dictionaries(keys, children, min_size=least, max_size=3)
    return items.map(lambda items: Node("dict", tuple(items.values()), tuple(items)))


def sequences(children):
    return hyp.builds(Node, hyp.sampled_from(["list", "tuple"]), hyp.lists(children, max_size=3).map(tuple))


def state_dicts(tensors, values):
    """Return plans of dicts with strings as keys, which hold more of them, lists, tuples, tensors and plain values."""
    leaves = hyp.one_of(tensors, hyp.builds(Value, values))
    return mappings(hyp.recursive(leaves, lambda children: mappings(children) | sequences(children), max_leaves=6))


@given(plan=state_dicts(tensor_plans(geometries=[*WRITABLE, "expanded", "channels_last"]), checked_values))
def test_offload(plan):
    tree = build(plan)
    assert_trees_equal(st.offload(tree), _offload_state_dict_to_cpu(tree))


def fill(src, dst):
    return _copy_state_dict(src, dst, type_check=False)


@given(
    plan=state_dicts(
        tensor_plans(dtypes=WITH_NUMBERS, geometries=["contiguous", "transposed", "gaps", "inside"], wraps=["tensor"]),
        without_sizes,
    )
)
def test_allocate_like(plan):
    """Whoever allocates, and whoever fills."""
    tree = build(plan)
    expected = fill(tree, _create_cpu_state_dict(tree))
    for found in (
        st.copy_into(tree, st.allocate_like(tree)),
        st.copy_into(tree, _create_cpu_state_dict(tree)),
        fill(tree, st.allocate_like(tree)),
    ):
        assert_trees_equal(found, expected, strides=False)


@given(
    plan=state_dicts(tensor_plans(geometries=[*WRITABLE, "expanded"]), without_sizes),
    geometries=hyp.lists(hyp.sampled_from(WRITABLE), min_size=1, max_size=3),
)
def test_copy_into(plan, geometries):
    """The tensors that are written lie otherwise in their storages, and hold other numbers."""
    tree = build(plan)
    outcomes = []
    for copy_into in (st.copy_into, fill):
        _, target = build(Node("tuple", (plan, relaid(plan, itertools.cycle(geometries)))))
        outcomes.append({"returned": copy_into(tree, target), "written": target})
    assert_trees_equal(*outcomes)


def relaid(plan, geometries):
    """Return a plan of the same tree, but for how its tensors lie in their storages."""
    if isinstance(plan, TensorPlan):
        return dataclasses.replace(plan, geometry=next(geometries))
    if isinstance(plan, Node):
        return dataclasses.replace(plan, children=tuple(relaid(child, geometries) for child in plan.children))
    return plan


@given(plan=state_dicts(tensor_plans(geometries=WRITABLE), without_sizes), data=hyp.data())
def test_similarity(plan, data):
    """Of two trees that differ in one place at most."""
    other = data.draw(hyp.sampled_from([plan, *changed(plan)]))
    a, b = build(plan), build(other)
    found = bool(st.similarity(a, b, values=False))
    with torch.no_grad():
        assert found == _check_state_dict_similarity(a, b)  # which overwrites b: it comes last
    assert found == (other is plan)


def changed(plan):
    """Yield the plans that differ from a plan in one place."""
    if isinstance(plan, TensorPlan):
        yield dataclasses.replace(plan, shape=(*plan.shape, 2))
        yield dataclasses.replace(plan, dtype=torch.int16 if plan.dtype != torch.int16 else torch.float32)
    elif isinstance(plan, Node):
        more = (*plan.keys, "new") if plan.kind == "dict" else plan.keys
        yield dataclasses.replace(plan, children=(*plan.children, Value(None)), keys=more)
        for index, child in enumerate(plan.children):
            before, after = plan.children[:index], plan.children[index + 1 :]
            remaining = plan.keys[:index] + plan.keys[index + 1 :]
            yield dataclasses.replace(plan, children=before + after, keys=remaining)
            if plan.kind == "dict":
                yield dataclasses.replace(plan, children=(*before, *after, child), keys=(*remaining, "new"))
            for other in changed(child):
                yield dataclasses.replace(plan, children=(*before, other, *after))


@given(
    plan=state_dicts(
        hyp.one_of(
            tensor_plans(geometries=REAL, wraps=["tensor", "buffer", "attribute"]),
            hyp.builds(
                ViewPlan, hyp.integers(0, 1), hyp.sampled_from(KEPT_BY_STAGER), hyp.integers(0, 24), hyp.integers(0, 24)
            ),
        ),
        plain,
    )
)
def test_stage(plan):
    """The first time, and again when everything has changed."""
    tree, changed_tree = build(plan), build(Node("tuple", (plan, plan)))[1]
    by_torch = StateDictStager()
    with st.Stager() as stager:
        assert_trees_equal(stager.stage(tree), by_torch.stage(tree), containers=True)
        for old, new in zip(*(st.flatten(side)[0] for side in (tree, changed_tree)), strict=True):
            if isinstance(old, torch.Tensor):
                old.untyped_storage().copy_(new.untyped_storage())
        assert_trees_equal(stager.stage(tree), by_torch.stage(tree), containers=True)


def flattened_by_torch():
    """Return plans of trees that torch flattens down to the leaves: lists hold tensors, and nothing is empty."""
    tensors = tensor_plans(max_dims=1)

    def nodes(children):
        lists = hyp.builds(lambda tensor, rest: Node("list", (*rest, tensor)), tensors, hyp.lists(children, max_size=3))
        return lists | mappings(children, least=1)

    return mappings(hyp.recursive(tensors | hyp.builds(Value, plain), nodes, max_leaves=6))


@given(plan=flattened_by_torch())
def test_to_flat_and_from_flat(plan):
    tree = build(plan)
    try:
        theirs, mapping = flatten_state_dict(tree)
    except ValueError as error:
        hypothesis.assume("duplicated flatten key" not in str(error))
        raise
    ours, spec = st.to_flat(tree)
    assert_trees_equal(ours, theirs)
    assert_trees_equal(st.from_flat(ours, spec), unflatten_state_dict(theirs, mapping))


def built(value):
    """Make the DTensors of a tree of layouts and other plans, on every rank."""
    if isinstance(value, dict):
        return {key: built(child) for key, child in value.items()}
    if isinstance(value, list):
        return [built(child) for child in value]
    return value.build() if isinstance(value, Layout) else build(value)


def gather_alike(plan, dst):
    tree = built(plan)
    assert_trees_equal(st.gather(tree), _gather_state_dict(tree), strides=False, ties=False)
    ours, theirs = st.gather(tree, dst=dst), _gather_state_dict(tree, ranks_only=(dst,))
    if dist.get_rank() == dst:
        assert_trees_equal(ours, theirs, strides=False, ties=False)


gathered_leaves = hyp.one_of(
    layouts(2, partial=True, strided=False, subsets=False),
    tensor_plans(geometries=DENSE),
    hyp.builds(Value, checked_values),
)


gathered_trees = hyp.dictionaries(keys, gathered_leaves | hyp.lists(gathered_leaves, max_size=3), max_size=3)


@as_many()
@given(batch=batches(hyp.tuples(gathered_trees, hyp.integers(0, 1))))
def test_gather(batch):
    run_ranks(2, each, gather_alike, batch)


def zeroed(tree):
    for leaf in tree.values():
        if isinstance(leaf, torch.Tensor):
            torch.zero_(leaf.to_local() if isinstance(leaf, DTensor) else leaf)
    return tree


def spread_alike(sharded, plain):
    """Give every rank its part of what rank 0 holds, or of what each holds."""
    whole = built(plain)
    full = {key: layout.full() for key, layout in sharded.items()} | whole
    is_source = dist.get_rank() == 0

    theirs = zeroed(built(sharded | plain))
    _broadcast_state_dict(full if is_source else {}, theirs, CPU)
    ours = st.distribute(full if is_source else None, zeroed(built(sharded | plain)), src=0)
    assert_trees_equal(ours, theirs, strides=False)

    theirs = zeroed(built(sharded | plain))
    _distribute_state_dict(full, theirs, CPU)
    ours = st.distribute(full, zeroed(built(sharded | plain)))
    assert_trees_equal(ours, theirs, strides=False)

    theirs = zeroed(built(plain))
    _broadcast_state_dict(whole if is_source else {}, theirs, CPU)
    ours = st.broadcast(whole if is_source else None)
    assert_trees_equal(ours, whole)
    assert_trees_equal(ours, theirs, strides=False)  # of empty tensors torch's are its own


spread_layouts = layouts(2, strided=False, subsets=False).filter(lambda layout: layout.shape)


spread_trees = hyp.tuples(
    hyp.dictionaries(keys, spread_layouts, max_size=3),
    hyp.dictionaries(
        keys,
        tensor_plans(dtypes=SENT, geometries=["contiguous", "inside"], wraps=["tensor"])
        | hyp.builds(Value, checked_values),
        max_size=3,
    ),
)


@as_many()
@given(batch=batches(spread_trees))
@hypothesis.example(batch=[({}, {"": TensorPlan((0, 1), torch.float16)})])
def test_distribute_and_broadcast(batch):
    run_ranks(2, each, spread_alike, batch)
