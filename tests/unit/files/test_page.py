"""``to_html``, and what notebooks show."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import statetree as st
from statetree.files import open as open_file
from statetree.files import opened
from tests.cli.states import bits, nested_state, tied_state, write


class Balance(HTMLParser):
    """Notes elements that are left open, and addresses that would be asked for."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.titles = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("details", "summary", "p", "div", "span", "b", "i"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self.titles += [value for name, value in attrs if name == "title" and tag == "p"]

    def handle_endtag(self, tag):
        if tag in ("details", "summary", "p", "div", "span", "b", "i"):
            assert self.open.pop() == tag


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
    assert sorted(found.titles) == sorted(map(str, st.paths(nested_state())))


def test_names_are_escaped(tmp_path):
    text, _ = page_of(tmp_path, {"<script>alert(1)</script>": bits(2), "v": "</p><img src=x>\x1b[2J"})
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\x1b" not in text


def test_ties_have_one_colour_and_are_linked(tmp_path):
    for tree in (tied_state(), open_file(write(tied_state(), tmp_path / "a.pt"))):
        text, found = page_of(tmp_path, tree)
        assert text.count("class=tie") == 5 + 2  # views on `base`, and two that overlap in `half`
        assert len(found.addresses) == 7
        assert all(f"id={address[1:]} " in text for address in found.addresses)
        assert "= overlapping</a>" in text


def test_differences_are_said(tmp_path):
    text, _ = page_of(tmp_path, {"w": torch.zeros(2), "x": torch.zeros(3)}, other={"w": torch.zeros(2), "x": bits(4)})
    assert "<td>x<td>shape<td class=gone>(3,)<td class=new>(4,)" in text
    assert '<p title="x" class=gone>' in text
    assert '<p title="w">' in text
    assert "<h2>1 difference</h2>" in text


def test_a_page_shows_and_counts_what_similarity_finds(tmp_path):
    tree, other = ({"w": torch.zeros(3), "n": n, "same": bits(2)} for n in (1, 2))
    other["w"][1] = 0.25
    text, _ = page_of(tmp_path, tree, other=other)
    assert "<h2>2 differences</h2>" in text
    assert "<td>w<td>value<td class=gone>0.0 at index (1,) (1 of 3 elements differ)<td class=new>0.25 at" in text
    assert "<td>0.25" in text
    assert '<p title="w" class=gone>' in text
    assert '<p title="same">' in text
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
