"""``reshard``: a state in the layout of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from statetree.declare import collective
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.driver import exchange
from statetree.exchange.fitting import LikeOptions
from statetree.exchange.recognition import recognised
from statetree.transforms.deltas.delta import Delta
from statetree.transforms.deltas.moving import moved_delta

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from statetree.errors import Difference
    from statetree.exchange.group import Timeout
    from statetree.tree.selection import Where

T = TypeVar("T")


@collective
@recognised("tree", "like")
def reshard(
    tree: T,
    like: Any,
    *,
    group: ProcessGroup | None = None,
    in_place: bool = False,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
    on_missing: Callable[[Difference], object] | None = None,
    union: bool = False,
    replicas: Literal["check", "first"] = "check",
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> T:
    """Bring a tree's tensors into the layout of another tree.

    Any layout becomes any other: other placements, another mesh, whole tensors on every rank. Each rank receives the
    elements that it needs and lacks, from the ranks that have them, and nothing else.

    Args:
        tree: Where elements and plain values come from: the same tree on every rank, up to elements and plain values.
            Or a ``Delta`` of such a tree: then only what changed moves, ``like`` must hold the elements of the base,
            and the result is the ``Delta`` to apply to it. Options but ``group`` and ``timeout`` mean nothing then.
        like: A tree of the same structure, whose tensors have the same global shapes and dtypes (but for ``cast``). It
            gives layouts, devices, strides, ties and classes. Without ``in_place`` its contents do not matter, and its
            tensors may be ``meta`` ones.
        group: The ranks that take part; by default all. Together they must hold every tensor of ``tree`` completely.
        in_place: Write into the tensors of ``like`` instead of fresh ones.
        where: Which leaves of ``like`` are meant, as for ``select``; its others are left alone, and what differs there
            does not count. A predicate is asked about the leaves of ``like``, and about those of ``tree`` that ``like``
            lacks. The ranks must mean the same leaves. Every tensor of ``tree`` must be held completely, meant or not.
        cast: Convert elements to the dtypes of ``like``, as ``copy_into(cast=True)`` does: losslessly, or between
            floating point types, and not where a value is too large. They are converted where they are sent if that
            makes fewer bytes, otherwise where they arrive.
        strict: Whether both trees must have the same keys. With ``False``, what both have is moved, and the rest of
            ``like`` is left alone. Lists, tuples and other containers must match all the same.
        on_missing: Called with the ``Difference`` for each path that only one of the trees has, if ``strict`` is
            ``False``; on every rank, before anything moves.
        union: Whether ranks may hold different keys (pipeline stages, experts). The ranks exchange their keys, and the
            result has all of them on every rank. Where a rank has no key of ``like``, it gets a ``meta`` tensor of the
            global shape. Otherwise that is refused.
        replicas: What to do with a path at which the ranks hold tensors over meshes that differ from rank to rank (two
            copies of a model, or two pipeline stages with one name for their layers). With ``"check"`` their bytes are
            hashed, and they are copies only if the hashes agree. With ``"first"``, the elements of the first rank's
            mesh are taken, and nothing is compared. Copies within a mesh are not compared, nor is ``like``.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree with the structure and plain values of ``tree``, and tensors in the layouts of ``like``. With
        ``where`` or without ``strict`` its structure is that of ``like``.

    Aliasing:
        None, but with ``in_place`` the tensors are those of ``like``, and so are leaves that nothing is moved to (see
        ``where`` and ``strict``).

    Collective:
        Every rank of the group calls it, with the same options.

    Raises:
        TreeMismatch: If structure, global shapes or dtypes differ, a glob matches nothing in either tree, a tensor of
            ``like`` cannot be written or is ``Partial``, or tensors of ``like`` are tied that hold different values
            in ``tree`` (or, with ``union``, of which no rank holds both), or overlap without being the same view, or
            with ``in_place`` something to move lies in memory that is written. Nothing is written then.
        RankMismatch: If the ranks hold different trees or pass different options, if they mean different leaves, if one
            of them failed or did not answer in time, if tensors of ``like`` are tied on some ranks only, or if meshes
            that differ from rank to rank do not hold the same (see ``replicas``). On every rank, before anything moves.
        UnsupportedLeaf: If the chunks of a leaf are unknown, or the group does not hold all of them.
        MemoryError: As for ``gather``.

    Example:
        >>> import statetree as st, torch
        >>> st.reshard({"w": torch.ones(2)}, like={"w": torch.empty(2, device="meta")})
        {'w': tensor([1., 1.])}
    """
    if isinstance(tree, Delta):
        with exchange("reshard", group, timeout, delta=True) as run:
            moved: Any = moved_delta(run, tree, like)
            return moved
    how = LikeOptions(in_place, cast, strict, on_missing, where)
    options: dict[str, Any] = {**how.agreed(), "union": union, "replicas": replicas, "bucket_bytes": bucket_bytes}
    with exchange("reshard", group, timeout, **options) as run:
        source = run.manifest(tree, complete=True, union=union, unread=True)
        return run.move(source, run.destination_like(source, run.manifest(like, written=True, union=union), how))
