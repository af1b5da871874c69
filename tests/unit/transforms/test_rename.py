"""``rename``: patterns, containers that go with their leaves, inverses, and what is refused."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import statetree as st

Pair = namedtuple("Pair", "left right")


@dataclass
class Config:
    w: object
    b: object


def there_and_back(tree, rules):
    rules = st.Renaming(rules)
    found = st.rename(tree, rules)
    again = st.rename(found, rules.inverse)
    assert st.flatten(again)[1] == st.flatten(tree)[1]
    assert all(a is b for a, b in zip(st.flatten(again)[0], st.flatten(tree)[0], strict=True))
    return found


@pytest.mark.parametrize(
    ("tree", "rules", "expected"),
    [
        ({"a.b": 1, "c": 2}, {"a.{x}": "{x}.z"}, {"b.z": 1, "c": 2}),
        ({"a": {"b": 1}, "c": {"d": 2}}, {"a.{x}": "z.{x}"}, {"z": {"b": 1}, "c": {"d": 2}}),
        ({"a.b": 1, "c": 2}, {"**": "model.**"}, {"model.a.b": 1, "model.c": 2}),
        ({"m.a.b": 1, "m.c": 2}, {"m.**": "**"}, {"a.b": 1, "c": 2}),
        ({"a.w": 1, "w": 2}, {"**.w": "**.kernel"}, {"a.kernel": 1, "kernel": 2}),
        ({"a": 1, "b": 2}, [("a", "b"), ("b", "a")], {"b": 1, "a": 2}),
        ({"a": {"w": 1}, "x": {"y": {"w": 2}}}, {"a.w": "a.deep.w"}, {"a": {"deep": {"w": 1}}, "x": {"y": {"w": 2}}}),
        ({"l": [{"w": 1}, {"w": 2}], "m": {}}, {"l.{i}.w": "k.{i}.v"}, {"k": [{"v": 1}, {"v": 2}], "m": {}}),
        ({"l": [1, 2]}, [("l.0", "l.1"), ("l.1", "l.0")], {"l": [2, 1]}),
        ({"s": {0: {"m": 1}, 1: {"m": 2}}}, {"s.{i}.m": "s.{i}.avg"}, {"s": {0: {"avg": 1}, 1: {"avg": 2}}}),
        ({"s": {0: 1, 1: 2}}, [("s.0", "s.7")], {"s": {7: 1, 1: 2}}),
        (
            {"p": Pair(1, 2), "c": Config(3, 4)},
            [("p.**", "q.**"), ("c.**", "d.**")],
            {"q": Pair(1, 2), "d": Config(3, 4)},
        ),
        ({"x{i}": 1, "y*": 2}, [("x\\{i\\}", "\\*"), ("y\\*", "y")], {"*": 1, "y": 2}),
        ({"a..b": 1, "a.": 2}, {"a.**": "z.**"}, {"z..b": 1, "z.": 2}),
        ({"h.1.1.x": 1, "h.1.2.x": 2}, [("h.{i}.{i}.x", "d.{i}.x")], {"d.1.x": 1, "h.1.2.x": 2}),
    ],
    ids=str,
)
def test_there_and_back(tree, rules, expected):
    found = there_and_back(tree, rules)
    assert found == expected


def test_classes_and_attributes_of_containers_are_kept():
    state = OrderedDict({"layers.0.w": 1, "norm": 2})
    state._metadata = OrderedDict({"": {"version": 1}, "layers.0": {"version": 2}})
    state.extra = torch.arange(3.0)
    tree = {"model": state, "queue": deque([{"a": 3}], maxlen=5), "epoch": 7}
    found = there_and_back(tree, [("model.layers.{i}.w", "model.h.{i}.attn.w"), ("queue.{i}.a", "line.{i}.b")])
    assert type(found["model"]) is OrderedDict
    assert list(found["model"]) == ["h.0.attn.w", "norm"]
    assert found["model"]._metadata == state._metadata
    assert found["model"].extra is state.extra
    assert found["line"] == deque([{"b": 3}])
    assert found["line"].maxlen == 5


def test_a_whole_state_dict_moves_with_its_class():
    tree = {"model": OrderedDict({"layers.0.w": 1}), "step": 2}
    assert type(there_and_back(tree, {"model.**": "ema.**"})["ema"]) is OrderedDict


@pytest.mark.parametrize("rules", [[], {"**": "**"}, {"**": "a.**"}], ids=["none", "same", "another"])
def test_what_is_empty_stays_empty(rules):
    for tree in ({}, [], OrderedDict()):
        renamed = st.rename(tree, rules)
        assert renamed == tree
        assert type(renamed) is type(tree)
        assert renamed is not tree


def test_the_first_rule_that_matches_counts():
    assert st.rename({"a.w": 1, "b.w": 2}, [("a.w", "x"), ("{m}.w", "{m}.v")]) == {"x": 1, "b.v": 2}


@pytest.mark.parametrize(
    ("tree", "rules", "message"),
    [
        ({"a": 1, "b": 2}, {"a": "b"}, "two leaves would get one path: expected one for each, got 'b' for a and b"),
        ({"x.1": 1, "y.1": 2}, {"{m}.1": "z"}, "got 'z' for x.1 and y.1"),
        ({"a": 1, "b": {"c": 2}}, {"a": "b"}, "a path would go through a leaf: .* the leaf a \\(to b\\), above b.c"),
        ({"a": 1, "b": {"c": 2}}, {"a": "b.c.d"}, "the leaf b.c, above a \\(to b.c.d\\)"),
        ({"l": [1, 2]}, {"l.0": "l.5"}, "a list cannot have these keys at l: expected 0, 1, got 5, 1"),
        ({"l": [1, 2], "m": {"n": 3}}, {"l.0": "m.o"}, "a list cannot have these keys at l: expected 0, 1, got 1"),
        (
            {"p": Pair(1, 2)},
            {"p.left": "p.up"},
            "a Pair cannot have these keys at p: expected left, right, got up, right",
        ),
        ({"model.w": 1}, {"modl.{x}": "{x}"}, "no path matches the rule 'modl.{x}'"),
        ({"a": 1, "b": 2}, [("a", "c"), ("d", "e")], "no path matches the rule 'd'"),
        ({"a": 1}, [("*", "b.*"), ("a", "c")], "no path matches the rule 'a' that no rule before it matches"),
        ({"a": {"b": 1}}, {"a": "c"}, r"no path matches the rule 'a', which is a container: did you mean 'a.\*\*'"),
        ({"a.b": 1}, {"a.b.**": "**"}, "the path a.b would be lost"),
        (5, {"*": "pre.*"}, "a single leaf has no path to change: expected a container, got the rule"),
        ({"x": {0: 1}, "y": 2}, {"y": "x.0"}, "two leaves would get one path: .* got 'x.0' for x.0 and y"),
        ({"y": 2, "x": {0: 1}}, {"y": "x.0"}, "two leaves would get one path: .* got 'x.0' for y and x.0"),
        ({"a.b": 1, "a": {"c": 2}}, {"a.c": "a.b"}, "two leaves would get one path: .* got 'a.b' for a.b and a.c"),
        ({"b": {"c": 2}, "x": {0: {"a": 1}}}, {"b.c": "x.0.c"}, "two keys at x are equal or read alike: .* '0', 0"),
    ],
    ids=str,
)
def test_what_is_refused(tree, rules, message):
    with pytest.raises(st.TreeMismatch, match=f"rename: .*{message.replace('{', chr(92) + '{')}"):
        st.rename(tree, rules)


def test_keys_that_read_alike_stay_where_no_rule_is_for_them():
    tree = {"x": {0: 1, "0": 2}, "a.b": 3, "a": {"b": 4}, "y": 5}
    assert there_and_back(tree, {"y": "z"}) == {"x": {0: 1, "0": 2}, "a.b": 3, "a": {"b": 4}, "z": 5}


def test_a_rule_may_match_nothing_if_that_is_said():
    assert st.rename({"a": 1}, {"b": "c"}, missing_ok=True) == {"a": 1}
    assert st.rename(3, [], missing_ok=True) == 3


def test_what_is_not_captured_cannot_be_asked_for():
    for source, target in [("a.{x}", "{y}"), ("a", "b.*"), ("*", "*.*"), ("*", "**")]:
        with pytest.raises(ValueError, match="does not capture"):
            st.Renaming({source: target})


@pytest.mark.parametrize(
    ("source", "target"),
    [("a.{x}", "b"), ("a.*", "b"), ("a.{x}.*", "b.{x}")],
    ids=str,
)
def test_what_loses_something_has_no_inverse(source, target):
    with pytest.raises(ValueError, match="has no inverse"):
        _ = st.Renaming({source: target}).inverse


@pytest.mark.parametrize("rules", ["ab", [("a", "b", "c")], {0: "a"}, [None]], ids=str)
def test_rules_that_are_no_pairs_of_texts_are_refused(rules):
    with pytest.raises(TypeError, match="rename: the rules are no pairs of patterns: expected two texts, got "):
        st.rename({"a": 1}, rules)


@pytest.mark.parametrize("tree", [{}, [], OrderedDict()], ids=str)
def test_an_empty_tree_stays_as_it_is(tree):
    assert there_and_back(tree, {}) == tree


def test_rules_can_be_looked_at():
    rules = st.Renaming([("a.{x}", "b.{x}")])
    assert rules.pairs == [("a.{x}", "b.{x}")]
    assert rules.inverse.inverse.pairs == rules.pairs
    assert repr(rules) == "Renaming([('a.{x}', 'b.{x}')])"


def hugging_face_names(layers):
    """Return the names of transformers' ``LlamaForCausalLM``."""
    inner = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    inner += ["input_layernorm", "post_attention_layernorm"]
    names = [f"model.layers.{i}.{name}.weight" for i in range(layers) for name in inner]
    return ["model.embed_tokens.weight", *names, "model.norm.weight", "lm_head.weight"]


def torchtitan_names(layers):
    """Return the names of torchtitan's ``Transformer``, in the same order."""
    inner = [f"attention.w{p}" for p in "qkvo"] + [f"feed_forward.w{p}" for p in "132"]
    inner += ["attention_norm", "ffn_norm"]
    names = [f"layers.{i}.{name}.weight" for i in range(layers) for name in inner]
    return ["tok_embeddings.weight", *names, "norm.weight", "output.weight"]


LLAMA = [
    ("model.embed_tokens.weight", "tok_embeddings.weight"),
    ("model.layers.{i}.self_attn.{p}_proj.weight", "layers.{i}.attention.w{p}.weight"),
    ("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.feed_forward.w1.weight"),
    ("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.feed_forward.w2.weight"),
    ("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.feed_forward.w3.weight"),
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "output.weight"),
]


def nested(flat):
    tree = {}
    for name, leaf in flat.items():
        *above, last = name.split(".")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[last] = leaf
    return tree


@pytest.mark.parametrize("form", [OrderedDict, nested], ids=["flat", "nested"])
def test_the_two_forms_of_llama(form):
    weights = [torch.empty(i + 1, device="meta") for i in range(len(hugging_face_names(32)))]
    theirs = dict(zip(hugging_face_names(32), weights, strict=True))
    ours = dict(zip(torchtitan_names(32), weights, strict=True))
    found = there_and_back(form(theirs), LLAMA)
    flat = st.to_flat(found)[0]
    assert list(flat) == torchtitan_names(32)
    assert all(flat[name] is leaf for name, leaf in ours.items())
    assert st.similarity(found, form(ours), values=False)


def test_keys_that_are_texts_of_another_class_or_attributes_are_one_key():
    class Text(str):
        __slots__ = ()

    tensor = torch.ones(1)
    with_attribute = OrderedDict(weight=tensor)
    with_attribute.extra = torch.zeros(1)
    for tree in (with_attribute, {Text("weight"): tensor}):
        assert list(st.rename(tree, {"weight": "layer.weight"})) == ["layer.weight"]


def test_rules_may_be_any_pairs_of_texts():
    class Pair(NamedTuple):
        old: str
        new: str

    assert st.rename({"a": 1}, [Pair("a", "b")]) == {"b": 1}
    with pytest.raises(TypeError, match="expected two texts"):
        st.rename({"a": 1}, [("a", 1)])
