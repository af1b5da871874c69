"""``copy_into``: a state copied into the tensors of another, or not touched at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.declare import phase
from statetree.leaves.copying import prepared_copy
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.errors import Difference
    from statetree.tree.selection import Where

T = TypeVar("T")


@quietly
def copy_into(
    src: T,
    dst: T,
    *,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
    on_missing: Callable[[Difference], object] | None = None,
) -> T:
    """Copy a tree's tensors into those of another tree, all of them or none.

    Everything is validated before the first byte is written. Mappings are matched by their keys, whatever their type
    and order, so that a loaded ``dict`` fits a model's ``OrderedDict``. Devices may differ.

    Args:
        src: Where the elements, plain values and opaque objects come from.
        dst: Where the elements go. Only the memory of its tensors changes, not that of tensors in their attributes
            (``param.main_grad``).
        where: Which leaves are copied, as for ``select``; what differs elsewhere does not count. A predicate is asked
            about the leaves of ``dst``, and about those of ``src`` that ``dst`` lacks. What is tied to a tensor that is
            written changes with it.
        cast: Allow dtypes to differ where the conversion is lossless (``int8`` to ``int16``) or between floating
            point or complex types (``float32`` to ``bfloat16``).
        strict: Whether both trees must have all leaves. If not, those that both have are copied, and the rest of
            ``dst`` is left alone; a ``HOLE`` counts as a leaf that is not there. Sequences must be equally long even
            so, since nothing says which of their items is missing: pass what ``partition`` made, not what ``select``
            made.
        on_missing: With ``strict=False``, called with a ``Difference`` for each leaf that only one side has, after
            everything was validated and before anything is written.

    Returns:
        A tree with ``src``'s structure and plain values, and ``dst``'s tensors, in fresh containers. With ``where`` or
        ``strict=False`` it has the structure of ``dst``, and ``dst``'s own leaves where nothing was copied.

    Aliasing:
        The result's tensors are those of ``dst``. Opaque objects are copies of ``src``'s, in which a view on a tensor
        that is copied is the same view on the tensor of ``dst``; those of ``dst`` that nothing was copied to are its
        own.

    Raises:
        TreeMismatch: If structure, leaf types, shapes, dtypes, layouts, meshes or placements differ (it names every
            place), if a glob matches nothing in either tree, if a tensor of ``dst`` cannot be written (it overlaps
            itself and its source does not do so alike, it is an inference tensor, lies in a file, or has no memory), if
            tensors of ``dst`` overlap otherwise than those of ``src`` do (the same view twice may receive equal
            values), if an opaque object shares memory with a tensor that is copied and the tensor of ``dst`` has no
            such view (its dtype or strides differ), or if a value is too large for the dtype that it is converted to.
            Nothing is written then.
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
    with phase("copy_into.plan"):
        result, write = prepared_copy(
            "copy_into", src, dst, cast=cast, where=where, strict=strict, on_missing=on_missing
        )
    with phase("copy_into.move"):
        write()
    return result
