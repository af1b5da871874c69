"""What a checkpoint holds of one leaf: a tensor, the parts of a tensor, or a plain value."""

from __future__ import annotations

from operator import eq
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.chunks.boxes import whole_box
from statetree.dcp.groups import ranks_of
from statetree.dcp.local_pieces import LocalPieces
from statetree.errors import UnsupportedLeaf
from statetree.exchange.manifest import chunks_of
from statetree.files.filling import check_elements, refuse_leaf
from statetree.files.key_texts import without_addresses
from statetree.key_paths import Path
from statetree.leaves.builtin import facts, is_distributed, is_plain, leaf_type_of, settled
from statetree.leaves.location import located_error
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.replicas import replicated
from statetree.leaves.types.special import QUANTIZED
from statetree.leaves.types.tensor import TENSOR
from statetree.spans.layout import extents
from statetree.spans.memory import memory_of
from statetree.torch_internals import WITHOUT_KERNELS, as_copied, quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.boxes import Box
    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group

TENSOR_ENTRY: Final = "tensor"
PARTS_ENTRY: Final = "parts"
VALUE_ENTRY: Final = "value"


def is_array_of_numbers(value: Any) -> bool:
    """Whether a value is an array of NumPy without objects: it may be large, and need not be pickled to look inside."""
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__qualname__ == "ndarray" and value.dtype.kind in "biufc"


class Content(NamedTuple):
    """What there is to save of a leaf, or to fill.

    Attributes:
        sort: ``TENSOR_ENTRY``, ``PARTS_ENTRY`` or ``VALUE_ENTRY``.
        tensors: The tensor itself (``LocalPieces`` of a distributed one), or its parts. None for plain values.
        facts: What must agree, besides, for the parts to be of use.
        unpacked: How a leaf is packed again of its parts; ``None`` where there are none.
    """

    sort: str
    tensors: Sequence[Any]
    facts: str = ""
    unpacked: Unpacked | None = None

    @property
    def contexts(self) -> list[Any]:
        """What a value of a registered leaf type has beside its parts."""
        return [] if self.unpacked is None else self.unpacked.contexts(0)

    def packed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the leaf again, of other tensors in the place of ``tensors``."""
        assert self.unpacked is not None
        parts = list(self.unpacked.parts)
        for index, tensor in zip(dict.fromkeys(self.unpacked.parts_of(0)), tensors, strict=True):
            parts[index] = tensor.view(parts[index].dtype)
        return self.unpacked.pack(parts)[0]


PLAIN: Final = Content(VALUE_ENTRY, ())


def content_of(verb: str, leaf: Any, path: Path, ranks: Group | None = None) -> Content:
    """Say what there is to save, or to fill, of a leaf.

    Args:
        verb: On whose behalf, for messages.
        leaf: Any leaf.
        path: Where it lies.
        ranks: Those that take part; ``None`` for this one alone.

    Returns:
        Plain tensors come without gradient and class, on the memory of the leaf.

    Raises:
        UnsupportedLeaf: If it has no elements in memory, cannot be taken apart, or is distributed in a way that DCP
            does not know.
    """
    if is_plain(leaf) or is_array_of_numbers(leaf):
        return PLAIN
    leaf_type = leaf_type_of(type(leaf))
    assert leaf_type is not None
    if leaf_type.opaque:
        _check_whole(verb, leaf, path)
        return PLAIN
    leaf = settled(leaf)
    leaf_type = leaf_type_of(type(leaf))
    if is_distributed(leaf):
        if leaf_type is TENSOR:  # a process that saves alone would keep its part alone
            refuse_leaf(verb, path, "a tensor of which each rank holds a part", "Gather it")
        return Content(TENSOR_ENTRY, (LocalPieces(_held(verb, leaf, path, ranks or ranks_of(verb, None))),))
    if leaf_type is TENSOR and leaf.layout is torch.strided and not leaf.is_nested and leaf.dtype not in QUANTIZED:
        tensor = _bare(leaf)
        check_elements(verb, tensor, path)
        if tensor.dtype not in WITHOUT_KERNELS:
            return Content(TENSOR_ENTRY, (tensor,))
        # DCP asks torch for the sizes of elements, which it does not know of these dtypes.
        return Content(PARTS_ENTRY, (as_copied(tensor),), _facts(leaf))
    if leaf_type is not None and not leaf_type.has_elements:
        refuse_leaf(verb, path, f"a {type(leaf).__qualname__}, which has no elements", "Materialize it")
    unpacked = unpack(verb, [leaf], lambda: [path])
    if unpacked.holds_distributed():
        held = f"a {type(leaf).__qualname__} around a distributed tensor"
        refuse_leaf(verb, path, held, "Gather it")
    parts = [_bare(unpacked.parts[index]) for index in dict.fromkeys(unpacked.parts_of(0))]
    for part in parts:
        check_elements(verb, part, path)
    parts = [as_copied(part) if part.dtype in WITHOUT_KERNELS else part for part in parts]
    return Content(PARTS_ENTRY, parts, _facts(leaf), unpacked)


@quietly
def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def _facts(leaf: Any) -> str:
    return without_addresses(dict(facts(leaf)))


def _check_whole(verb: str, leaf: Any, path: Path) -> None:
    """Raise if a leaf that is to be pickled is or holds a distributed tensor: the first rank's part would be kept."""
    if is_distributed(leaf):
        refuse_leaf(verb, path, f"a {type(leaf).__qualname__}, of which each rank holds a part", "Gather it")
    try:
        unpacked = unpack(verb, [leaf], lambda: [path], memory=False)
    except UnsupportedLeaf:  # then it cannot be pickled either, and need not be where it is only replaced
        return
    if unpacked.holds_distributed():
        held = f"a {type(leaf).__qualname__} with a distributed tensor inside"
        refuse_leaf(verb, path, held, "Gather it, or register the class as a container (register_container)")


def _held(verb: str, leaf: Any, path: Path, ranks: Group) -> LocalChunks:
    """Return the chunks that this rank holds of a distributed leaf."""
    cls = type(leaf).__qualname__
    try:
        held = chunks_of(leaf, ranks)
    except Exception as error:
        raise located_error(verb, "tell the chunks of", error, lambda: [path], [leaf], 0) from error
    assert held is not None
    if held.partials is not None:
        refuse_leaf(verb, path, f"a {cls} with the placements {leaf.placements}", "Redistribute or reduce it")
    if held.dtype in WITHOUT_KERNELS:  # DCP asks torch for the sizes of elements
        refuse_leaf(verb, path, f"a {cls} of {held.dtype}", "View it as numbers (uint8)")
    for piece in held.memory:
        if leaf_type_of(type(piece)) is not TENSOR or piece.layout is not torch.strided:
            refuse_leaf(verb, path, f"a {cls} of a {type(piece).__qualname__}", "Gather it, or save its inner tensors")
        check_elements(verb, piece, path)
    if held.layout is not None and not held.layout.is_complete:
        part = f"one of which the ranks of the group hold only a part ({held.text})"
        refuse_leaf(verb, path, part, "Pass the process_group of all ranks that hold it, or gather it")
    return held


def compact(value: Any) -> Any:
    """Return a plain value to be pickled, or a copy if it holds small parts of large storages: pickle writes all."""
    if is_plain(value) or is_array_of_numbers(value) or type(value) in (list, tuple, dict):  # only plain values in it
        return value
    try:
        columns = unpack("save", [value], lambda: [Path()]).columns
        devices = set(columns.devices) - {torch.device("meta")}
        if len(devices) != 1 or all(map(eq, extents(columns), columns.storage_bytes)):
            return value
        return replicated("save", value, memory_of(devices.pop()), copy=True)
    except UnsupportedLeaf:  # pickle may know better
        return value


@quietly
def to_save(tensor: Any) -> Any:
    """Return a tensor whose memory holds what the tensor reads as."""
    if isinstance(tensor, LocalPieces):
        return tensor
    if tensor.dtype is torch.bool:  # DCP clones views, and that changes bytes
        return as_copied(tensor).clone(memory_format=torch.contiguous_format).view(torch.bool)
    return tensor.resolve_conj().resolve_neg()


def boxes_of(tensor: Any) -> Sequence[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that this rank holds, and the plain tensors in which their elements lie."""
    if isinstance(tensor, LocalPieces):
        return [(box, _bare(piece)) for box, piece in zip(tensor.boxes, tensor.pieces, strict=True)]
    return [(whole_box(tensor.shape), tensor)]
