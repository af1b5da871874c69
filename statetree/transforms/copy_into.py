"""``copy_into``: a state copied into the tensors of another, or not touched at all."""

from __future__ import annotations

from typing import Any

from statetree.leaves.copying import prepared_copy
from statetree.torch_internals import quietly


def copy_into(src: Any, dst: Any, *, cast: bool = False, saturate: bool = False) -> Any:
    """Copy a tree's tensors into those of another tree, all of them or none.

    Everything is validated before the first byte is written. Mappings are matched by their keys, whatever their type
    and order, so that a loaded ``dict`` fits a model's ``OrderedDict``. Devices may differ.

    Args:
        src: Where the elements, plain values and opaque objects come from.
        dst: Where the elements go. Only the memory of its tensors changes.
        cast: Allow dtypes to differ where the conversion is lossless (``int8`` to ``int16``) or between floating
            point or complex types (``float32`` to ``bfloat16``).
        saturate: Store the largest value of a dtype in place of values that are too large for it (infinities stay
            where the dtype has them), instead of refusing them.

    Returns:
        A tree with ``src``'s structure and plain values, and ``dst``'s tensors, in fresh containers.

    Aliasing:
        The result's tensors are those of ``dst``. Opaque objects are copies of ``src``'s.

    Raises:
        TreeMismatch: If structure, leaf types, shapes, dtypes, layouts, meshes or placements differ (it names every
            place), if a tensor of ``dst`` cannot be written (it overlaps itself and its source does not do so alike,
            it is an inference tensor, lies in a memory map for reading, or has no memory), if tensors of ``dst``
            overlap otherwise than those of ``src`` do (the same view twice may receive equal values), or if a value
            is too large for the dtype that it is converted to. Nothing is written then.
        UnsupportedLeaf: If a leaf cannot be taken apart.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> before = st.offload(model.state_dict())
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> _ = st.copy_into(before, model.state_dict())
        >>> bool(st.similarity(before, model.state_dict(), values=True))
        True
    """
    return _copy_into(src, dst, cast=cast, saturate=saturate)


@quietly
def _copy_into(src: Any, dst: Any, *, cast: bool, saturate: bool) -> Any:
    result, write = prepared_copy("copy_into", src, dst, cast=cast, saturate=saturate)
    write()
    return result
