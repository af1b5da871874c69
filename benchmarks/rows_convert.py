"""Conversions and arithmetic: shards brought into an engine's form, and checkpoints averaged."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree as st
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.ranks import RankRow
from benchmarks.rows import Aim, Result, Row, faster, within
from benchmarks.states import Kept, State, size

LAYERS, WIDTH, HIDDEN = 8, 1024, 2816
TO_ENGINE = st.Conversion(
    [
        (["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m"),
        (["{i}.w1", "{i}.w3"], "{i}.gate_up", "f m, f m -> (f + f) m"),
        ("{i}.w2", "{i}.down"),
    ],
    sizes={"q": 4, "d": 64},
)


def trainer(scale: float) -> State:
    """Return this rank's rows of a trainer's matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = max(round(LAYERS * scale), 1)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH // 4, WIDTH), "v": (WIDTH // 4, WIDTH)}
    shapes |= {"w1": (HIDDEN, WIDTH), "w3": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN)}
    tree = {}
    for number, (layer, (name, shape)) in enumerate((layer, row) for layer in range(layers) for row in shapes.items()):
        whole = torch.arange(number, number + shape[0] * shape[1], dtype=torch.float32).view(shape)
        tree[f"{layer}.{name}"] = DTensor.from_local(_part(whole, 0), mesh, [Shard(0)], run_check=False)
    return State(f"{layers} layers of DTensors", tree)


def into_engine(state: State) -> list[Contender]:
    """Bring a trainer's rows into the columns and rows of an engine with fused tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = {}
    for key, leaf in TO_ENGINE(state.tree).items():
        dim = 1 if key.endswith("down") else 0
        local = torch.empty([length // (mesh.size() if at == dim else 1) for at, length in enumerate(leaf.shape)])
        like[key] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    def by_hand() -> dict[str, torch.Tensor]:
        """Gather, convert and slice, a leaf after the other as frameworks do it."""
        found = {}
        for layer in dict.fromkeys(key.split(".")[0] for key in state.tree):
            whole = [state.tree[f"{layer}.{name}"].full_tensor() for name in ("q", "k", "v", "w1", "w3", "w2")]
            q, k, v, w1, w3, w2 = whole
            groups = [part.view(-1, count * 64, WIDTH) for part, count in ((q, 4), (k, 1), (v, 1))]
            found[f"{layer}.qkv"] = _part(torch.cat(groups, 1).view(-1, WIDTH), 0)
            found[f"{layer}.gate_up"] = _part(torch.cat([w1, w3]), 0)
            found[f"{layer}.down"] = _part(w2, 1)
        return found

    def holds(result: Any) -> bool:
        expected = by_hand()
        return all(
            torch.equal(leaf.to_local() if isinstance(leaf, DTensor) else leaf, expected[key])
            for key, leaf in result.items()
        )

    prepared = st.prepare(st.reshard, TO_ENGINE(state.tree), like, in_place=True)
    return [
        ours(lambda: st.reshard(TO_ENGINE(state.tree), like, in_place=True), holds),
        variant("statetree, prepared", prepared, holds),
        peer("gather, convert, slice", by_hand, holds),
    ]


def _part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def two_files(scale: float) -> State:
    """Return two checkpoints in files, of the size of one."""
    here = Path(mkdtemp())
    weakref.finalize(two_files, shutil.rmtree, here, ignore_errors=True)
    count = max(round(32 * scale), 2)
    tree = {f"layers.{index}": torch.arange(index, index + (1 << 20), dtype=torch.float32) for index in range(count)}
    for number in (1, 2):
        st.save({key: leaf * number for key, leaf in tree.items()}, here / f"{number}.safetensors")
    return Kept(f"{count} x {size(4 << 20)} tensors", {**tree, "folder": str(here)})


def average(state: State) -> list[Contender]:
    """Average two files into a third, in buckets. The floor reads both and writes as many bytes, without arithmetic."""
    here = Path(state.tree["folder"])

    def averaged() -> Path:
        one, two = (st.files.open(here / f"{number}.safetensors") for number in (1, 2))
        st.save(st.combine(lambda a, b: (a + b) / 2, one, two), here / "mean.safetensors")
        return here / "mean.safetensors"

    def copied() -> Path:
        block, other = bytearray(16 << 20), bytearray(16 << 20)
        paths = here / "1.safetensors", here / "2.safetensors"
        with paths[0].open("rb") as one, paths[1].open("rb") as two, (here / "copy").open("wb") as out:
            while count := one.readinto(block):
                two.readinto(other)
                out.write(memoryview(block)[:count])
            out.flush()
            os.fsync(out.fileno())
        return here / "copy"

    def is_mean(path: Path) -> bool:
        return all(torch.equal(leaf, state.tree[key] * 1.5) for key, leaf in st.load(path).items())

    return [
        ours(averaged, is_mean),
        floor("reading and writing the bytes", copied, Path.exists),
    ]


def _sends_what_lacks(most: float) -> Aim:
    """Aim at sending little more than what has to change its rank, of 2: half of what is stacked, half of ``w2``."""
    share = 1.5 * HIDDEN / (1.5 * WIDTH + 3 * HIDDEN)

    def value(result: Result) -> float:
        return sum(result.of_ours.sent) / (share * result.nbytes)

    return Aim(f"all ranks together send ≤ {most:g} times what they lack", value, lambda value: value <= most)


ROWS = (
    RankRow(
        "convert",
        "reshard through a conversion",
        trainer,
        into_engine,
        (faster("gather, convert, slice", 3), _sends_what_lacks(1.02)),
        rounds=7,
    ),
    Row("combine", "average two files", two_files, average, (within(1.5, "reading and writing the bytes"),), rounds=7),
)
