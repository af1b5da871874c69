"""``LeafType``: what a user says of a class whose values are made of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.chunks.cuts import Cut, cut_alike
from statetree.tree.atoms import is_atom_type
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

#: The global shape of what a rank holds chunks of, and where each of these begins in it.
Chunks = tuple["Sequence[int]", "Sequence[Sequence[int]]"]


class LeafType:
    """How values of one class are taken apart into tensors, and put together again.

    Derive from it, and register the class with ``register_leaf_type``. All methods have defaults. ``unpack`` and
    ``pack`` belong together: define both, or neither for a class that is nothing but its attributes. ``layout`` is for
    values of which the ranks of a group hold different chunks.

    Attributes:
        name: What values are called in comparisons and messages; by default their class's name.

    Example:
        >>> import statetree as st, torch
        >>> class Scaled:
        ...     def __init__(self, values, scale):
        ...         self.values, self.scale = values, scale
        >>> class ScaledType(st.LeafType):
        ...     def unpack(self, value):
        ...         return [value.values], value.scale
        ...
        ...     def pack(self, context, parts):
        ...         return Scaled(parts[0], context)
        ...
        ...     def describe(self, value):
        ...         return {"scale": value.scale}
        >>> st.register_leaf_type(Scaled, ScaledType())
        >>> st.offload({"x": Scaled(torch.ones(2), 0.5)})["x"].values
        tensor([1., 1.])
    """

    name: str = ""

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Return the tensors inside a value, and the context that ``pack`` needs beside them.

        The tensors may be of any leaf type themselves. A tensor that *is* the value is taken as plain. By default what
        there is in the attributes of an instance: plain values are the context, and all others the tensors.
        """
        leaves, spec = flatten(dict(vars(value)))
        plain = [is_atom_type(type(leaf)) for leaf in leaves]
        parts = [leaf for leaf, is_plain in zip(leaves, plain, strict=True) if not is_plain]
        kept = {index: leaf for index, leaf in enumerate(leaves) if plain[index]}
        return parts, (type(value), spec, kept)

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value from the context and new tensors in place of those of ``unpack``.

        By default an instance with the attributes, without running ``__init__``.
        """
        cls, spec, kept = context
        pending = iter(parts)
        leaves = [kept[index] if index in kept else next(pending) for index in range(spec.num_leaves)]
        fresh = cls.__new__(cls)
        vars(fresh).update(unflatten(spec, leaves))
        return fresh

    def describe(self, value: Any) -> Mapping[str, Any]:
        """Return the facts, by name, that must agree for one value's bytes to be copied into another's.

        ``dtype`` and ``shape`` are the usual ones. What is left out is not compared: ``similarity``, ``digest``,
        ``delta`` and the ranks of a collective do not notice that it differs. By default nothing is compared, but for
        the plain values among the attributes where ``unpack`` is the default, too.
        """
        if type(self).unpack is not LeafType.unpack:
            return {}
        _, (_, _, kept) = LeafType.unpack(self, value)
        return {"attributes": [*kept.values()]}

    def layout(self, value: Any) -> Sequence[Chunks | None]:
        """Return of which tensors the ranks of a group hold chunks, for each of what ``unpack`` returns.

        ``unpack`` returns for such a part the chunk that this rank holds, or a list of several (of a rank that holds
        none, an empty tensor). What ``gather`` makes of a value with one part is a tensor. Of several parts it packs a
        value again, of whole tensors; a context that says where chunks begin has to be without effect then.

        Returns:
            For each part its global shape, and where each of this rank's chunks begins in it; ``None`` for a part
            that each rank has as a whole, as all are by default.
        """
        return [None] * len(self.unpack(value)[0])

    def part_names(self, context: Any, count: int) -> Sequence[str]:  # noqa: ARG002 - for others
        """Return the names of what ``unpack`` returns, for the paths of parts. By default they are numbered."""
        return list(map(str, range(count)))

    def cuts(self, value: Any, inner: Sequence[torch.Tensor]) -> Sequence[tuple[Cut | None, ...]]:
        """Return how the tensors inside a value are cut where it is the local tensor of a ``DTensor``.

        By default a dim that is as long as the value's is cut alike, and others are whole on every rank.
        """
        return [cut_alike(value.shape, tensor.shape) for tensor in inner]

    def reshaped(self, context: Any, shape: Sequence[int], stride: Sequence[int]) -> Any:  # noqa: ARG002 - for others
        """Return the context of a value of another shape: it was the chunk of one rank, and becomes the whole."""
        return context
