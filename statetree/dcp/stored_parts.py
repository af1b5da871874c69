"""Leaves that a checkpoint holds in parts: matched with a leaf, and checked before its tensors are filled.

Some parts say where elements lie: indices and offsets. torch takes them as they are, and reads and writes outside of
the memory if they are wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import whole_box
from statetree.dcp.tensors import PARTS_ENTRY, Content, content_of
from statetree.errors import CheckpointError, Difference
from statetree.files.checkpoint import StoredParts
from statetree.files.entry_matching import refuse_all
from statetree.files.filling import Target
from statetree.torch_internals import check_sparse_indices, quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.files.stored import StoredTensor
    from statetree.key_paths import Path

#: What says where the pieces of nested tensors begin and end.
_JAGGED: Final = ("offsets", "lengths")
_NESTED: Final = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


class SavedParts(StoredParts):
    """A leaf that ``save`` took apart.

    Args:
        name: What it is.
        tensors: Its parts.
        facts: What must agree, besides, for these to be of use.
        contexts: What a value of a registered leaf type has beside its parts, as it was saved; ``None`` without.
    """

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
        if has_indices(leaf):
            made = content_of("load", leaf, path).packed([stored.read() for stored in self._tensors])
            check_indices(made, leaf, str(path) or "<root>")

    def completed(self, path: Path, leaf: Any) -> Any:
        """Return the leaf, with the context that was saved."""
        if self._contexts is None:
            return leaf
        content: Content = content_of("load", leaf, path)
        unpacked = content.unpacked
        assert unpacked is not None
        if type(self._contexts) is not list or len(self._contexts) != len(content.contexts):
            msg = f"load: the context of the leaf at {path or '<root>'} is damaged. Load another checkpoint."
            raise CheckpointError(msg)
        unpacked.replace_contexts(0, self._contexts)
        return unpacked.pack(unpacked.parts)[0]


def has_indices(leaf: Any) -> bool:
    """Whether parts of a leaf say where its elements lie."""
    return isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested)


def check_indices(leaf: Any, template: Any, where: str) -> None:
    """Raise ``CheckpointError`` if parts of a tensor lead outside of it.

    Args:
        leaf: The tensor, put together from parts that were loaded.
        template: What it is loaded into. Nested ones are alike, as was said beside the parts.
        where: Its path, for the message.
    """
    try:
        if leaf.is_nested:
            _check_same_pieces(leaf, template)
        else:
            check_sparse_indices(leaf)
    except (RuntimeError, ValueError) as error:
        what = str(error).splitlines()[0][:300]
        msg = f"load: the indices of the leaf at {where} are damaged: {what}. Load another checkpoint."
        raise CheckpointError(msg) from None


def _check_same_pieces(leaf: Any, template: Any) -> None:
    for name in _JAGGED if leaf.layout is torch.jagged else _NESTED:
        found, expected = getattr(leaf, name)(), getattr(template, name)()
        if expected is not None and not torch.equal(found, expected.to(found.device)):
            msg = f"expected {name.strip('_')} of {expected.tolist()}, got {found.tolist()}"
            raise ValueError(msg)
