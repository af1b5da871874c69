"""``distribute``: whole tensors in the layout of another tree."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from statetree.chunks.boxes import whole_box
from statetree.declare import collective_unless
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.description import SourceTree
from statetree.exchange.driver import Exchange, exchange
from statetree.exchange.fitting import LikeOptions, partners_of, raise_differences, unfit
from statetree.exchange.like import reads_values
from statetree.exchange.recognition import recognised
from statetree.leaves.builtin import is_cuttable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from statetree.errors import Difference
    from statetree.exchange.group import Timeout
    from statetree.exchange.manifest import Manifest
    from statetree.tree.selection import Where

T = TypeVar("T")


def _is_alone(options: Mapping[str, Any]) -> bool:
    """Whether a call with some options communicates with nobody."""
    return options.get("src") is None


@collective_unless(_is_alone)
@recognised("full", "like", alone=_is_alone)
def distribute(
    full: T | None,
    like: T,
    *,
    src: int | None = None,
    group: ProcessGroup | None = None,
    in_place: bool = False,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
    on_missing: Callable[[Difference], object] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> T:
    """Bring a tree of whole tensors into the layout of another tree: the inverse of ``gather``.

    Args:
        full: A tree of tensors that are not distributed.
        like: A tree of the same structure, whose tensors have the same global shapes and dtypes (but for ``cast``). It
            gives layouts, devices, strides, ties and classes. Without ``in_place`` its contents do not matter, and its
            tensors may be ``meta`` ones.
        src: With ``None`` every rank holds ``full`` and takes its own part of it, without communication. Otherwise the
            rank of the group that holds it: each rank receives its own chunks alone, and ``full`` of the others, which
            may be ``None``, is not used. Tensors that are not distributed are the source's on every rank.
        group: The ranks that take part; by default all.
        in_place: Write into the tensors of ``like`` instead of fresh ones.
        where: Which leaves of ``like`` are meant, as for ``select``; its others are left alone, and what differs there
            does not count. A predicate is asked about the leaves of ``like``, and where ``full`` is about those that
            ``like`` lacks. The ranks must mean the same leaves. No leaf of ``full`` may be distributed, meant or not.
        cast: Convert elements to the dtypes of ``like``, as ``copy_into(cast=True)`` does: losslessly, or between
            floating point types, and not where a value is too large. They are converted where they are sent if that
            makes fewer bytes, otherwise where they arrive.
        strict: Whether both trees must have the same keys. With ``False``, what both have is moved, and the rest of
            ``like`` is left alone. Lists, tuples and other containers must match all the same.
        on_missing: Called with the ``Difference`` for each path that only one of the trees has, if ``strict`` is
            ``False``; on every rank, before anything moves.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result (and tensors that are not distributed, twice).
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree with the structure and plain values of ``full``, and tensors in the layouts of ``like``. With
        ``where`` or without ``strict`` its structure is that of ``like``.

    Aliasing:
        None, but with ``in_place`` the tensors are those of ``like``, and so are leaves that nothing is moved to (see
        ``where`` and ``strict``).

    Collective:
        With ``src``, every rank of the group calls it, with the same options. Structure and plain values are sent by
        pickle. Without ``src`` there is no communication; if only some ranks pass ``src``, they wait for the others.

    Raises:
        TreeMismatch: If structure, global shapes or dtypes differ, a glob matches nothing in either tree, a tensor of
            ``like`` cannot be written or is ``Partial``, or tensors of ``like`` are tied that hold different values in
            ``full``, or overlap without being the same view, or with ``in_place`` something to move lies in memory that
            is written. Nothing is written then.
        RankMismatch: If the ranks pass a different ``like`` or different options, if they mean different leaves, if one
            of them failed or did not answer in time, or if ``src`` is not a rank of the group.
        UnsupportedLeaf: If a leaf of ``full`` is distributed or cannot be sent.
        MemoryError: As for ``gather``. A rank without memory for the description of the source's tree leaves the others
            waiting, because it is received after the agreement.

    Example:
        >>> import statetree as st, torch
        >>> st.distribute({"w": torch.ones(2)}, like={"w": torch.empty(2, device="meta")})
        {'w': tensor([1., 1.])}
    """
    how = LikeOptions(in_place, cast, strict, on_missing, where)
    options: dict[str, Any] = {"src": src, **how.agreed(), "bucket_bytes": bucket_bytes}
    with exchange("distribute", group, timeout, alone=src is None, **options) as run:
        if src is None:
            source = _whole(run.manifest(full, complete=True, unread=True))
            return run.move(source, run.destination_like(source, run.manifest(like, written=True), how))
        run.check_rank("src")
        wanted = run.manifest(like, written=True)
        if cast:  # then plain leaves may move as elements, which depends on their ties, too
            wanted.add_ties([index for index in wanted.order if is_cuttable(wanted.leaves[index])])
        make = partial(_sent, run, full, wanted, how) if run.group.rank == src else None
        how, chosen = how.as_chosen_in(wanted)
        reads = reads_values(wanted, cast=cast)
        source = run.receive(make, wanted, how.selection(wanted, chosen), reads=reads)
        return run.move(source, run.destination_like(source, wanted, how))


def _sent(run: Exchange, full: Any, like: Manifest, how: LikeOptions) -> SourceTree:
    """Return the source's tree, and which of its leaves go into distributed ones, or are converted."""
    source = _whole(run.manifest(full))
    source.divide(like.recipes, run.group)
    partners, _ = partners_of(source, like, how)
    matched = [index for index in source.order if partners[index] >= 0]
    for index in set(source.order).difference(matched):
        source.leaves[index] = None  # nobody asks for it
    moving = []
    for index in matched:
        leaf, target = source.leaves[index], like.leaves[partners[index]]
        # A plain tensor that goes into one of another dtype is sent as elements, of the smaller of both.
        is_converted = how.cast and is_cuttable(leaf) and is_cuttable(target) and leaf.dtype != target.dtype
        if partners[index] in like.chunks or is_converted:
            moving.append(index)
    raise_differences("distribute", unfit(source, like, partners, moving, cast=how.cast))
    return SourceTree(
        source, {index: (source.leaves[index].dtype, tuple(source.leaves[index].shape)) for index in moving}
    )


def _whole(manifest: Manifest) -> Manifest:
    """Refuse a tree with distributed leaves, but for chunks that are all of their tensor."""
    for index, chunks in list(manifest.chunks.items()):
        is_empty = 0 in chunks.shape  # then there are no chunks
        if chunks.layout is None and (is_empty or list(chunks.boxes) == [whole_box(chunks.shape)]):
            whole = torch.empty(chunks.shape, dtype=chunks.dtype, device="cpu") if is_empty else chunks.pieces[0]
            manifest.leaves[index] = whole
            del manifest.chunks[index], manifest.canonical[index]
            continue
        msg = f"the leaf at %PATH% is distributed already: expected a whole tensor, got {chunks.text}. Use reshard."
        raise manifest.unsupported(index, msg)
    return manifest
