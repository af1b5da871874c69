"""safetensors: tensors that lie side by side, and a header that lists them. One file, or several with an index.

The header is checked against the file before anything is believed. The safetensors library tells neither where a tensor
lies in the file, nor that a name is listed twice.
"""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import CheckpointError, shown, unsignalled
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint
from statetree.files.hugging_face import INDEX, MAX_JSON_BYTES, SAFETENSORS_NAMES, file_in, read_index, read_json
from statetree.files.pickled_tensors import MAX_DIMS
from statetree.files.stored import StoredTensor
from statetree.files.strided_reading import memory_view
from statetree.files.untrusted import NOT_IN_NAMES, is_text, printable, refuse
from statetree.spans.layout import holds_memory
from statetree.torch_internals import as_copied
from statetree.tree.mapping import to_flat

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.checkpoint import SaveOptions
    from statetree.files.ranges import FileRange, OpenFiles

_SUFFIX: Final = ".safetensors"
_METADATA: Final = "__metadata__"
#: A text, and the names, of files in which DCP's ``HuggingFaceStorageWriter`` keeps ranks' shards (torch 2.11 to 2.15).
_SHARDS, _SHARD_NAMES = "DCP_SHARDING_INFO", f"shard-*{_SUFFIX}"
#: Two elements a byte: the header counts elements, torch counts bytes.
_PACKED: Final = "F4"
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    _PACKED: torch.float4_e2m1fn_x2,
}
_NAME_OF: Final = {dtype: name for name, dtype in _DTYPES.items()}


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
        is_header = beginning[8:9] == b"{" and int.from_bytes(beginning[:8], "little") <= MAX_JSON_BYTES
        return is_header or name.endswith(self.suffixes) or is_index

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:  # noqa: ARG002
        file = files.open((file_in(path, SAFETENSORS_NAMES) or path) if path.is_dir() else path)
        metadata: dict[str, str] = {}
        read = partial(_read, metadata=metadata)
        tree = read_index(file, read) if file.path.name.lower().endswith(INDEX) else read(file)
        return OpenedCheckpoint(tree, self.title, files, metadata=metadata, is_nested=False)

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:
        tensors = _tensors(tree)
        metadata: dict[Any, Any] = {"format": "pt", **options.metadata}
        if not all(isinstance(text, str) and is_text(text) for item in metadata.items() for text in item):
            raise TypeError(
                f"save: metadata of safetensors must be texts: expected names and values of type str, got {metadata!r}."
            )
        if options.shard_bytes is None and not name.endswith(INDEX):
            _write(folder / name, tensors, metadata)
            return [name]
        stem = name.removesuffix(INDEX).removesuffix(_SUFFIX)
        shards = _shards(tensors, options.shard_bytes)
        names = [f"{stem}-{number:05}-of-{len(shards):05}{_SUFFIX}" for number in range(1, len(shards) + 1)]
        if any(char in stem for char in NOT_IN_NAMES):
            what = f"the name {stem!r} may not stand in an index of several files: expected one without '\\' and ':'"
            raise CheckpointError(f"save: {what}. Choose another name.")
        for file, shard in zip(names, shards, strict=True):
            _write(folder / file, shard, metadata)
        total = sum(tensor.nbytes for tensor in tensors.values())
        weights = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / f"{stem}{_SUFFIX}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
        return [*names, f"{stem}{_SUFFIX}{INDEX}"]


def _has_shards(name: str, text: str) -> bool:
    """Whether a file, by its name and the text that DCP keeps there, holds parts of tensors."""
    try:
        starts = [start for entry in json.loads(text).values() for start in entry["saved_offsets"]]
    except unsignalled(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        starts = []
    return any(starts) or fnmatchcase(name, _SHARD_NAMES)


def _read(file: FileRange, metadata: dict[str, str]) -> dict[str, StoredTensor]:
    """Return the tensors of one file, which account for every byte of it, and add its texts to others."""
    if file.length < 8:
        refuse(file.path, f"it ends after {file.length} bytes: expected a safetensors file")
    size = int.from_bytes(file.read(0, 8, "the size of the header"), "little")
    header = read_json(file, 8, size, "the header")
    texts = header.pop(_METADATA, None) or {}
    if not isinstance(texts, dict) or not all(type(value) is str for value in texts.values()):
        refuse(file.path, "the header has metadata that are no texts")
    if not all(map(is_text, [*header, *texts, *texts.values()])):
        refuse(file.path, "the header has names or metadata that are no texts")
    # Of shards neither the shapes of whole tensors are known, nor how many files there are.
    if _SHARDS in texts and _has_shards(file.path.name, texts[_SHARDS]):
        what = "it has one rank's shards of tensors, as HuggingFaceStorageWriter(save_distributed=True) writes them"
        refuse(file.path, what, "Join them with torch's consolidate_safetensors_files.")
    data = file.part(8 + size, file.length - 8 - size, "the data")
    places = {key: _place(file, key, entry) for key, entry in header.items()}
    end = 0
    for begin, stop, key in sorted((begin, stop, key) for key, (_, _, begin, stop) in places.items()):
        if begin != end:
            problem = "overlaps another one" if begin < end else "leaves a gap before it"
            refuse(file.path, f"the tensor {key!r} begins at byte {begin} and {problem}: expected {end}")
        end = stop
    if end != data.length:
        refuse(file.path, f"the header accounts for {end} bytes of data: the file has {data.length}")
    metadata.update(texts)
    return {
        key: StoredTensor.at(data.part(begin, stop - begin, f"the tensor {key!r}"), dtype, shape)
        for key, (dtype, shape, begin, stop) in places.items()
    }


def _place(file: FileRange, key: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """Return the dtype and shape of a tensor as torch has them, and where its bytes begin and stop in the data."""
    try:
        name, stated, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(name)
        is_sound = isinstance(stated, list) and all(type(part) is int and part >= 0 for part in [*stated, begin, stop])
    except unsignalled(KeyError, TypeError, ValueError):
        refuse(file.path, f"the header of the tensor {key!r} is damaged")
    if not is_sound or len(stated) > MAX_DIMS or (0 in stated and math.prod([part for part in stated if part]) > 2**62):
        refuse(file.path, f"the header of the tensor {key!r} has an impossible shape or offset")
    if dtype is None:
        refuse(file.path, f"the tensor {key!r} has the dtype {str(name)[:20]!r}, which torch does not have")
    shape = stated
    if name == _PACKED:
        if not stated or stated[-1] % 2:
            refuse(file.path, f"the tensor {key!r} has an odd number of elements of half a byte")
        shape = [*stated[:-1], stated[-1] // 2]
    need = math.prod(shape) * dtype.itemsize
    if stop - begin != need:
        refuse(file.path, f"the tensor {key!r} has {stop - begin} bytes: expected {need} for shape {str(stated)[:60]}")
    return dtype, shape, begin, stop


def _tensors(tree: Any) -> dict[str, Any]:
    flat, _ = to_flat(tree)
    lines = []
    for key, leaf in flat.items():
        try:
            why = _why_not(key, leaf)
        except unsignalled(Exception) as error:  # a subclass may refuse anything, and so do uninitialized parameters
            why = f"a {type(leaf).__qualname__}, of which torch says: {str(error).splitlines()[0][:200]}"
        lines += [f"{printable(key)}: {why}"] if why else []
    if lines:
        raise CheckpointError(
            f"save: safetensors files hold only tensors, and not of all kinds: got\n  {shown(lines)}\n"
            "Leave them out (select; convert: --match, --drop-values), or choose another format."
        )
    return flat


def _why_not(key: str, leaf: Any) -> str:
    """Say why the format cannot hold a leaf under a name; empty if it can."""
    outline = leaf.outline if isinstance(leaf, StoredTensor) else leaf
    if not isinstance(outline, torch.Tensor):
        return "a plain value"
    if outline.layout is not torch.strided or outline.is_nested or (outline is not leaf and not leaf.is_strided):
        return "a tensor of several parts, or without elements"
    if outline is not leaf and leaf.is_repetitive:
        return "a view that repeats its elements, which would be written one by one"
    if outline.dim() > MAX_DIMS:
        return f"a tensor of {outline.dim()} dims: at most {MAX_DIMS} are read"
    if outline.dtype not in _NAME_OF:
        return f"safetensors have no {str(outline.dtype).removeprefix('torch.')}"
    has_no_memory = outline is leaf and (outline.is_meta or not holds_memory(outline))
    if has_no_memory or hasattr(type(outline), "__tensor_flatten__"):
        return "a tensor without elements of its own"
    if _NAME_OF[outline.dtype] == _PACKED and not outline.shape:
        return "two numbers in a byte, which no shape stands for"
    if key == _METADATA:
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
    header: dict[str, object] = {_METADATA: metadata}
    at = 0
    for key, tensor in ordered:
        shape = list(tensor.shape)
        if _NAME_OF[tensor.dtype] == _PACKED:
            shape[-1] *= 2
        header[key] = {"dtype": _NAME_OF[tensor.dtype], "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"save: the header of {path.name} takes {len(text)} bytes: expected at most {MAX_JSON_BYTES}. Write "
            "several files (shard_bytes), or shorten names (rename)."
        )
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
        yield as_copied(tensor.detach().cpu().resolve_conj().resolve_neg()).contiguous()
