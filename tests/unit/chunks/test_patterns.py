"""Patterns: what is one, what it says of sizes, and how its sums are written out."""

import pytest

from statetree.chunks.patterns import Strand, block_axes, equations, parse_pattern, shown_dims, solve, written_out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("(h d two) m -> (h two d) m", [["(h d two) m"], ["(h two d) m"]]),
        ("f m, f m->(f+f) m", [["f m", "f m"], ["(f + f) m"]]),
        ("(g (q + 1) d) m -> (g q d) m , (g d) m", [["(g (q + 1) d) m"], ["(g q d) m", "(g d) m"]]),
        ("a 1 b -> () b a", [["a 1 b"], ["1 b a"]]),
        ("(a b + c) -> (a b), c", [["(a b + c)"], ["(a b)", "c"]]),
        (" -> 1", [["()"], ["1"]]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_a_pattern(text, shown):
    assert [list(map(shown_dims, side)) for side in parse_pattern(text)] == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "expected one ->, got 0"),
        ("a -> b -> c", "expected one ->, got 2"),
        ("a + b -> a, b", r"expected sums in parentheses, got '\+'"),
        ("(a b -> a b", r"expected a \) for each \(, got fewer"),
        ("a) -> a", r"expected an axis, got '\)'"),
        ("a a -> a", "expected each axis once in what is no sum, got a twice"),
        ("(a + a b a) -> a, a b", "expected each axis once in what is no sum, got a twice"),
        ("a 2 -> a", "expected names of axes, .* got '2'"),
        ("a ... -> a", r"got '\.'"),
        ("(a + ) -> a", "expected summands, got an empty one"),
    ],
    ids=str,
)
def test_what_is_none(text, message):
    with pytest.raises(ValueError, match=f"is not a pattern: .*{message}"):
        parse_pattern(text)


def test_sums_are_written_out_in_order():
    ((dims,), _) = parse_pattern("(g (q + 1 + 1) d) (m + n) -> a")
    sizes = {"g": 2, "q": 4, "d": 3, "m": 5, "n": 6}
    shape, blocks = written_out(dims, sizes)
    assert shape == (36, 11)
    assert block_axes([dims]) == [[*map(frozenset, ("gqdm", "gqdn", "gdm", "gdn", "gdm", "gdn"))]]
    assert blocks[0] == (Strand(0, (("g", 18), ("q", 3), ("d", 1))), Strand(0, (("m", 1),)))
    assert blocks[3] == (Strand(12, (("g", 18), ("d", 1))), Strand(5, (("n", 1),)))
    assert blocks[5] == (Strand(15, (("g", 18), ("d", 1))), Strand(5, (("n", 1),)))


@pytest.mark.parametrize(
    ("text", "shapes", "known", "found", "wrong"),
    [
        ("(h d two) m", [(12, 5)], {"two": 2, "d": 3}, {"h": 2, "m": 5}, 0),
        ("(f + f) m", [(14, 5)], {}, {"f": 7, "m": 5}, 0),
        ("(f + f) m", [(15, 5)], {}, {"m": 5}, 1),
        ("(g (q + 1 + 1) d)", [(36,)], {"g": 2, "d": 3}, {"q": 4}, 0),
        ("(g (q + 1 + 1) d)", [(36,)], {"d": 3}, {}, 0),
        ("(g q d), (g d), (g d)", [(24,), (6,), (6,)], {"d": 3}, {"g": 2, "q": 4}, 0),
        ("(g q d), (g d), (g d)", [(24,), (6,), (9,)], {"d": 3}, {"g": 2, "q": 4}, 1),
        ("(a b)", [(0,)], {"a": 0}, {}, 0),
        ("(a b)", [(4,)], {"a": 0}, {}, 1),
        ("a (b + 1)", [(3, 0)], {}, {"a": 3}, 1),
        ("a 1", [(3, 2)], {}, {"a": 3}, 1),
    ],
    ids=str,
)
def test_sizes_follow_from_shapes(text, shapes, known, found, wrong):
    tensors, _ = parse_pattern(f"{text} -> z")
    given = [each for dims, shape in zip(tensors, shapes, strict=True) for each in equations(dims, shape, "x")]
    solved, unfit = solve(given, known)
    assert solved == {**known, **found}
    assert len(unfit) == wrong
