"""``gather``: distributed tensors as whole ones, on some ranks or on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from statetree.declare import collective, leafwise
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.destination import WholeOn
from statetree.exchange.driver import exchange
from statetree.exchange.recognition import recognised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.exchange.group import Timeout

T = TypeVar("T")


@leafwise
@collective
@recognised("tree", compares_values=False)
def gather(
    tree: T,
    *,
    dst: int | Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    union: bool = False,
    replicas: Literal["check", "first"] = "check",
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> T:
    """Turn distributed tensors into whole ones.

    ``DTensor``, ``ShardedTensor`` and other distributed leaves become plain tensors of their global shape, whatever
    their placements: uneven and strided shards, several mesh dims, and ``Partial`` sums, which are reduced. Leaves that
    share memory are moved once, and share memory again.

    Args:
        tree: Any tree, the same on every rank up to elements and plain values.
        dst: Which ranks of the group get the tensors: one, several, or with ``None`` all.
        group: The ranks that take part; by default all. Together they must hold every distributed tensor completely.
        device: Where the tensors are put, by default where the shards lie: devices of one type on every rank. With
            ``"meta"`` nothing is moved.
        union: Whether ranks may hold different keys (pipeline stages, experts). The ranks exchange their keys, and the
            result has all of them on every rank, including plain values and tensors that only some ranks hold.
            Otherwise that is refused.
        replicas: What to do with a path at which the ranks hold tensors over meshes that differ from rank to rank (two
            copies of a model, or two pipeline stages with one name for their layers). With ``"check"`` their bytes are
            hashed, and they are copies only if the hashes agree. With ``"first"``, the elements of the first rank's
            mesh are taken, and nothing is compared. Copies within a mesh are not compared.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree of the same structure. On ranks outside of ``dst``, every tensor in it is a ``meta`` tensor of its global
        shape and dtype.

    Aliasing:
        Leaves that are not distributed are passed through (with ``device``: if they lie there already; with ``union``:
        if all ranks hold them).

    Collective:
        Every rank of the group calls it, with the same options.

    Raises:
        RankMismatch: If the ranks hold different trees or pass different options, if one of them failed or did not
            answer in time, if ``dst`` is not a rank of the group, or if meshes that differ from rank to rank do not
            hold the same (see ``replicas``). On every rank, before anything moves.
        UnsupportedLeaf: If the chunks of a leaf are unknown, or the group does not hold all of them.
        MemoryError: If there is no memory for the result or the buckets (``RuntimeError`` where torch says so). It is
            taken before anything moves (buckets for the first 1,000 rounds), and the other ranks raise
            ``RankMismatch``.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.gather({"w": torch.ones(2)})  # without ranks there is nothing to do
        {'w': tensor([1., 1.])}
    """
    options: dict[str, Any] = {"union": union, "replicas": replicas, "bucket_bytes": bucket_bytes}
    with exchange("gather", group, timeout, dst=dst, **options) as run:
        # Which device of a type it is may differ from rank to rank.
        run.options["device"] = None if device is None else torch.device(device).type
        receivers = run.ranks(dst)
        source = run.manifest(tree, complete=True, union=union)
        target = run.destination(source, WholeOn(receivers), device=device)
        return run.move(source, target)
