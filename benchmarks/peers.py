"""What PyTorch's users call today. torch's private names are imported here alone: tried with torch 2.11 and 2.13.

tensordict (0.15) and torch_checkpointing (0.1.1) take part where they are installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import _foreach_copy_ as foreach_copy_
from torch.distributed._state_dict_utils import (
    _broadcast_state_dict as broadcast_state_dict,
)
from torch.distributed._state_dict_utils import (
    _check_state_dict_similarity as check_state_dict_similarity,
)
from torch.distributed._state_dict_utils import (
    _copy_state_dict as copy_state_dict,
)
from torch.distributed._state_dict_utils import (
    _create_cpu_state_dict as create_cpu_state_dict,
)
from torch.distributed._state_dict_utils import (
    _flatten_state_dict as flatten_state_dict,
)
from torch.distributed._state_dict_utils import (
    _gather_state_dict as gather_state_dict,
)
from torch.distributed._state_dict_utils import (
    _unflatten_state_dict as unflatten_state_dict,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.utils._pytree import tree_flatten as pytree_flatten
from torch.utils._pytree import tree_unflatten as pytree_unflatten

__all__ = [
    "BlockingAsyncStager",
    "StateDictStager",
    "broadcast_state_dict",
    "check_state_dict_similarity",
    "copy_state_dict",
    "create_cpu_state_dict",
    "flatten_state_dict",
    "foreach_clone",
    "foreach_copy_",
    "gather_state_dict",
    "pytree_flatten",
    "pytree_unflatten",
    "tensor_dict",
    "torch_checkpointing_stager",
    "unflatten_state_dict",
]


def foreach_clone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, made in one call where torch has one for that: 2.13 does, 2.11 does not."""
    clone_all = getattr(torch, "_foreach_clone", None)
    return list(clone_all(tensors)) if clone_all is not None else [tensor.clone() for tensor in tensors]


def tensor_dict(tree: dict[str, Any]) -> Any:
    """Return a flat dict as a ``TensorDict``, or ``None`` where there is no tensordict."""
    if find_spec("tensordict") is None:
        return None
    from tensordict import TensorDict

    return TensorDict(tree, batch_size=[])


def torch_checkpointing_stager() -> Any:
    """Return the stager of torch_checkpointing that stages at once and into plain memory, or ``None`` without it."""
    if find_spec("torch_checkpointing") is None:
        return None
    from torch_checkpointing.staging import CheckpointStagerConfig, DefaultStager

    config = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(config)
