"""Checkpoints in several files, as Hugging Face has them: an index says which file each tensor is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.files.safetensors_header import bounded, parsed
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from statetree.files.ranges import FileRange

INDEX: Final = ".index.json"
#: What the one file in a folder is called, or with ``INDEX`` the index of several.
SAFETENSORS_NAMES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors")
TORCH_NAMES: Final = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")


def file_in(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the index or the file that a folder holds.

    Raises:
        CheckpointError: If it holds both.
    """
    found = [file for name in names for file in (folder / f"{name}{INDEX}", folder / name) if file.is_file()]
    stems = [file.name.partition(".")[0] for file in found]
    if len(set(stems)) < len(stems):
        refuse(folder, f"it holds {' and '.join(file.name for file in found)}, which may differ", "Name one of them.")
    return found[0] if found else None


def read_index(file: FileRange, read: Callable[[FileRange], dict[str, Any]]) -> dict[str, Any]:
    """Return what the files hold that an index lists, in its order.

    Raises:
        CheckpointError: If it is damaged, leads out of its directory, or does not list just what the files hold.
    """
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
