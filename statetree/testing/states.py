"""The states that ``check_transform`` tries, as code: ordinary ones, hard ones, and those that hypothesis draws.

Those are the same ones in every run.
"""

from __future__ import annotations

import functools

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from statetree.testing.dtensor_layout import Layout
from statetree.testing.elements import DTYPES, ELEMENTS, HARD_TO_KEEP, HARD_TO_KEEP_TOO, TRAINING_DTYPES
from statetree.testing.layout_strategies import layouts
from statetree.testing.sources import Source, again, code, node, size, tensor, value, view
from statetree.testing.strategies import plain_values, sources_of, state_trees, tensors, tied_trees


def _dict(**children: Source) -> Source:
    return node("dict", tuple(children.values()), tuple(children))


_W = tensor()
_MODEL = node(
    "OrderedDict",
    (tensor((3, 2), wrap="parameter"), tensor((3,), wrap="parameter"), tensor((), torch.int64)),
    ("layer.weight", "layer.bias", "norm.num_batches_tracked"),
    _metadata=node("dict", (node("dict", (value(2),), ("version",)),), ("",)),
)
_OPTIMIZER = _dict(
    state=node("dict", (_dict(step=tensor(()), exp_avg=tensor((2, 3))),), (0,)),
    param_groups=node("list", (_dict(lr=value(0.001), betas=node("tuple", (value(0.9), value(0.999)))),)),
)
_COUNTERS = (torch.int64, torch.int32, torch.float32, torch.float64)  # as optimizers count their steps, without dims
_WRAPS = ("requires_grad", "computed", "parameter", "frozen", "buffer", "subclass", "attribute")
_SCALAR = Source("torch.tensor(1.0)")  # equal to others, and none of them
_WITH_GRADIENT = Source("samples.having(torch.nn.Parameter(torch.ones(2)), grad=torch.ones(2))")
_NOT_SAVED = Source("torch.nn.Buffer(torch.ones(2), persistent=False)")
_SPARSE = Source("torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (3,), check_invariants=False)")
_SLICE = functools.partial(view, kind="slice")

#: Those that faults are found with most often come first: who asks for few examples gets these.
STATES = (
    _dict(w=_W),
    _dict(a=again(), b=again()),
    _dict(a=view(), b=view()),
    _dict(a=view(), b=view(kind="rows", start=6, stop=18)),
    _dict(a=_SLICE(stop=6), b=_SLICE(start=3, stop=9)),
    _dict(a=_SLICE(stop=6), b=_SLICE(start=12, stop=18)),
    _dict(a=view(kind="parameter"), b=view()),
    _dict(a=again("one_parameter"), b=again("one_parameter")),
    _dict(a=_W, b=_W),
    _dict(w=tensor((3, 100_001))),  # more elements than blocks and pieces have
    *(_dict(w=tensor(dtype=dtype, elements=kind)) for dtype, kind in HARD_TO_KEEP),
    _dict(**{f"step{number}": tensor((), dtype, elements="precise") for number, dtype in enumerate(_COUNTERS)}),
    *(_dict(w=tensor(dtype=dtype, elements=kind)) for dtype, kind in HARD_TO_KEEP_TOO),
    *(_dict(v=value(plain)) for plain in (2**53 + 1, 0.1, -0.0)),  # a float rounds the first, float32 the second
    node("dict", (node("list", [tensor()] * 15),), ("many",)),
    *(_dict(w=tensor(shape)) for shape in ((0,), (), (2, 2), (2, 3, 2))),
    *(_dict(w=tensor(dtype=dtype)) for dtype in TRAINING_DTYPES),
    *(_dict(w=tensor((2, 3), geometry=geometry)) for geometry in ("transposed", "expanded")),
    _dict(w=tensor((2, 3, 2), geometry="transposed"), v=tensor((2, 3), torch.int64, geometry="expanded")),
    *(_dict(w=tensor(geometry=geometry)) for geometry in ("gaps", "inside", "negated", "meta")),
    _dict(w=tensor((2,), torch.complex64, geometry="conjugated")),
    *(_dict(w=tensor(wrap=wrap)) for wrap in _WRAPS),
    *(_dict(v=value(plain)) for plain in (None, True, 1, " A", float("nan"), float("inf"), torch.Size([2]))),
    _dict(z=value(1), a=value(2)),
    _dict(z=_W, a=_W),
    node("dict", (_W, value(1)), (3, 1)),
    *(_dict(inner=node(kind)) for kind in ("dict", "list", "tuple")),
    _dict(a=_SCALAR, b=_SCALAR),
    _dict(w=_WITH_GRADIENT),
    *(_dict(inner=node(kind, (_W, other))) for kind in ("list", "tuple") for other in (_W, value(None))),
    *(_dict(inner=node(kind, (_W, value(1)))) for kind in ("NamedPair", "Pair", "bounded")),
    _dict(inner=node("defaultdict", (_W,), ("a",))),
    _dict(inner=node("Counter", (value(1),), ("a",))),
    _dict(inner=node("DictSubclass", (_W,), ("a",), extra=_W)),
    node("dict", (_W, value(1)), (0, "0")),
    node("dict", (_W,), (("a", 0),)),
    _dict(inner=_dict(inner=node("dict", (_W,), ("a.b",)))),
    _dict(held=node("Thing", (_W,))),
    *(_MODEL, _OPTIMIZER, _dict(model=_MODEL, optimizer=_OPTIMIZER, step=value(3))),
    _dict(w=tensor((2, 3, 2, 2), geometry="channels_last")),
    _dict(a=node("list", (_dict(z=_W, a=_dict(c=node("tuple", (_dict(z=_W, b=_W, a=_W),))), b=_W),))),  # deep
    *(_dict(w=tensor((300,), dtype)) for dtype in DTYPES if dtype not in TRAINING_DTYPES),  # few functions take them
    _dict(w=tensor(dtype=torch.uint64, elements="infinite")),
    *(_dict(w=_SPARSE), _dict(w=_NOT_SAVED)),
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


def states_on_ranks(world_size: int) -> tuple[Source, ...]:
    """Return states that are distributed over some ranks."""
    everyone = tuple(range(world_size))
    placed = [
        *(_dict(w=value(Layout((2 * world_size + 1, 2), everyone, (kind,)))) for kind in ("R", "S0", "S1", "P")),
        *(_dict(w=_spread(everyone, torch.float32, kind)) for kind in ELEMENTS[1:]),
        *(_dict(w=_spread(everyone, dtype, "precise")) for dtype in (torch.float64, torch.int64, torch.bfloat16)),
    ]
    tied = _dict(a=Source(f"(tied := {value(Layout((3,), everyone, ('S0',)))})"), b=Source("tied"))
    uneven = _dict(w=value(Layout((1,), everyone, ("S0",))), n=value(1), plain=tensor())
    inside = value(Layout((3,), everyone, ("S0",), geometry="inside"))
    flags = _dict(w=_spread(everyone, torch.bool, "counted"))
    return (*placed, tied, uneven, _dict(a=inside, b=view(), c=view()), flags)


def _spread(ranks: tuple[int, ...], dtype: torch.dtype, elements: str) -> Source:
    return value(Layout((2 * len(ranks) + 1,), ranks, ("S0",), dtype, elements=elements))


@functools.cache
def _sources(world_size: int | None) -> st.SearchStrategy[Source]:
    """Trees of ordinary tensors, of any, and of tied ones; with ranks, of DTensors beside what all hold."""
    if world_size is not None:
        # Torch, asked too, errs about others.
        placed = layouts(world_size, partial=True, strided=False, subsets=False, elements=ELEMENTS).map(value)
        leaves = st.one_of(placed, placed, sources_of(tensors(dtypes="training", wraps=["tensor"])))
        return st.dictionaries(st.sampled_from("abcd"), leaves, min_size=1, max_size=3).map(lambda held: _dict(**held))
    usual = st.one_of(tensors(dtypes="training", wraps=["tensor", "parameter"]), plain_values())
    trees = state_trees(usual, opaque=False), state_trees(), tied_trees()
    return st.one_of(*map(sources_of, trees))


@functools.lru_cache(maxsize=8)
def drawn_states(world_size: int | None, count: int, number: int) -> tuple[str, ...]:
    """Return some states: other ones for another number."""
    found: list[str] = []

    @seed(number)
    @settings(_SETTINGS, max_examples=count)
    @given(source=_sources(world_size))
    def draw(source: Source) -> None:
        found.append(code(source))

    draw()
    return tuple(found)


def states_for(world_size: int | None, examples: int, number: int) -> list[str]:
    """Return states, the smallest first: those that are known, as many as are asked for, and drawn ones."""
    known = STATES if world_size is None else states_on_ranks(world_size)
    found = list(map(code, known[:examples]))
    if len(found) < examples:
        found += drawn_states(world_size, examples - len(found), number)
    return sorted(dict.fromkeys(found), key=size)
