"""``reshard``: a state in the layout of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.declare import collective
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.consensus import Statement
from statetree.exchange.group import Group, Timeout, group_of
from statetree.exchange.manifest import Survey, agree_on_layouts
from statetree.exchange.relayout import Relayout
from statetree.exchange.transfers import Departure, check_bucket
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks.layouts import ChunkLayout


@collective
def reshard(
    tree: Any,
    like: Any,
    *,
    group: ProcessGroup | None = None,
    in_place: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> Any:
    """Bring a tree's tensors into the layout of another tree.

    Any layout becomes any other: other placements, another mesh, whole tensors on every rank. Each rank receives the
    elements that it needs and lacks, from the ranks that have them, and nothing else.

    Args:
        tree: Where elements and plain values come from: the same tree on every rank, up to elements and plain values.
        like: A tree of the same structure, whose tensors have the same global shapes and dtypes. It gives layouts,
            devices, strides, ties and classes. Without ``in_place`` its contents do not matter, and its tensors may be
            ``meta`` ones.
        group: The ranks that take part; by default all. Together they must hold every tensor of ``tree`` completely.
        in_place: Write into the tensors of ``like`` instead of fresh ones.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree with the structure and plain values of ``tree``, and tensors in the layouts of ``like``.

    Aliasing:
        None, but with ``in_place`` the tensors are those of ``like``.

    Collective:
        Every rank of the group calls it, with the same options.

    Raises:
        TreeMismatch: If structure, global shapes or dtypes differ, a tensor of ``like`` cannot be written or is
            ``Partial``, or tensors of ``like`` are tied that hold different values in ``tree``, or overlap without
            being the same view. Nothing is written then.
        RankMismatch: If the ranks hold different trees or pass different options, or one of them failed or did not
            answer in time.
        UnsupportedLeaf: If the chunks of a leaf cannot be told, or the group does not hold all of them.
        MemoryError: As for ``gather``.

    Example:
        >>> import statetree as st, torch
        >>> st.reshard({"w": torch.ones(2)}, like={"w": torch.empty(2, device="meta")})
        {'w': tensor([1., 1.])}
    """
    return _reshard("reshard", tree, like, group_of("reshard", group, timeout), bucket_bytes, in_place=in_place)


@quietly
def _reshard(verb: str, tree: Any, like: Any, group: Group, bucket_bytes: int, *, in_place: bool) -> Any:
    def prepare() -> tuple[Statement, Sequence[tuple[Survey, bool]], Relayout]:
        check_bucket(verb, bucket_bytes)
        source = Survey(verb, tree, group)
        relayout = Relayout(source, like, group, in_place=in_place)
        options = f"{verb}(in_place={in_place}, bucket_bytes={bucket_bytes})"
        return Statement(options, relayout.entries(), relayout.details()), relayout.surveys, relayout

    def load(relayout: Relayout, layouts: Sequence[dict[int, ChunkLayout]], key: Any) -> Departure:
        return relayout.load(layouts[0], layouts[1], key, bucket_bytes)

    relayout, departure = agree_on_layouts(verb, group, prepare, load)
    departure.move()
    return relayout.finished()
