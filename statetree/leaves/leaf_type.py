"""``LeafType``: what a user says of a class whose values are made of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.chunks.cuts import Cut, cut_alike
from statetree.errors import UnsupportedLeaf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

#: The global shape of what a rank holds chunks of, and where each of these begins in it.
Chunks = tuple["Sequence[int]", "Sequence[Sequence[int]]"]


class LeafType:
    """How values of one class are taken apart into tensors, and put together again.

    Derive from it, define ``unpack`` and ``pack``, and register the class with ``register_leaf_type``. All methods have
    defaults. ``layout`` is for values of which the ranks of a group hold different chunks.

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

        The tensors may be of any leaf type themselves. A tensor that *is* the value is taken as plain. (A list in the
        place of one is for chunks, of which ``layout`` says where they begin.) By default a value is refused: nobody
        else can tell which tensors make it up.
        """
        raise self._lacks("unpack", type(value).__qualname__)

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:  # noqa: ARG002 - for others
        """Return a fresh value from the context and new tensors in place of those of ``unpack``.

        By default it is refused.
        """
        raise self._lacks("pack", self.name or type(self).__qualname__)

    def _lacks(self, method: str, what: str) -> UnsupportedLeaf:
        return UnsupportedLeaf(
            f"the leaf at %PATH% ({what}) has a leaf type without {method}: expected unpack and pack. Define both in "
            f"{type(self).__qualname__}."
        )

    def describe(self, value: Any) -> Mapping[str, Any]:  # noqa: ARG002 - for others
        """Return the facts, by name, that must agree for one value's bytes to be copied into another's.

        ``dtype`` and ``shape`` are the usual ones. What is left out is not compared: ``similarity``, ``digest``,
        ``delta`` and the ranks of a collective do not notice that it differs. By default nothing is compared.
        """
        return {}

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
