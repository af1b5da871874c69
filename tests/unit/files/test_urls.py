"""Paths that are URLs are refused, with both of their slashes where they still have them."""

import re
from pathlib import Path

import pytest
import torch

import statetree as st
from statetree.errors import CheckpointError

URLS = [
    "s3://bucket/run/model.pt",
    "https://example.com/model.safetensors",
    "hf://org/model",
    "file:///tmp/a",
    " s3://bucket/run",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "verb",
    [st.files.open, lambda url: st.load(url, {}), lambda url: st.save({"w": torch.ones(2)}, url)],
    ids=["open", "load", "save"],
)
def test_urls_are_refused_and_make_no_folder(verb, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"(read|save): {re.escape(url)} is no path: expected a local one, got a"):
        verb(url)
    with pytest.raises(CheckpointError, match="is no path: expected a local one, got a URL"):
        verb(Path(url))
    assert not list(tmp_path.iterdir())


def test_a_colon_alone_makes_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a:b.pt", "step:3.safetensors"):
        st.save({"w": torch.arange(3)}, name)
        assert st.offload(st.files.open(name))["w"].tolist() == [0, 1, 2]
