"""What a type checker knows of ``statetree.dcp`` and ``statetree.files``."""

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_saver import async_save

import statetree as st
from statetree import dcp


def files(state: dict[str, Any], group: ProcessGroup) -> None:
    st.save(state, "a", group=group)
    assert_type(st.load(Path("a"), state, in_place=True, group=group), dict[str, Any])
    assert_type(st.load("a", verify=False), Any)
    with st.Stager() as stager:
        future = dcp.async_save(state, checkpoint_id=Path("a"), stager=stager, process_group=group)
        assert_type(future, Future[None])


def single_files(state: dict[str, Any], leaf: st.files.StoredTensor) -> None:
    st.files.save(state, "a.safetensors")
    assert_type(st.files.open(Path("a.safetensors")), Any)
    assert_type(leaf.dtype, torch.dtype)


def note(event: dcp.Event) -> None:
    assert_type(event.seconds, float)


def series(state: dict[str, Any]) -> None:
    options: dict[str, Any] = {"mirror": "s3://bucket/run", "on_event": note}
    with st.Checkpointer("run", stager=st.Stager(), keep=3, keep_every=10, keep_best=2, **options) as checkpointer:
        assert_type(checkpointer, dcp.Checkpointer)
        assert_type(checkpointer.due(1), bool)
        checkpointer.save(1, state, metric=0.5, metadata={"commit": "a"})
        assert_type(checkpointer.path(1), Path)
        assert_type(checkpointer.best_step(), int | None)
        assert_type(checkpointer.async_save(2, state), Future[None])
        assert_type(checkpointer.restore(state), dict[str, Any])
        assert_type(checkpointer.restore(state, step=1, where="model.**", verify=False), dict[str, Any])
        assert_type(checkpointer.restore(step=1, weights_only=True), Any)
        assert_type(checkpointer.steps(), list[int])
    checkpointer.close()


def watched(state: dict[str, Any]) -> None:
    def log(event: dcp.Event) -> None:
        assert_type(event.seconds, float)

    with st.Checkpointer("run", every=timedelta(minutes=10), on_event=log) as checkpointer:
        checkpointer.save_on(15)
        assert_type(checkpointer.due(1), bool)
        assert_type(checkpointer.signalled, int | None)
        checkpointer.save(1, state, metadata={"commit": "abc"})
        assert_type(checkpointer.path(), Path)
        assert_type(checkpointer.metadata(1), dict[str, Any])


def stagers(state: dict[str, Any]) -> None:
    stager = dcp.AsyncStager(share_memory=True)
    assert_type(stager.stage(state), Any)
    assert_type(stager.should_synchronize_after_execute, bool)
    stager.synchronize_staging()
    async_save(state, checkpoint_id="a", async_stager=stager)
