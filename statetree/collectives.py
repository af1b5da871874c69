"""What collectives move, from where and to where, by exchanges that are planned once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.buffers import Memory
from statetree.errors import RankMismatch
from statetree.exchange import Exchange, Pieces
from statetree.plans import Move
from statetree.summands import Source, reduce_summands
from statetree.torch_internals import WITHOUT_KERNELS
from statetree.transforms._pipeline import replicated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks import Holding, Layout
    from statetree.groups import Group
    from statetree.survey import Survey


class Receipt(NamedTuple):
    """Where the elements of a tensor go: the layout, and this rank's pieces in the order of its rows."""

    layout: Layout
    pieces: Sequence[torch.Tensor]


def pieces_of(holding: Holding, layout: Layout, rank: int) -> list[torch.Tensor]:
    """Return this rank's pieces in the order of a layout's rows, as tensors that can be copied."""
    if len(holding.boxes) == 1:
        return [movable(holding.pieces[0])]
    by_box = dict(zip(holding.boxes, holding.pieces, strict=True))
    return [movable(by_box[box]) for box in layout.boxes_of(rank)]


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one that torch can copy: without gradient, and as numbers if it has no kernels."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dtype not in WITHOUT_KERNELS else tensor.view(moved_dtype(tensor.dtype))


def moved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype as which elements are moved."""
    if dtype not in WITHOUT_KERNELS:
        return dtype
    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def sources_of(
    survey: Survey, layouts: dict[int, Layout], moving: Sequence[int], group: Group, bucket_bytes: int
) -> dict[int, Source]:
    """Return where the elements of distributed leaves come from. Summands are reduced."""
    holdings = survey.holdings
    found = {index: Source(layouts[index], pieces_of(holdings[index], layouts[index], group.rank)) for index in moving}
    summed = [index for index in moving if holdings[index].summands is not None]
    if summed:
        device = communicating_device(group, [holdings[index].device for index in summed])
        reduced = reduce_summands(
            [found[index] for index in summed],
            [moved_dtype(holdings[index].dtype) for index in summed],
            [summands for index in summed if (summands := holdings[index].summands) is not None],
            group,
            device,
            bucket_bytes,
        )
        found.update(zip(summed, reduced, strict=True))
    return found


#: A tensor to move: where it comes from, where it goes, and its dtype.
Item = tuple[Source, Receipt, torch.dtype]

#: Exchanges that were planned, by what the ranks agreed on: the last ones used.
_PLANNED: Final[OrderedDict[Any, Exchange]] = OrderedDict()
_MAX_PLANNED: Final = 16


def exchange(
    key: Any,
    items: Sequence[Item],
    group: Group,
    device: torch.device,
    bucket_bytes: int,
    *,
    source: int | None = None,
) -> Exchange:
    """Move elements from where they come from to where they go.

    Args:
        key: What the ranks agreed on. For a key that was seen before, the plan is known.
        items: What moves.
        group: The ranks.
        device: The memory that is sent from and received into.
        bucket_bytes: As for ``Exchange``.
        source: As for ``Exchange``.
    """
    key = (key, group.rank, group.global_ranks, bucket_bytes)
    planned = _PLANNED.pop(key, None)
    if planned is None:
        moves = [Move(sent.layout, received.layout, moved_dtype(dtype)) for sent, received, dtype in items]
        planned = Exchange(moves, group, bucket_bytes, source=source)
    _PLANNED[key] = planned
    while len(_PLANNED) > _MAX_PLANNED:
        _PLANNED.popitem(last=False)
    planned.run([Pieces(sent.pieces, received.pieces) for sent, received, _ in items], group, device)
    return planned


def communicating_device(group: Group, kinds: Sequence[str]) -> torch.device:
    """Return the memory to send from and receive into, for tensors on devices of certain types."""
    supported = group.devices
    wanted = [kind for kind in sorted(set(kinds) - {"cpu", "meta", ""}) if kind in supported]
    return group.device(wanted[0] if wanted else supported[0])


def check_rank(verb: str, name: str, rank: Any, group: Group) -> None:
    """Raise ``RankMismatch`` unless an argument is a rank of the group."""
    if not isinstance(rank, int) or not 0 <= rank < group.size:
        msg = f"{verb}: {name} must be a rank of the group: expected one of 0 to {group.size - 1}, got {rank!r}."
        raise RankMismatch(msg)


def check_bucket(verb: str, bucket_bytes: Any) -> None:
    """Raise ``ValueError`` unless a bucket holds something."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        msg = f"{verb}: bucket_bytes must be a positive number of bytes, got {bucket_bytes!r}."
        raise ValueError(msg)


def as_leaf(fresh: torch.Tensor, leaf: Any) -> torch.Tensor:
    """Return a fresh plain tensor as what a distributed leaf is beside its elements: a parameter, with attributes."""
    requires_grad = bool(getattr(leaf, "requires_grad", False))
    if isinstance(leaf, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=requires_grad)
    elif isinstance(leaf, torch.nn.Buffer):
        fresh = torch.nn.Buffer(fresh, persistent=leaf.persistent)
    elif requires_grad:
        fresh.requires_grad_()
    # What torch's classes keep for themselves begins with an underscore.
    carried = {name: held for name, held in getattr(leaf, "__dict__", {}).items() if not name.startswith("_")}
    if carried and isinstance(leaf, torch.Tensor):
        vars(fresh).update(replicated("gather", carried, Memory(), copy=True))
    return fresh
