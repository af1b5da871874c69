"""``to_html``."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

import statetree as st
from statetree.files import open as open_file
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
    assert found.addresses == []
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


def test_ties_have_one_colour(tmp_path):
    for tree in (tied_state(), open_file(write(tied_state(), tmp_path / "a.pt"))):
        text, _ = page_of(tmp_path, tree)
        assert text.count("class=tie") >= 2


def test_differences_are_said(tmp_path):
    text, _ = page_of(tmp_path, {"w": torch.zeros(2), "x": torch.zeros(3)}, other={"w": torch.zeros(2), "x": bits(4)})
    assert text.count("class=gone") == 1
    assert "shape differs at x" in text


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
    assert "torch.float32 [3]" in (tmp_path / "x.html").read_text()
    assert "shape differs" in (tmp_path / "y.html").read_text()
    assert capsys.readouterr().err == ""
