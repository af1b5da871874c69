"""The driver of every collective: describe what this rank holds, say where it goes, agree, plan, move."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.autograd.graph import increment_version

from statetree.declare import phase, without_collections
from statetree.errors import RankMismatch
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.call import Call, is_rank
from statetree.exchange.consensus import Entry, Fingerprint
from statetree.exchange.description import Received, described, manifest_of, read_description, span_transfers
from statetree.exchange.destination import FreshDestination
from statetree.exchange.discovery import discover_layouts
from statetree.exchange.executor import Executor
from statetree.exchange.fitting import LikeOptions
from statetree.exchange.group import group_of
from statetree.exchange.key_union import unite
from statetree.exchange.like import LikeDestination
from statetree.exchange.manifest import Manifest
from statetree.exchange.prepared import preparation_under_way
from statetree.exchange.transfers import PlannedTransfers, TransferOptions, plan_transfers, sources_of
from statetree.leaves.parts import unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.consensus import Alike, Consensus
    from statetree.exchange.description import SourceTree
    from statetree.exchange.destination import Destination, Device, Rule
    from statetree.exchange.group import Timeout
    from statetree.exchange.plan import Transfer

_USUAL: Final = LikeOptions()


class Exchange(Call):
    """One call of a collective that moves elements, or records (``executor``) how. Made by ``exchange``."""

    def __init__(
        self, verb: str, process_group: ProcessGroup | None, timeout: Timeout, *, alone: bool, **options: Any
    ) -> None:
        group = group_of(verb, process_group, timeout)
        super().__init__(verb, group.alone() if alone else group, **options)
        self._preparation = preparation_under_way()
        self.executor = Executor()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None and kind is None:
            try:
                preparation.conclude(self)
            except BaseException as failure:
                self._tell(failure)
                raise
        super().__exit__(kind, error, traceback)

    def agree(self, fingerprint: Fingerprint) -> Consensus:
        """Do as ``Call.agree``. If the call is prepared, the ranks agree once more, at its end."""
        consensus = super().agree(fingerprint)
        if self._preparation is not None:
            self._preparation.agreed(self, consensus.number)
        return consensus

    def check_options(self) -> None:
        """Raise ``ValueError`` if an option that many collectives have cannot be."""
        if self._preparation is not None:
            self.executor = self._preparation.begin(self)
        bucket_bytes = self.options.get("bucket_bytes", 1)
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"{self.verb}: bucket_bytes must be a positive number of bytes, got {bucket_bytes!r}.")
        replicas = self.options.get("replicas", "check")
        if not isinstance(replicas, str) or replicas not in ("check", "first"):
            raise ValueError(f'{self.verb}: replicas must be "check" or "first", got {replicas!r}.')

    @property
    def bucket_bytes(self) -> int:
        """How many bytes a rank sends and receives at a time."""
        chosen: int = self.options.get("bucket_bytes", BUCKET_BYTES)
        return chosen

    def ranks(self, chosen: int | Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks of the group that a user named: one, several, or with ``None`` all."""
        size = self.group.size
        try:
            listed: list[Any] = list(range(size) if chosen is None else cast("Sequence[int]", chosen))
        except TypeError:  # one of them, also as NumPy's or torch's number
            listed = [chosen]
        if not listed or not all(is_rank(rank, size) for rank in listed):
            msg = f"{self.verb}: dst must name ranks of the group: {self.group.expected_ranks('some')}, got {chosen!r}."
            raise RankMismatch(msg)
        ranks = tuple(sorted(set(listed)))
        self.options["dst"] = list(ranks)
        return ranks

    def manifest(
        self,
        tree: Any,
        *,
        complete: bool = False,
        written: bool = False,
        union: bool = False,
        every: bool = False,
        unread: bool = False,
    ) -> Manifest:
        """Describe what this rank holds of a tree.

        Args:
            tree: Any tree, the same on every rank up to elements and plain values.
            complete: Whether its elements will be read: the ranks must hold all of them between them.
            written: Whether elements will be moved into its tensors.
            union: Whether ranks may hold different keys: they tell each other, and it describes a tree that has all.
            every: Whether all leaves are divided that are made of tensors.
            unread: Whether ``destination_like`` reads what is made of stored tensors, by boxes. Prepared calls do not.
        """
        replicas = None if written else self.options.get("replicas", "check")
        options = {"complete": complete, "written": written, "every": every}
        options["unread"] = unread and not union and self._preparation is None
        with phase(f"{self.verb}.describe"):
            found = Manifest(self.verb, tree, self.group, replicas=replicas, **options)
        if self.group.devices != ["cpu"]:
            for piece in [piece for chunks in found.chunks.values() for piece in chunks.memory]:
                self.group.settle_on(piece.device)
        if complete:
            found.check_readable()
        if union:
            unite(self, found)
        return found

    @without_collections
    def destination(self, source: Manifest, rule: Rule, *, device: Device = None) -> FreshDestination:
        """Make fresh tensors for a tree's distributed leaves: on each rank the box that a rule gives it.

        Args:
            source: The tree.
            rule: ``WholeOn(ranks)``, or any function that is given what this rank knows of a leaf (``LocalChunks``) and
                returns the ``ChunkLayout`` in which it arrives.
            device: Where the tensors are put, and other leaves are brought; by default where they lie.
        """
        return FreshDestination(source, rule, self.group.rank, device=device)

    @without_collections
    def destination_like(self, source: Manifest, like: Manifest, options: LikeOptions = _USUAL) -> LikeDestination:
        """Take the layouts of another tree as those that a tree's leaves arrive in.

        Args:
            source: The tree.
            like: The other tree, of the same structure.
            options: Whether its tensors are written into, and what may differ.
        """
        return LikeDestination(source, like, self.group, options=options)

    def layouts(self, *manifests: Manifest, beside: Sequence[Entry] = ()) -> list[dict[int, ChunkLayout]]:
        """Agree with the other ranks on trees, and return which rank holds which chunks of each distributed leaf.

        ``beside`` is what else must be the same on all ranks.
        """
        consensus = self.agree(self._fingerprint(manifests, beside))
        return [discover_layouts(self, manifest, details_agree=consensus.details_agree)[0] for manifest in manifests]

    def _fingerprint(
        self, manifests: Sequence[Manifest], beside: Sequence[Entry] = (), *, nbytes: int = 0, reads: bool = False
    ) -> Fingerprint:
        entries: list[Entry] = []
        details: list[str] = []
        alike: list[Alike] = []
        for number, manifest in enumerate(manifests):
            found, held = manifest.entries(), manifest.alike(self.group)
            entries += [Entry(f"{path} (like)", text) for path, text in found] if number else found
            alike += [part._replace(path=f"{part.path} (like)") for part in held] if number else held
            details += manifest.details()
        kinds = {chunks.device for manifest in manifests for chunks in manifest.chunks.values()}
        device = self.group.number_of(kinds)
        details.append(self.group.devices[device])
        fingerprint = Fingerprint(self.described(), [*entries, *beside], details, alike, nbytes, device, reads)
        if self.options.get("union", True):
            return fingerprint
        return replace(fingerprint, remedy=f"{fingerprint.remedy} Where ranks hold different keys, pass union=True.")

    def move(self, source: Manifest, target: Destination) -> Any:
        """Agree with the other ranks, move the elements, and return the resulting tree."""
        received: Received | None = source.received
        with phase(f"{self.verb}.plan"):
            planned = self._plan(source, target) if received is None else self._plan_received(source, target, received)
        if source.unread:
            self.expect()
            target.read_stored()
            self.ready()
        with phase(f"{self.verb}.move"):
            planned.run(self.executor)
        return self.finish(target, source if received is None else received.own)

    def _plan(self, source: Manifest, target: Destination) -> PlannedTransfers:
        """Agree with the other ranks, and plan.

        Usually every rank knows by itself who holds what, so that one agreement is enough, for which everything is
        planned in advance. Otherwise the ranks tell each other, and agree once more when they are ready.
        """
        manifests = [source, *target.manifests]
        fingerprint = self._fingerprint(manifests, target.selection())
        known = [layouts for manifest in manifests if (layouts := manifest.known_layouts()) is not None]
        planned: list[PlannedTransfers] = []
        if len(known) == len(manifests):
            key = (fingerprint.key, (b"",) * len(manifests))
            planned.append(self._planned(source, target, known, key, self.group.devices[fingerprint.device]))
        consensus = self.agree(fingerprint)
        if not planned or not consensus.details_agree:
            planned.clear()  # before memory is taken again
            self._is_told_more()
            found = [discover_layouts(self, manifest, details_agree=consensus.details_agree) for manifest in manifests]
            told = tuple([digest for _, digest in found])
            self.expect()
            held = [layouts for layouts, _ in found]
            planned.append(self._planned(source, target, held, (consensus.key, told), consensus.device))
            self.ready()
        return planned.pop()

    def _plan_received(self, source: Manifest, target: Destination, received: Received) -> PlannedTransfers:
        """Plan how a tree moves from the rank that described it, once all ranks have agreed on what it is."""
        if received.reads and self._preparation is not None:
            self._preparation.agree_again(partial(self._agree_on_values, source, target))
        key = (*received.key, len(received.pending))
        layouts = [source.known_layouts() or {}, received.layouts]
        planned = self._planned(source, target, layouts, key, received.device, target.arriving(received.pending))
        self.ready()
        return planned

    def _agree_on_values(self, source: Manifest, target: Destination) -> None:
        """Agree that what has arrived may be written on every rank."""
        with Call(self.verb, self.group) as call:
            target.check_values(source)
            call.ready()

    def finish(self, target: Destination, source: Manifest | None) -> Any:
        """Do what is left once elements have moved, and return the resulting tree.

        ``source`` is the tree that they come from, if it is this rank's.
        """
        self.executor.call(target.write)
        self.executor.with_each(target.written_again)
        if source is not None:
            self.executor.before_each(partial(target.check_values, source))
        preparation = self._preparation
        if preparation is not None:
            given = source or target.own
            if given is not None:
                preparation.refuse_copies(given.spec, given.leaves, target.returned())
                preparation.hold(given.spec, given.leaves, target.read())
            for manifest in [source, *target.manifests]:
                if manifest is not None and manifest.recipes:  # of divided leaves, what ranks hold alike is compared
                    preparation.hold(manifest.outline.spec, manifest.outer, manifest.outline.counts)
                    of_one_rank = manifest is source and self.options.get("src") is not None
                    if not (manifest.written or of_one_rank):
                        preparation.alike.append(partial(manifest.alike, self.group))
            preparation.hold(target.source.spec, target.leaves, target.touched())
        return target.finish()

    def _is_told_more(self) -> None:
        """Note that the call depends on more than what the ranks agreed on before they planned."""
        if self._preparation is not None:
            self._preparation.is_repeatable = False

    def receive(
        self,
        make: Callable[[], SourceTree] | None,
        like: Manifest | None,
        selection: Sequence[Entry] = (),
        *,
        reads: bool = False,
    ) -> Manifest:
        """Agree with the other ranks on a tree that one of them, the option ``src``, describes; return its manifest.

        Its elements are left to ``move``, unless somebody looks at them before: then the ranks agree once more.

        Args:
            make: Makes the tree, on the source: what is wrong with it, all ranks raise. ``None`` on other ranks.
            like: What this rank holds already; ``None`` if nothing.
            selection: Which leaves of that are meant, if not all.
            reads: Whether this rank looks at elements of leaves that are described before it moves the others.
        """
        src = self.options["src"]
        sent, sent_spans, own = (b"", (), None) if make is None else described(make)
        if like is None:
            fingerprint = Fingerprint(self.described(), None, nbytes=len(sent))
        else:
            fingerprint = self._fingerprint([like], selection, nbytes=len(sent), reads=reads)
        consensus = self.agree(fingerprint)
        layouts: dict[int, ChunkLayout] = {}
        told = b""
        if like is not None and not consensus.absent:
            layouts, told = discover_layouts(self, like, details_agree=consensus.details_agree)
            if told:
                self._is_told_more()
        text = self.group.broadcast_bytes(sent, consensus.nbytes, src)
        self.expect()
        description = read_description(self.verb, text)
        parts, spans = description.metadata.allocate(self.verb)
        # By their keys: only the source knows which leaves it has, and with which dtypes if they are converted.
        keys = description.spec.flat_keys()
        exchanged = tuple([(keys[index], facts) for index, facts in description.exchanged.items()])
        key = (consensus.key, told, exchanged, tuple([span.numel() for span in spans]))
        pending = span_transfers(src, self.group, sent_spans, spans)
        kinds = {torch.device(name).type for name in description.metadata.tensors}
        kind = self.group.devices[self.group.number_of(kinds)]  # on every rank alike
        device = consensus.device if exchanged else kind
        if pending and (consensus.reads or device != kind or description.depends_on_elements):
            planned = plan_transfers(self._options(key, kind), pending)
            self.ready()
            planned.run(self.executor)
            self.executor.catch_up()
            self.expect()
            self._is_told_more()
            pending = []
        if own is not None and self._preparation is not None:
            self._preparation.refuse_copies(own.spec, own.leaves, description.described)
            self._preparation.hold(own.spec, own.leaves, description.described, opaque=True)
        leaves = description.put_together(self.verb, parts)
        if self._preparation is not None:  # spans are written, which share no version counter with what lies on them
            written = unpack(self.verb, list(leaves), list, memory=False).parts
            self.executor.call(partial(increment_version, written))
        received = Received(own, pending, layouts, key, device, consensus.reads)
        return manifest_of(self.verb, src, description, leaves, received)

    @without_collections
    def _planned(
        self,
        source: Manifest,
        target: Destination,
        layouts: Sequence[dict[int, ChunkLayout]],
        key: Any,
        kind: str,
        pending: Sequence[Transfer] = (),
    ) -> PlannedTransfers:
        sources, reduction = sources_of(source, layouts[0], target.sources(), self.group.rank)
        transfers = [*pending, *target.transfers(sources, *layouts[1:])]
        return plan_transfers(self._options(key, kind), transfers, reduction)

    def _options(self, key: Any, kind: str) -> TransferOptions:
        return TransferOptions(key, self.group, self.group.device(kind), self.bucket_bytes)


def exchange(
    verb: str, group: ProcessGroup | None = None, timeout: Timeout = None, *, alone: bool = False, **options: Any
) -> Exchange:
    """Begin a call of a collective, as a context manager.

    Args:
        verb: Its name, for messages.
        group: The ranks that take part; by default all.
        timeout: How long each step of communication may take, in seconds or as a ``timedelta``.
        alone: Whether this rank has all that it needs: then it communicates with nobody.
        options: What every rank must pass alike, by name; ``bucket_bytes`` and ``replicas`` are what they are for
            ``gather``.

    Returns:
        An ``Exchange``: ``manifest`` describes what this rank holds, ``move`` agrees, plans and moves. If the block is
        left by an exception, all ranks raise.

    Raises:
        RankMismatch: If this process is not in the group.
    """
    return Exchange(verb, group, timeout, alone=alone, **options)
