"""Reads safetensors: a header of JSON, and tensors that lie side by side. Nothing of the header is taken on trust."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files.checkpoint import SAFETENSORS, Checkpoint
from statetree.files.stored import FileStorage, StoredTensor
from statetree.files.untrusted import is_text, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.ranges import FileRange, OpenFiles

#: What the safetensors library takes at most, too.
MAX_HEADER_BYTES: Final = 100_000_000
METADATA: Final = "__metadata__"
_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
DTYPES: Final = {name: getattr(torch, of) for name, of in _NAMES.items() if hasattr(torch, of)}
#: Two elements a byte: the header counts elements, torch counts bytes.
PACKED: Final = "F4"


def read_safetensors(path: Path, files: OpenFiles) -> Checkpoint:
    """Open one file.

    Raises:
        CheckpointError: If its header is damaged, or does not account for every byte of the file once.
    """
    place = files.open(path)
    tree, metadata = _read(place)
    return Checkpoint(path, SAFETENSORS, tree, place.length, [path], metadata=metadata, is_nested=False)


def read_index(path: Path, files: OpenFiles) -> Checkpoint:
    """Open a sharded checkpoint by its index.

    Raises:
        CheckpointError: If the index is damaged, if it names files outside its directory, or if a file does not hold
            what the index says, or holds more.
    """
    place = files.open(path)
    index = _parse(place, place.read(0, _bounded(place, place.length, "the index"), "the index"), "the index")
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        refuse(path, "it has no weight_map from names of tensors to names of files")
    shards = {name: files.listed(path.parent, name, path) for name in dict.fromkeys(weights.values())}
    found: dict[str, dict[str, StoredTensor]] = {}
    places = [place]
    metadata: dict[str, str] = {}
    for name, shard in shards.items():
        places.append(files.open(shard))
        found[name], more = _read(places[-1])
        metadata.update(more)
    tree = {}
    for key, name in weights.items():
        if key not in found[name]:
            refuse(path, f"it says that {key!r} is in {name}, which does not hold it", "Get all files of one version.")
        tree[key] = found[name].pop(key)
    left = next(((name, key) for name, tensors in found.items() for key in tensors), None)
    if left is not None:
        refuse(shards[left[0]], f"it holds {left[1]!r}, which the index {path.name} does not list")
    total = sum(part.length for part in places)
    paths = [part.path for part in places]
    return Checkpoint(path, SAFETENSORS, tree, total, paths, metadata=metadata, is_nested=False)


def _bounded(place: FileRange, size: int, what: str) -> int:
    if size > MAX_HEADER_BYTES:
        refuse(place.path, f"{what} has {size} bytes: expected at most {MAX_HEADER_BYTES}")
    return size


def _parse(place: FileRange, text: bytes, what: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            refuse(place.path, f"{what} has {twice!r} twice")
        return made

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs)  # of bytes, it would guess the encoding
    except (ValueError, RecursionError) as error:
        refuse(place.path, f"{what} is no JSON: {str(error)[:100]}")


def _read(place: FileRange) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the metadata of one file."""
    if place.length < 8:
        refuse(place.path, f"it ends after {place.length} bytes: expected a safetensors file")
    beginning = place.read(0, 8, "the size of the header")
    if beginning.startswith(b"PK\x03\x04"):
        refuse(place.path, "it looks like a zip archive", "If torch.save wrote it, give it a name that ends in .pt.")
    size = int.from_bytes(beginning, "little")
    header = _parse(place, place.read(8, _bounded(place, size, "the header"), "the header"), "the header")
    if not isinstance(header, dict):
        refuse(place.path, "the header is no JSON object")
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        refuse(place.path, "the header has metadata that are no texts")
    if not all(map(is_text, [*header, *metadata, *metadata.values()])):
        refuse(place.path, "the header has names or metadata that are no texts")
    data = place.part(8 + size, place.length - 8 - size, "the data")
    places = [(*_bounds(place, key, entry), key) for key, entry in header.items()]
    end = 0
    for begin, stop, key in sorted(places):
        if begin != end:
            problem = "overlaps another one" if begin < end else "leaves a gap before it"
            refuse(place.path, f"the tensor {key!r} begins at byte {begin} and {problem}: expected {end}")
        end = stop
    if end != data.length:
        refuse(place.path, f"the header accounts for {end} bytes of data: the file has {data.length}")
    return {key: _tensor(data, key, header[key], begin, stop) for begin, stop, key in places}, metadata


def _bounds(place: FileRange, key: str, entry: Any) -> tuple[int, int]:
    """Return where a tensor's data begin and end, once its header was checked."""
    try:
        dtype, shape, (begin, stop) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        is_sound = isinstance(shape, list) and all(type(part) is int and part >= 0 for part in [*shape, begin, stop])
    except (KeyError, TypeError, ValueError):
        refuse(place.path, f"the header of the tensor {key!r} is damaged")
    if not is_sound or len(shape) > 64:
        refuse(place.path, f"the header of the tensor {key!r} has an impossible shape or place")
    if dtype is None:
        refuse(place.path, f"the tensor {key!r} has the dtype {str(entry['dtype'])[:20]!r}, which torch does not have")
    need = math.prod(shape) * dtype.itemsize
    if entry["dtype"] == PACKED:
        if not shape or shape[-1] % 2:
            refuse(place.path, f"the tensor {key!r} has an odd number of elements of half a byte")
        need //= 2
    if stop - begin != need or max(need, *shape, 0) > 2**62:
        refuse(place.path, f"the tensor {key!r} has {stop - begin} bytes: expected {need} for shape {str(shape)[:60]}")
    return begin, stop


def _tensor(data: FileRange, key: str, entry: Any, begin: int, stop: int) -> StoredTensor:
    shape = list(entry["shape"])
    if entry["dtype"] == PACKED:
        shape[-1] //= 2
    entry_name = f"the tensor {key!r}"
    return StoredTensor(
        FileStorage(entry_name, data.part(begin, stop - begin, entry_name)), DTYPES[entry["dtype"]], tuple(shape)
    )
