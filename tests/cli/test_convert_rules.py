"""``statetree convert --rules``: names and tensors by the rules of a file, both ways."""

import pytest
import torch

import statetree as st
from tests.cli.test_convert import converted
from tests.judge import assert_trees_equal

RULES = """
ignore = ["**.inv_freq"]

[[rules]]
left = ["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"]
right = "h.{i}.qkv"
pattern = "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m"

[[rules]]
left = "norm"
right = ["ln", "tied"]

[sizes]
q = 2
d = 2
"""


def ramp(*shape, start=0):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.mark.parametrize("names", [("a.safetensors", "b.pt", "c.safetensors"), ("a.pt", "b", "c.pt")], ids="-".join)
def test_there_and_back(names, rules, tmp_path, statetree):
    state = {
        "layers.0.k": ramp(4, 3, start=50),
        "layers.0.q": ramp(8, 3),
        "layers.0.v": ramp(4, 3, start=90),
        "norm": ramp(3),
    }
    st.save({**state, "rotary.inv_freq": ramp(2)}, tmp_path / names[0])
    converted(statetree, "--rules", rules, tmp_path / names[0], tmp_path / names[1])
    found = st.offload(st.files.open(tmp_path / names[1]))
    expected = torch.cat([state[f"layers.0.{key}"].view(2, -1, 2, 3) for key in "qkv"], 1)
    assert torch.equal(found["h.0.qkv"], expected.reshape(16, 3))
    assert torch.equal(found["tied"], state["norm"])
    converted(statetree, "--rules", rules, "--inverse", tmp_path / names[1], tmp_path / names[2])
    assert st.similarity(st.offload(st.files.open(tmp_path / names[2])), state)
    converted(statetree, "--rules", rules, "--cast", "bfloat16", tmp_path / names[0], tmp_path / "d.safetensors")
    narrow = st.offload(st.files.open(tmp_path / "d.safetensors"))
    assert_trees_equal(narrow["h.0.qkv"], found["h.0.qkv"].bfloat16())


def test_tied_names_that_differ_are_found_when_they_are_read(rules, tmp_path, statetree):
    st.save({"ln": ramp(3), "tied": ramp(3, start=1)}, tmp_path / "a.safetensors")
    ran = statetree("convert", "--rules", rules, "--inverse", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert ran.status == 2
    assert "ln, tied have one name in the result, and hold different values" in ran.err
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = 3", "expected [[rules]], each with left and right"),
        ("[[rules]]\nleft = 'a'", "expected [[rules]], each with left and right"),
        ("[[rules]]\nleft = 'a'\nright = 'b'\npatern = 'a -> a'", "got the key patern"),
        ("rules = [{left = 'a', right = 3}]", "a rule is not valid"),
        ("rules = [{left = 'a', right = 'b', pattern = 'a -> b'}]", "expected the same axes on both sides"),
        ("rules = []\nsizes = {a = 'b'}", "the size of a must be a whole number, got 'b'"),
        ("rules = []\nignore = 3", "a list of globs as ignore"),
        ("rules = [", "it cannot be read"),
    ],
)
def test_rules_that_are_none_are_refused(text, message, tmp_path, statetree):
    st.save({"a": ramp(3)}, tmp_path / "a.safetensors")
    (tmp_path / "rules.toml").write_text(text)
    ran = statetree("convert", "--rules", tmp_path / "rules.toml", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert ran.status == 2
    assert message in ran.err


def test_what_the_rules_do_not_take_is_named(rules, tmp_path, statetree):
    st.save({"a": ramp(3)}, tmp_path / "a.safetensors")
    ran = statetree("convert", "--rules", rules, tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert (ran.status, "rules do not fit at a: expected one that takes it" in ran.err) == (2, True)
    ran = statetree("convert", "--rules", tmp_path / "none.toml", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert (ran.status, "there is no such file" in ran.err) == (2, True)
    ran = statetree("convert", "--inverse", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert (ran.status, "--inverse is for --rules" in ran.err) == (2, True)


TIED = 'ignore = ["step"]\n[[rules]]\nleft = "tok"\nright = ["emb", "head"]\n'


def test_notes_are_about_what_is_written(tmp_path, statetree):
    rules = tmp_path / "tied.toml"
    rules.write_text(TIED)
    weight = torch.ones(2)
    st.save({"emb": weight, "head": weight, "step": 3}, tmp_path / "tied.pt")  # a plain value that the rules ignore
    ran = converted(statetree, "--rules", rules, "--inverse", tmp_path / "tied.pt", tmp_path / "one.safetensors")
    assert "share bytes" not in ran.err
    st.save({"tok": weight}, tmp_path / "one.pt")
    ran = converted(statetree, "--rules", rules, tmp_path / "one.pt", tmp_path / "two.safetensors")
    assert "note: emb, head: share bytes, and are written once each" in ran.err


def test_whether_a_file_is_strict_is_true_or_false(tmp_path, statetree):
    rules = tmp_path / "odd.toml"
    rules.write_text('strict = "no"\n' + TIED)
    st.save({"tok": torch.ones(2)}, tmp_path / "a.pt")
    ran = statetree("convert", "--rules", rules, tmp_path / "a.pt", tmp_path / "b.pt")
    assert ran.status == 2
    assert "expected true or false as strict, got 'no'" in ran.err
