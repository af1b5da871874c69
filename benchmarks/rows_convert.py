"""Conversions and arithmetic: shards brought into an engine's form, and checkpoints averaged."""

from __future__ import annotations

import os
import shutil
import weakref
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

import statetree as st
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.ranks import RankRow
from benchmarks.rows import Aim, Result, Row, faster, within
from benchmarks.states import Kept, State, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAYERS, WIDTH, HIDDEN = 8, 1024, 2816
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH // 4, WIDTH),
    "v": (WIDTH // 4, WIDTH),
    "w1": (HIDDEN, WIDTH),
    "w3": (HIDDEN, WIDTH),
    "w2": (WIDTH, HIDDEN),
}
TO_ENGINE = st.Conversion(
    [
        (["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m"),
        (["{i}.w1", "{i}.w3"], "{i}.gate_up", "f m, f m -> (f + f) m"),
        ("{i}.w2", "{i}.down"),
    ],
    sizes={"q": 4, "d": 64},
)
#: The layout of vLLM: the rows of each of two ranks lie together.
TO_TWO = st.Conversion(
    [
        (["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(tp q) m, (tp k) m, (tp v) m -> (tp (q + k + v)) m"),
        (["{i}.w1", "{i}.w3"], "{i}.gate_up", "(tp f) m, (tp f) m -> (tp (f + f)) m"),
        ("{i}.w2", "{i}.down"),
    ],
    sizes={"tp": 2},
)


def trainer(scale: float) -> State:
    """Return this rank's rows of a trainer's matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tree = {
        name: DTensor.from_local(_part(whole, 0), mesh, [Shard(0)], run_check=False) for name, whole in _matrices(scale)
    }
    return State(f"{len(tree) // len(SHAPES)} layers of DTensors", tree)


def _matrices(scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    rows = [(layer, row) for layer in range(max(round(LAYERS * scale), 1)) for row in SHAPES.items()]
    for number, (layer, (name, shape)) in enumerate(rows):
        yield f"{layer}.{name}", torch.arange(number, number + shape[0] * shape[1], dtype=torch.float32).view(shape)


def half_of_the_ranks(scale: float) -> State:
    """Return a trainer's matrices, in rows over the first two of four ranks."""
    mesh = DeviceMesh("cpu", [0, 1])
    tree = {name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for name, whole in _matrices(scale)}
    return State(f"{len(tree) // len(SHAPES)} layers of DTensors in float32, 2 + 2 in bfloat16", tree)


def into_other_ranks(state: State) -> list[Contender]:
    """Bring a trainer's rows into the tensors of an engine on the other two ranks, in bfloat16."""
    mesh, rank = DeviceMesh("cpu", [2, 3]), dist.get_rank()
    shapes = {key: leaf.shape for key, leaf in TO_TWO(state.tree).items()}
    dims = {key: 1 if key.endswith("down") else 0 for key in shapes}
    like = {
        key: zeros(shape, device_mesh=mesh, placements=[Shard(dims[key])], dtype=torch.bfloat16)
        for key, shape in shapes.items()
    }

    def by_hand() -> dict[str, torch.Tensor]:
        """Gather on the trainers, convert, send all to the engines, and slice there, as frameworks do it."""
        found = {}
        for layer in dict.fromkeys(key.split(".")[0] for key in state.tree):
            if rank < 2:
                q, k, v, w1, w3, w2 = [state.tree[f"{layer}.{name}"].full_tensor().bfloat16() for name in SHAPES]
            for key in ("qkv", "gate_up", "down"):
                if rank < 2:
                    halves = {"qkv": (q, k, v), "gate_up": (w1, w3), "down": (w2,)}[key]
                    pairs = zip(*(one.chunk(2) for one in halves), strict=True)
                    fused = torch.cat([half for pair in pairs for half in pair])
                else:
                    fused = torch.empty(shapes[f"{layer}.{key}"], dtype=torch.bfloat16)
                dist.broadcast(fused, src=0)
                if rank >= 2:
                    found[f"{layer}.{key}"] = fused.chunk(2, dims[f"{layer}.{key}"])[rank - 2].clone()
        return found

    def holds(result: Any) -> bool:
        expected = by_hand()
        return all(torch.equal(_local(result[key]), local) for key, local in expected.items())

    sync = st.prepare(st.reshard, TO_TWO(state.tree), like, in_place=True, cast=True)
    # Trainer i has all rows of engine i, and of the columns each engine needs half of every trainer's.
    columns = sum(shape.numel() for key, shape in shapes.items() if dims[key]) // 4 * 2
    rows = sum(shape.numel() for key, shape in shapes.items() if not dims[key]) // 2 * 2
    sent = [0, 0, rows + columns if rank == 0 else columns, rows + columns if rank == 1 else columns]
    return [
        ours(lambda: st.reshard(TO_TWO(state.tree), like, in_place=True, cast=True), holds),
        variant("statetree, prepared", sync, holds),
        peer("gather, convert, broadcast, slice", by_hand, holds),
        _bare(sent if rank < 2 else [0] * 4),
    ]


def _bare(counts: Sequence[int]) -> Contender:
    """Send so many bytes to each rank, from memory where they lie ready."""
    given = torch.tensor(counts)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    source, target = torch.zeros(sum(counts), dtype=torch.uint8), torch.empty(int(taken.sum()), dtype=torch.uint8)
    send = partial(dist.all_to_all_single, target, source, taken.tolist(), list(counts))
    return floor("all_to_all_single of the bytes", send, lambda _: True)


def _local(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


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
        return all(torch.equal(_local(leaf), expected[key]) for key, leaf in result.items())

    prepared = st.prepare(st.reshard, TO_ENGINE(state.tree), like, in_place=True)
    return [
        ours(lambda: st.reshard(TO_ENGINE(state.tree), like, in_place=True), holds),
        variant("statetree, prepared", prepared, holds),
        peer("gather, convert, slice", by_hand, holds),
        _bare([round(MOVED * state.nbytes / 2) * (rank != dist.get_rank()) for rank in range(mesh.size())]),
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


#: Which part of a trainer's elements has to change its rank, of 2: half of what is stacked, half of ``w2``.
MOVED = 1.5 * HIDDEN / (1.5 * WIDTH + 3 * HIDDEN)


def _sends_what_lacks(most: float, of_all: float) -> Aim:
    """Aim at sending little more than what has to change its rank: a part of all bytes."""

    def value(result: Result) -> float:
        return sum(result.of_ours.sent) / (of_all * result.nbytes)

    # Fewer would mean that not everything was counted.
    return Aim(f"all ranks together send ≤ {most:g} times what they lack", value, lambda value: 0.999 < value <= most)


ROWS = (
    RankRow(
        "convert",
        "reshard through a conversion",
        trainer,
        into_engine,
        (faster("gather, convert, slice", 3), _sends_what_lacks(1.02, MOVED)),
        rounds=7,
    ),
    RankRow(
        "convert",
        "trainer to engine",
        half_of_the_ranks,
        into_other_ranks,
        (faster("gather, convert, broadcast, slice", 3), _sends_what_lacks(1.02, 0.5)),
        ranks=4,
        rounds=7,
    ),
    Row("combine", "average two files", two_files, average, (within(1.5, "reading and writing the bytes"),), rounds=7),
)
