"""The hypothesis strategies for tensors and trees.

Each draws a source, makes its tree, and notes the code, which hypothesis prints when a test fails. Elements of tensors
are unique by position, and many are lost by conversions: see ``elements``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from hypothesis import note
from hypothesis import strategies as st

from statetree.testing import sources
from statetree.testing.elements import DTYPES, ELEMENTS, HARD_TO_KEEP, TRAINING_DTYPES
from statetree.testing.samples import Color, Pair, a_factory
from statetree.testing.sources import MAPPINGS, PAIRS, SEQUENCES, USUAL_WRAPS, Source, again, node, tensor, value, view

AWKWARD_KEYS = (
    *(True, False, None, 0.0, -0.0, 1.0, float("nan"), "0", "1", "True", "None", "", ".", "[0]", "['a']", "\ud800"),
    *(b"a", Color.RED, (0,), ("0",), (False, "a"), ()),
)
#: The simplest leaf. It is drawn in one choice, so that what shrinks ends here, and not with an empty object.
_NOTHING = st.just(value(None))


def tensors(
    *,
    dtypes: Sequence[torch.dtype] | str = DTYPES,
    max_dims: int = 3,
    max_side: int = 3,
    geometries: Sequence[str] = sources.GEOMETRIES,
    wraps: Sequence[str] = USUAL_WRAPS,
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors whose elements are unique by position.

    Many of them change when they go through a narrower dtype or through arithmetic: full mantissas, whole numbers that
    a float rounds, negative zero, subnormals, infinities, and NaNs with payloads.

    Args:
        dtypes: Their dtypes, or ``"training"``: those of ordinary training states.
        max_dims: How many dims they have at most.
        max_side: How long each dim is at most; 0 is always among the sizes.
        geometries: How they lie in their storages: ``contiguous``, ``transposed``, ``gaps``, ``inside`` (of a larger
            storage), ``expanded``, ``channels_last``, ``conjugated``, ``negated``, ``meta``. What a dtype cannot be is
            contiguous.
        wraps: What they are: ``tensor``, ``requires_grad``, ``parameter``, ``frozen`` (a parameter), ``buffer``,
            ``subclass``, ``attribute`` (with an attribute that holds another tensor); not by default ``computed`` (no
            leaf of autograd, as transforms return them).
    """
    check_some_of("geometries", geometries, sources.GEOMETRIES)
    check_some_of("wraps", wraps, sources.WRAPS)
    return _built(
        st.builds(
            tensor,
            shape=shapes(max_dims=max_dims, max_side=max_side),
            dtype=st.sampled_from(_dtypes(dtypes)),
            geometry=st.sampled_from(geometries),
            wrap=st.sampled_from(wraps),
            elements=st.sampled_from(ELEMENTS),
        )
    )


def state_trees(
    leaves: st.SearchStrategy[Any] | None = None,
    *,
    dtypes: Sequence[torch.dtype] | str = DTYPES,
    max_leaves: int = 12,
    opaque: bool = True,
) -> st.SearchStrategy[Any]:
    """Trees of any containers and any leaves.

    Containers of every kind that statetree knows, empty ones, and keys that are hard to tell apart; ``None`` and other
    plain values; tensors of any kind, with elements as those of ``tensors``, none of which share a storage
    (``tied_trees`` has those). Half of the trees have ten leaves or more, where so many are allowed.

    Args:
        leaves: Leaves; by default tensors and plain values. Of strategies of this module, and of ``one_of`` them and
            others, elements are unique over the tree. (What another strategy draws is put into the tree as it is.)
        dtypes: Dtypes of the default leaves, or ``"training"``: those of ordinary training states, for all of which
            torch implements arithmetic.
        max_leaves: How many leaves a tree has at most, about. Its depth grows with the logarithm.
        opaque: Whether there are objects of unknown classes.
    """
    hard = [_hard_tensors(_dtypes(dtypes)) for _ in range(2)]  # one that is given twice would count once
    # What is mapped, hypothesis takes apart: ``builds`` has plain values count as one choice, and not as nine.
    usual = st.one_of(_NOTHING, sources_of(tensors(dtypes=dtypes)), *hard, st.builds(value, plain_values()))
    chosen = usual if leaves is None else sources_of(leaves)
    trees = st.recursive(chosen, lambda smaller: _nodes(smaller, opaque=opaque), max_leaves=max_leaves)
    fewest = st.sampled_from([0, 2, 2])  # else half of these would be leaves, or empty
    small = st.one_of(trees, fewest.flatmap(lambda count: _nodes(trees, opaque=opaque, fewest=count)))
    large = _large(chosen, max_leaves)
    return _built(st.sampled_from([small, small, large, large, large]).flatmap(lambda drawn: drawn))


def tied_trees(*, max_leaves: int = 12, opaque: bool = True) -> st.SearchStrategy[Any]:
    """Trees whose leaves are views that overlap in a few storages, among others.

    Tensors and containers appear in several places: the very same object.

    Args:
        max_leaves: As for ``state_trees``.
        opaque: As for ``state_trees``.
    """
    places = st.integers(0, 24)
    kinds = st.sampled_from(list(sources.VIEWS))
    views = [st.builds(view, st.integers(0, most), kinds, places, places) for most in (0, 1, 2)]
    one = st.builds(again, st.sampled_from(sources.OBJECTS))
    wrapped = st.builds(tensor, wrap=st.sampled_from(USUAL_WRAPS))
    leaves = st.one_of(_NOTHING, *views, one, wrapped, st.builds(value, plain_values()))
    return state_trees(leaves, max_leaves=max_leaves, opaque=opaque)


def sources_of(drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[Source]:
    """Sources of what a strategy draws."""
    # Leaves that were built one by one would each count their elements from 1, and would not print as code.
    if branches := getattr(drawn, "original_strategies", ()):  # hypothesis' own name, of ``one_of``
        return st.one_of(*map(sources_of, branches))
    found: st.SearchStrategy[Any] = getattr(drawn, "sources", drawn)
    return found.map(lambda leaf: leaf if isinstance(leaf, Source) else value(leaf))


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, with sides of 0 and 1 among them."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def plain_values() -> st.SearchStrategy[Any]:
    """Values that hold no tensor: numbers, strings, and what is passed by identity."""
    return st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers()),
        *(st.text(max_size=3), st.binary(max_size=3)),
        st.sampled_from([Color.RED, a_factory, Pair, torch.float32, torch.device("cpu"), torch.Size([2, 1])]),
    )


def check_some_of(name: str, given: object, allowed: Collection[Any]) -> None:
    """Refuse what is no sequence of some values, or an empty one: at once, and not when something is drawn."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given or set(given) - set(allowed):
        msg = f"{name}: expected a list or tuple of some of {', '.join(map(repr, allowed))}, got {given!r}."
        raise ValueError(msg)


def _dtypes(dtypes: Sequence[torch.dtype] | str) -> Sequence[torch.dtype]:
    if dtypes == "training":
        return TRAINING_DTYPES
    if isinstance(dtypes, str):
        raise ValueError(f"dtypes: expected 'training', or a list or tuple of dtypes, got {dtypes!r}.")  # noqa: TRY004 - a word may be right
    check_some_of("dtypes", dtypes, DTYPES)
    return dtypes


def _built(drawn: st.SearchStrategy[Source]) -> st.SearchStrategy[Any]:
    @st.composite
    def built(draw: st.DrawFn) -> Any:
        body = sources.code(draw(drawn))
        note(sources.module(body))
        return sources.run(body)

    strategy = built()
    vars(strategy)["sources"] = drawn
    return strategy


def _hard_tensors(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Source]:
    """Tensors with elements that are easily lost. Few that ``tensors`` draws are such."""
    pairs = [pair for pair in HARD_TO_KEEP if pair[0] in dtypes] or [(dtype, "counted") for dtype in dtypes]
    filled = st.lists(st.integers(1, 3), max_size=3).map(tuple)  # an empty one has none of them
    drawn = st.tuples(filled, st.sampled_from(pairs), st.sampled_from(USUAL_WRAPS))
    return drawn.map(lambda drawn: tensor(drawn[0], drawn[1][0], wrap=drawn[2], elements=drawn[1][1]))


@st.composite
def _holding(
    draw: st.DrawFn, kind: str, held: Sequence[Source], children: st.SearchStrategy[Source] | None = None
) -> Source:
    """Containers of a kind and some children; with a strategy, with attributes, if they can have any."""
    count = len(held)
    usual = st.text("ab.", max_size=3), st.integers(0, 3)  # those that ordinary states have
    keys = st.one_of(*usual, st.sampled_from(AWKWARD_KEYS), st.text(max_size=2))
    drawn = draw(st.lists(keys, min_size=count, max_size=count, unique=True)) if kind in MAPPINGS else ()
    named: dict[str, Source] = {}
    if children is not None and kind in sources.WITH_ATTRIBUTES:
        named = draw(st.dictionaries(st.sampled_from(["_metadata", "extra", "a"]), children, max_size=2))
    return node(kind, held, drawn, **named)


@st.composite
def _nodes(draw: st.DrawFn, children: st.SearchStrategy[Source], *, opaque: bool, fewest: int = 0) -> Source:
    kind = draw(st.sampled_from(draw(st.sampled_from(_FAMILIES if opaque else _FAMILIES[:-1]))))
    most = 1 if kind == "Counter" else 4  # to be shown, it sorts what it holds, and tensors cannot be
    least, most = (2, 2) if kind in PAIRS else (min(fewest, most), most)
    held = draw(st.lists(children, min_size=least, max_size=most))
    return draw(_holding(kind, held, children))


_FAMILIES = [list(MAPPINGS), list(SEQUENCES), list(PAIRS), ["Thing"]]
_WIDE = [kind for kind in (*MAPPINGS, *SEQUENCES) if kind != "Counter"]


@st.composite
def _large(draw: st.DrawFn, leaves: st.SearchStrategy[Source], max_leaves: int) -> Source:
    """Trees of ten leaves or more, if so many are allowed: what ``st.recursive`` draws seldom has more than three."""
    items = draw(st.lists(leaves, min_size=min(10, max_leaves), max_size=max_leaves))
    while len(items) > 1:  # into containers of up to four
        fours = [items[start : start + 4] for start in range(0, len(items), 4)]
        items = [draw(_holding(draw(st.sampled_from(_WIDE)), four)) for four in fours]
    return items[0]
