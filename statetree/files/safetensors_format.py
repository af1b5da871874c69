"""safetensors: tensors that lie side by side, and a header that lists them. One file, or several with an index."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import CheckpointError
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint
from statetree.files.json_headers import (
    DTYPES,
    INDEX,
    MAX_HEADER_BYTES,
    METADATA,
    PACKED,
    SAFETENSORS_NAMES,
    file_in,
    is_header,
    read_header,
    read_index,
)
from statetree.files.stored import StoredTensor
from statetree.files.strided_reading import memory_view
from statetree.files.untrusted import is_text, printable
from statetree.tree.mapping import to_flat

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.checkpoint import SaveOptions
    from statetree.files.ranges import FileRange, OpenFiles

_NAME_OF: Final = {getattr(torch, of): name for name, (of, _) in DTYPES.items()}
_SUFFIX: Final = ".safetensors"


class SafetensorsFormat(CheckpointFormat):
    """safetensors: one file, several with an index, or a folder as Hugging Face has it."""

    title = "safetensors file"
    suffixes = (_SUFFIX, f"{_SUFFIX}{INDEX}")

    def recognises(self, path: Path, beginning: bytes) -> bool:
        """Whether a file begins with the size of a header and a brace, or is an index of such files."""
        if path.is_dir():
            return file_in(path, SAFETENSORS_NAMES) is not None
        name = path.name.lower()
        is_index = name.endswith(INDEX) and beginning.lstrip()[:1] == b"{"
        return is_header(beginning) or name.endswith(self.suffixes) or is_index

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:  # noqa: ARG002
        """Open a file, or the index of several."""
        file = files.open((file_in(path, SAFETENSORS_NAMES) or path) if path.is_dir() else path)
        metadata: dict[str, str] = {}
        read = partial(_read, metadata=metadata)
        tree = read_index(file, read) if file.path.name.lower().endswith(INDEX) else read(file)
        return OpenedCheckpoint(tree, self.title, files, metadata=metadata, is_nested=False)

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:
        """Write a file, or several and their index."""
        tensors = _tensors(tree)
        metadata: dict[Any, Any] = {"format": "pt", **options.metadata}
        if not all(isinstance(text, str) and is_text(text) for item in metadata.items() for text in item):
            msg = (
                f"save: metadata of safetensors must be texts: expected names and values of type str, got {metadata!r}."
            )
            raise TypeError(msg)
        if options.shard_bytes is None and not name.endswith(INDEX):
            _write(folder / name, tensors, metadata)
            return [name]
        stem = name.removesuffix(INDEX).removesuffix(_SUFFIX)
        shards = _shards(tensors, options.shard_bytes)
        names = [f"{stem}-{number:05}-of-{len(shards):05}{_SUFFIX}" for number in range(1, len(shards) + 1)]
        for file, shard in zip(names, shards, strict=True):
            _write(folder / file, shard, metadata)
        total = sum(tensor.nbytes for tensor in tensors.values())
        weights = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / f"{stem}{_SUFFIX}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
        return [*names, f"{stem}{_SUFFIX}{INDEX}"]


def _read(file: FileRange, metadata: dict[str, str]) -> dict[str, StoredTensor]:
    """Return the tensors of one file, and add its texts to others."""
    entries, texts, begin = read_header(file)
    metadata.update(texts)
    data = file.part(begin, file.length - begin, "the data")
    return {
        entry.key: StoredTensor.at(
            data.part(entry.begin, entry.stop - entry.begin, f"the tensor {entry.key!r}"),
            getattr(torch, entry.dtype),
            entry.shape,
        )
        for entry in entries
    }


def _tensors(tree: Any) -> dict[str, Any]:
    """Return the tensors of a tree by their flat keys."""
    flat, _ = to_flat(tree)
    why = {key: reason for key, leaf in flat.items() if (reason := _why_not(key, leaf))}
    if why:
        lines = [f"{printable(key)}: {reason}" for key, reason in list(why.items())[:10]]
        more = [f"… and {len(why) - 10} more"] * (len(why) > 10)
        msg = "save: safetensors hold tensors only, and not of every kind: got\n  " + "\n  ".join([*lines, *more])
        raise CheckpointError(msg + "\nLeave them out (select; convert: --match, --drop-values), or convert them.")
    return flat


def _why_not(key: str, leaf: Any) -> str:
    """Say why the format cannot hold a leaf under a name; empty if it can."""
    outline = leaf.outline if isinstance(leaf, StoredTensor) else leaf
    if not isinstance(outline, torch.Tensor):
        return "a plain value"
    if (
        outline.layout is not torch.strided
        or outline.is_nested
        or (isinstance(leaf, StoredTensor) and not leaf.is_strided)
    ):
        return "a tensor of several parts, or without elements"
    if isinstance(leaf, StoredTensor) and leaf.is_repetitive:
        return "a view that repeats its elements, which would be written one by one"
    if outline.dtype not in _NAME_OF:
        return f"safetensors have no {str(outline.dtype).removeprefix('torch.')}"
    if hasattr(type(outline), "__tensor_flatten__") or (outline.is_meta and outline is leaf):
        return "a tensor without elements of its own"
    if _NAME_OF[outline.dtype] == PACKED and not outline.shape:
        return "two numbers in a byte, which no shape stands for"
    if key == METADATA:
        return "a name that safetensors keep for themselves"
    return "" if is_text(key) else "a name that is no text, which safetensors cannot encode"


def _shards(tensors: dict[str, Any], shard_bytes: int | None) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and shard_bytes is not None and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _write(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    # The largest elements first: then all of them are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {METADATA: metadata}
    at = 0
    for key, tensor in ordered:
        shape = list(tensor.shape)
        if _NAME_OF[tensor.dtype] == PACKED:
            shape[-1] *= 2
        header[key] = {"dtype": _NAME_OF[tensor.dtype], "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        msg = (
            f"save: the header of {path.name} takes {len(text)} bytes: expected at most {MAX_HEADER_BYTES}. Write "
            "several files (shard_bytes), or shorten names (rename)."
        )
        raise CheckpointError(msg)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for piece in _pieces(tensor):
                file.write(memory_view(piece))


def _pieces(tensor: Any) -> Any:
    """Yield a tensor's elements in row-major order, as contiguous tensors on the CPU."""
    if isinstance(tensor, StoredTensor):
        yield from (tensor.read(index).resolve_conj().resolve_neg() for index in tensor.boxes())
    elif tensor.numel():
        yield tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
