"""What a checkpoint file holds comes back from it, in every format: all of it, a part of it, and into another tree."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import statetree
from tests.cli.states import COMMON_DTYPES, bits
from tests.judge import assert_trees_equal

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


@st.composite
def flat_states(draw):
    """Tensors of any common dtype and strides, some of them views on the memory of others."""
    state = {}
    for number, name in enumerate(draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True))):
        tensor = bits(*draw(SHAPES), dtype=draw(st.sampled_from(COMMON_DTYPES)), start=number)
        if draw(st.booleans()):
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if tensor.dim() and draw(st.booleans()):
            tensor = tensor[draw(st.integers(0, tensor.shape[0])) :]
        tied = [other for other in state.values() if other.dim() and other.shape[0]]
        state[name] = draw(st.sampled_from(tied))[0] if tied and draw(st.integers(0, 4)) == 0 else tensor
    return state


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".safetensors.index.json", ""])
@given(state=flat_states(), data=st.data())
def test_what_is_saved_comes_back(suffix, state, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        statetree.save(state, path, shard_bytes=50 if "index" in suffix else None)
        opened = statetree.files.open(path)
        read = statetree.offload({name: opened[name] for name in state})
        assert_trees_equal(read, state, ties=False, strides=False, storages=False)
        for name, stored in opened.items():
            index = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in stored.shape)
            assert statetree.similarity(stored.read(index), state[name][index], values=True)
        like = statetree.map_leaves(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), state)
        assert_trees_equal(statetree.load(path, like), state, ties=False, strides=False, storages=False)
