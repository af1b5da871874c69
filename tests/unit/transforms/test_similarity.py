"""``similarity``: total, symmetric, read-only, and if it is true ``copy_into`` succeeds."""

import copy
import datetime
import decimal
import enum
import fractions
import math
import re
import signal
import types
from collections import OrderedDict, namedtuple
from itertools import product

import numpy as np
import pytest
import torch

import statetree as st
from statetree import Path
from statetree.torch_internals import can_negate
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch
from tests.trees import TREES
from tests.trees.classes import TwoTensors
from tests.trees.tensors import BITS, DTYPES, of_bytes, with_bits

Point = namedtuple("Point", "x y")
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
]


class Box:
    """An opaque object."""

    def __init__(self, **content):
        self.__dict__.update(content)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def ramp(*shape, dtype=torch.float32, start=0):
    count = int(np.prod(shape))
    return torch.arange(start, start + count).to(dtype).reshape(shape)


def both(a, b, *, values=False, **options):
    """Compare in both directions: the answers mirror each other, and nothing changes."""
    watches = Watch(a), Watch(b)
    there, back = (st.similarity(*pair, values=values, **options) for pair in ((a, b), (b, a)))
    for watch in watches:
        watch.check()
    assert bool(there) == bool(back)
    assert there.count == back.count
    assert sorted((str(d.path), d.kind) for d in there.differences) == sorted(
        (str(d.path), d.kind) for d in back.differences
    )
    return there


def differs(a, b, kind, path="", **options):
    report = both(a, b, **options)
    assert not report
    assert [(difference.kind, str(difference.path)) for difference in report.differences] == [(kind, path)]
    return report


# True


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.keyed_by_identity], ids=str)
@pytest.mark.parametrize("values", [False, True])
def test_equal_trees_are_similar(tree, values):
    if tree.refused and values:
        pytest.skip("its bytes cannot be read")
    a, b = tree.make(), tree.make()
    report = both(a, b, values=values)
    if not tree.refused:
        assert report, report


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_is_similar_to_itself(tree):
    made = tree.make()
    # What cannot be copied is like nothing, not even itself: else copy_into would have to succeed (which leaves
    # attributes of tensors alone).
    expected = not tree.refused or tree.name == "tensor_that_is_its_own_attribute"
    found = bool(both(made, made)), bool(both(made, made, values=True))
    assert found == (expected, expected)


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.keyed_by_identity], ids=str)
def test_where_it_is_true_copy_into_succeeds(tree):
    a, b = tree.make(), tree.make()
    if not st.similarity(a, b, values=False):
        return
    try:
        result = st.copy_into(a, b)
    except st.TreeMismatch as error:
        # Only what cannot be written at all is left out of the promise.
        assert {difference.kind for difference in error.differences} <= {"writability", "overlap"}, error
        assert "overlaps itself" in str(error) or "inference" in str(error)
        return
    assert st.similarity(a, result, values=True)


def test_what_is_not_compared():
    a = {"w": ramp(3, 4), "v": ramp(4, start=9)}
    b = {"v": torch.nn.Parameter(ramp(8, start=50)[::2]), "w": ramp(4, 3, start=99).t().requires_grad_()}
    a["w"].note = "seen"
    assert both(a, b)
    assert both(OrderedDict(a), b)
    assert not both(a, b, values=True)


def test_plain_values_are_compared_by_type_only():
    assert both({"n": 1, "s": "a", "t": (1.0, None)}, {"n": 2, "s": "b", "t": (2.5, None)})
    for one, other in [(1, 1.0), (1, True), (1.0, None), ("a", b"a"), (Color.RED, 1)]:
        differs({"n": one}, {"n": other}, "type", "n")
        differs({"n": one}, {"n": other}, "type", "n", values=True)


def test_values_are_compared_by_value_where_asked():
    for one, other in [(1, 2), (1.0, 1.5), ("a", "b"), (True, False), (Color.RED, Color.BLUE), (b"a", b"b")]:
        assert both({"n": one}, {"n": other})
        differs({"n": one}, {"n": other}, "value", "n", values=True)
        assert both({"n": one}, {"n": one}, values=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex(float("nan"), 1),
        lambda: complex(1, float("nan")),
        lambda: decimal.Decimal("NaN"),
        lambda: (float("nan"), [float("nan")]),
        lambda: {0, 8, 16, 24},
        lambda: frozenset({"a", "b"}),
        lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        lambda: 10**400,
        lambda: -0.0,
        lambda: np.arange(3),
        lambda: np.float32(1.5),
        lambda: slice(1, 2),
        lambda: Box(w=1, nan=float("nan")),
        lambda: Box(w=ramp(3), inner=Box(v=ramp(2))),
        lambda: math.inf,
    ],
    ids=lambda make: type(make()).__name__,
)
def test_equal_values_are_equal(make):
    assert both([make()], [make()], values=True)


def test_sets_have_no_order():
    assert both([{0, 8}], [{8, 0}], values=True)
    assert not both([{0, 8}], [{8, 1}], values=True)
    zero, eight = fractions.Fraction(0), fractions.Fraction(8)
    one, other = (types.SimpleNamespace(a=each) for each in ({zero, eight}, {eight, zero}))
    assert both([one], [other], values=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([0.0]), np.array([-0.0])),
        (np.array([1], ">i4"), np.array([1], "<i4")),
        (np.datetime64("2020", "Y"), np.datetime64("2020", "s")),
        ({0.0}, {-0.0}),
        ({1}, {True}),
        ({(1, 2)}, {(1, 2.0)}),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=True)),
        (types.SimpleNamespace(a={1: 0}), types.SimpleNamespace(a={1.0: 0})),
        (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, fold=1)),
    ],
    ids=repr,
)
def test_what_digests_tell_apart_differs_inside_of_objects_that_are_equal(one, other):
    assert one == other
    assert st.digest({"a": one}) != st.digest({"a": other})
    assert st.delta({"a": one}, {"a": other}).changed == {"a": 1}
    differs({"a": one}, {"a": other}, "value", "a", values=True)


# Bytes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (
            torch.tensor([0x7FC00000]).to(torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001]).to(torch.int32).view(torch.float32),
        ),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    ],
    ids=["zero sign", "nan payload", "int", "bool", "bf16", "complex"],
)
def test_one_bit_is_enough(one, other):
    assert both({"w": one}, {"w": other})
    report = differs({"w": one}, {"w": other}, "value", "w", values=True)
    assert "elements differ" in str(report)
    assert both({"w": one}, {"w": one.clone()}, values=True)


def test_nan_is_nan():
    assert both([torch.tensor([float("nan"), 1.0])], [torch.tensor([float("nan"), 1.0])], values=True)


def test_the_first_differing_element_is_shown():
    a, b = ramp(3, 4), ramp(3, 4)
    b[1, 2] = 77
    b[2, 3] = 78
    report = differs([a], [b.t().contiguous().t()], "value", "0", values=True)
    assert re.search(r"6\.0 at index \(1, 2\).*2 of 12 elements.*77\.0", str(report))


def test_bits_are_what_they_stand_for():
    z = torch.complex(ramp(3), ramp(3, start=1))
    assert both([z.conj()], [z.conj().resolve_conj()], values=True)
    assert both([z.conj().imag], [-z.imag], values=True)
    assert not both([z.conj()], [z], values=True)


@pytest.mark.slow
def test_bits_on_every_dtype():
    """Also where private functions have set a negative bit on what torch cannot negate, and so not read."""
    for dtype in DTYPES:
        for mine, others in product(BITS, repeat=2):
            a, b = (with_bits(of_bytes(dtype, (2,)), **bits) for bits in (mine, others))
            if both([a], [b], values=True):
                st.copy_into([a], [b])
                assert both([a], [b], values=True)
            elif a.is_neg() != b.is_neg() and not can_negate(dtype):
                differs([a], [b], "value", "0", values=True)


def test_ties_are_compared_of_what_can_be_read():
    flags = torch.tensor([True, False, True])
    other = with_bits(flags.clone(), conj=False, neg=True)
    report = both([flags, flags[1:]], [other, other[1:]], values=True)
    assert [(difference.kind, str(difference.path)) for difference in report.differences] == [
        ("value", "0"),
        ("value", "1"),
    ]


# Every difference


@pytest.mark.parametrize(
    ("a", "b", "kind", "path"),
    [
        (ramp(3), ramp(4), "shape", ""),
        (ramp(1), torch.tensor(0.0), "shape", ""),
        (ramp(3), ramp(3).double(), "dtype", ""),
        (ramp(3), 3, "leaf type", ""),
        (ramp(3), None, "leaf type", ""),
        (ramp(3), Box(), "leaf type", ""),
        (ramp(3), torch.empty(3, device="meta"), "memory", ""),
        ([1], (1,), "structure", ""),
        ([1], [1, 2], "length", ""),
        ([1], {"a": 1}, "structure", ""),
        ([1], 1, "structure", ""),
        ({"a": {"b": 1}}, {"a": {}}, "missing", "a.b"),
        ({"a": [ramp(2)]}, {"a": [ramp(3)]}, "shape", "a.0"),
        (Point(1, 2), (1, 2), "structure", ""),
        (Box(), Point, "type", ""),
        (Box(), 1, "type", ""),
        (int, 1, "type", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_difference(a, b, kind, path):
    differs(a, b, kind, path)
    differs(a, b, kind, path, values=True)


def test_layouts():
    report = both({"w": ramp(3)}, {"w": ramp(3).to_sparse()})
    assert "layout" in {difference.kind for difference in report.differences}
    assert {str(difference.path) for difference in report.differences} == {"w"}


def test_every_difference_is_reported():
    a = {f"k{n}": ramp(n + 1) for n in range(10)}
    b = {f"k{n}": ramp(n + 2) for n in range(10)}
    report = both(a, b)
    assert report.count == 10
    assert str(report).startswith("10 differences in structure (values were not compared):")
    assert all(f"shape differs at k{n}: ({n + 1},) against ({n + 2},)" in str(report) for n in range(10))
    assert report.differences[0].path == Path(("k0",))
    assert report.differences[0].left == (1,)
    assert report.differences[0].right == (2,)


def test_differences_are_capped_and_counted():
    report = both([ramp(1)] * 5000, [ramp(2)] * 5000)
    assert report.count == 5000
    assert len(report.differences) == 1000
    assert "… and 4980 more" in str(report)
    assert len(str(report).splitlines()) < 30


def test_one_difference_is_said_to_be_one():
    assert str(st.similarity({"a": 1, "b": 2}, {"a": 1.0, "b": 2})).startswith("1 difference:\n")
    assert str(st.similarity({"a": 1, "b": 2}, {"a": 1.0, "b": 2.0})).startswith("2 differences:\n")


def test_long_values_are_cut():
    whole, long = "x" * 58, "x" * 59  # and two quotes
    (found,) = st.similarity([whole], [long], values=True).differences
    assert (found.left, found.right) == (repr(whole), repr(long)[:57] + "...")


def test_similar_says_so():
    assert str(st.similarity([1], [1])) == "similar"


def test_what_looked_at_structure_alone_says_so():
    report = st.similarity([1, ramp(2)], [2, ramp(2, start=1)], values=False)
    assert (bool(report), report.values) == (True, False)
    assert str(report) == "similar in structure (values were not compared)"
    said = str(st.similarity([ramp(2)], [ramp(3)], values=False))
    assert said.startswith("1 difference in structure (values were not compared):\n  shape differs at 0")
    assert "values were not compared" in st.similarity([1], [1.0], values=False)._repr_html_()


def test_values_are_compared_unless_that_is_left_out():
    report = st.similarity({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    assert (bool(report), report.count, report.values) == (False, 1, True)
    (found,) = report.differences
    assert (found.kind, found.largest) == ("value", 1.0)
    assert str(report).endswith("(3 of 3 elements differ) against 0.0 at index (0,), by at most 1")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("a", "b", "options", "largest"),
    [
        ([100.0, 1.0], [101.0, 1.0], {"rtol": 0.01}, None),
        ([100.0, 1.0], [101.0, 1.0], {"rtol": 0.0099}, 1.0),  # of the larger one, so that it is symmetric
        ([100.0, 1.0], [100.0, 1.5], {"atol": 0.5}, None),
        ([100.0, 1.0], [100.0, 1.5], {"atol": 0.49}, 0.5),
        ([1.0], [1.75], {"atol": 0.5, "rtol": 0.25}, None),
        ([NAN, 0.0], [-NAN, -0.0], {"atol": 1e-9}, None),
        ([NAN, 0.0], [-NAN, 0.0], {}, 0.0),
        ([NAN], [1.0], {"atol": INF, "rtol": INF}, INF),
        ([INF], [1.0], {"atol": 1e300, "rtol": 0.5}, INF),
        ([INF], [-INF], {"rtol": 1.0}, INF),
        ([INF], [INF], {"rtol": 1.0}, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_numbers_may_differ_within_a_tolerance(a, b, options, largest, dtype):
    one, other = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    if -NAN in b or any(x != x and y != y for x, y in zip(a, b, strict=True)):
        other.view(torch.uint8)[0] ^= 1  # another payload
    report = both({"w": one}, {"w": other}, values=True, **options)
    assert bool(report) == (largest is None)
    assert [found.largest for found in report.differences] == [largest] * (largest is not None)


def test_numbers_whose_magnitude_no_float_holds_have_a_tolerance_too():
    huge = torch.tensor([1.5e308 + 1.5e308j], dtype=torch.complex128)
    for other in (-huge, torch.tensor([1.5e308 + 0j], dtype=torch.complex128)):
        assert not both({"w": huge}, {"w": other}, values=True, rtol=1e-9)
    assert both({"w": huge}, {"w": huge * (1 - 1e-12)}, values=True, rtol=1e-9)
    assert not both({"w": huge}, {"w": huge * (1 - 1e-6)}, values=True, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_have_no_tolerance(dtype):
    a, b = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert not both([a], [b], values=True, atol=10, rtol=10)
    assert not both([1.0], [1.5], values=True, atol=10)  # nor have plain values


def test_a_tolerance_is_a_number_of_zero_or_more():
    for options in ({"rtol": -1e-9}, {"atol": NAN}):
        with pytest.raises(ValueError, match=f"similarity: {next(iter(options))} is no tolerance: expected a number"):
            st.similarity(1, 1, **options)


def test_the_largest_differences_come_first_and_structure_before_them():
    a = {name: torch.full((4,), 1.0) for name in "abc"} | {"huge": torch.full((4,), 1e6), "type": 1, "nan": ramp(2)}
    b = {"a": a["a"] + 0.5, "b": a["b"] + 3, "c": a["c"].clone(), "huge": a["huge"] + 8, "type": 1.0, "more": 1}
    b["nan"] = torch.tensor([0.0, NAN])
    report = both(a, b, values=True)
    assert [(str(found.path), found.largest) for found in report.differences] == [
        *[("more", None), ("type", None), ("nan", INF), ("huge", 8.0), ("b", 3.0), ("a", 0.5)]
    ]
    many = st.similarity([torch.tensor([float(i)]) for i in range(1200)], [torch.tensor([-1.0]) for _ in range(1200)])
    assert (many.count, len(many.differences)) == (1200, 1000)
    assert [found.largest for found in many.differences] == list(range(1200, 200, -1))


@pytest.mark.parametrize(
    ("prefixed", "plain", "rules"),
    [
        ({"module.a.w": 1, "module.b": 2}, {"a.w": 1, "b": 2}, {"module.**": "**"}),
        ({"module": {"a": {"w": 1}, "b": 2}}, {"a": {"w": 1}, "b": 2}, {"module.**": "**"}),
        ({"_orig_mod.module.a": 1}, {"a": 1}, {"_orig_mod.module.**": "**"}),
        ({"m": {"module.a": 1, "module.b": 2}, "n": 3}, {"m": {"a": 1, "b": 2}, "n": 3}, {"m.module.**": "m.**"}),
    ],
    ids=["flat", "nested", "two", "inner"],
)
def test_a_prefix_is_told_with_the_rename_that_mends_it(prefixed, plain, rules):
    for a, b, which in ((prefixed, plain, "left"), (plain, prefixed, "right")):
        report = st.similarity(a, b)
        prefix = next(iter(rules)).removesuffix("**").removeprefix("m." if "m" in plain else "")
        said = f"The names differ by the prefix {prefix!r} of the {which} tree: rename(tree, {rules}) takes it away."
        assert report.hint == said
        assert str(report).endswith(f"\n  {said}")
        assert said.replace("'", "&#x27;") in report._repr_html_()
    assert st.similarity(st.rename(prefixed, rules), plain)
    with pytest.raises(st.TreeMismatch, match=r"The names differ by the prefix .* of the given tree: rename"):
        st.copy_into(prefixed, plain)
    with pytest.raises(st.TreeMismatch, match=r"The names differ by the prefix .* of the expected tree: rename"):
        st.copy_into(plain, prefixed)


@pytest.mark.parametrize(
    ("prefixed", "plain", "rules"),
    [
        ({"{a}*.w": 1, "{a}*.b": 2}, {"w": 1, "b": 2}, {r"\{a\}\*.**": "**"}),
        ({"m*": {"x*.a": 1, "x*.b": 2}}, {"m*": {"a": 1, "b": 2}}, {r"m\*.x\*.**": r"m\*.**"}),
    ],
    ids=["prefix", "above"],
)
def test_what_a_prefix_holds_of_wildcards_is_quoted(prefixed, plain, rules):
    assert f"rename(tree, {rules}) takes it away" in st.similarity(prefixed, plain).hint
    assert st.similarity(st.rename(prefixed, rules), plain)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"module.a": 1, "module.b": 2}, {"a": 1, "c": 2}),
        ({"module.a": 1, "b": 2}, {"a": 1, "c": 2}),
        ({"module.a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_other_names_are_no_prefix(a, b):
    assert st.similarity(a, b).hint == st.similarity(b, a).hint == ""


def test_an_object_whose_tie_copy_into_would_lose_differs():
    held = ramp(6)
    a, b = {"box": Box(x=held), "w": held[2:4]}, {"box": Box(x=ramp(6)), "w": ramp(2, start=2)}
    differs(a, b, "ties", "box", values=True)
    with pytest.raises(st.TreeMismatch, match="ties at box"):
        st.copy_into(a, b)
    other = ramp(6)
    assert both(a, {"box": Box(x=other), "w": other[2:4]}, values=True)


def test_differences_in_structure_and_bytes_of_many_kinds():
    a = {"x": ramp(2), "y": 1, "z": [ramp(3), "a"], "o": Box(w=ramp(2))}
    b = {"x": ramp(2, start=5), "y": 2, "z": [ramp(3, start=1), "b"], "o": Box(w=ramp(2, start=3))}
    assert both(a, b)
    report = both(a, b, values=True)
    assert {str(d.path) for d in report.differences} == {"x", "y", "z.0", "z.1", "o"}


def test_differences_of_all_kinds_are_reported_together():
    a = {"gone": ramp(1), "shape": ramp(2), "value": ramp(3), "same": ramp(4), "type": 1, "list": [ramp(1), 5]}
    b = {"list": [ramp(1), 6, 7], "type": "1", "same": ramp(4), "value": ramp(3, start=1), "shape": ramp(3), "new": 0}
    report = both(a, b, values=True)
    assert {(str(d.path), d.kind) for d in report.differences} == {
        ("gone", "missing"),
        ("new", "missing"),
        ("list", "length"),
        ("shape", "shape"),
        ("type", "type"),
        ("value", "value"),
    }
    kinds = {(str(d.path), d.kind) for d in both(a, b).differences}
    assert kinds == {(str(d.path), d.kind) for d in report.differences} - {("value", "value")}


def test_leaves_that_differ_otherwise_do_not_hide_the_elements_of_others():
    base = ramp(4)
    a = {"w": base, "tied": base, "x": ramp(3).to_sparse(), "y": ramp(2), "o": Box(w=ramp(2))}
    b = {"w": ramp(4), "tied": ramp(4, start=2), "x": ramp(3), "y": ramp(2, start=2), "o": Box(w=ramp(2, start=5))}
    found = {(str(d.path), d.kind) for d in both(a, b, values=True).differences}
    assert ("x", "layout") in found
    assert {path for path, _ in found} == {"w", "tied", "x", "y", "o"}


# Ties


def test_ties_matter_where_values_differ():
    base = ramp(4)
    tied = {"a": base, "b": base}
    apart = {"a": ramp(4), "b": ramp(4, start=50)}
    assert not both(tied, apart)
    assert both(tied, {"a": ramp(4, start=7), "b": ramp(4, start=7)})
    report = st.similarity(tied, apart, values=False)
    assert {difference.kind for difference in report.differences} == {"ties"}
    with pytest.raises(st.TreeMismatch, match="overlap at"):
        st.copy_into(apart, tied)
    st.copy_into(tied, apart)


def test_similar_and_freed():
    freed, whole = ramp(4), ramp(4)
    freed.untyped_storage().resize_(0)
    report = both({"w": freed}, {"w": whole})
    assert not report
    both({"w": freed}, {"w": whole}, values=True)
    other = ramp(4)
    other.untyped_storage().resize_(0)
    both({"w": freed}, {"w": other})
    both({"w": freed}, {"w": other}, values=True)


# Total


class Hostile:
    """Has an opinion about everything, and it is always an exception."""

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("leave me alone")

    __eq__ = __ne__ = __repr__ = __str__ = __bool__ = __len__ = __lt__ = __iter__ = __getattr__ = _refuse
    __hash__ = _refuse


class HostileKey:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise RuntimeError("I am like nobody")

    __repr__ = __str__ = __eq__


class AmbiguousKey:
    def __init__(self):
        self.w = torch.ones(2)

    def __eq__(self, other):
        return self.w == self.w  # has no truth value

    def __hash__(self):
        return 7


class Moody(type):
    def __eq__(cls, other):
        raise RuntimeError("classes have feelings")

    def __hash__(cls):
        return 3


class OfMoodyClass(metaclass=Moody):
    pass


class Unhashable(type):
    def __hash__(cls):
        raise RuntimeError("no hash")


class OfUnhashableClass(metaclass=Unhashable):
    pass


class Exits:
    """Leaves the program wherever it is asked for anything."""

    def _exit(self, *args):
        raise SystemExit(3)

    __reduce_ex__ = __eq__ = _exit
    __hash__ = None


class BrokenList(list):
    def __iter__(self):
        raise SystemExit(4)


class NoPickle:
    def __reduce_ex__(self, protocol):
        raise RuntimeError("not me")


class LiesAboutItself:
    @property
    def __class__(self):
        return torch.Tensor


class BadWrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        raise RuntimeError("do not look inside")

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("do not compute")


ODD = {
    "hostile": Hostile,
    "hostile key": lambda: {HostileKey(1): 1},
    "ambiguous key": lambda: {AmbiguousKey(): ramp(2)},
    "moody class": OfMoodyClass,
    "class without a hash": OfUnhashableClass,
    "among leaves": lambda: [ramp(1), OfUnhashableClass()],
    "exits": Exits,
    "list that exits": BrokenList,
    "unpicklable": NoPickle,
    "liar": LiesAboutItself,
    "bad wrapper": lambda: BadWrapper(ramp(2)),
    "generator": lambda: (n for n in ()),
    "module": lambda: math,
    "class": lambda: Box,
    "lambda": lambda: lambda: 1,
    "mkldnn": lambda: ramp(2, 2).to_mkldnn(),
    "zero tensor": lambda: torch._efficientzerotensor(3),
    "quint4x2": lambda: torch.quantize_per_channel(ramp(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
    "vague": lambda: Box(h=Hostile()),
    "weird list": lambda: [Hostile(), HostileKey(3)],
    "not a number key": lambda: {float("nan"): 1},
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
    "freed": lambda: _freed(),
    "tensor": lambda: ramp(2),
    "none": lambda: None,
}


def _freed():
    tensor = ramp(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("one", ODD.values(), ids=ODD)
def test_any_two_values_can_be_compared(one, values):
    a = one()
    for other in ODD.values():
        b = other()
        for left, right in ((a, b), ({"k": a}, {"k": b}), ([1, a, ramp(2)], [1, b, ramp(2)])):
            there = st.similarity(left, right, values=values)
            back = st.similarity(right, left, values=values)
            assert bool(there) == bool(back)
            assert "%PATH%" not in str(there)
            assert (there.count == 0) == bool(there)


def test_exits_of_an_object_are_named():
    (found,) = st.similarity([ramp(2), Exits()], [ramp(2), Exits()], values=False).differences
    assert (found.kind, found.path) == ("leaf type", "1")


@pytest.mark.parametrize("handler", ["function", "method"])
def test_an_exit_that_a_signal_asks_for_is_not_swallowed(handler):
    class Asks:
        def __reduce__(self):
            signal.raise_signal(signal.SIGUSR1)
            raise AssertionError

    class Handler:
        def leave(self, number, frame):
            raise SystemExit(5)

    before = signal.signal(signal.SIGUSR1, Handler().leave if handler == "method" else lambda *_: Exits()._exit())
    try:
        with pytest.raises(SystemExit, match=r"[35]"):
            st.similarity([Asks()], [Asks()], values=False)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_opaque_objects_are_compared_by_the_tensors_inside():
    assert both([Box(w=ramp(2), n=1)], [Box(w=ramp(2, start=5), n=2)])
    differs([Box(w=ramp(2))], [Box(w=ramp(3))], "parts", "0")
    differs([Box(w=ramp(2))], [Box(w=ramp(2).double())], "parts", "0")
    differs([Box(w=ramp(2))], [Box(w=ramp(2), v=ramp(2))], "parts", "0")
    differs([Box(w=ramp(2))], [Box(w=Box(w=ramp(1)))], "parts", "0")
    differs([Box(w=ramp(2))], [Box(w=ramp(2, start=5))], "value", "0", values=True)
    assert not both([Box(w=ramp(2), n=1)], [Box(w=ramp(2), n=2)], values=True)


def test_interrupts_are_not_swallowed():
    class Impatient:
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        st.similarity([Impatient()], [Impatient()], values=False)


def test_cycles_are_named():
    cyclic = {"w": 1}
    cyclic["again"] = cyclic
    with pytest.raises(st.CyclicTree, match="again"):
        st.similarity(cyclic, {"w": 1, "again": 2}, values=False)


def test_keys_are_matched_by_type():
    assert both({1: "a", True + 1: "b"}, {2: "b", 1: "a"})
    assert not both({1: "a"}, {True: "a"})
    assert not both({1: "a"}, {1.0: "a"})
    assert not both({"1": "a"}, {1: "a"})
    assert both({float("nan"): 1}, {float("nan"): 2})


def test_the_result_can_be_kept():
    report = st.similarity([ramp(2)], [ramp(3)], values=False)
    assert hash(report) == hash(st.similarity([ramp(2)], [ramp(3)], values=False))
    assert report == st.similarity([ramp(2)], [ramp(3)], values=False)
    assert_trees_equal(report.count, 1)


def test_an_object_that_cannot_be_taken_apart_does_not_hide_the_others():
    closed = NoPickle()
    left = [closed, TwoTensors(ramp(2), ramp(2)), TwoTensors(ramp(2), ramp(2)), TwoTensors(ramp(2), ramp(2))]
    right = [closed, TwoTensors(ramp(2), ramp(2) + 1), TwoTensors(ramp(2), ramp(2)), TwoTensors(ramp(2), ramp(3))]
    found = st.similarity(left, right, values=True).differences
    assert {difference.path[0]: difference.kind for difference in found} == {0: "leaf type", 1: "value", 3: "parts"}


def test_all_that_is_taken_apart_differently_is_named():
    left, right = [Box(w=ramp(2)), Box(w=ramp(2))], [Box(w=[ramp(2), ramp(3)]), Box(w=[])]
    parts = [difference for difference in both(left, right, values=True).differences if difference.kind == "parts"]
    assert [difference.path for difference in parts] == [Path((0,)), Path((1,))]


def test_what_is_freed_inside_is_like_nothing_but_itself():
    def wrapper():
        return TwoTensors(ramp(2), ramp(2))

    gone, gone_as_well = wrapper(), wrapper()
    for tensor in (gone, gone_as_well):
        tensor.b.untyped_storage().resize_(0)
    for a, b in ((gone, wrapper()), (wrapper(), gone)):
        report = st.similarity([a], [b], values=True)
        assert not report
        assert "freed" in str(report)
    assert st.similarity([gone], [gone_as_well], values=True)


def test_values_that_cannot_be_shown_are_told_apart():
    found = st.similarity([Unspeakable("a")], [Unspeakable("b")], values=True).differences
    assert [(difference.kind, str(difference.path)) for difference in found] == [("value", "0")]
    assert "Unspeakable object" in found[0].left


class Unspeakable:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "leaf", [torch.eye(2).to_sparse(), torch.eye(3).to_sparse_csr(), torch.ones(2).untyped_storage(), torch.ones(2)]
)
def test_what_has_no_memory_is_not_like_what_has(leaf):
    on_meta = st.offload({"k": leaf}, device="meta")
    for a, b in (({"k": leaf}, on_meta), (on_meta, {"k": leaf})):
        assert {found.kind for found in st.similarity(a, b, values=False).differences} == {"memory"}
        with pytest.raises(st.TreeMismatch, match="memory differs at k"):
            st.copy_into(a, b)


class Zone(datetime.tzinfo):
    """It has no text of its own."""

    def __init__(self, hours=1):
        self.hours = hours

    def utcoffset(self, moment):
        return datetime.timedelta(hours=self.hours)

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return hash(self.hours)


def test_moments_are_equal_in_their_own_zones():
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=Zone())
    assert st.similarity({"t": noon}, {"t": copy.deepcopy(noon)})
    assert not st.similarity({"t": noon}, {"t": noon.astimezone(datetime.UTC)})
    assert not st.similarity({"t": noon}, {"t": noon.replace(fold=1)})
    assert not st.similarity({"t": noon.timetz()}, {"t": noon.timetz().replace(fold=1)})
