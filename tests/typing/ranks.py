"""What a type checker knows of the verbs that all ranks call."""

from datetime import timedelta
from typing import Any, assert_type

from torch.distributed import ProcessGroup

import statetree as st


def collectives(state: dict[str, Any], group: ProcessGroup) -> None:
    assert_type(st.gather(state), Any)
    assert_type(st.gather(state, dst=0, group=group, device="cpu", bucket_bytes=1 << 20, timeout=60.0), Any)
    assert_type(st.gather(state, dst=[0, 2], timeout=timedelta(minutes=1)), Any)
    assert_type(st.distribute(state, state), Any)
    assert_type(st.distribute(None, like=state, src=0, group=group, in_place=True, bucket_bytes=1, timeout=1), Any)
    assert_type(st.distribute(state, state, where=["a.*"], strict=False), Any)
    assert_type(st.reshard(state, state, where=lambda path, leaf: len(path) > 1), Any)
    assert_type(st.broadcast(state, src=1, group=group, bucket_bytes=1 << 20, timeout=None), Any)
    assert_type(st.reshard(state, like=state, group=group, in_place=False, bucket_bytes=1, timeout=1), Any)
    assert_type(st.partition_replicas(state, group=group, timeout=60), Any)
