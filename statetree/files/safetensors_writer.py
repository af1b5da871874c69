"""Writes safetensors: one file, or several with an index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from statetree.errors import CheckpointError
from statetree.files.ranges import memory_of
from statetree.files.safetensors_reader import DTYPES, MAX_HEADER_BYTES, METADATA, PACKED
from statetree.files.untrusted import is_text

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.checkpoint import Progress
    from statetree.files.stored import StoredTensor

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
INDEX: Final = ".safetensors.index.json"
SUFFIX: Final = ".safetensors"


def why_not_stored(key: str, tensor: StoredTensor) -> str:
    """Say why the format cannot hold a tensor under a name; empty if it can."""
    if tensor.dtype not in _NAMES:
        return f"safetensors have no {str(tensor.dtype).removeprefix('torch.')}"
    if _NAMES[tensor.dtype] == PACKED and not tensor.shape:
        return "two numbers in a byte, which no shape stands for"
    if key == METADATA:
        return "a name that safetensors keep for themselves"
    return "" if is_text(key) else "a name that is no text, which safetensors cannot encode"


def write_safetensors(
    folder: Path,
    name: str,
    tensors: dict[str, StoredTensor],
    metadata: dict[str, str],
    shard_bytes: int | None,
    progress: Progress,
) -> list[str]:
    """Write files into a folder. Returns their names; the one that says what is where comes last.

    Args:
        folder: Where.
        name: The name of the file, or of the index.
        tensors: What.
        metadata: Texts for the header.
        shard_bytes: Up to how many bytes of tensors go into one file; ``None`` for one file.
        progress: Is told what was written.
    """
    metadata = {"format": "pt", **metadata}
    if shard_bytes is None and not name.endswith(INDEX):
        _write(folder / name, tensors, metadata, progress)
        return [name]
    stem = name.removesuffix(INDEX).removesuffix(SUFFIX)
    shards = _shards(tensors, shard_bytes)
    names = [f"{stem}-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, shard, metadata, progress)
    total = sum(tensor.nbytes for tensor in tensors.values())
    weights = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}  # in the order of tensors
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / f"{stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
    return [*names, f"{stem}{INDEX}"]


def _shards(tensors: dict[str, StoredTensor], shard_bytes: int | None) -> list[dict[str, StoredTensor]]:
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and shard_bytes is not None and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _write(path: Path, tensors: dict[str, StoredTensor], metadata: dict[str, str], progress: Progress) -> None:
    # The largest elements first: then all of them are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {METADATA: metadata}
    at = 0
    for key, tensor in ordered:
        shape = list(tensor.shape)
        if _NAMES[tensor.dtype] == PACKED:
            shape[-1] *= 2
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        msg = (
            f"convert: the header of {path.name} takes {len(text)} bytes: expected at most {MAX_HEADER_BYTES}. "
            "Pass --shard-bytes, shorten names (--rename), or choose with --match."
        )
        raise CheckpointError(msg)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for piece in tensor.pieces():
                file.write(memory_of(piece))
                progress(piece.numel() * piece.dtype.itemsize)
