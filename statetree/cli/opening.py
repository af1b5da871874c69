"""Opens a checkpoint by its name: the suffix chooses the format."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from statetree.errors import CheckpointError
from statetree.files.checkpoint import DCP, SAFETENSORS, TORCH, Checkpoint
from statetree.files.ranges import OpenFiles
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt")
INDEX: Final = ".safetensors.index.json"
_ENDS: Final = f"{', '.join(TORCH_SUFFIXES)}, .safetensors or {INDEX}"
_LINK: Final = "If torch.save wrote it, link or rename it to a name that ends in .pt."


def _format_of(path: Path) -> str:
    """Return the format that a name stands for; empty if it has a suffix that stands for none.

    What begins with a digit, as in ``run-v1.5``, is no suffix.
    """
    name = path.name.lower()
    if name.endswith(TORCH_SUFFIXES) and not path.is_dir():
        return TORCH
    if name.endswith((".safetensors", INDEX)) and not path.is_dir():
        return SAFETENSORS
    return "" if path.suffix and not path.suffix[1].isdigit() and not path.is_dir() else DCP


def source_format(path: Path) -> str:
    """Return the format of a checkpoint that is to be read.

    Raises:
        CheckpointError: If its name stands for none.
    """
    found = _format_of(path)
    if not found or (found == DCP and path.is_file()):
        what = "a file without a known suffix" if found else f"the suffix {path.suffix!r} stands for no format"
        refuse(path, what, f"{_LINK} Formats go by the names' ends: {_ENDS}.")
    return found


def destination_format(path: Path) -> str:
    """Return the format in which a checkpoint is to be written.

    Raises:
        CheckpointError: If its name stands for none.
    """
    found = _format_of(path)
    if not found:
        what = f"the suffix {path.suffix!r} stands for no format. Use {_ENDS}, or no suffix for a DCP directory."
        raise CheckpointError(f"convert: cannot write {path}: {what}")
    return found


@contextmanager
def opened(path: Path, *, follow_links: bool = False) -> Iterator[Checkpoint]:
    """Open a checkpoint for reading.

    Args:
        path: Where it is.
        follow_links: Whether the files that an index lists may be symbolic links that lead out of its directory.

    Raises:
        CheckpointError: If it cannot be read.
    """
    with OpenFiles(follow_links=follow_links) as files:
        try:
            checkpoint = _read(path, files)
        except OSError as error:
            refuse(path, f"it cannot be read: {error.strerror or error}", "Check its permissions, and the disk.")
        yield checkpoint


def _read(path: Path, files: OpenFiles) -> Checkpoint:
    # Each reader is loaded when it is needed: that of directories takes as long as torch.distributed.
    kind = source_format(path)
    if kind == TORCH:
        from statetree.files.torch_reader import read_torch

        return read_torch(path, files)
    if kind == SAFETENSORS:
        from statetree.files.safetensors_reader import read_index, read_safetensors

        return (read_index if path.name.lower().endswith(INDEX) else read_safetensors)(path, files)
    from statetree.cli.dcp_directory import read_directory

    return read_directory(path, files)
