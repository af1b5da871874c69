"""``to_html``, and what notebooks show."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import statetree as st
from statetree.files import open as open_file
from statetree.files import opened
from tests.cli.states import bits, nested_state, tied_state, write
from tests.trees import TREES


class Balance(HTMLParser):
    """Notes elements that are left open, addresses that would be asked for, and the paths of leaves."""

    elements = ("details", "summary", "p", "div", "span", "b", "i", "button", "search", "output", "svg")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.titles, self.paths, self.marked, self.folds = [], [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag in self.elements:
            self.open.append(tag)
        if tag == "summary":
            self.is_marked, self.text = ("class", "gone") in attrs, ""
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self.titles += [value for name, value in attrs if name == "title" and tag == "p"]

    def handle_endtag(self, tag):
        if tag in self.elements:
            assert self.open.pop() == tag
        if tag == "summary":
            self.folds.append((self.open.count("details"), self.text))

    def handle_data(self, data):
        if self.open[-1:] == ["button"]:
            self.paths.append(data)
            self.marked += [data] * self.is_marked
        elif "summary" in self.open:
            self.text += data


def page_of(tmp_path, *trees, **options):
    st.to_html(*trees, tmp_path / "page.html", **options)
    text = (tmp_path / "page.html").read_text()
    found = Balance()
    found.feed(text)
    assert found.open == []
    assert all(address.startswith("#") for address in found.addresses)
    assert "http" not in text
    return text, found


def test_a_page_has_every_path_and_asks_for_nothing(tmp_path):
    _, found = page_of(tmp_path, nested_state())
    assert sorted(found.paths) == sorted(map(str, st.paths(nested_state())))


def test_a_page_is_made_whatever_the_default_device_is(tmp_path):
    tree = {**nested_state(), "nowhere": torch.ones(2, device="meta")}
    with torch.device("meta"):
        text, _ = page_of(tmp_path, tree)
    assert text == page_of(tmp_path, tree)[0]


def test_names_are_escaped(tmp_path):
    text, _ = page_of(tmp_path, {"<script>alert(1)</script>": bits(2), "v": "</p><img src=x>\x1b[2J"})
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\x1b" not in text


def test_keys_fold_at_their_dots(tmp_path):
    keys = ["net.0.w", "net.0.b", "net.1.w", "head.w", "a..b", "a..c", "", "net", "x.y.z.w", "x.y.z.v"]
    _, found = page_of(tmp_path, {"model": dict.fromkeys(keys, 1), 0: [2, 3]})
    assert found.paths == [
        *[f"model.{key}" for key in ("net.0.w", "net.0.b", "net.1.w", "head.w", "a..b", "a..c", "", "net")],
        *("model.x.y.z.w", "model.x.y.z.v", "0.0", "0.1"),
    ]
    assert [fold for fold in found.folds if fold[0] < 6] == [
        *[(1, "root dict of 2"), (2, "model dict of 10"), (3, "net 3"), (4, "0 2"), (5, "w int 1"), (5, "b int 1")],
        *[(4, "1.w int 1"), (3, "head.w int 1"), (3, "a..b int 1"), (3, "a..c int 1"), (3, " int 1"), (3, "net int 1")],
        *[(3, "x.y.z 2"), (4, "w int 1"), (4, "v int 1"), (2, "0 list of 2"), (3, "0 int 2"), (3, "1 int 3")],
    ]
    hostile = {"d." * 100_000 + "a": 1, "d." * 100_000 + "b": 2, **{"<b>." * n + "<i>": n for n in range(9)}}
    text, found = page_of(tmp_path, hostile)
    assert sorted(found.paths) == sorted(map(str, st.paths(hostile)))
    assert "<b><" not in text


def test_a_page_can_be_searched(tmp_path):
    text, _ = page_of(tmp_path, nested_state())
    assert "<search><input type=search" in text
    assert text.index("<search>") < text.index("<details")
    assert text.index("</details><script>") > 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_leaf_that_is_chosen_shows_its_elements(tmp_path, is_stored):
    ramp = torch.arange(64.0)
    ramp[60:] = torch.tensor([float("nan"), float("nan"), float("inf"), 3.0])
    state = {"ramp": ramp, "few": torch.tensor([1, 2]), "one": torch.tensor(7.0), "same": torch.ones(9), "n": 5}
    state["empty"] = torch.zeros(0)
    tree = open_file(write(state, tmp_path / "a.pt")) if is_stored else state
    text, _ = page_of(tmp_path, tree)
    assert "<p>256 bytes, min 0, max 59, mean 29.07, std 17.5, 2 NaN, 1 inf, 1 zero</p><svg" in text
    assert "<b class=gone>2 NaN</b> <b class=gone>1 inf</b></summary>" in text
    assert text.count("<svg") == 1
    assert "float32 []</i> = 7.0</summary>" in text
    assert "int64 [2]</i> = [1, 2]</summary>" in text
    assert "<p>5</p>" in text
    text, _ = page_of(tmp_path, tree, values=False)
    assert "<p>256 bytes</p></details>" in text
    assert "29.07" not in text


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_every_tree_has_a_page(tmp_path, tree):
    state = tree.make()
    assert len(page_of(tmp_path, state)[1].paths) == len(st.paths(state))


def test_ties_have_one_colour_and_are_linked(tmp_path):
    for tree in (tied_state(), open_file(write(tied_state(), tmp_path / "a.pt"))):
        text, found = page_of(tmp_path, tree)
        assert text.count("class=tie") == 5 + 2  # views on `base`, and two that overlap in `half`
        assert len(found.addresses) == 7
        assert all(f"id={address[1:]}>" in text for address in found.addresses)
        assert "= overlapping</a>" in text


def test_differences_are_said(tmp_path):
    text, found = page_of(
        tmp_path, {"w": torch.zeros(2), "x": torch.zeros(3)}, other={"w": torch.zeros(2), "x": bits(4)}
    )
    assert "<td>x<td>shape<td class=gone>(3,)<td class=new>(4,)" in text
    assert (found.paths, found.marked) == (["w", "x"], ["x"])
    assert "<h2>1 difference</h2>" in text


def test_a_page_shows_and_counts_what_similarity_finds(tmp_path):
    tree, other = ({"w": torch.zeros(3), "n": n, "same": bits(2)} for n in (1, 2))
    other["w"][1] = 0.25
    text, found = page_of(tmp_path, tree, other=other)
    assert "<h2>2 differences</h2>" in text
    assert "<td>w<td>value<td class=gone>0.0 at index (1,) (1 of 3 elements differ)<td class=new>0.25 at" in text
    assert "<td>0.25" in text
    assert found.marked == ["w", "n"]
    assert "same" in found.paths
    text, _ = page_of(tmp_path, {"w": tree["w"]}, other={"w": other["w"]}, atol=0.25)
    assert "<h2>0 differences</h2>" in text
    text, _ = page_of(tmp_path, tree, other=other, values=False)
    assert "<h2>0 differences in structure; values were not compared</h2>" in text
    text, _ = page_of(tmp_path, list(range(3000)), other=[-1] * 3000)
    assert "<h2>3,000 differences</h2>" in text
    assert "The first 1,000 of 3,000 are shown." in text
    text, _ = page_of(tmp_path, {"module.w": 1}, other={"w": 1})
    assert "rename(tree, {&#x27;module.**&#x27;: &#x27;**&#x27;})" in text


def test_shards_are_boxes_by_rank(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        rows = distribute_tensor(bits(8, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        both = distribute_tensor(bits(6, 4), mesh, [Shard(1), Shard(0)], src_data_rank=None)
        text, found = page_of(tmp_path, {"a": rows, "b": rows.clone(), "c": rows + 1, "both": both, "whole": bits(2)})
    finally:
        dist.destroy_process_group()
    assert found.addresses == ["#shards1"] * 3 + ["#shards2"]
    first, second = (figure.partition("</figure>")[0] for figure in text.split("<figure id=")[1:])
    assert text.count("this rank&#x27;s part: min") == 4
    assert re.findall(r">([0-9, ]+)</span>", first) == ["0, 2", "1, 3"]
    assert re.findall(r">([0-9, ]+)</span>", second) == ["0", "2", "1", "3"]
    assert "top:50.0%;left:0.0%;height:50.0%;width:100.0%" in first
    assert "the ranks of 3 tensors" in first


def test_notebooks_show_structures_differences_deltas_and_checkpoints(tmp_path):
    state = {"<w>": torch.arange(4.0), "step": 3}
    changed = {"<w>": torch.tensor([0.0, 1.0, 7.0, 3.0]), "step": 4}
    shown = {
        "structure": st.flatten(state)[1],
        "1 difference": st.similarity(state, {**state, "step": 4}, values=True),
        "similar": st.similarity(state, state, values=False),
        "&lt;w&gt;<td>1": st.delta(changed, state),
        "float32 [4]": opened(write(state, tmp_path / "a.pt")),
    }
    for text, value in shown.items():
        html = value._repr_html_()
        found = Balance()
        found.feed(html)
        assert found.open == []
        assert "<w>" not in html
        if text != "structure":
            assert text in html
        else:
            assert found.titles == ["<w>", "step"]


def test_what_notebooks_keep_is_bounded():
    spec = st.flatten({f"layers.{number}.weight": number for number in range(30_000)})[1]
    assert len(spec._repr_html_()) < 2_000_000


@pytest.mark.slow
def test_large_and_deep_trees(tmp_path):
    text, _ = page_of(tmp_path, {f"layers.{number}.weight": bits(3) for number in range(10_000)})
    assert len(text) < 5_000_000
    deep = bits(1)
    for _ in range(500):
        deep = {"d": deep}
    page_of(tmp_path, deep)


def test_the_command_writes_pages(tmp_path, capsys):
    from statetree.cli.app import main

    one, other = write({"w": bits(3)}, tmp_path / "a.pt"), write({"w": bits(4)}, tmp_path / "b.pt")
    assert main(["show", "--html", str(tmp_path / "x.html"), str(one)]) == 0
    assert main(["diff", "--html", str(tmp_path / "y.html"), str(one), str(other)]) == 1
    assert "float32 [3]" in (tmp_path / "x.html").read_text()
    assert "<td>shape" in (tmp_path / "y.html").read_text()
    assert f"<th>{one}<th>{other}" in (tmp_path / "y.html").read_text()
    assert " = [" not in (tmp_path / "x.html").read_text()
    assert main(["show", "--stats", "--html", str(tmp_path / "x.html"), str(one)]) == 0
    assert " = [" in (tmp_path / "x.html").read_text()
    third = write({"w": bits(3) + 1}, tmp_path / "c.safetensors")
    capsys.readouterr()
    for options, expected in (
        ([], "<h2>1 difference</h2>"),
        (["--atol", "1"], "<h2>0 differences</h2>"),
        (["--no-values"], "<h2>0 differences in structure; values were not compared</h2>"),
    ):
        main(["diff", *options, "--html", str(tmp_path / "z.html"), str(one), str(third)])
        assert expected in (tmp_path / "z.html").read_text()
    assert capsys.readouterr().err == ""
