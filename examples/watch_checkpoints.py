"""Log what a checkpointer does to TensorBoard: seconds, bytes, and how long training waited.

Run it, then `tensorboard --logdir run/log`. Without the package tensorboard, the events are printed.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch

import statetree as st

if TYPE_CHECKING:
    from statetree.dcp import Event


def writer(folder: str) -> Any:
    """Return a writer of TensorBoard's, or nothing if it is not installed."""
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(f"{folder}/log")


def main(folder: str) -> None:
    """Save a few steps."""
    board = writer(folder)

    def log(event: Event) -> None:
        print(f"{event.kind:<7} {event.step:>3} {event.bytes:>9,} bytes, waited {event.waited:.3f} s")
        if board is not None:
            board.add_scalar(f"checkpoint/{event.kind}/seconds", event.seconds, event.step)
            board.add_scalar(f"checkpoint/{event.kind}/waited", event.waited, event.step)
            board.add_scalar(f"checkpoint/{event.kind}/bytes", event.bytes, event.step)

    model = torch.nn.Linear(500, 500)
    with st.Checkpointer(f"{folder}/steps", keep=2, every=5, on_event=log) as checkpointer:
        for step in range(1, 21):
            if checkpointer.due(step):
                checkpointer.async_save(step, {"model": model, "step": step}, metadata={"loss": 1 / step})
    if board is not None:
        board.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
