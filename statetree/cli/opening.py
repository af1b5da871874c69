"""Opens a checkpoint by its name: the suffix chooses the format."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from statetree.cli.checkpoint import DCP, SAFETENSORS, TORCH, Checkpoint
from statetree.cli.files import Files
from statetree.cli.names import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt")
INDEX: Final = ".safetensors.index.json"


def format_of(path: Path) -> str:
    """Return the format that a name stands for.

    Raises:
        CheckpointError: If it stands for none.
    """
    name = path.name.lower()
    if path.is_dir():
        return DCP
    if name.endswith(TORCH_SUFFIXES):
        return TORCH
    if name.endswith((".safetensors", INDEX)):
        return SAFETENSORS
    if path.suffix:
        refuse(
            path,
            f"the suffix {path.suffix!r} stands for no format",
            f"Use {', '.join(TORCH_SUFFIXES)}, .safetensors or {INDEX}, or no suffix for a DCP directory.",
        )
    return DCP


@contextmanager
def opened(path: Path, *, follow_links: bool = False) -> Iterator[Checkpoint]:
    """Open a checkpoint for reading.

    Args:
        path: Where it is.
        follow_links: Whether the files that an index lists may be symbolic links that lead out of its directory.

    Raises:
        CheckpointError: If it cannot be read.
    """
    kind = format_of(path)
    with Files(follow_links=follow_links) as files:
        if kind == TORCH:
            from statetree.cli.formats.torch_file import read_torch

            yield read_torch(path, files)
        elif kind == SAFETENSORS:
            from statetree.cli.formats.safetensors_file import read_index, read_safetensors

            yield (read_index if path.name.lower().endswith(INDEX) else read_safetensors)(path, files)
        else:
            from statetree.cli.formats.dcp_directory import read_directory

            yield read_directory(path, files)
