"""``reshard``: a state in the layout of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from statetree.agreement import Statement
from statetree.collectives import Departure, check_bucket, check_choice
from statetree.compose import collective
from statetree.exchange import BUCKET_BYTES
from statetree.groups import Group, Timeout, group_of
from statetree.relayout import Relayout
from statetree.survey import Survey, agree_on_layouts
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks import Layout


@collective
def reshard(
    tree: Any,
    like: Any,
    *,
    group: ProcessGroup | None = None,
    in_place: bool = False,
    replicas: Literal["check", "first"] = "check",
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
        replicas: What to do with a path at which the ranks hold tensors over meshes that differ from rank to rank (two
            copies of a model, or two pipeline stages with one name for their layers). With ``"check"`` they are copies
            only if their bytes are the same, which are hashed for that. With ``"first"``, what the first rank's mesh
            holds is taken without a look at the others. Copies within a mesh are not compared, nor is ``like``.
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
        RankMismatch: If the ranks hold different trees or pass different options, if one of them failed or did not
            answer in time, if tensors of ``like`` are tied on some ranks only, or if meshes that differ from rank to
            rank do not hold the same (see ``replicas``). On every rank, before anything moves.
        UnsupportedLeaf: If the chunks of a leaf cannot be told, or the group does not hold all of them.
        MemoryError: As for ``gather``.

    Example:
        >>> import statetree as st, torch
        >>> st.reshard({"w": torch.ones(2)}, like={"w": torch.empty(2, device="meta")})
        {'w': tensor([1., 1.])}
    """
    ranks = group_of("reshard", group, timeout)
    return _reshard("reshard", tree, like, ranks, bucket_bytes, replicas, in_place=in_place)


@quietly
def _reshard(verb: str, tree: Any, like: Any, group: Group, bucket_bytes: int, replicas: str, *, in_place: bool) -> Any:
    def prepare() -> tuple[Statement, Sequence[tuple[Survey, bool]], Relayout]:
        check_bucket(verb, bucket_bytes)
        check_choice(verb, replicas)
        source = Survey(verb, tree, group, replicas=replicas)
        relayout = Relayout(source, like, group, in_place=in_place)
        options = f"{verb}(in_place={in_place}, replicas={replicas!r}, bucket_bytes={bucket_bytes})"
        return Statement(options, relayout.entries(), relayout.details()), relayout.surveys, relayout

    def load(relayout: Relayout, layouts: Sequence[dict[int, Layout]], key: Any) -> Departure:
        return relayout.load(layouts[0], layouts[1], key, bucket_bytes)

    relayout, departure = agree_on_layouts(verb, group, prepare, load)
    departure.move()
    return relayout.finished()
