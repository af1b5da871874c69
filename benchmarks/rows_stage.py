"""Staging: a state copied into host memory, again and for the first time."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import statetree as st
from benchmarks.checks import is_copy_of
from benchmarks.fresh import FreshRow
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.peers import StateDictStager, foreach_clone, foreach_copy_
from benchmarks.rows import Aim, Row, faster, memory_within, share, within
from benchmarks.states import (
    State,
    few_large,
    many_small,
    of_3_mb,
    optimizer_state,
    quarter_of_1_5_mb,
    quarter_of_3_mb,
    quarter_of_32_mb,
    training_state,
)
from statetree.dcp import AsyncStager, async_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


def again(state: State) -> list[Contender]:
    """Stage a state that was staged before, the last staged tree being let go of."""
    copied = is_copy_of(state)
    stager, their_stager = st.Stager(), StateDictStager()
    return [
        ours(lambda: stager.stage(state.tree), copied),
        peer("StateDictStager", lambda: their_stager.stage(state.tree), copied),
    ]


def again_small(state: State) -> list[Contender]:
    """Stage again, against one call that copies all tensors."""
    sources = state.tensors
    targets = [torch.empty_like(tensor) for tensor in sources]

    def copy_all() -> list[torch.Tensor]:
        foreach_copy_(targets, sources)
        return targets

    return [
        *again(state),
        peer("copy.deepcopy", lambda: copy.deepcopy(state.tree), is_copy_of(state)),
        floor("_foreach_copy_", copy_all, is_copy_of(State("", sources))),
    ]


def again_large(state: State) -> list[Contender]:
    """Stage again, against a ``copy_`` of each tensor."""
    sources = state.tensors
    targets = [torch.zeros_like(tensor) for tensor in sources]

    def copy_each() -> list[torch.Tensor]:
        return [target.copy_(source) for target, source in zip(targets, sources, strict=True)]

    return [*again(state), floor("copy_", copy_each, is_copy_of(State("", sources)))]


def beside(busy: int) -> Callable[[State], list[Contender]]:
    """Stage again while so many other processes want a core each."""

    def contenders(state: State) -> list[Contender]:
        found = again(state)
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        for other in others:
            weakref.finalize(found[0].run, _end, other)  # with the row
        return found

    return contenders


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def for_the_first_time(state: State) -> list[Contender]:
    """Stage with a new stager, and copy in other ways that take new memory."""
    copied = is_copy_of(state)
    sources = state.tensors
    return [
        ours(lambda stager: stager.stage(state.tree), copied, fresh=lambda: with_fresh_heap(st.Stager())),
        variant("statetree, offload", lambda _: st.offload(state.tree), copied, fresh=lambda: with_fresh_heap(None)),
        peer(
            "StateDictStager",
            lambda stager: stager.stage(state.tree),
            copied,
            fresh=lambda: with_fresh_heap(StateDictStager()),
        ),
        peer("copy.deepcopy", lambda _: copy.deepcopy(state.tree), copied, fresh=lambda: with_fresh_heap(None)),
        floor(
            "_foreach_clone",
            lambda _: foreach_clone(sources),
            is_copy_of(State("", sources)),
            fresh=lambda: with_fresh_heap(None),
        ),
    ]


def in_the_background(state: State) -> list[Contender]:
    """Have a state staged in the background. Timed is how long the caller waits, not how long it takes."""
    copied = is_copy_of(state)
    stager = st.Stager()
    their_stager = DefaultStager(plain_memory(in_background=True))
    under_way: list[Future[Any]] = []

    def start(stage: Callable[[Any], Future[Any]]) -> Future[Any]:
        under_way.append(stage(state.tree))
        return under_way[-1]

    def wait() -> None:
        """Let nothing of one run go on in the next."""
        while under_way:
            under_way.pop().result()

    def is_done(future: Future[Any]) -> bool:
        return copied(future.result())

    def at_once(_: None) -> Any:
        return stager.stage(state.tree)

    return [
        ours(lambda _: start(stager.stage_async), is_done, fresh=wait),
        variant("stage", at_once, copied, fresh=wait),
        peer("DefaultStager", lambda _: start(their_stager.stage), is_done, fresh=wait),
    ]


def ten_saves(state: State) -> list[Contender]:
    """Save a state ten times in DCP's format, with a new stager each time this is done: by DCP, or by ourselves."""
    here = Path(mkdtemp())

    def save(stager: Any) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            for number in range(10):
                path = here / str(number)
                saved = torch_dcp.async_save(state.tree, checkpoint_id=path, async_stager=stager, no_dist=True)
                getattr(saved, "upload_completion", saved).result()
        stager.close()
        return path

    def save_ourselves(stager: st.Stager) -> Path:
        for number in range(10):
            path = here / f"ours-{number}"
            async_save(state.tree, checkpoint_id=path, stager=stager).result()
        stager.close()
        return path

    weakref.finalize(save, shutil.rmtree, here, ignore_errors=True)  # with the row

    def check(path: Path) -> bool:
        loaded = State("", copy.deepcopy(state.tree))
        for tensor in loaded.tensors:
            tensor.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_dcp.load(loaded.tree, checkpoint_id=path, no_dist=True)
        return is_copy_of(state)(loaded.tree)

    options = plain_memory(in_background=False)
    return [
        ours(save, check, fresh=AsyncStager),
        variant("statetree, async_save", save_ourselves, check, fresh=st.Stager),
        peer("DefaultStager", save, check, fresh=lambda: DefaultStager(options)),
        peer("BlockingAsyncStager", save, check, fresh=BlockingAsyncStager),
    ]


def plain_memory(*, in_background: bool) -> StagingOptions:
    """Return options for what both can do without an accelerator."""
    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=in_background,
        use_non_blocking_copy=False,
    )


def with_fresh_heap(subject: T) -> T:
    """Give freed memory back to the system first: a first stage faults in its pages."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
    return subject


def _never_slower(than: str) -> tuple[Aim, Aim]:
    return within(1, than), within(1, than, "statetree, offload")


ROWS = (
    Row(
        "stage",
        "stage again",
        many_small,
        again_small,
        (faster("StateDictStager", 8.5),),
    ),
    Row("stage", "stage again", few_large, again_large, (share(0.95, "copy_"),)),
    Row("stage", "stage again", of_3_mb, again, (faster("StateDictStager", 2),)),
    *(
        Row("busy", f"stage again beside {busy} busy", state, beside(busy), (faster("StateDictStager", 2),), rounds=11)
        for state in (few_large, of_3_mb)
        for busy in (1, 2)
    ),
    Row("stage", "stage again", optimizer_state, again_small),
    Row("stage", "stage again", training_state, again_small),
    *(
        FreshRow(
            "first",
            "first stage",
            state,
            for_the_first_time,
            (*_never_slower("StateDictStager"), *_never_slower("copy.deepcopy")),
            rounds=7,
        )
        for state in (quarter_of_32_mb, quarter_of_3_mb, quarter_of_1_5_mb, many_small)
    ),
    Row("background", "start to stage in the background", many_small, in_the_background, moves_bytes=False),
    Row("background", "start to stage in the background", few_large, in_the_background, moves_bytes=False),
    Row(
        "saves",
        "ten saves",
        training_state,
        ten_saves,
        (faster("DefaultStager", 2, "statetree, async_save"), memory_within(1.1, "BlockingAsyncStager")),
        rounds=3,
        memory=True,
    ),
)
