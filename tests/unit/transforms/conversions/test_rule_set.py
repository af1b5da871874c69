"""``Conversion``: which rules there are, what is a view, kept and tied, and what is refused, all at once."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import statetree as st
from tests.judge import assert_trees_equal

FUSED = (["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m")
EXPERTS = ("moe.w", "experts.{e}.w", "e f m -> f m")
TIED = ("embed", ["tokens", "head"])


def ramp(*shape, start=0):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def attention(layers=1):
    parts = {"q": (8, 3), "k": (4, 3), "v": (4, 3)}
    return {f"{i}.{key}": ramp(*shape, start=100 * i) for i in range(layers) for key, shape in parts.items()}


def test_fused_tensors_are_made_and_taken_apart():
    fused = st.Conversion([FUSED], sizes={"q": 2, "d": 2})
    state = attention(2)
    found = fused(state)
    for i in range(2):
        q, k, v = (state[f"{i}.{key}"].view(2, -1, 2, 3) for key in "qkv")
        assert torch.equal(found[f"{i}.qkv"], torch.cat([q, k, v], 1).reshape(16, 3))
    assert list(found) == ["0.qkv", "1.qkv"]
    assert_trees_equal(fused.inverse(found), state, ties=False)


def test_an_axis_may_lie_along_leaves():
    stacked = {"moe.w": ramp(3, 2, 4)}
    apart = st.Conversion([EXPERTS])(stacked)
    assert list(apart) == [f"experts.{e}.w" for e in range(3)]
    assert all(torch.equal(apart[f"experts.{e}.w"], stacked["moe.w"][e]) for e in range(3))
    again = st.Conversion([EXPERTS]).inverse(apart)
    assert again["moe.w"].data_ptr() == stacked["moe.w"].data_ptr()  # the views lie as they did
    assert torch.equal(again["moe.w"], stacked["moe.w"])
    fresh = {name: leaf.clone() for name, leaf in apart.items()}
    assert torch.equal(st.Conversion([EXPERTS]).inverse(fresh)["moe.w"], stacked["moe.w"])
    both = st.Conversion([(["experts.{e}.w", "shared.w"], "moe.w", "f, f -> (e + 1) f")])
    parts = {**{f"experts.{e}.w": ramp(5, start=10 * e) for e in range(3)}, "shared.w": ramp(5, start=70)}
    assert both(parts)["moe.w"].tolist() == torch.stack(list(parts.values())).tolist()
    assert_trees_equal(both.inverse(both(parts)), parts, ties=False)


def test_views_where_a_view_will_do():
    state = {"a": ramp(6, 4), "b": ramp(2, 3), "c": ramp(4), "d": ramp(6, 2)}
    rules = [
        ("a", ["a1", "a2"], "(f + f) m -> f m, f m"),
        ("b", "bt", "x y -> y x"),
        ("c", "c1", "(x y) -> x 1 y"),
        ("d", "d1", "(x y) m -> (y x) m"),
    ]
    found = st.Conversion(rules, sizes={"y": 2})({**state, "b": ramp(2, 2)})
    own = {name: leaf.untyped_storage().data_ptr() for name, leaf in found.items()}
    assert own["a1"] == own["a2"] == state["a"].data_ptr()
    assert found["bt"].stride() == (1, 2)
    assert own["c1"] == state["c"].data_ptr()
    assert found["c1"].shape == (2, 1, 2)
    assert own["d1"] != state["d"].data_ptr()
    assert torch.equal(found["d1"], state["d"].view(3, 2, 2).transpose(0, 1).reshape(6, 2))


def test_what_stays_as_it_is_is_the_leaf_itself():
    state = {"a": object(), "b": nn.Parameter(ramp(2)), "c": 3, "d": ramp(2, 2).to_sparse(), "e": ramp(4, 2)}
    rules = [(f"{{n}}.{key}", f"z.{{n}}.{key}") for key in "abcd"]
    rules.append(("{n}.e", "z.{n}.e", "(x y) m -> (x y) m"))
    found = st.Conversion(rules, sizes={"x": 2})({f"0.{key}": leaf for key, leaf in state.items()})
    assert all(found[f"z.0.{key}"] is leaf for key, leaf in state.items())


def test_parameters_stay_parameters_and_attributes_go_along():
    state = {key: nn.Parameter(leaf) for key, leaf in attention().items()}
    for leaf in state.values():
        leaf.note = "kept"
    fused = st.Conversion([FUSED], sizes={"q": 2, "d": 2})
    found = fused(state)["0.qkv"]
    assert (type(found), found.requires_grad, found.is_leaf, found.note) == (nn.Parameter, True, True, "kept")
    again = fused.inverse({"0.qkv": found})
    assert all(type(leaf) is nn.Parameter and leaf.note == "kept" for leaf in again.values())
    assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize("change", ["requires_grad", "dtype", "attributes", "leaf type", "device"])
def test_tensors_that_are_fused_are_of_one_kind(change):
    state = attention()
    state["0.k"] = {
        "requires_grad": lambda k: k.requires_grad_(),
        "dtype": lambda k: k.double(),
        "attributes": lambda k: (setattr(k, "note", 1), k)[1],
        "leaf type": lambda k: nn.Parameter(k, requires_grad=False),
        "device": lambda k: k.to("meta"),
    }[change](state["0.k"])
    with pytest.raises(st.TreeMismatch, match=f"Conversion: (?s:.*){change} differs at 0.k: expected .*, as 0.q has"):
        st.Conversion([FUSED], sizes={"q": 2, "d": 2})(state)


def test_one_leaf_may_have_several_names():
    tied = st.Conversion([TIED])
    leaf = ramp(3)
    found = tied({"embed": leaf})
    assert found["tokens"] is found["head"] is leaf
    assert tied.inverse(found)["embed"] is leaf
    assert tied.inverse({"head": leaf})["embed"] is leaf
    assert torch.equal(tied.inverse({"tokens": leaf, "head": leaf.clone()})["embed"], leaf)
    with pytest.raises(st.TreeMismatch, match="value differs at head: expected that of tokens, its tie, got another"):
        tied.inverse({"tokens": leaf, "head": leaf + 1})
    turned = st.Conversion([("embed", ["tokens", "head"], "a b -> b a")])
    found = turned({"embed": ramp(2, 3)})
    assert found["tokens"] is found["head"]
    assert found["tokens"].shape == (3, 2)


def test_ties_are_kept_by_equal_copies_and_lost_by_others():
    pairs = st.Conversion([([a, x], f"{a}{x}", "f, f -> (f + f)") for a, x in ("ax", "by")])
    tied, one = ramp(3), ramp(3, start=7)
    found = pairs({"a": tied, "x": one, "b": tied, "y": one})
    assert found["ax"] is found["by"]
    with pytest.raises(st.TreeMismatch, match="ties at a"):
        pairs({"a": tied, "x": one, "b": tied, "y": ramp(3, start=9)})


def test_ties_are_kept_where_tensors_are_copied():
    fused = st.Conversion([FUSED, ("a", "b"), ("c", "d", "(x y) -> (y x)")], sizes={"q": 2, "d": 2, "x": 2})
    state = attention()
    twice = {**state, **{f"1.{key[2:]}": leaf for key, leaf in state.items()}}
    found = fused(twice)
    assert found["0.qkv"].data_ptr() == found["1.qkv"].data_ptr()
    leaf = ramp(4)
    for other in (leaf, leaf[1:], leaf.view(2, 2)):
        with pytest.raises(st.TreeMismatch, match=r"ties at ."):
            fused({"a": leaf, "c": other} if other.dim() == 1 and len(other) == 4 else {"c": leaf, "a": other})
    halves = st.Conversion([(["w1", "w3"], "w", "f, f -> (f + f)")])
    with pytest.raises(st.TreeMismatch, match="ties at w"):
        halves({"w1": leaf, "w3": leaf})
    assert halves({"w1": leaf[:2], "w3": leaf[2:]})["w"].data_ptr() == leaf.data_ptr()


def test_a_tree_of_one_level_has_whole_keys_and_others_components():
    rule = ("layers.{i}.w", "h.{i}.weight")
    leaf = ramp(2)
    assert st.Conversion([rule])({"layers.0.w": leaf}) == {"h.0.weight": leaf}
    found = st.Conversion([rule])({"layers": [{"w": leaf}]})
    assert found == {"h": {"0": {"weight": leaf}}}
    state = OrderedDict({"layers.0.w": leaf})
    state._metadata = {"": {"version": 1}}
    assert type(st.Conversion([rule])(state)) is dict


def test_what_is_ignored_or_not_taken_is_left_out():
    state = {"a": 1, "x.inv_freq": 2, "b": 3}
    assert st.Conversion([("a", "z")], ignore=["**.inv_freq", "none.*"], strict=False)(state) == {"z": 1}
    with pytest.raises(st.TreeMismatch, match="rules do not fit at b: expected one that takes it, got none"):
        st.Conversion([("a", "z")], ignore=["**.inv_freq"])(state)
    assert st.Conversion([("a", "z"), ("none", "nothing")])({"a": 1}) == {"z": 1}


def test_everything_that_does_not_fit_is_said_at_once():
    conversion = st.Conversion(
        [FUSED, EXPERTS, ("{n}.same", "{n}.other"), ("0.*", "other.*"), ("x.w", "y"), ("z.w", "y")],
        sizes={"q": 2, "d": 2},
    )
    state = {
        **{key: leaf for key, leaf in attention(3).items() if key != "1.v"},
        "2.k": ramp(5, 3),
        "0.same": 1,
        "x.w": 1,
        "z.w": 2,
        "lost": 3,
    }
    with pytest.raises(st.TreeMismatch) as caught:
        conversion(state)
    assert {(found.kind, str(found.path)) for found in caught.value.differences} == {
        ("rules", "0.same"),
        ("rules", "0.q"),
        ("rules", "0.k"),
        ("rules", "0.v"),
        ("missing", "1.v"),
        ("sizes", "2.q"),
        ("rules", "lost"),
        ("origin", "y"),
        ("way back", "y"),
    }


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"experts.0.w": ramp(2), "experts.2.w": ramp(2)}, "missing at experts.1.w: expected a leaf"),
        (
            {"experts.0.w": ramp(2), "experts.1.w": ramp(3)},
            r"shape differs at experts.1.w: expected \(2,\), as experts.0",
        ),
        ({"experts.0.w": ramp(2), "experts.x.w": ramp(2)}, "rules do not fit at experts.x.w: expected one .* got none"),
        (
            {"experts.0.w": ramp(2, 2)},
            r"sizes do not fit at experts.0.w: .*got \(2, 2\) in experts.{e}.w, where f belongs",
        ),
    ],
    ids=["missing", "shape", "word", "dims"],
)
def test_experts_that_do_not_fit_are_refused(state, message):
    with pytest.raises(st.TreeMismatch, match=message):
        st.Conversion([("moe", "experts.{e}.w", "e f -> f")]).inverse(state)


def test_an_index_may_be_as_large_as_it_likes():
    with pytest.raises(st.TreeMismatch, match=r"missing at experts.1.w: expected a leaf"):
        st.Conversion([EXPERTS]).inverse({f"experts.{e}.w": ramp(2, 2) for e in (0, 10**15)})
    both = st.Conversion([(["experts.{e}.w", "shared.w"], "moe.w", "f, f -> (e + 1) f")])
    with pytest.raises(st.TreeMismatch, match=r"missing at experts.0.w: expected a leaf"):
        both({"shared.w": ramp(5)})


@pytest.mark.parametrize(
    ("sizes", "shape", "message"),
    [
        ({}, (6,), "got no size of a, b, which does not follow from shapes"),
        ({"a": 4}, (6,), "got 6 in a dim of x, where a=4 . b belongs"),
        ({"a": 2, "b": 2}, (6,), "got 6 in a dim of x, where a=2 . b=2 belongs"),
    ],
    ids=["unknown", "odd", "other"],
)
def test_sizes_that_do_not_fit_are_refused(sizes, shape, message):
    with pytest.raises(st.TreeMismatch, match=f"sizes do not fit at x: expected sizes that fit x <-> y: .*, {message}"):
        st.Conversion([("x", "y", "(a b) -> (b a)")], sizes=sizes)({"x": ramp(*shape)})
    with pytest.raises(st.TreeMismatch, match=r"size differs at experts.2.w: expected at most"):
        st.Conversion([EXPERTS], sizes={"e": 2}).inverse({f"experts.{e}.w": ramp(2, 2) for e in range(3)})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("{a}_{b}", "{b}_{a}"), "way back"),
        (("**.x", "y.**"), None),
    ],
    ids=str,
)
def test_a_name_that_could_not_be_read_again_is_refused(rule, message):
    conversion = st.Conversion([rule])
    if message is None:
        assert conversion.inverse(conversion({"a.b.x": 1})) == {"a.b.x": 1}
        return
    assert conversion({"1_2": 1}) == {"2_1": 1}
    with pytest.raises(st.TreeMismatch, match=r"way back differs at z_x_y: expected the rule .* alone, got"):
        conversion({"x_y_z": 1})
    with pytest.raises(st.TreeMismatch, match=r"way back differs at z: .* got none: it is ignored"):
        st.Conversion([("x", "z")], ignore=["z"])({"x": 1})


@pytest.mark.parametrize(
    "rule", ["ab", ("a",), ("a", "b", 3), ("a", "b", "c -> c", "d"), (["a", 1], "b"), ([], "b")], ids=str
)
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(TypeError, match="Conversion: a rule is not valid: expected"):
        st.Conversion([rule])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("a.{i}", "b"), "expected a pattern with the axis i, got none"),
        (("a.*", "b", "x -> x"), r"expected captures that all names have, or those of one side alone, got \*"),
        ((["a.{i}", "c"], "b.{i}", "x, x -> (x + x)"), r"captures that all names have, .* got {i}"),
        ((["a", "c"], "b", "x, y, z -> (x + y + z)"), "expected a tensor for each of 2 names, got 3"),
        ((["a", "c"], "b", "x, x -> (x + x + x)"), "expected as many summands as tensors, got 2 and 3"),
        (("a", "b", "x y -> x z"), "expected the same axes on both sides, got y, z on one"),
        (("a", "b.{x}", "y -> x y"), "expected captures that are no dims of their own tensors, got one that is"),
        (("a", ["b.{x}", "c.{y}"], "x y -> y"), "expected the same captures in tied names, got"),
    ],
    ids=str,
)
def test_rules_that_lose_something_are_refused(rule, message):
    with pytest.raises(ValueError, match=f"the rule .* is not valid: .*{message}".replace("{i}", "\\{i\\}")):
        st.Conversion([rule])


def test_patterns_are_for_strided_tensors():
    for leaf in (3, ramp(2, 2).to_sparse(), torch.quantize_per_tensor(ramp(2, 2), 1.0, 0, torch.qint8)):
        with pytest.raises(st.UnsupportedLeaf, match="Conversion: a pattern is for the leaf at x: expected a strided"):
            st.Conversion([("x", "y", "a b -> b a")])({"x": leaf})


def test_conversions_can_be_looked_at():
    conversion = st.Conversion([FUSED, TIED], sizes={"q": 2, "d": 2}, ignore=["*.inv_freq"])
    assert str(conversion) == (
        f"[{{i}}.q, {{i}}.k, {{i}}.v] <-> {{i}}.qkv: {FUSED[2]}\n"
        "embed <-> [tokens, head]\nsizes: q=2, d=2\nignored: *.inv_freq"
    )
    assert str(conversion.inverse.inverse) == str(conversion)
    assert repr(conversion) == "Conversion(2 rules)"
    assert conversion.explain({**attention(), "embed": ramp(3)}) == (
        f"0.qkv (16, 3) <- 0.q (8, 3), 0.k (4, 3), 0.v (4, 3)\n  {FUSED[2]}\ntokens, head (3,) <- embed (3,)"
    )


def test_bits_and_gradients():
    state = {"x": torch.complex(ramp(2, 3), ramp(2, 3) + 7).conj().requires_grad_(), "y": torch._neg_view(ramp(2, 3))}
    conversion = st.Conversion([("x", "a", "f m -> (m f)"), ("y", "b", "f m -> (m f)")])
    found = conversion(state)
    assert torch.equal(found["a"].detach().resolve_conj(), state["x"].detach().resolve_conj().T.reshape(-1))
    assert torch.equal(found["b"], state["y"].T.reshape(-1))
    assert found["a"].requires_grad
    assert found["a"].is_leaf
    empty = st.Conversion([("x", "a", "f m -> (m f)")])({"x": torch.empty(0, 3)})["a"]
    assert empty.shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": {"a": -2}}, "the size of a must be a whole number, got -2"),
        ({"sizes": {"a": 2.0}}, "the size of a must be a whole number, got 2.0"),
        ({"ignore": [3]}, r"ignore must be globs of paths, got \[3\]"),
    ],
    ids=["negative", "fraction", "glob"],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(TypeError, match=f"Conversion: {message}"):
        st.Conversion([("x", "y", "(a b) -> (b a)")], **options)


def test_what_would_be_no_leaf_at_all_is_refused():
    conversion = st.Conversion([("moe", "e.{e}.w", "e f -> f")])
    with pytest.raises(st.TreeMismatch, match="e=0, along which there would be no leaf"):
        conversion({"moe": torch.empty(0, 3)})
    with pytest.raises(st.TreeMismatch, match=r"rules do not fit at e\.111"):
        conversion.inverse({f"e.{'1' * 5000}.w": torch.ones(2)})


def test_stored_leaves_of_one_name_that_differ_are_found_when_they_are_read(tmp_path):
    st.save({"emb": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "a.safetensors")
    conversion = st.Conversion([("x", ["emb", "head"])]).inverse
    with pytest.raises(st.TreeMismatch, match="load: emb, head have one name in the result, and hold different values"):
        st.load(tmp_path / "a.safetensors", through=conversion)


def test_an_empty_block_does_not_make_a_copy():
    whole = ramp(4, 2)
    state = {"a": whole[:2], "b": whole[2:], "c": torch.empty(0, 2)}
    made = st.Conversion([(["a", "b", "c"], "x", "f m, g m, h m -> (f + g + h) m")])(state)["x"]
    assert made.data_ptr() == whole.data_ptr()
    assert torch.equal(made, whole)


REST = ("**", "**")


@pytest.mark.parametrize("rules", [[FUSED, REST], [REST, FUSED]], ids=["last", "first"])
def test_the_rest_keeps_its_name(rules):
    conversion = st.Conversion(rules, sizes={"q": 2, "d": 2}, ignore=["**.inv_freq"])
    rest = {"norm.weight": ramp(3), "step": 7}
    made = conversion({**attention(), **rest, "rope.inv_freq": ramp(2)})
    assert list(made) == ["0.qkv", "norm.weight", "step"]
    assert made["norm.weight"] is rest["norm.weight"]
    assert_trees_equal(conversion.inverse(made), {**attention(), **rest}, ties=False)
    assert "norm.weight (3,) <- norm.weight (3,)" in conversion.explain(rest)
    assert_trees_equal(conversion({"model": {"norm": ramp(3)}}), {"model": {"norm": ramp(3)}}, ties=False)


def test_what_another_rule_would_take_back_is_no_rest():
    conversion = st.Conversion([("a", "b"), REST])
    with pytest.raises(
        st.TreeMismatch, match=r"way back differs at b: expected the rule \*\* <-> \*\* alone, got a <-> b"
    ):
        conversion({"b": ramp(2)})
    with pytest.raises(st.TreeMismatch, match="origin differs at b"):
        conversion({"a": ramp(2), "b": ramp(2)})


def test_two_rules_of_which_none_is_for_the_rest_take_no_leaf_together():
    with pytest.raises(st.TreeMismatch, match=r"rules do not fit at a: .* got a <-> b and \{x\}"):
        st.Conversion([("a", "b"), ("{x}", "{x}"), REST])({"a": ramp(2)})


def test_a_single_leaf_has_no_path_to_convert():
    with pytest.raises(st.TreeMismatch, match="Conversion: a single leaf has no path to convert"):
        st.Conversion([REST])(ramp(2))
