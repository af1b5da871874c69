"""The private parts of DCP that everything here stands on, each behind one function.

Tried with torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


def _empty_bytes() -> bytes:
    return b""


# torch.load(weights_only=True) admits bytes, but not empty ones, which pickle makes by calling the class. The class
# itself would make as many as a hostile file asks for.
torch.serialization.add_safe_globals([(_empty_bytes, "builtins.bytes")])


def is_distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


# The public functions warn wherever there is no process group, in a way that only a change of the process' warning
# filters could silence, which is not safe in a thread; and they look for objects with a state_dict method.


def run_save(writer: StorageWriter, planner: SavePlanner, group: Any) -> Any:
    """Save what the planner prepares. Returns the metadata."""
    return _save_state_dict({}, writer, group, no_dist=not is_distributed(), planner=planner)


def run_load(reader: StorageReader, planner: LoadPlanner, group: Any) -> None:
    """Load what the planner chooses."""
    _load_state_dict({}, reader, group, no_dist=not is_distributed(), planner=planner)
