"""Plans of the states that ``check_transform`` tries: ordinary ones, hard ones, and those that hypothesis draws.

Those are the same ones in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from statetree.key_paths import Path
from statetree.testing.dtensor_layout import Layout
from statetree.testing.elements import HARD_TO_KEEP, HARD_TO_KEEP_TOO, TRAINING_DTYPES
from statetree.testing.layout_strategies import layouts
from statetree.testing.plans import MAPPINGS, PAIRS, Again, Node, TensorPlan, Value, ViewPlan, build, code_of
from statetree.testing.strategies import plain_values, plans_of, state_trees, tensors, tied_trees

Where = Callable[[Path, Any], bool]


def _dict(**children: object) -> Node:
    return Node("dict", tuple(children.values()), tuple(children))


_W = TensorPlan()
_MODEL = Node(
    "OrderedDict",
    (TensorPlan((3, 2), wrap="parameter"), TensorPlan((3,), wrap="parameter"), TensorPlan((), torch.int64)),
    ("layer.weight", "layer.bias", "norm.num_batches_tracked"),
    (("_metadata", Node("dict", (Node("dict", (Value(2),), ("version",)),), ("",))),),
)
_OPTIMIZER = _dict(
    state=Node("dict", (_dict(step=TensorPlan(()), exp_avg=TensorPlan((2, 3))),), (0,)),
    param_groups=Node("list", (_dict(lr=Value(0.001), betas=Node("tuple", (Value(0.9), Value(0.999)))),)),
)
_WRAPS = ("requires_grad", "computed", "parameter", "frozen", "buffer", "subclass", "attribute")
_SLICE = functools.partial(ViewPlan, kind="slice")

STATES = (
    _dict(w=_W),
    *(_dict(w=TensorPlan(dtype=dtype, elements=kind)) for dtype, kind in (*HARD_TO_KEEP, *HARD_TO_KEEP_TOO)),
    _dict(v=Value(2**53 + 1)),  # a float rounds it
    *(_dict(w=TensorPlan(shape)) for shape in ((0,), (), (2, 2))),
    *(_dict(w=TensorPlan(dtype=dtype)) for dtype in TRAINING_DTYPES),
    *(_dict(w=TensorPlan((2, 3), geometry=geometry)) for geometry in ("transposed", "expanded")),
    *(_dict(w=TensorPlan(geometry=geometry)) for geometry in ("gaps", "inside", "negated", "meta")),
    _dict(w=TensorPlan((2,), torch.complex64, geometry="conjugated")),
    *(_dict(w=TensorPlan(wrap=wrap)) for wrap in _WRAPS),
    _dict(a=ViewPlan(), b=ViewPlan()),
    _dict(a=ViewPlan(), b=ViewPlan(kind="rows", start=6, stop=18)),
    _dict(a=_SLICE(stop=6), b=_SLICE(start=3, stop=9)),
    _dict(a=_SLICE(stop=6), b=_SLICE(start=12, stop=18)),
    _dict(a=ViewPlan(kind="parameter"), b=ViewPlan()),
    _dict(a=TensorPlan(wrap="parameter"), b=Again()),
    _dict(a=_W, b=_W),
    *(_dict(v=Value(value)) for value in (None, True, 1, 0.1, "a", float("nan"))),
    _dict(z=Value(1), a=Value(2)),
    _dict(z=_W, a=_W),
    _dict(inner=Node("dict")),
    *(_dict(inner=Node(kind, (_W, other))) for kind in ("list", "tuple") for other in (_W, Value(None))),
    *(_dict(inner=Node(kind, (_W, Value(1)))) for kind in ("NamedPair", "Pair", "bounded")),
    _dict(inner=Node("defaultdict", (_W,), ("a",))),
    _dict(inner=Node("Counter", (Value(1),), ("a",))),
    _dict(inner=Node("DictSubclass", (_W,), ("a",), (("extra", _W),))),
    Node("dict", (_W, Value(1)), (0, "0")),
    Node("dict", (_W,), (("a", 0),)),
    _dict(held=Node("Thing", (_W,))),
    *(_MODEL, _OPTIMIZER, _dict(model=_MODEL, optimizer=_OPTIMIZER, step=Value(3))),
)
#: How many plans are tried to make one smaller.
MOST_TRIED = 200
#: What stands for leaves of which a predicate does not hold: the first of which it does.
_INSTEAD = (
    *(TensorPlan(dtype=dtype) for dtype in TRAINING_DTYPES),
    TensorPlan(wrap="parameter"),
    *map(Value, (None, 1, 1.0, "a", True)),
)
_SETTINGS = settings(
    settings.get_profile("default"),  # whatever profile tests have: what is found does not depend on it
    derandomize=False,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def states_on_ranks(world_size: int) -> tuple[Node, ...]:
    """Return plans of states that are distributed over some ranks."""
    everyone = tuple(range(world_size))
    placed = [_dict(w=Layout((2 * world_size + 1, 2), everyone, (kind,))) for kind in ("R", "S0", "S1")]
    uneven = _dict(w=Layout((1,), everyone, ("S0",)), n=Value(1), plain=TensorPlan())
    return (*placed, uneven, _dict(a=Layout((3,), everyone, ("S0",), geometry="inside"), b=ViewPlan(), c=ViewPlan()))


@functools.cache
def _plans(world_size: int | None) -> st.SearchStrategy[Any]:
    """Plans of trees: of ordinary tensors, of any, and of tied ones; with ranks, of DTensors beside what all hold."""
    if world_size is not None:
        placed = layouts(world_size, strided=False, subsets=False)  # torch, which is asked too, errs about others
        leaves = st.one_of(placed, placed, plans_of(tensors(dtypes="training", wraps=["tensor"])))
        named = st.dictionaries(st.sampled_from("abcd"), leaves, min_size=1, max_size=3)
        return named.map(lambda items: _dict(**items))
    usual = st.one_of(tensors(dtypes="training", wraps=["tensor", "parameter"]), plain_values())
    trees = state_trees(usual, max_leaves=6, opaque=False), state_trees(max_leaves=8), tied_trees(max_leaves=8)
    return st.one_of(*map(plans_of, trees))


@functools.lru_cache(maxsize=8)
def drawn_plans(world_size: int | None, count: int, number: int) -> tuple[Any, ...]:
    """Return some plans: other ones for another number."""
    found: list[Any] = []

    @seed(number)
    @settings(_SETTINGS, max_examples=count)
    @given(plan=_plans(world_size))
    def draw(plan: Any) -> None:
        found.append(plan)

    draw()
    return tuple(found)


def plans_for(world_size: int | None, examples: int, where: Where | None, number: int) -> list[Any]:
    """Return plans, the smallest first: those that are known, as many as are asked for, and drawn ones."""
    found = list(STATES if world_size is None else states_on_ranks(world_size))[:examples]
    if len(found) < examples:
        found += drawn_plans(world_size, examples - len(found), number)
    if where is not None:
        found = [only(where, plan) for plan in found]
    return sorted({repr(plan): plan for plan in found}.values(), key=size)


def size(plan: Any) -> tuple[bool, int]:
    """Return what is less for what is read more easily, by transforms that take containers alone, too."""
    return not isinstance(plan, Node), len(code_of(plan).source())


def smallest(plan: Any, fails: Callable[[Any], bool]) -> Any:
    """Return a smaller plan that fails as the given one does, as far as that can be found soon.

    Hypothesis makes smaller only what it draws: to draw such a tree anew and shrink it takes half a minute.
    """
    tried = {repr(plan)}
    while len(tried) < MOST_TRIED:
        untried = [each for each in _smaller(plan) if size(each) < size(plan) and repr(each) not in tried]
        if not untried:
            break
        smaller = min(untried, key=size)
        tried.add(repr(smaller))
        if fails(smaller):
            plan = smaller
    return plan


def _smaller(plan: Any) -> Iterator[Any]:
    """Yield plans that are one step simpler: in themselves, or in one of their children."""
    replace = dataclasses.replace
    if isinstance(plan, Node):
        yield from plan.children
        yield replace(plan, kind="dict" if plan.kind in MAPPINGS else "list", attributes=())
        yield replace(plan, keys=tuple("abcdefghijkl"[: len(plan.keys)]))
        for at, child in enumerate(plan.children):
            before, after = plan.children[:at], plan.children[at + 1 :]
            if plan.kind not in PAIRS:
                yield replace(plan, children=before + after, keys=plan.keys[:at] + plan.keys[at + 1 :])
            yield from (replace(plan, children=(*before, part, *after)) for part in _smaller(child))
    else:
        yield Value(None)
        if isinstance(plan, (TensorPlan, ViewPlan)):
            yield from (replace(plan, **{field.name: field.default}) for field in dataclasses.fields(plan))


def only(where: Where, plan: Any, path: Path = Path(())) -> Any:  # noqa: B008 - it cannot change
    """Return a plan of the same containers, in which every leaf is one of which a predicate holds."""
    if isinstance(plan, Node) and plan.kind != "Thing":
        keys = plan.keys if plan.kind in MAPPINGS else range(len(plan.children))
        children = [only(where, child, path.child(key)) for key, child in zip(keys, plan.children, strict=True)]
        kind = "Pair" if plan.kind == "SlottedPair" else plan.kind  # which has a leaf of its own
        return dataclasses.replace(plan, kind=kind, children=tuple(children), attributes=())
    for candidate in (plan, *_INSTEAD):
        if where(path, build(candidate)):
            return candidate
    msg = "check_transform: where holds of no leaf: expected one of a tensor, a number, a string or None."
    raise ValueError(msg)
