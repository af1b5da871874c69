"""Hypothesis strategies for state trees: any containers, any tensors, ties of any kind, optimizers, layouts.

Most come in two forms. ``tree_plans`` draws a *plan*, of which ``build`` makes the same tree as often as it is asked
to; ``state_trees`` draws the trees themselves. When a test fails, a plan prints as code that can be pasted into it, and
so does what made a tree, in a note. Elements of tensors are unique by position, over all tensors of a tree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import note
from hypothesis import strategies as st

from statetree.testing.arguments import check_at_least, check_some_of, refuse
from statetree.testing.container_plan import MAPPINGS, PAIRS, SEQUENCES, WITH_ATTRIBUTES, Again, Node, Value
from statetree.testing.layout import LOCAL_GEOMETRIES, Layout, largest_sum, mesh_shape, meshes, over_later_dims, total
from statetree.testing.optimizer_plan import OPTIMIZERS, SIDES, OptimizerPlan
from statetree.testing.plans import Plan, build
from statetree.testing.samples import Color, NamedPair, Pair, a_factory
from statetree.testing.tensor_plan import DTYPES, GEOMETRIES, USUAL_WRAPS, VIEWS, WRAPS, TensorPlan, ViewPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

NAN = float("nan")
AWKWARD_KEYS = (
    *(True, False, None, 0.0, -0.0, 1.0, NAN, "0", "1", "True", "None", "", ".", "[0]", "['a']", "\ud800", b"a"),
    *(Color.RED, (0,), ("0",), (False, "a"), (), frozenset({"a", "b"}), NamedPair(1, "a"), int),
)
#: The simplest leaf. It is drawn in one choice, so that what shrinks ends here, and not with an empty object.
_NOTHING = st.just(Value(None))


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, with sides of 0 and 1 among them."""
    check_at_least("max_dims", max_dims, 0)
    check_at_least("max_side", max_side, 0)
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def tensor_plans(
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_dims: int = 3,
    max_side: int = 3,
    geometries: Sequence[str] = tuple(GEOMETRIES),
    wraps: Sequence[str] = USUAL_WRAPS,
) -> st.SearchStrategy[TensorPlan]:
    """Plans of single tensors (see ``tensors``)."""
    check_some_of("dtypes", dtypes, DTYPES)
    check_some_of("geometries", geometries, GEOMETRIES)
    check_some_of("wraps", wraps, WRAPS)
    return st.builds(
        TensorPlan,
        shape=shapes(max_dims=max_dims, max_side=max_side),
        dtype=st.sampled_from(dtypes),
        geometry=st.sampled_from(geometries),
        wrap=st.sampled_from(wraps),
    ).filter(can_be_shown)


def can_be_shown(plan: TensorPlan) -> bool:
    """Whether torch can print the tensor: a test that fails on another would fail with torch's error, not its own."""
    return plan.shape != () or plan.dtype is not torch.float4_e2m1fn_x2


def tensors(
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_dims: int = 3,
    max_side: int = 3,
    geometries: Sequence[str] = tuple(GEOMETRIES),
    wraps: Sequence[str] = USUAL_WRAPS,
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors whose elements are unique by position.

    Args:
        dtypes: Their dtypes.
        max_dims: How many dims they have at most.
        max_side: How long each dim is at most; 0 is always among the sizes.
        geometries: How they lie in their storages: ``contiguous``, ``transposed``, ``gaps``, ``inside`` (of a larger
            storage), ``expanded``, ``channels_last``, ``conjugated``, ``negated``, ``meta``. What a dtype cannot be is
            contiguous.
        wraps: What they are: ``tensor``, ``requires_grad``, ``parameter``, ``frozen`` (a parameter), ``buffer``,
            ``subclass``, ``attribute`` (with an attribute that holds another tensor); not by default ``computed`` (no
            leaf of autograd, as transforms return them).
    """
    plans = tensor_plans(dtypes=dtypes, max_dims=max_dims, max_side=max_side, geometries=geometries, wraps=wraps)
    return _built(plans)


def view_plans(*, max_bases: int = 3) -> st.SearchStrategy[ViewPlan]:
    """Plans of views that overlap in a few storages."""
    return st.builds(
        ViewPlan,
        base=st.integers(0, max_bases - 1),
        kind=st.sampled_from(list(VIEWS)),
        start=st.integers(0, 24),
        stop=st.integers(0, 24),
    )


def plain_values() -> st.SearchStrategy[Any]:
    """Values that hold no tensor: numbers, strings, and what is passed by identity."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from([Color.RED, a_factory, Pair, torch.float32, torch.device("cpu"), torch.Size([2, 1])]),
    )


def keys() -> st.SearchStrategy[Any]:
    """Keys of mappings: those that ordinary states have, and those that are hard to tell apart."""
    return st.one_of(st.text("ab.", max_size=3), st.integers(0, 3), st.sampled_from(AWKWARD_KEYS), st.text(max_size=2))


def tree_plans(
    leaves: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 12, opaque: bool = True
) -> st.SearchStrategy[Any]:
    """Plans of trees (see ``state_trees``)."""
    check_at_least("max_leaves", max_leaves, 1)
    if not (leaves is None or isinstance(leaves, st.SearchStrategy)):
        refuse("leaves", "a strategy, or None", leaves, TypeError)
    usual = st.one_of(_NOTHING, tensor_plans(), tensor_plans(), st.builds(Value, plain_values()))
    chosen = usual if leaves is None else _plans_of(leaves)
    trees = st.recursive(chosen, lambda smaller: _nodes(smaller, opaque=opaque), max_leaves=max_leaves)
    fewest = st.sampled_from([0, 2, 2])  # else half of all trees would be leaves, or empty
    return st.one_of(trees, fewest.flatmap(lambda count: _nodes(trees, opaque=opaque, fewest=count)))


def state_trees(
    leaves: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 12, opaque: bool = True
) -> st.SearchStrategy[Any]:
    """Trees of any containers and any leaves.

    Containers of every kind that statetree knows, empty ones, and keys that are hard to tell apart; ``None`` and other
    plain values; tensors of any kind, none of which share a storage (``tied_trees`` has those).

    Args:
        leaves: Leaves, or plans of leaves; by default tensors and plain values. Of strategies of this module, and of
            ``one_of`` them and others, the plans are taken. (What another strategy draws is put into the tree as it is:
            a tensor's elements may be those of others, and a test that changes it changes what hypothesis shows.)
        max_leaves: How many leaves a tree has at most, about. Its depth grows with the logarithm.
        opaque: Whether there are objects of unknown classes.
    """
    return _built(tree_plans(leaves, max_leaves=max_leaves, opaque=opaque))


_wrapped = st.builds(TensorPlan, wrap=st.sampled_from(USUAL_WRAPS))


def tied_plans(*, max_leaves: int = 12, opaque: bool = True) -> st.SearchStrategy[Any]:
    """Plans of trees whose leaves share storages (see ``tied_trees``)."""
    again = st.builds(Again, st.integers(0, 7))
    views = (view_plans(max_bases=1), view_plans(max_bases=2), view_plans())
    leaves = st.one_of(_NOTHING, *views, again, _wrapped, st.builds(Value, plain_values()))
    return tree_plans(leaves, max_leaves=max_leaves, opaque=opaque)


def tied_trees(*, max_leaves: int = 12, opaque: bool = True) -> st.SearchStrategy[Any]:
    """Trees whose leaves are views that overlap in a few storages, among others.

    Tensors and containers appear in several places: the very same object.

    Args:
        max_leaves: As for ``state_trees``.
        opaque: As for ``state_trees``.
    """
    return _built(tied_plans(max_leaves=max_leaves, opaque=opaque))


def optimizer_plans(*, names: Sequence[str] = tuple(OPTIMIZERS)) -> st.SearchStrategy[OptimizerPlan]:
    """Plans of states of optimizers (see ``optimizer_states``)."""
    check_some_of("names", names, OPTIMIZERS)
    return _optimizer_plans(names)


@st.composite
def _optimizer_plans(draw: st.DrawFn, names: Sequence[str]) -> OptimizerPlan:
    name = draw(st.sampled_from(names))
    dims, least = SIDES.get(name, (0, 0))
    sides = st.lists(st.integers(least, 3), min_size=dims, max_size=2).map(tuple)
    group = st.lists(sides, min_size=1, max_size=2).map(tuple)
    return OptimizerPlan(
        name=name,
        variant=draw(st.integers(0, len(OPTIMIZERS[name]) - 1)),
        shapes=tuple(draw(st.lists(group, min_size=1, max_size=2))),
        steps=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )


def optimizer_states(*, names: Sequence[str] = tuple(OPTIMIZERS)) -> st.SearchStrategy[dict[str, Any]]:
    """States of parameters and of an optimizer of ``torch.optim`` that has really stepped over them.

    Args:
        names: Which optimizers.
    """
    return _built(optimizer_plans(names=names))


def layouts(
    world_size: int,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.bfloat16, torch.complex64),
    max_dims: int = 3,
    max_side: int = 7,
    partial: bool = False,
    strided: bool = True,
    subsets: bool = True,
) -> st.SearchStrategy[Layout]:
    """Descriptions of DTensors: a mesh, placements, and a global shape of any size, even or not.

    They can be pickled; ``layout.build()`` makes the DTensor on each rank, and ``layout.full()`` what it stands for.

    Args:
        world_size: How many ranks there are.
        dtypes: Dtypes of the tensors.
        max_dims: How many dims they have at most.
        max_side: How long each is at most.
        partial: Whether there are ``Partial`` placements, where the dtype can hold their sums exactly.
        strided: Whether there are strided shards, as FSDP makes over tensor parallelism. They hold other elements than
            plain ones where two dims of the mesh are longer than 1, for which there must be four ranks.
        subsets: Whether meshes may leave ranks out.
    """
    check_at_least("world_size", world_size, 1)
    check_some_of("dtypes", dtypes, DTYPES)
    found = meshes(world_size, subsets=subsets)
    drawn = functools.partial(_layouts, world_size, dtypes=st.sampled_from(dtypes), partial=partial)
    plain = [drawn(shapes(max_dims=max_dims, max_side=max_side), _by_dims(found)) for _ in range(2)]
    if not strided or max_dims == 0:
        return plain[0]
    deep = [mesh for mesh in found if len(mesh_shape(mesh)) > 1]
    wide = [mesh for mesh in deep if sum(size > 1 for size in mesh_shape(mesh)) > 1]
    sharded = drawn(shapes(min_dims=1, max_dims=max_dims, max_side=max_side), _by_dims(wide or deep))
    return st.one_of(*plain, _strided(sharded, max_side))  # a third; one that is given twice would count once


def _by_dims(found: list[tuple[Any, ...]]) -> st.SearchStrategy[tuple[Any, ...]]:
    # Drawn from one list, most meshes would have as many dims as can be: there are more such.
    return st.one_of(
        *(st.sampled_from(list(meshes)) for _, meshes in itertools.groupby(found, lambda mesh: len(mesh_shape(mesh))))
    )


@st.composite
def _layouts(
    draw: st.DrawFn,
    world_size: int,
    shapes: st.SearchStrategy[Any],
    meshes: st.SearchStrategy[Any],
    *,
    dtypes: st.SearchStrategy[torch.dtype],
    partial: bool,
) -> Layout:
    shape, mesh, dtype = draw(shapes), draw(meshes), draw(dtypes)
    count = math.prod(mesh_shape(mesh))
    if not shape and count < world_size:
        shape = (1,)  # DTensor.from_local does not take the shape of a scalar outside the mesh
    sums = partial and largest_sum(dtype) >= total(count)
    kinds = ["R", *(f"S{dim}" for dim in range(len(shape))), *(["P"] if sums else [])]
    placements = draw(st.tuples(*[st.sampled_from(kinds) for _ in mesh_shape(mesh)]))
    return Layout(shape, mesh, placements, dtype, draw(st.sampled_from(LOCAL_GEOMETRIES)))


@st.composite
def _strided(draw: st.DrawFn, layouts: st.SearchStrategy[Layout], max_side: int) -> Layout:
    layout = draw(layouts)
    dim = draw(st.integers(0, len(layout.shape) - 1))
    shape = list(layout.shape)
    shape[dim] = draw(st.integers(min(2, max_side), max_side))
    # One pair of dims of the mesh: torch's own collectives do not take three that shard one dim unevenly.
    pair = draw(st.sampled_from(list(itertools.combinations(range(len(layout.placements)), 2))))
    others = ("R" if kind == f"S{dim}" else kind for kind in layout.placements)
    placements = tuple(f"S{dim}" if place in pair else kind for place, kind in enumerate(others))
    placements = over_later_dims(placements, layout.mesh)
    return dataclasses.replace(layout, shape=tuple(shape), placements=placements)


def _built(plans: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Composite strategies stand for themselves in representations: those of strategies within strategies would grow.
    @st.composite
    def built(draw: st.DrawFn) -> Any:
        plan = draw(plans)
        tree = build(plan)
        note(f"from build({plan!r})")
        return tree

    strategy = built()
    vars(strategy)["plans"] = plans
    return strategy


def _plans_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Leaves that were built one by one would each count their elements from 1, and would not print as code.
    if branches := getattr(leaves, "original_strategies", ()):  # hypothesis' own name, of ``one_of``
        return st.one_of(*map(_plans_of, branches))
    plans: st.SearchStrategy[Any] = getattr(leaves, "plans", leaves)
    return plans.map(_planned)


def _planned(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Plan) else Value(leaf)


def _nodes(children: st.SearchStrategy[Any], *, opaque: bool, fewest: int = 0) -> st.SearchStrategy[Any]:
    @st.composite
    def mappings(draw: st.DrawFn) -> Node:
        kind = draw(st.sampled_from(list(MAPPINGS)))
        most = 1 if kind == "Counter" else 4  # to be shown, it sorts what it holds, and tensors cannot be
        items = st.lists(st.tuples(keys(), children), min_size=min(fewest, most), max_size=most, unique_by=_key_of)
        drawn = draw(items)
        attributes = draw(_attributes(kind, children))
        return Node(kind, tuple(child for _, child in drawn), tuple(key for key, _ in drawn), attributes)

    @st.composite
    def sequences(draw: st.DrawFn) -> Node:
        kind = draw(st.sampled_from(list(SEQUENCES)))
        items = draw(st.lists(children, min_size=fewest, max_size=4))
        return Node(kind, tuple(items), attributes=draw(_attributes(kind, children)))

    @st.composite
    def pairs(draw: st.DrawFn) -> Node:
        return Node(draw(st.sampled_from(list(PAIRS))), (draw(children), draw(children)))

    @st.composite
    def things(draw: st.DrawFn) -> Node:
        return Node("Thing", tuple(draw(st.lists(children, min_size=fewest, max_size=3))))

    return st.one_of(mappings(), sequences(), pairs(), *([things()] if opaque else []))


def _key_of(item: tuple[Any, Any]) -> Any:
    return item[0]


def _attributes(kind: str, children: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    if kind not in WITH_ATTRIBUTES:
        return st.just(())
    names = st.sampled_from(["_metadata", "extra", "a"])
    return st.dictionaries(names, children, max_size=2).map(lambda named: tuple(named.items()))
