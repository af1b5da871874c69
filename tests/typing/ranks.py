"""What a type checker knows of the verbs that all ranks call."""

from datetime import timedelta
from typing import Any, assert_type

from torch.distributed import ProcessGroup

import statetree as st


def collectives(state: dict[str, Any], group: ProcessGroup) -> None:
    assert_type(st.gather(state), dict[str, Any])
    assert_type(st.gather(state, dst=0, group=group, device="cpu", bucket_bytes=1 << 20, timeout=60.0), dict[str, Any])
    assert_type(st.gather(state, dst=[0, 2], timeout=timedelta(minutes=1)), dict[str, Any])
    assert_type(st.distribute(state, state), dict[str, Any])
    assert_type(
        st.distribute(None, like=state, src=0, group=group, in_place=True, bucket_bytes=1, timeout=1), dict[str, Any]
    )
    assert_type(st.distribute(state, state, where=["a.*"], strict=False), dict[str, Any])
    assert_type(st.reshard(state, state, where=lambda path, leaf: len(path) > 1), dict[str, Any])
    assert_type(st.broadcast(state, src=1, group=group, bucket_bytes=1 << 20, timeout=None), dict[str, Any])
    assert_type(st.reshard(state, like=state, group=group, in_place=False, bucket_bytes=1, timeout=1), dict[str, Any])
    assert_type(st.partition_replicas(state, group=group, timeout=60), dict[str, Any])


def from_the_source(state: dict[str, Any], rank: int) -> None:
    assert_type(st.broadcast(state if rank == 0 else None), dict[str, Any])
    assert_type(st.broadcast(None, src=1), Any)
    assert_type(st.distribute(state if rank == 0 else None, state, src=0), dict[str, Any])
    assert_type(st.reshard(st.delta(state, state), like=state), st.Delta)
