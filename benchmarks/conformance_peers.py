"""Implementations that ``benchmarks.conformance`` looks at, each by a function that uses nothing of statetree.

What is private in torch was tried with torch 2.11 and 2.13; tensordict (0.15) and torch_checkpointing (0.1.1) take part
where they are installed.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def deepcopy(state: Any) -> Any:
    """Python's own copy."""
    import copy

    return copy.deepcopy(state)


def offload_state_dict_to_cpu(state: Any) -> Any:
    """Torch's private helper for state dicts."""
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    return _offload_state_dict_to_cpu(state)


def copy_state_dict(state: Any) -> Any:
    """Torch's private helpers: one that allocates, and one that copies."""
    from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

    return _copy_state_dict(state, _create_cpu_state_dict(state))


def tensordict_clone(state: Any) -> Any:
    """A nested dict as a ``TensorDict``, and back."""
    from tensordict import TensorDict

    return TensorDict(state, batch_size=[]).clone().to_dict()


def state_dict_stager() -> Any:
    """What torch's stagers use."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    return StateDictStager()


def default_stager() -> Any:
    """The stager of ``torch.distributed.checkpoint.async_save``, without options that need a GPU."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def blocking_async_stager() -> Any:
    """The stager that ``async_save`` had before."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return BlockingAsyncStager()


def torch_checkpointing_stager() -> Any:
    """The stager of torch_checkpointing, without options that need a GPU."""
    from torch_checkpointing.staging import CheckpointStagerConfig, DefaultStager

    return DefaultStager(
        CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def gather_state_dict(state: Any) -> Any:
    """Torch's private helper."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    return _gather_state_dict(state)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Something to look at.

    Attributes:
        title: What it is called in tables.
        kind: ``copy``, ``stager`` or ``gather``.
        make: The function to call.
        needs: The distribution that it comes from.
        unsupported: What its documentation says that it does not do, by the names of faults.
    """

    title: str
    kind: str
    make: Callable[..., Any]
    needs: str = "torch"
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> str:
        """The function as code, for a reproduction."""
        return inspect.getsource(self.make)


_STATE_DICT_TYPES = "the docstring lists torch.Tensor, DTensor, int, float, str, list, dict and None"
_OF_STATE_DICTS = dict.fromkeys(
    ("container_types", "metadata_of_a_state_dict", "plain_values", "tensors_inside_of_objects"), _STATE_DICT_TYPES
)
_OF_TENSORDICTS = {
    **dict.fromkeys(
        (
            "container_types",
            "metadata_of_a_state_dict",
            "plain_values",
            "tensors_inside_of_objects",
            "containers_shared",
        ),
        "a TensorDict holds tensors by strings, and other values as non-tensor data",
    ),
    "keys": "keys of a TensorDict are strings",
    "history_of_autograd": "clone is recorded by autograd, as torch.clone is",
}
IMPLEMENTATIONS = (
    Implementation("`copy.deepcopy`", "copy", deepcopy),
    Implementation("`_offload_state_dict_to_cpu`", "copy", offload_state_dict_to_cpu, unsupported=_OF_STATE_DICTS),
    Implementation("`_copy_state_dict`", "copy", copy_state_dict, unsupported=_OF_STATE_DICTS),
    Implementation("tensordict", "copy", tensordict_clone, "tensordict", _OF_TENSORDICTS),
    Implementation("`StateDictStager`", "stager", state_dict_stager),
    Implementation("`DefaultStager`", "stager", default_stager),
    Implementation("`BlockingAsyncStager`", "stager", blocking_async_stager, unsupported=_OF_STATE_DICTS),
    Implementation("torch_checkpointing", "stager", torch_checkpointing_stager, "torch_checkpointing"),
    Implementation("`_gather_state_dict`", "gather", gather_state_dict),
)
