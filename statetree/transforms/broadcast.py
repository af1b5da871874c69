"""``broadcast``: one rank's tree on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.agreement import Statement
from statetree.collectives import Item, Receipt, check_bucket, check_rank, pieces_of
from statetree.compose import collective
from statetree.errors import UnsupportedLeaf
from statetree.exchange import BUCKET_BYTES
from statetree.groups import Group, Timeout, group_of
from statetree.spreading import Made, Parcel, Sent, packed, spread
from statetree.summands import Source
from statetree.survey import Survey, path_order
from statetree.target import allocated
from statetree.torch_internals import copy_each, quietly
from statetree.tree import unflatten

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from statetree.chunks import Layout


@collective
def broadcast(
    tree: Any,
    *,
    src: int = 0,
    group: ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> Any:
    """Give every rank the source's tree.

    Structure, plain values, opaque objects, ties and geometry come out as they are on the source, bit for bit.

    Args:
        tree: The source's tree. Other ranks may pass ``None``. What they pass otherwise must have the same structure,
            shapes and dtypes, and is not looked at beyond that. Trees with distributed tensors must be passed on every
            rank: those keep their layout, with the source's elements wherever it has a replica. Whether a tensor that
            is not distributed lies in the memory of one that is, is not kept: they take elements of different ranks.
        src: The source, a rank of the group.
        group: The ranks that take part; by default all.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        The source's tree, on tensors of each rank's own.

    Aliasing:
        None. Functions, classes and modules are looked up by their names on the other ranks.

    Collective:
        Every rank of the group calls it, with the same options. Structure and plain values are sent by pickle.

    Raises:
        RankMismatch: If the ranks pass different trees or options, if one of them failed or did not answer in time, or
            if ``src`` is not a rank of the group.
        UnsupportedLeaf: If a leaf cannot be copied or sent.
        MemoryError: As for ``distribute``.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.broadcast({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    return _broadcast(tree, src, group_of("broadcast", group, timeout), bucket_bytes)


@quietly
def _broadcast(tree: Any, src: int, group: Group, bucket_bytes: int) -> Any:
    def prepare() -> tuple[Statement, tuple[Survey | None, Sent]]:
        check_bucket("broadcast", bucket_bytes)
        check_rank("broadcast", "src", src, group)
        options = f"broadcast(src={src}, bucket_bytes={bucket_bytes})"
        if tree is None and group.rank != src:
            return Statement(options, None), (None, Sent())
        survey = Survey("broadcast", tree, group, written=True)  # tensors like these are filled
        survey.check_readable()
        elements = {index: (holding.dtype, holding.shape) for index, holding in survey.holdings.items()}
        sent = packed("broadcast", tree, lambda *_: elements) if group.rank == src else Sent()
        return Statement(options, survey.entries(), survey.details(), len(sent.message)), (survey, sent)

    def make(parcel: Parcel, survey: Survey | None, layouts: dict[int, Layout], leaves: list[Any]) -> Made:
        if not parcel.shapes:
            return Made(leaves, [])
        if survey is None or not layouts:  # this rank passed None, or another one
            path = parcel.spec.paths()[next(iter(parcel.shapes))]
            msg = (
                f"broadcast: the leaf at {path or '<root>'} is distributed: expected the tree on every rank, got None. "
                "Pass it, or gather it first."
            )
            raise UnsupportedLeaf(msg, path)
        return Made(leaves, _put_distributed(leaves, parcel, survey, layouts, group))

    return spread("broadcast", src, group, bucket_bytes, prepare, make)


def _put_distributed(
    leaves: list[Any], parcel: Parcel, survey: Survey, layouts: dict[int, Layout], group: Group
) -> list[Item]:
    """Put fresh distributed tensors like this rank's own in their places, and return what moves into them."""
    wanted = [leaf if index in survey.holdings else None for index, leaf in enumerate(survey.leaves)]
    fresh = allocated("broadcast", wanted, survey.spec)
    for there, here in zip(path_order(parcel.spec), survey.order, strict=True):
        if here in survey.holdings:
            leaves[there] = fresh[here]
    made = Survey("broadcast", unflatten(survey.spec, fresh), group)
    items: list[Item] = []
    for index in survey.leading():
        layout, holding = layouts[index], survey.holdings[index]
        sources = pieces_of(holding, layout, group.rank)
        targets = pieces_of(made.holdings[index], layout, group.rank)
        if holding.summands is None:
            items.append((Source(layout, sources), Receipt(layout, targets), holding.dtype))
        else:  # every rank has a summand of its own
            copy_each(targets, sources)
    return items
