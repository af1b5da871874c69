"""Plans of ordinary states, and of those with which transforms of real projects went wrong."""

from __future__ import annotations

import torch

from statetree.testing.dtensor_layout import Layout
from statetree.testing.elements import HARD_TO_KEEP
from statetree.testing.plans import Again, Node, TensorPlan, Value, ViewPlan


def _dict(**children: object) -> Node:
    return Node("dict", tuple(children.values()), tuple(children))


_WEIGHT = TensorPlan((2, 3))
_MODEL = Node(
    "OrderedDict",
    (TensorPlan((3, 2), wrap="parameter"), TensorPlan((3,), wrap="parameter"), TensorPlan((), torch.int64)),
    ("layer.weight", "layer.bias", "norm.num_batches_tracked"),
    (("_metadata", Node("dict", (Node("dict", (Value(2),), ("version",)),), ("",))),),
)
_OPTIMIZER = _dict(
    state=Node("dict", (_dict(step=TensorPlan(()), exp_avg=_WEIGHT),), (0,)),
    param_groups=Node("list", (_dict(lr=Value(0.001), betas=Node("tuple", (Value(0.9), Value(0.999)))),)),
)

STATES = (
    _dict(w=TensorPlan()),
    *(_dict(w=TensorPlan(dtype=dtype, elements=elements)) for dtype, elements in HARD_TO_KEEP),
    _dict(w=TensorPlan((0,))),
    _dict(w=TensorPlan(())),
    _dict(w=TensorPlan((2,), torch.float64)),
    _dict(w=TensorPlan((2,), torch.bfloat16)),
    _dict(w=TensorPlan((2,), torch.int64)),
    _dict(w=TensorPlan((2,), torch.bool)),
    _dict(w=TensorPlan((2,), torch.uint8)),
    _dict(w=TensorPlan((2, 2))),
    _dict(w=TensorPlan((2, 3), geometry="transposed")),
    _dict(w=TensorPlan((2,), geometry="gaps")),
    _dict(w=TensorPlan((2,), geometry="inside")),
    _dict(w=TensorPlan((2, 3), geometry="expanded")),
    _dict(w=TensorPlan((2,), torch.complex64, geometry="conjugated")),
    _dict(w=TensorPlan(geometry="negated")),
    _dict(w=TensorPlan(geometry="meta")),
    _dict(w=TensorPlan(wrap="requires_grad")),
    _dict(w=TensorPlan(wrap="computed")),
    _dict(w=TensorPlan(wrap="parameter")),
    _dict(w=TensorPlan(wrap="frozen")),
    _dict(w=TensorPlan(wrap="buffer")),
    _dict(w=TensorPlan(wrap="subclass")),
    _dict(w=TensorPlan(wrap="attribute")),
    _dict(a=ViewPlan(), b=ViewPlan()),
    _dict(a=ViewPlan(), b=ViewPlan(kind="rows", start=6, stop=18)),
    _dict(a=ViewPlan(kind="slice", stop=6), b=ViewPlan(kind="slice", start=3, stop=9)),
    _dict(a=ViewPlan(kind="slice", stop=6), b=ViewPlan(kind="slice", start=12, stop=18)),
    _dict(a=ViewPlan(kind="parameter"), b=ViewPlan()),
    _dict(a=TensorPlan(wrap="parameter"), b=Again()),
    _dict(a=TensorPlan(), b=TensorPlan()),
    _dict(w=Value(None)),
    _dict(n=Value(1)),
    _dict(lr=Value(0.1)),
    _dict(name=Value("a")),
    _dict(nan=Value(float("nan"))),
    _dict(z=Value(1), a=Value(2)),
    _dict(z=TensorPlan(), a=TensorPlan()),
    _dict(inner=Node("dict")),
    _dict(inner=Node("list", (TensorPlan(), TensorPlan()))),
    _dict(inner=Node("list", (TensorPlan(), Value(None)))),
    _dict(inner=Node("tuple", (TensorPlan(), TensorPlan()))),
    _dict(inner=Node("NamedPair", (TensorPlan(), Value(1)))),
    _dict(inner=Node("Pair", (TensorPlan(), Value(1)))),
    _dict(inner=Node("bounded", (TensorPlan(),))),
    _dict(inner=Node("defaultdict", (TensorPlan(),), ("a",))),
    _dict(inner=Node("Counter", (Value(1),), ("a",))),
    _dict(inner=Node("DictSubclass", (TensorPlan(),), ("a",), (("extra", TensorPlan()),))),
    Node("dict", (TensorPlan(), Value(1)), (0, "0")),
    Node("dict", (TensorPlan(),), (("a", 0),)),
    _dict(held=Node("Thing", (TensorPlan(),))),
    _MODEL,
    _OPTIMIZER,
    _dict(model=_MODEL, optimizer=_OPTIMIZER, step=Value(3)),
)


def states_on_ranks(world_size: int) -> tuple[Node, ...]:
    """Return plans of states that are distributed over some ranks."""
    everyone = tuple(range(world_size))
    placed = [_dict(w=Layout((2 * world_size + 1, 2), everyone, (kind,))) for kind in ("R", "S0", "S1")]
    uneven = _dict(w=Layout((1,), everyone, ("S0",)), n=Value(1), plain=TensorPlan())
    return (*placed, uneven, _dict(a=Layout((3,), everyone, ("S0",), geometry="inside"), b=ViewPlan(), c=ViewPlan()))
