"""Checkpoints in several files, as Hugging Face has them: an index, in JSON, says which file each tensor is in."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from statetree.errors import unsignalled
from statetree.files.untrusted import inside, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from statetree.files.ranges import FileRange

INDEX: Final = ".index.json"
#: What the one file in a folder is called, or with ``INDEX`` the index of several.
SAFETENSORS_NAMES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors")
TORCH_NAMES: Final = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")
#: Of a header or an index: what the safetensors library takes at most, too.
MAX_JSON_BYTES: Final = 100_000_000


def file_in(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the index or the file that a folder holds, which may not hold both."""
    found = [file for name in names for file in (folder / f"{name}{INDEX}", folder / name) if file.is_file()]
    stems = [file.name.partition(".")[0] for file in found]
    if len(set(stems)) < len(stems):
        refuse(folder, f"it holds {' and '.join(file.name for file in found)}, which may differ", "Name one of them.")
    return found[0] if found else None


def read_json(file: FileRange, start: int, length: int, what: str) -> dict[str, Any]:
    """Return the object that a part of a file holds, in which no name is listed twice."""
    if length > MAX_JSON_BYTES:
        refuse(file.path, f"{what} has {length} bytes: expected at most {MAX_JSON_BYTES}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            refuse(file.path, f"{what} has {twice!r} twice")
        return made

    try:
        text = file.read(start, length, what).decode("utf-8")  # of bytes, ``json`` would guess the encoding
        found = json.loads(text, object_pairs_hook=pairs)
    except unsignalled(ValueError, RecursionError) as error:
        refuse(file.path, f"{what} is no JSON: {str(error)[:100]}")
    if not isinstance(found, dict):
        refuse(file.path, f"{what} is no JSON object")
    return found


def read_index(file: FileRange, read: Callable[[FileRange], dict[str, Any]]) -> dict[str, Any]:
    """Return what the files hold that an index lists, in its order: just that, and inside of its directory."""
    path = file.path
    weights = read_json(file, 0, file.length, "the index").get("weight_map")
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        refuse(path, "it has no weight_map from names of tensors to names of files")
    files = file.files
    shards = {
        name: files.open(inside(path.parent, name, path, follow_links=files.follow_links))
        for name in dict.fromkeys(weights.values())
    }
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
