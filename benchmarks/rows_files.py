"""Files: whole saves and loads, what the step waits for, shards loaded by slices, and two files compared."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import DefaultStager

import statetree as st
from benchmarks.checks import holds_values_of, is_copy_of
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.ranks import RankRow
from benchmarks.rows import Aim, Row, faster, within
from benchmarks.rows_exchange import Sharded, sharded, two_buckets
from benchmarks.rows_real import experts
from benchmarks.rows_stage import plain_memory
from benchmarks.states import MB, Kept, State, few_large, zeros_like
from statetree.exchange.buckets import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

BARE_WRITE: Final = "writing the bytes"
UNVERIFIED: Final = "statetree, verify=False"


def in_432(scale: float) -> State:
    """A transformer of 36 layers of 12 tensors, 541 MB in float32."""
    width, hidden = (max(round(number * scale**0.5), 2) for number in (640, 1108))
    shapes = {f"attention.{name}": (width, width) for name in ("wq", "wk", "wv", "wo")}
    shapes |= {"ffn.w1": (hidden, width), "ffn.w3": (hidden, width), "ffn.w2": (width, hidden)}
    shapes |= {f"norm.{number}": (width,) for number in range(5)}
    tree = {
        f"layers.{layer}.{name}": torch.arange(layer, layer + torch.Size(shape).numel(), dtype=torch.float32).view(
            shape
        )
        for layer in range(36)
        for name, shape in shapes.items()
    }
    state = State("", tree)
    return State(f"{len(tree)} tensors, {state.nbytes / 1e6:,.0f} MB", tree)


def of_2_gb(scale: float) -> State:
    """One tensor of 2 GB."""
    return State("a tensor of 2 GB", {"weight": torch.arange(int(scale * 2 * 1024 * MB) // 4, dtype=torch.float32)})


def save(state: State) -> list[Contender]:
    """Save a state to files that are synchronised. The floor writes the bytes of all tensors into one."""
    here = _folder(state)
    fresh = partial(_emptied, here)

    def bare() -> Path:
        with here.open("wb", buffering=0) as file:
            for tensor in state.tensors:
                for part in tensor.reshape(-1).view(torch.uint8).split(BUCKET_BYTES):  # one call writes 2 GiB at most
                    file.write(memoryview(part.numpy()))
            os.fsync(file.fileno())
        return here

    return [
        ours(lambda path: _save(state, path), partial(_saved, state), fresh=fresh),
        peer("torch's dcp.save", lambda path: _torch_save(state, path), partial(_saved, state), fresh=fresh),
        floor(BARE_WRITE, lambda _: bare(), lambda path: path.stat().st_size == state.nbytes, fresh=fresh),
    ]


def start_to_save(state: State) -> list[Contender]:
    """Start to save in the background: what a training step waits for. The earlier save has ended."""
    here, step, waiting = _folder(state), count(), list[Any]()
    checkpointer = st.Checkpointer(here, keep=1)
    stager = DefaultStager(plain_memory(in_background=False))
    weakref.finalize(state, checkpointer.close)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said by a thread of torch's

    def ended() -> None:
        while waiting:
            waiting.pop().result()
        shutil.rmtree(here / "theirs", ignore_errors=True)

    def start(_: None) -> Callable[[], Path]:
        number = next(step)
        waiting.append(checkpointer.async_save(number, state.tree))
        return lambda: checkpointer.path(number)

    def start_theirs(_: None) -> Callable[[], Path]:
        saving = torch_dcp.async_save(state.tree, checkpoint_id=here / "theirs", async_stager=stager, no_dist=True)
        waiting.append(getattr(saving, "upload_completion", saving))
        return lambda: here / "theirs"

    def saved(path: Callable[[], Path]) -> bool:
        waiting[-1].result()
        return _saved(state, path())

    return [
        ours(start, saved, fresh=ended),
        peer("torch's dcp.async_save", start_theirs, saved, fresh=ended),
    ]


def start_to_mirror(state: State) -> list[Contender]:
    """Save with a mirror, and without: how long the step waits. Uploads have ended before the next save."""
    here, step = _folder(state), count()
    plain, mirror = st.Checkpointer(here / "plain", keep=1), f"memory://{uuid.uuid4()}"
    alive = list[st.Checkpointer]()

    def run(checkpointer: st.Checkpointer) -> st.Checkpointer:
        checkpointer.save(next(step), state.tree)
        return checkpointer

    def ended() -> None:
        while alive:
            alive.pop().close()

    def mirrored() -> st.Checkpointer:
        ended()
        alive.append(st.Checkpointer(here / "mirrored", keep=1, mirror=mirror))
        return alive[0]

    def without() -> st.Checkpointer:
        ended()
        return plain

    def holds(checkpointer: st.Checkpointer) -> bool:
        return bool(st.similarity(checkpointer.restore(), state.tree))

    weakref.finalize(state, ended)
    return [ours(run, holds, fresh=mirrored), floor("the same without a mirror", run, holds, fresh=without)]


def load(state: State) -> list[Contender]:
    """Load what torch saved into tensors that are there, from the system's cache. statetree compares checksums, too."""
    here = _torch_save(state, _folder(state))
    target, unverified, theirs = zeros_like(state), zeros_like(state), zeros_like(state)

    def ours_into(into: State, *, verify: bool) -> Callable[[None], object]:
        return lambda _: st.load(here, into.tree, in_place=True, verify=verify)

    def held(into: State) -> dict[str, Any]:
        return {"check": holds_values_of(state, target=into), "fresh": partial(_unfilled, into)}

    return [
        ours(ours_into(target, verify=True), **held(target)),
        variant(UNVERIFIED, ours_into(unverified, verify=False), **held(unverified)),
        peer("torch's dcp.load", lambda _: _torch_load(theirs, here), **held(theirs)),
    ]


def load_shards(state: KeptShards) -> list[Contender]:
    """Load this rank's rows of every tensor of a safetensors file into DTensors that are there."""
    file = _shared_folder() / "whole.safetensors"
    if not dist.get_rank():
        safetensors.torch.save_file(state.whole_tree(), file)
    dist.barrier()
    target, theirs = state.zeros(), state.zeros()

    def by_slices(_: None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with safetensors.safe_open(file, "pt") as opened:
            for key, leaf in theirs.items():
                rows = opened.get_slice(key)
                each = rows.get_shape()[0] // ranks
                leaf.to_local().copy_(rows[rank * each : (rank + 1) * each])

    return [
        ours(lambda _: st.load(file, target, in_place=True), **_filled(state, target)),
        peer("safetensors and slicing", by_slices, **_filled(state, theirs)),
    ]


def load_shards_of_directory(state: KeptShards) -> list[Contender]:
    """Load this rank's rows of whole tensors that a DCP directory holds. statetree compares checksums, too."""
    here = _shared_folder() / "whole"
    st.save(state.whole_tree(), here)
    target, theirs = state.zeros(), state.zeros()
    return [
        ours(lambda _: st.load(here, target, in_place=True), **_filled(state, target)),
        peer("torch's dcp.load", lambda _: torch_dcp.load(theirs, checkpoint_id=here), **_filled(state, theirs)),
    ]


def compare(state: State) -> list[Contender]:
    """Compare two files of the same elements, of which one differs."""
    here = _folder(state)
    here.mkdir()
    files = here / "one.safetensors", here / "other.safetensors"
    last = state.tensors[-1].view(-1)
    for file in files:
        st.save(state.tree, file)
        last[-1] += 1
    last[-1] -= 2

    def differences() -> int:
        return len(st.similarity(*map(st.files.open, files)).differences)

    def equal() -> int:
        with safetensors.safe_open(files[0], "pt") as one, safetensors.safe_open(files[1], "pt") as other:
            return sum(not torch.equal(one.get_tensor(key), other.get_tensor(key)) for key in state.tree)

    return [
        ours(differences, lambda count: count == 1),
        floor("torch.equal of both", equal, lambda count: count == 1),
    ]


@dataclass(frozen=True)
class KeptShards(Kept, Sharded):
    """DTensors that stay as they are."""

    def whole_tree(self) -> dict[str, torch.Tensor]:
        """Return what they are shards of."""
        return {key: self.whole(index) for index, key in enumerate(self.tree)}

    def zeros(self) -> dict[str, DTensor]:
        """Return such shards of zeros."""
        return {key: torch.zeros_like(leaf) for key, leaf in self.tree.items()}


def large(scale: float) -> KeptShards:
    """64 DTensors of 8 MB."""
    state = sharded(64, 2048, 1024, scale)
    return KeptShards(state.title, state.tree, state.shape)


def kept(make: Callable[[float], State], scale: float) -> Kept:
    """Return a state that stays as it is."""
    state = make(scale)
    return Kept(state.title, state.tree)


def _unfilled(state: State) -> None:
    """Change the last element of every tensor, so that a load that is left out shows."""
    for tensor in state.tensors:
        tensor.view(-1)[-1:].neg_()


def _filled(state: KeptShards, target: dict[str, DTensor]) -> dict[str, Any]:
    """Return how a load into shards is checked, and what empties them before it."""

    def check(_: Any) -> bool:
        return all(torch.equal(leaf.to_local(), state.tree[key].to_local()) for key, leaf in target.items())

    return {"check": check, "fresh": lambda: [leaf.to_local().zero_() for leaf in target.values()] and None}


def _shared_folder() -> Path:
    """Return a folder of all ranks, which is removed with the first process that ends."""
    folder = [mkdtemp() if not dist.get_rank() else None]
    dist.broadcast_object_list(folder)
    here = Path(str(folder[0]))
    weakref.finalize(load_shards, shutil.rmtree, here, ignore_errors=True)
    return here


def _folder(state: State) -> Path:
    """Return a folder that is removed with the state."""
    here = Path(mkdtemp())
    weakref.finalize(state, shutil.rmtree, here, ignore_errors=True)
    return here / "saved"


def _emptied(path: Path) -> Path:
    """Remove what was saved there."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def _torch_save(state: State, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        torch_dcp.save(state.tree, checkpoint_id=path, no_dist=True)
    return path


def _torch_load(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state.tree, checkpoint_id=path, no_dist=True)


def _save(state: State, path: Path) -> Path:
    st.save(state.tree, path)
    return path


def _saved(state: State, path: Path) -> bool:
    """Whether torch loads what was saved."""
    loaded = zeros_like(state)
    _torch_load(loaded, path)
    return is_copy_of(state)(loaded.tree)


def _unverified_at_least(times: float) -> Aim:
    """Aim at being so many times faster than torch where no checksum is compared."""
    return Aim(
        f"≥ {times:g} times faster without checksums",
        lambda result: result.of("torch's dcp.load").median / result.of(UNVERIFIED).median,
        lambda value: value >= times,
        UNVERIFIED,
    )


_two_buckets = Aim(
    "≤ two buckets of memory",
    lambda result: result.of_ours.peaks[0] / (2 * BUCKET_BYTES) if result.of_ours.peaks else None,
    lambda value: value <= 1,
)
_saves = faster("torch's dcp.save", 1.6), within(1.3, BARE_WRITE), _two_buckets
_loads = faster("torch's dcp.load", 1.8), _unverified_at_least(4), _two_buckets
_directory_shards = faster("torch's dcp.load", 1.8), two_buckets
_shards = faster("safetensors and slicing", 1.5), two_buckets
_waits = (faster("torch's dcp.async_save", 3),)
_mirrors = (within(1.05, "the same without a mirror"),)
_equal = (within(2, "torch.equal of both"),)

ROWS = (
    *(Row("files", "save", make, save, _saves, rounds=5, memory=True) for make in (in_432, experts, of_2_gb)),
    *(
        Row("files", "load", partial(kept, make), load, _loads, rounds=7, memory=True)
        for make in (in_432, experts, of_2_gb)
    ),
    Row("files", "start to save", in_432, start_to_save, _waits, rounds=5),
    Row("files", "save with a mirror", in_432, start_to_mirror, _mirrors, rounds=5),
    RankRow("files", "load into shards", large, load_shards, _shards, rounds=11),
    RankRow("files", "load a directory into shards", large, load_shards_of_directory, _directory_shards, rounds=11),
    Row("files", "compare two files", partial(kept, few_large), compare, _equal, rounds=5),
)
