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


class Stream:
    """A file to write to, until it is closed."""

    def __init__(self, file: Any) -> None:
        self._write = file.write

    def write(self, data: Any) -> int:
        """Write bytes."""
        written: int = self._write(data)
        return written

    def flush(self) -> None:
        """There is nothing to flush: whoever opened the file does that."""

    def close(self) -> None:
        """Write no more."""
        # A writer of torch that broke off writes once more when it is freed. If that raises, the process ends.
        self._write = len


def save_to(value: Any, stream: Stream) -> None:
    """Write a value as ``torch.save`` does, and raise what writing raises: an interrupt, or that the disk is full."""
    handled = sys.exception()
    try:
        torch.save(value, stream)  # type: ignore[arg-type]  # what torch uses of a file
    except RuntimeError as error:
        hidden = error.__context__  # torch's writer closes the archive, and raises that it is not whole
        if hidden is None or hidden is handled:
            raise
        raise hidden from None
    finally:
        stream.close()


def save_as(value: Any, path: Path) -> None:
    """Write a value to a file that is not there yet, as ``torch.save`` does."""
    with path.open("xb") as file:
        save_to(value, Stream(file))


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
