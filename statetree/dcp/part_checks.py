"""Parts of tensors that say where elements lie: indices and offsets out of a file, checked before they are used.

torch takes them as they are, and reads and writes outside of the memory if they are wrong.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from statetree.errors import CheckpointError
from statetree.torch_internals import check_sparse_indices

#: What says where the pieces of nested tensors begin and end.
_JAGGED: Final = ("offsets", "lengths")
_NESTED: Final = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


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
