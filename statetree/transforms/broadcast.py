"""``broadcast``: one rank's tree on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.declare import collective
from statetree.errors import UnsupportedLeaf
from statetree.exchange.allocation import allocated
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.description import SourceTree
from statetree.exchange.driver import Exchange, exchange
from statetree.exchange.partial_reduction import Chunked
from statetree.exchange.path_order import path_order
from statetree.exchange.transfers import Transfer, sendable_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from statetree.exchange.description import Received
    from statetree.exchange.group import Timeout
    from statetree.exchange.manifest import Manifest

T = TypeVar("T")


@collective
def broadcast(
    tree: T | None,
    *,
    src: int = 0,
    group: ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> T:
    """Give every rank the source's tree.

    Structure, plain values, opaque objects, ties and geometry come out as they are on the source, bit for bit.

    Args:
        tree: The source's tree. Other ranks may pass ``None``. If they pass a tree, it must have the same structure,
            shapes and dtypes; its elements are not used. Trees with distributed tensors must be passed on every rank:
            those keep their layout, with the source's elements wherever it has a replica. A tie between a distributed
            tensor and one that is not distributed is lost: their elements come from different ranks.
        src: The source, a rank of the group.
        group: The ranks that take part; by default all.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        The source's tree, on tensors of each rank's own: on the device of their type that the rank uses, or if the
        source's lie on several of a type, on those with the same numbers.

    Aliasing:
        None. Functions, classes and modules are looked up by their names on the other ranks.

    Collective:
        Every rank of the group calls it, with the same options. Structure and plain values are sent by pickle.

    Raises:
        RankMismatch: If the ranks pass different trees or options, if one of them failed or did not answer in time, or
            if ``src`` is not a rank of the group.
        UnsupportedLeaf: If a leaf cannot be copied or sent, or if the source's tensors lie on several devices of a type
            and a rank lacks one of them.
        MemoryError: As for ``distribute``.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.broadcast({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    with exchange("broadcast", group, timeout, src=src, bucket_bytes=bucket_bytes) as run:
        run.check_rank("src")
        nothing = tree is None and run.group.rank != src
        own = None if nothing else run.manifest(tree, written=True)
        elements = {}
        if own is not None:
            own.check_readable()
            elements = {index: (held.dtype, held.shape) for index, held in own.chunks.items()}
        sent = SourceTree(own, elements) if own is not None and run.group.rank == src else None
        received = run.receive(sent, own)
        transfers = _distributed(run, received, own)
        spec, leaves = received.description.spec, received.leaves
        run.move_from(received, transfers)
        if own is not None:
            run.hold(own.spec, own.leaves, own.chunks)
        run.hold(spec, leaves, range(len(leaves)))
        return received.description.outline.lift("broadcast", leaves, {} if own is None else own.recipes)


def _distributed(run: Exchange, received: Received, own: Manifest | None) -> list[Transfer]:
    """Put fresh distributed tensors like this rank's own in their places, and return what moves into them."""
    description, layouts, rank = received.description, received.layouts, run.group.rank
    if not description.exchanged:
        return []
    if own is None or not layouts:  # this rank passed None, or another one
        path = description.spec.paths()[next(iter(description.exchanged))]
        msg = (
            f"broadcast: the leaf at {path or '<root>'} is distributed: expected the tree on every rank, got None. "
            "Pass it, or gather it first."
        )
        raise UnsupportedLeaf(msg, path)
    wanted = [leaf if index in own.chunks else None for index, leaf in enumerate(own.leaves)]
    fresh = allocated("broadcast", wanted, own.spec, keep_meta=True)
    for there, here in zip(path_order(description.spec), own.order, strict=True):
        if here in own.chunks:
            received.leaves[there] = fresh[here]
    made = run.manifest(fresh)
    transfers: list[Transfer] = []
    for index in own.moving():
        layout, held = layouts[index], own.chunks[index]
        sources, targets = (sendable_pieces(chunks, layout, rank) for chunks in (held, made.chunks[index]))
        if held.partials is None:
            transfers.append(Transfer(Chunked(layout, sources), Chunked(layout, targets), held.dtype))
        else:  # every rank has a partial of its own
            run.executor.copy(targets, sources)
    return transfers
