"""Checkpoints that each supported version of torch wrote are read by this one."""

from __future__ import annotations

import pytest
import torch

import statetree as st
from tests.dcp.versions import WRITTEN, flat, nested
from tests.judge import assert_trees_equal

FOLDERS = sorted(folder for folder in WRITTEN.iterdir() if folder.is_dir())


def test_the_oldest_and_the_newest_are_there():
    assert {"2.11.0", "2.13.0", "2.15.0"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
class TestWrittenBy:
    def test_torch_dcp(self, folder):
        template = st.allocate_like(flat())
        assert_trees_equal(st.load(folder / "torch_dcp", template, in_place=True), flat())

    def test_statetree_dcp(self, folder):
        template = st.allocate_like(nested())
        loaded = st.load(folder / "statetree_dcp", template, in_place=True)
        assert st.similarity(loaded, nested(), values=True)
        assert_trees_equal(st.load(folder / "statetree_dcp"), nested(), ties=False)

    def test_torch_file(self, folder):
        assert_trees_equal(torch.load(folder / "torch.pt", weights_only=True), nested())
