"""``broadcast``: one rank's tree on every rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from statetree.declare import collective
from statetree.errors import UnsupportedLeaf
from statetree.exchange.allocation import allocated
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.description import SourceTree
from statetree.exchange.destination import Destination
from statetree.exchange.driver import Exchange, exchange
from statetree.exchange.plan import Chunked, Transfer
from statetree.exchange.recognition import recognised
from statetree.exchange.senders import held_for_all
from statetree.exchange.transfers import sendable_pieces
from statetree.torch_internals import copy_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.group import Timeout
    from statetree.exchange.manifest import Manifest

T = TypeVar("T")


@overload
def broadcast(
    tree: None, *, src: int = 0, group: ProcessGroup | None = None, bucket_bytes: int = ..., timeout: Timeout = None
) -> Any: ...
@overload
def broadcast(
    tree: T | None, *, src: int = 0, group: ProcessGroup | None = None, bucket_bytes: int = ..., timeout: Timeout = None
) -> T: ...
@collective
@recognised("tree")
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
        make = partial(SourceTree, own, elements) if own is not None and run.group.rank == src else None
        source = run.receive(make, own)
        return run.move(source, _SameLayouts(source, own, run))


class _SameLayouts(Destination):
    """Fresh tensors on every rank: those that the source described, and distributed ones like this rank's own."""

    def __init__(self, source: Manifest, own: Manifest | None, run: Exchange) -> None:
        super().__init__(source, list(source.leaves))
        self.own, self._rank, self._src = own, run.group.rank, run.options["src"]
        self._made: Manifest | None = None
        assert source.received is not None
        if not source.chunks:
            return
        if own is None or not source.received.layouts:  # this rank passed None, or another one
            path = source.path(next(iter(source.chunks)))
            msg = (
                f"broadcast: the leaf at {path or '<root>'} is distributed: expected the tree on every rank, got None. "
                "Pass it, or gather it first."
            )
            raise UnsupportedLeaf(msg, path)
        wanted = [leaf if index in own.chunks else None for index, leaf in enumerate(own.leaves)]
        fresh = allocated("broadcast", wanted, own.spec, keep_meta=True)
        for there, here in zip(source.order, own.order, strict=True):
            if here in own.chunks:
                self.leaves[there] = fresh[here]
        self._made = run.manifest(fresh)
        self._layouts = source.received.layouts

    def _moving(self, *, partial: bool) -> list[Transfer]:
        """Return how this rank's leaves move: those of which ranks hold partials, or the others."""
        found: list[Transfer] = []
        if self.own is None or self._made is None:
            return found
        for index in self.own.moving():
            layout, held, made = self._layouts[index], self.own.chunks[index], self._made.chunks[index]
            if (held.partials is not None) == partial:
                origin = layout if partial else held_for_all(layout, self._src)
                given = Chunked(origin, sendable_pieces(held, origin, self._rank))
                filled = Chunked(layout, sendable_pieces(made, layout, self._rank))
                found.append(Transfer(given, filled, held.dtype))
        return found

    def sources(self) -> list[int]:
        """Return nothing: what moves is each rank's own, wherever the source has a replica of it."""
        return []

    def transfers(self, sources: dict[int, Chunked], layouts: dict[int, ChunkLayout] | None = None) -> list[Transfer]:  # noqa: ARG002 - of each rank's own
        """Return what moves from where to where."""
        return self._moving(partial=False)

    def write(self) -> None:
        """Copy partials: every rank has its own."""
        for transfer in self._moving(partial=True):
            copy_each(transfer.target.pieces, transfer.source.pieces)

    def touched(self) -> Iterable[int]:
        """Return all leaves."""
        return range(len(self.leaves))

    def read(self) -> Iterable[int]:
        """Return this rank's distributed leaves."""
        return () if self.own is None else self.own.chunks

    def finish(self) -> Any:
        """Return the resulting tree."""
        return self.source.lift(self.leaves, {} if self.own is None else self.own.recipes)
