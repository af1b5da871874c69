"""What collectives move, from where and to where, by exchanges that are planned once."""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.buffers import Memory
from statetree.errors import RankMismatch
from statetree.exchange import Buckets, Exchange, Pieces, take_buckets
from statetree.plans import Move
from statetree.summands import Reduction, Source, prepare_reduction
from statetree.torch_internals import as_copied, copied_dtype
from statetree.transforms._pipeline import replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Return a tensor as one that torch can copy: without gradient, and as integers if copies would change it."""
    return as_copied(tensor.detach() if tensor.requires_grad else tensor)


#: A tensor to move: where it comes from, where it goes, and its dtype.
Item = tuple[Source, Receipt, torch.dtype]


class _Planned(NamedTuple):
    """An exchange, and the digest of what it was planned for."""

    exchange: Exchange
    digest: bytes


#: Exchanges that were planned, by what the ranks agreed on: the last ones used.
_PLANNED: Final[OrderedDict[Any, _Planned]] = OrderedDict()
_MAX_PLANNED: Final = 16
#: Set (in tests) to look, whenever a plan is used again, whether it is the one that would be made now. A plan that
#: depends on something that the ranks do not agree on moves other elements than it should, and nobody notices.
CHECK_PLANS: Final = "STATETREE_CHECK_PLANS"


class _Leg(NamedTuple):
    """An exchange with this rank's tensors, and what is done once their elements are there."""

    exchange: Exchange
    pieces: Sequence[Pieces]
    finish: Callable[[], None] | None = None


class Departure(NamedTuple):
    """Everything that moving elements needs, memory included: after that, only the others can fail."""

    legs: Sequence[_Leg]
    group: Group
    buckets: Buckets

    def move(self) -> None:
        """Move the elements."""
        for leg in self.legs:
            leg.exchange.run(leg.pieces, self.group, self.buckets)
            if leg.finish is not None:
                leg.finish()


class Terms(NamedTuple):
    """How elements are moved.

    Attributes:
        key: What the ranks agreed on. For a key that was seen before, the plan is known.
        group: The ranks.
        device: The memory that is sent from and received into.
        bucket_bytes: As for ``Exchange``.
        source: As for ``Exchange``.
    """

    key: Any
    group: Group
    device: torch.device
    bucket_bytes: int
    source: int | None = None


def depart(terms: Terms, items: Sequence[Item], reduction: Reduction | None = None) -> Departure:
    """Plan how elements move from where they come from to where they go, and take the memory for it.

    Args:
        terms: How.
        items: What moves.
        reduction: What is put together before that.
    """
    legs = []
    if reduction is not None:
        summed = _planned(terms, "summands", lambda: reduction.moves, reduction.pieces)
        legs.append(_Leg(summed, reduction.pieces, reduction.finish))
    pieces = [Pieces(sent.pieces, received.pieces) for sent, received, _ in items]
    legs.append(_Leg(_planned(terms, "elements", lambda: _moves(items), pieces), pieces))
    sizes = [leg.exchange.bucket_sizes(leg.pieces, terms.device) for leg in legs]
    return Departure(legs, terms.group, take_buckets(sizes, terms.device))


def _moves(items: Sequence[Item]) -> list[Move]:
    return [Move(sent.layout, received.layout, copied_dtype(dtype)) for sent, received, dtype in items]


def _planned(terms: Terms, what: str, moves: Callable[[], list[Move]], pieces: Sequence[Pieces]) -> Exchange:
    """Return an exchange, made anew unless its plan is known."""
    group = terms.group
    key = (terms.key, what, group.rank, group.global_ranks, terms.bucket_bytes)
    planned = _PLANNED.pop(key, None)
    if planned is None:
        needed = moves()
        exchange = Exchange(needed, group, terms.bucket_bytes, source=terms.source)
        planned = _Planned(exchange, _digest(terms, needed, pieces))
    elif os.environ.get(CHECK_PLANS) and planned.digest != _digest(terms, moves(), pieces):
        msg = f"the plan of {what} was made for other moves: they depend on something that the ranks do not agree on"
        raise AssertionError(msg)
    _PLANNED[key] = planned
    while len(_PLANNED) > _MAX_PLANNED:
        _PLANNED.popitem(last=False)
    return planned.exchange


def _digest(terms: Terms, moves: Sequence[Move], pieces: Sequence[Pieces]) -> bytes:
    """Return a digest of everything that an exchange is planned for, and of how many tensors it is run with."""
    found = blake2b(f"{terms.source} {terms.bucket_bytes} {len(moves)}".encode(), digest_size=16)
    for move, (sources, targets) in zip(moves, pieces, strict=True):
        found.update(move.source.digest + move.target.digest)
        found.update(f"{move.dtype} {len(sources)} {len(targets)} ".encode())
    return found.digest()


def sources_of(
    survey: Survey, layouts: dict[int, Layout], moving: Sequence[int], rank: int
) -> tuple[dict[int, Source], Reduction | None]:
    """Return where the elements of distributed leaves come from, and the summands that are put together before."""
    holdings = survey.holdings
    found = {index: Source(layouts[index], pieces_of(holdings[index], layouts[index], rank)) for index in moving}
    summed = [index for index in moving if holdings[index].summands is not None]
    if not summed:
        return found, None
    reduction = prepare_reduction(
        [found[index] for index in summed],
        [holdings[index].dtype for index in summed],
        [summands for index in summed if (summands := holdings[index].summands) is not None],
        rank,
    )
    found.update(zip(summed, reduction.reduced, strict=True))
    return found, reduction


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


def check_choice(verb: str, replicas: Any) -> None:
    """Raise ``ValueError`` unless it is known what to do where meshes differ from rank to rank."""
    if not isinstance(replicas, str) or replicas not in ("check", "first"):
        msg = f'{verb}: replicas must be "check" or "first", got {replicas!r}.'
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
