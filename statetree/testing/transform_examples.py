"""States for ``check_transform``, drawn by hypothesis: the same ones in every run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from statetree.key_paths import Path
from statetree.testing.elements import TRAINING_DTYPES
from statetree.testing.layout_strategies import layouts
from statetree.testing.plan_strategies import plain_values, tensor_plans, tied_plans, tree_plans
from statetree.testing.plans import MAPPINGS, Node, TensorPlan, Value, build

Where = Callable[[Path, Any], bool]
#: What stands for leaves of which a predicate does not hold: the first of which it does.
_INSTEAD = (
    *(TensorPlan(dtype=dtype) for dtype in TRAINING_DTYPES),
    TensorPlan(wrap="parameter"),
    *map(Value, (None, 1, 1.0, "a", True)),
)
_GENERATE = settings(
    settings.get_profile("default"),  # whatever profile tests have: what is found does not depend on it
    derandomize=False,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@functools.cache
def plans(world_size: int | None) -> st.SearchStrategy[Any]:
    """Plans of trees: of ordinary tensors, of any, and of tied ones; with ranks, of DTensors beside what all hold."""
    if world_size is not None:
        placed = layouts(world_size, strided=False, subsets=False)  # torch, which is asked too, errs about others
        leaves = st.one_of(placed, placed, tensor_plans(dtypes=TRAINING_DTYPES, wraps=["tensor"]))
        named = st.dictionaries(st.sampled_from("abcd"), leaves, min_size=1, max_size=3)
        return named.map(lambda items: Node("dict", tuple(items.values()), tuple(items)))
    usual = st.one_of(
        tensor_plans(dtypes=TRAINING_DTYPES, wraps=["tensor", "parameter"]), st.builds(Value, plain_values())
    )
    return st.one_of(tree_plans(usual, max_leaves=6, opaque=False), tree_plans(max_leaves=8), tied_plans(max_leaves=8))


@functools.lru_cache(maxsize=8)
def drawn_plans(world_size: int | None, count: int, number: int) -> tuple[Any, ...]:
    """Return some plans: other ones for another number."""
    found: list[Any] = []

    @seed(number)
    @settings(_GENERATE, max_examples=count)
    @given(plan=plans(world_size))
    def draw(plan: Any) -> None:
        found.append(plan)

    draw()
    return tuple(found)


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
