"""Checkpoints read straight into shards: each rank its own bytes, or every byte once in the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import statetree as st
from statetree.files import ranges
from statetree.files.formats import open as open_file
from statetree.testing import run_ranks
from tests.cli.states import bits, write

SHAPE = (64, 96)
PLACEMENTS = {"rows": (Shard(0),), "columns": (Shard(1),), "grid": (Shard(0), Shard(1)), "copies": (Replicate(),)}


def sharded(placements):
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if len(placements) == 2 else (ranks,)
    mesh = init_device_mesh("cpu", shape)
    state = {"a": bits(*SHAPE), "b": bits(*SHAPE, start=5), "v": bits(7)}
    like = {
        "a": distribute_tensor(torch.zeros(SHAPE), mesh, list(placements)),
        "b": distribute_tensor(torch.zeros(SHAPE), mesh, list(placements)),
        "v": torch.empty(7, device="meta"),
    }
    return state, like


def counted(call):
    """Return what a call returns, and how many bytes it reads."""
    found = []

    def made(self, original=ranges.OpenFiles.__init__, **options):
        original(self, **options)
        found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges.OpenFiles, "__init__", made)
        return call(), sum(files.nbytes_read for files in found)


def load_in_every_way(path, name):
    placements = PLACEMENTS[name]
    state, like = sharded(placements)
    headers = counted(lambda: open_file(path))[1]
    # Checksums are of whole tensors, so that comparing them reads those whole.
    loaded, nbytes = counted(lambda: st.load(path, like, verify=False))
    needed = sum(loaded[key].to_local().nbytes for key in "ab") + state["v"].nbytes
    extra = 6144 if path.endswith("dir") else 256  # where a piece lies is read with it
    assert nbytes - headers <= needed * (2.0 if name in ("columns", "grid") else 1.05) + extra, (
        nbytes,
        headers,
        needed,
    )
    stored = open_file(path)
    results = {
        "load": loaded,
        "reshard": st.reshard(stored, like),
        "distribute": st.distribute(stored, like),
        "in place": st.load(path, st.allocate_like(like), in_place=True),
    }
    for key, found in results.items():
        assert isinstance(found["a"], DTensor), key
        assert found["a"].placements == placements, key
        assert all(torch.equal(found[leaf].full_tensor(), state[leaf]) for leaf in "ab"), key
        assert torch.equal(found["v"], state["v"]), key


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("file", ["a.safetensors", "a.pt", "dir"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_rank_reads_its_own_bytes(name, file, world_size, tmp_path):
    state = {"a": bits(*SHAPE), "b": bits(*SHAPE, start=5), "v": bits(7)}
    run_ranks(world_size, load_in_every_way, str(write(state, tmp_path / file)), name)


def load_compared(path, placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = {"w": distribute_tensor(torch.zeros(1024, 1024), mesh, placements)}
    headers = counted(lambda: open_file(path))[1]
    loaded, nbytes = counted(lambda: st.load(path, like))
    assert torch.equal(loaded["w"].full_tensor(), torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024))
    return (nbytes - headers) / loaded["w"].to_local().nbytes


@pytest.mark.parametrize(
    ("placement", "most"),
    [
        pytest.param(Shard(0), 1.01, id="rows, which are blocks"),
        pytest.param(Shard(1), 2.01, id="columns, which lie in all blocks"),
        pytest.param(Replicate(), 1.01, id="all"),
    ],
)
def test_only_blocks_that_hold_its_own_elements_are_compared_by_a_rank(placement, most, tmp_path):
    state = {"w": torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)}
    st.save(state, tmp_path / "a")
    for ratio in run_ranks(2, load_compared, str(tmp_path / "a"), [placement]):
        assert ratio <= most


def load_tied(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    embedding = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])  # the last rank has none of it
    like = {"embed": embedding, "head": embedding.detach(), "n": torch.zeros(2)}
    loaded = st.load(path, like)
    st.load(path, like, in_place=True)
    same = loaded["head"].to_local().untyped_storage()._cdata == loaded["embed"].to_local().untyped_storage()._cdata
    return same, [st.gather(tree)["head"].tolist() for tree in (loaded, like)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_written_once_is_loaded_under_all_its_tied_names(ranks, tmp_path):
    """transformers writes one of two tied names."""
    state = {"embed": torch.arange(6.0).view(2, 3), "n": torch.ones(2)}
    path = str(tmp_path / "a.safetensors")
    st.save(state, path)
    expected = state["embed"].tolist()
    assert run_ranks(ranks, load_tied, path) == [(True, [expected, expected])] * ranks
    for device in ("cpu", "meta"):
        weight = torch.zeros(2, 3, device=device)
        loaded = st.load(path, {"head": weight.detach(), "embed": weight, "n": torch.zeros(2)})
        assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
        assert torch.equal(loaded["head"], state["embed"])
    for other in (torch.zeros(2, 3), weight.T, weight[:1]):
        with pytest.raises(st.TreeMismatch, match="head"):
            st.load(path, {"head": other, "embed": weight, "n": torch.zeros(2)})
