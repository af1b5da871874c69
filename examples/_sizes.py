"""A state as a table of paths and sizes."""

from __future__ import annotations

from typing import Any

import torch
from _training import local_part

import statetree as st


def size_table(state: Any) -> list[str]:
    """Return the lines of a table with dtype, shape, bytes and share of the total of everything in a state.

    Paths that differ in numbers alone (the blocks of a model, the parameters of an optimizer) share a line, on which
    a ``*`` stands for the numbers, and so do the plain values of a part of the state. Shapes are those of whole
    tensors, bytes are this rank's, and those of tied tensors count once.
    """
    groups: dict[str, list[tuple[str, Any]]] = {}
    for path, leaf in st.to_flat(state)[0].items():
        groups.setdefault(_pattern(path, leaf), []).append((path, leaf))
    owners: dict[int, str] = {}
    rows = [(pattern, *_describe(members, owners)) for pattern, members in groups.items()]
    total = sum(size for *_, size in rows)
    count = sum(map(len, groups.values()))
    rows.append(("total", f"{count} leaves", "", "", total))
    return [
        f"{'path':<38}{'leaves':<13}{'dtype':<9}{'shape':<22}{'bytes':>12}{'share':>8}",
        *(
            f"{pattern:<38}{what:<13}{dtype:<9}{shape:<22}{size:>12,}{size / total:>8.1%}".rstrip()
            for pattern, what, dtype, shape, size in rows
        ),
    ]


def _pattern(path: str, leaf: Any) -> str:
    parts = ["*" if part.isdigit() else part for part in path.split(".")]
    if not isinstance(leaf, torch.Tensor) and len(parts) > 1:
        parts = [parts[0], "…"]
    return ".".join(parts)


def _describe(members: list[tuple[str, Any]], owners: dict[int, str]) -> tuple[str, str, str, int]:
    """Return what is on a line besides the path: how many leaves, their dtype and shape, and their bytes."""
    path, first = members[0]
    if not isinstance(first, torch.Tensor):
        what = "1 value" if len(members) == 1 else f"{len(members)} values"
        kinds = sorted({type(leaf).__name__ for _, leaf in members})
        return what, "", ", ".join(kinds) if len(kinds) < 4 else f"{', '.join(kinds[:3])}, …", 0
    size = 0
    for own, leaf in members:
        if owners.setdefault(_address(leaf), own) == own:
            size += local_part(leaf).nbytes
    what = "1 tensor" if len(members) == 1 else f"{len(members)} tensors"
    dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for _, leaf in members})
    shapes = {tuple(leaf.shape) for _, leaf in members}
    shape = str(shapes.pop()) if len(shapes) == 1 else "various"
    owner = owners[_address(first)]
    if owner != path:
        shape = f"tied to {owner}"
    return what, ", ".join(dtypes), shape, size


def _address(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
