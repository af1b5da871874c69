"""Headers of safetensors, and indices of several files as Hugging Face has them: checked before anything is believed.

The safetensors library tells neither where a tensor lies in the file, nor that a name is listed twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.files.untrusted import is_text, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from statetree.files.ranges import FileRange

#: What the safetensors library takes at most, too.
MAX_HEADER_BYTES: Final = 100_000_000
METADATA: Final = "__metadata__"
#: Two elements a byte: the header counts elements, torch counts bytes.
PACKED: Final = "F4"
#: What torch calls each dtype, and how many bytes an element of torch's has.
DTYPES: Final = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "C64": ("complex64", 8),
    "BOOL": ("bool", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F4": ("float4_e2m1fn_x2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}
INDEX: Final = ".index.json"
#: What the one file in a folder is called, or with ``INDEX`` the index of several.
SAFETENSORS_NAMES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors")
TORCH_NAMES: Final = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")


class HeaderEntry(NamedTuple):
    """A tensor, as a header lists it: its dtype and its shape are torch's, its bytes are counted in the data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    stop: int


def is_header(beginning: bytes) -> bool:
    """Whether a file that begins so begins with the size of a header and a brace."""
    return beginning[8:9] == b"{" and int.from_bytes(beginning[:8], "little") <= MAX_HEADER_BYTES


def read_header(file: FileRange) -> tuple[list[HeaderEntry], dict[str, str], int]:
    """Return the tensors and the texts that the header of a file lists, and where the data begin."""
    if file.length < 8:
        refuse(file.path, f"it ends after {file.length} bytes: expected a safetensors file")
    size = int.from_bytes(file.read(0, 8, "the size of the header"), "little")
    header = parsed(file, file.read(8, bounded(file, size, "the header"), "the header"), "the header")
    if not isinstance(header, dict):
        refuse(file.path, "the header is no JSON object")
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        refuse(file.path, "the header has metadata that are no texts")
    if not all(map(is_text, [*header, *metadata, *metadata.values()])):
        refuse(file.path, "the header has names or metadata that are no texts")
    entries = [_entry(file, key, entry) for key, entry in header.items()]
    end = 0
    for begin, stop, key in sorted((entry.begin, entry.stop, entry.key) for entry in entries):
        if begin != end:
            problem = "overlaps another one" if begin < end else "leaves a gap before it"
            refuse(file.path, f"the tensor {key!r} begins at byte {begin} and {problem}: expected {end}")
        end = stop
    if end != file.length - 8 - size:
        what = f"the header accounts for {end} bytes of data: the file has {file.length - 8 - size}"
        refuse(file.path, what)
    return entries, metadata, 8 + size


def bounded(file: FileRange, size: int, what: str) -> int:
    """Return the size of a part that is read whole, if there is no need to be afraid of it."""
    if size > MAX_HEADER_BYTES:
        refuse(file.path, f"{what} has {size} bytes: expected at most {MAX_HEADER_BYTES}")
    return size


def parsed(file: FileRange, text: bytes, what: str) -> Any:
    """Return what JSON says, in which no name is listed twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            refuse(file.path, f"{what} has {twice!r} twice")
        return made

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs)  # of bytes, it would guess the encoding
    except (ValueError, RecursionError) as error:
        refuse(file.path, f"{what} is no JSON: {str(error)[:100]}")


def _entry(file: FileRange, key: str, entry: Any) -> HeaderEntry:
    try:
        name, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype, itemsize = DTYPES.get(name, ("", 0))
        is_sound = isinstance(shape, list) and all(type(part) is int and part >= 0 for part in [*shape, begin, stop])
    except (KeyError, TypeError, ValueError):
        refuse(file.path, f"the header of the tensor {key!r} is damaged")
    if not is_sound or len(shape) > 64:
        refuse(file.path, f"the header of the tensor {key!r} has an impossible shape or offset")
    if not dtype:
        refuse(file.path, f"the tensor {key!r} has the dtype {str(name)[:20]!r}, which torch does not have")
    need = math.prod(shape) * itemsize
    if name == PACKED:
        if not shape or shape[-1] % 2:
            refuse(file.path, f"the tensor {key!r} has an odd number of elements of half a byte")
        need, shape = need // 2, [*shape[:-1], shape[-1] // 2]
    if stop - begin != need or max(need, *entry["shape"], 0) > 2**62:
        what = f"the tensor {key!r} has {stop - begin} bytes: expected {need} for shape {str(entry['shape'])[:60]}"
        refuse(file.path, what)
    return HeaderEntry(key, dtype, tuple(shape), begin, stop)


def file_in(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the index or the file that a folder holds."""
    found = [file for name in names for file in (folder / f"{name}{INDEX}", folder / name) if file.is_file()]
    stems = [file.name.partition(".")[0] for file in found]
    if len(set(stems)) < len(stems):
        refuse(folder, f"it holds {' and '.join(file.name for file in found)}, which may differ", "Name one of them.")
    return found[0] if found else None


def read_index(file: FileRange, read: Callable[[FileRange], dict[str, Any]]) -> dict[str, Any]:
    """Return what the files hold that an index lists, in its order."""
    path = file.path
    index = parsed(file, file.read(0, bounded(file, file.length, "the index"), "the index"), "the index")
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        refuse(path, "it has no weight_map from names of tensors to names of files")
    shards = {name: file.files.listed(path.parent, name, path) for name in dict.fromkeys(weights.values())}
    found = {name: read(shard) for name, shard in shards.items()}
    tree = {}
    for key, name in weights.items():
        if key not in found[name]:
            refuse(path, f"it says that {key!r} is in {name}, which does not hold it", "Get all files of one version.")
        tree[key] = found[name].pop(key)
    left = next(((name, key) for name, tensors in found.items() for key in tensors), None)
    if left is not None:
        refuse(shards[left[0]].path, f"it holds {left[1]!r}, which the index {path.name} does not list")
    return tree
