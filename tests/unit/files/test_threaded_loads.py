"""Large tensors are filled by two threads: what one of them meets is raised, and no byte is another file's."""

from __future__ import annotations

import threading

import pytest
import torch

import statetree as st
from statetree.files import filling, ranges

NUMEL = 100_000  # 400 kB


def state(count):
    return {f"p{index}": torch.arange(NUMEL, dtype=torch.int32) + NUMEL * index for index in range(count)}


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counted_threads(monkeypatch):
    seen = set()
    original = filling.Target.read
    monkeypatch.setattr(
        filling.Target, "read", lambda self, *args: (seen.add(threading.get_ident()), original(self, *args))[1]
    )
    return seen


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
def test_two_threads_read_what_was_saved(name, tmp_path, monkeypatch):
    st.save(state(40), tmp_path / name)
    threads = counted_threads(monkeypatch)
    loaded = st.load(tmp_path / name, state(40))
    assert all(torch.equal(loaded[key], value) for key, value in state(40).items())
    assert 1 <= len(threads) <= 2


def test_files_that_one_thread_closes_are_opened_again_by_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_OPEN", 2)
    st.save(state(30), tmp_path / "a.safetensors", shard_bytes=1)
    for _ in range(5):
        loaded = st.load(
            tmp_path / "a.safetensors.index.json", {key: torch.zeros_like(t) for key, t in state(30).items()}
        )
        assert all(torch.equal(loaded[key], value) for key, value in state(30).items())


@pytest.mark.parametrize("index", [0, 1, 6, 7])
def test_a_flipped_bit_is_found_by_either_thread(index, tmp_path):
    st.save(state(8), tmp_path / "a")
    (path,) = (tmp_path / "a").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(state(8)[f"p{index}"].numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(st.CheckpointError, match=f"p{index}"):
        st.load(tmp_path / "a", state(8))


def test_values_out_of_range_are_named_by_path(tmp_path):
    large = {f"p{index}": torch.full((NUMEL,), 1e30, dtype=torch.float64) for index in range(4)}
    st.save(large, tmp_path / "a.safetensors")
    with pytest.raises(st.TreeMismatch, match=r"range differs at p\d"):
        st.load(tmp_path / "a.safetensors", {k: torch.zeros(NUMEL, dtype=torch.float16) for k in large}, cast=True)
