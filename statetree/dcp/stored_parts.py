"""Leaves that a checkpoint holds in parts: matched with a leaf, and checked before its tensors are filled.

Some parts say where elements lie: indices and offsets. torch takes them as they are, and reads and writes outside of
the memory if they are wrong.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import whole_box
from statetree.dcp.state_entries import PARTS_ENTRY, content_of
from statetree.errors import CheckpointError, Difference, unsignalled
from statetree.files.checkpoint import StoredParts, not_admitted
from statetree.files.entry_matching import refuse_all
from statetree.files.filling import Target
from statetree.files.pickled_tensors import LAYOUTS
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.torch_internals import check_sparse_indices, quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.key_paths import Path

#: What says where the pieces of nested tensors begin and end.
_JAGGED: Final = ("offsets", "lengths")
_NESTED: Final = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


class SavedParts(StoredParts):
    """A leaf that ``save`` took apart: as ``Content`` has it."""

    def __init__(self, name: str, tensors: Sequence[StoredTensor], facts: str, contexts: Any) -> None:
        super().__init__(name)
        self._tensors = tensors
        self._facts = facts
        self._contexts = contexts

    def targets(self, path: Path, leaf: Any) -> Sequence[Target]:
        """Return what there is to fill of a leaf."""
        content = content_of("load", leaf, path)
        found: list[Difference] = []
        if content.sort != PARTS_ENTRY:
            found.append(Difference(path, "leaf type", "a tensor saved in parts", f"a {type(leaf).__qualname__}"))
        elif content.facts != self._facts or len(self._tensors) != len(content.tensors):
            found.append(Difference(path, "layout", self._facts, content.facts))
        elif bool(content.contexts) != (self._contexts is not None):
            found.append(Difference(path, "leaf type", "a tensor saved in parts", "a registered leaf type"))
        else:
            for stored, tensor in zip(self._tensors, content.tensors, strict=True):
                if tuple(stored.shape) != tuple(tensor.shape):
                    found.append(Difference(path, "shape", tuple(stored.shape), tuple(tensor.shape)))
                if stored.dtype != tensor.dtype:
                    found.append(Difference(path, "dtype", stored.dtype, tensor.dtype))
        refuse_all(found)
        pairs = zip(self._tensors, content.tensors, strict=True)
        return [Target(path, stored, whole_box(tensor.shape), tensor) for stored, tensor in pairs if tensor.numel()]

    @quietly
    def check(self, path: Path, leaf: Any) -> None:
        """Raise ``CheckpointError`` if parts say that elements of the leaf lie outside of it."""
        if not isinstance(leaf, torch.Tensor) or (leaf.layout is torch.strided and not leaf.is_nested):
            return
        made = content_of("load", leaf, path).packed([stored.read() for stored in self._tensors])
        try:
            if leaf.is_nested:
                _check_same_pieces(made, leaf)
            else:
                check_sparse_indices(made)
        except unsignalled(RuntimeError, ValueError) as error:
            what = f"{path or '<root>'} are damaged: {str(error).splitlines()[0][:300]}"
            raise CheckpointError(f"load: the indices of the leaf at {what}. Load another checkpoint.") from None

    def completed(self, path: Path, leaf: Any) -> Any:
        """Return the leaf, with the context that was saved."""
        if self._contexts is None:
            return leaf
        content = content_of("load", leaf, path)
        assert content.unpacked is not None
        if isinstance(self._contexts, StoredObject):
            raise not_admitted(
                f"load: the context of the leaf at {path or '<root>'} cannot be read", self._contexts.name
            )
        if type(self._contexts) is not list or len(self._contexts) != len(content.contexts):
            msg = f"load: the context of the leaf at {path or '<root>'} is damaged. Load another checkpoint."
            raise CheckpointError(msg)
        for recipe, context in zip(content.unpacked.registered(0), self._contexts, strict=True):
            recipe.context = context
        return content.unpacked.pack(content.unpacked.parts)[0]


def _check_same_pieces(leaf: Any, template: Any) -> None:
    """Raise ``ValueError`` unless nested tensors are divided alike."""
    for name in _JAGGED if leaf.layout is torch.jagged else _NESTED:
        found, expected = getattr(leaf, name)(), getattr(template, name)()
        if expected is not None and not torch.equal(found, expected.to(found.device)):
            raise ValueError(f"expected {name.strip('_')} of {expected.tolist()}, got {found.tolist()}")


def tensor_name(facts: str) -> str:
    """Return what a leaf that was saved in parts is, by its facts."""
    found = re.search(r"'leaf type': '(?!Tensor')([^']*)'|torch\.((?!strided)\w+)", facts)
    return (found[1] or found[2]) if found else "a tensor of several parts"


def sparse_tensor(parts: Sequence[StoredTensor], facts: str) -> StoredTensor | None:
    """Return a tensor that was saved in parts, values first, if it is a sparse one. Its parts are read."""
    layout = re.search(r"'layout': torch\.(sparse_\w+)", facts)
    shape = re.search(r"'shape': torch\.Size\(\[([\d, ]*)\]\)", facts)
    is_alone = facts.startswith("{")  # otherwise it is inside of another tensor
    if not is_alone or layout is None or shape is None or len(parts) != (2 if layout[1] == "sparse_coo" else 3):
        return None
    size = tuple([int(length) for length in shape[1].split(",") if length.strip()])
    values, *indices = (part.read() for part in parts)
    options: dict[str, Any] = {"device": "cpu", "check_invariants": True}
    try:
        if layout[1] == "sparse_coo":
            is_coalesced = "'coalesced': True" in facts
            made = torch.sparse_coo_tensor(indices[0], values, size, is_coalesced=is_coalesced, **options)
        else:
            kind = LAYOUTS[f"torch.{layout[1]}"]
            made = torch.sparse_compressed_tensor(indices[1], indices[0], values, size, layout=kind, **options)
    except unsignalled(RuntimeError, ValueError, KeyError, OverflowError):  # facts out of a file may say anything
        return None
    return StoredTensor(made, lambda: None, None)
