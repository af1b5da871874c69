"""What ``torch.save`` writes, to a file of Python: what goes wrong there is raised as the system said it."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from pathlib import Path


#: The part of what ``torch.load`` says that is not advice for its callers.
_REASON: Final = re.compile(
    r"(?:WeightsUnpickler error: |(?=Unsupported (?:global|class|operand)|Trying to load))(.*?)(?:\. | Check the doc|$)"
)


class _Stream:
    """A file to write to, until it is closed."""

    def __init__(self, file: Any) -> None:
        self.write = file.write

    def flush(self) -> None:
        """There is nothing to flush: whoever opened the file does that."""

    def close(self) -> None:
        # A writer of torch that broke off writes once more when it is freed. If that raises, the process ends.
        self.write = len


def save_as(value: Any, path: Path) -> None:
    """Write a value as ``torch.save`` does to a file that is not there yet.

    What writing raises is raised: an interrupt, or that the disk is full.
    """
    handled = sys.exception()
    with path.open("xb") as file:
        stream: Any = _Stream(file)
        try:
            torch.save(value, stream)
        except RuntimeError as error:
            hidden = error.__context__  # torch's writer closes the archive, and raises that it is not whole
            if hidden is None or hidden is handled:
                raise
            raise hidden from None
        finally:
            stream.close()


def is_loaded(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` takes a plain value."""
    if type(value) in (int, float, str, bool, type(None), bytes) and (type(value) is not int or abs(value) < 1 << 1024):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, loading would raise it
        return False
    return True


def gist(error: Exception) -> str:
    """Return what an error of ``torch.load`` says that is of use to others than its callers."""
    text = " ".join(str(error)[:10_000].split())
    found = _REASON.search(text)
    return (found[1] if found else text)[:200]
