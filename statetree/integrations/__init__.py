"""Frameworks that save through a ``Checkpointer``: one small file each, imported when it is asked for.

- ``lightning``: ``CheckpointIO`` and ``Callback``. ``transformers``: ``Callback`` for the ``Trainer``.
- ``accelerate``: ``Registered``. ``torchtitan``: ``CheckpointManager``.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist


class RandomState:
    """The random state of this process, to be put into a state that a ``Checkpointer`` saves: of Python, NumPy, torch.

    Each rank saves its own. On more ranks than it was saved on, restore with ``strict=False``.

    Example:
        >>> import tempfile, torch, statetree as st
        >>> from statetree.integrations import RandomState
        >>> with st.Checkpointer(tempfile.mkdtemp()) as checkpointer:
        ...     checkpointer.save(1, {"random": RandomState()})
        ...     drawn = torch.rand(3)
        ...     _ = checkpointer.restore({"random": RandomState()})
        ...     torch.equal(torch.rand(3), drawn)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state, under the number of the rank."""
        version, words, gauss = random.getstate()
        state = {"python": (version, list(words), gauss), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            state["numpy"] = list(sys.modules["numpy"].random.get_state())
        return {_rank(): state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        own = state_dict[_rank()]
        version, words, gauss = own["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(own["torch"])
        if "cuda" in own and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(own["cuda"])
        if "numpy" in own and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(own["numpy"]))


class RandomStates:
    """The random state of every rank, for callbacks of frameworks of which the first rank alone saves."""

    _loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states: all ranks call it."""
        states = [RandomState().state_dict()]
        if dist.is_initialized():
            dist.all_gather_object(states := states * dist.get_world_size(), states[0])
        return {rank: state for own in states for rank, state in own.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until ``go_on`` is called."""
        self._loaded = state_dict

    def go_on(self) -> None:
        """Go on from what was loaded, if anything was."""
        if self._loaded is not None:
            RandomState().load_state_dict(self._loaded)
            self._loaded = None


def _rank() -> str:
    return f"rank_{dist.get_rank() if dist.is_initialized() else 0}"
