"""The layouts of another tree as a destination: made like its tensors, or these themselves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from statetree.chunks.boxes import whole_box
from statetree.chunks.layouts import layout_of, whole_on
from statetree.chunks.local import location_of
from statetree.declare import cached_property
from statetree.errors import Difference, TreeMismatch
from statetree.exchange.allocation import allocated
from statetree.exchange.destination import Destination
from statetree.exchange.fitting import (
    WITHOUT_MEMORY,
    LikeOptions,
    beyond_range,
    partners_of,
    parts_of,
    raise_differences,
    tied_differently,
    unfit,
    why_unwritable,
)
from statetree.exchange.key_union import partly_held
from statetree.exchange.manifest import chunks_of
from statetree.exchange.plan import Chunked
from statetree.exchange.transfers import as_sendable, converting_transfer, sendable_pieces
from statetree.leaves.builtin import IN_A_FILE, is_cuttable, is_plain
from statetree.leaves.copying import prepared_copy
from statetree.spans.bits import as_plain, flat_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extents
from statetree.spans.overlaps import overlaps_itself, shared_elements
from statetree.torch_internals import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.local import LocalChunks
    from statetree.exchange.consensus import Entry
    from statetree.exchange.group import Group
    from statetree.exchange.manifest import Manifest
    from statetree.exchange.plan import Transfer


class LikeDestination(Destination):
    """A tree whose leaves take the layouts of another one, ``like``; ``TreeMismatch`` if they cannot.

    Leaves that are distributed on one side are exchanged; the others this rank copies from its own.
    """

    def __init__(self, source: Manifest, like: Manifest, group: Group, *, options: LikeOptions) -> None:
        self.like = like
        self.manifests = [like]
        self._group = group
        self._options = options
        source.divide(like.recipes, group)
        like.divide(source.recipes, group)
        self._partners, self._missing = partners_of(source, like, options)
        self._leaf_of = {partner: index for index, partner in enumerate(self._partners) if partner >= 0}
        matched = [index for index in source.order if self._partners[index] >= 0]
        moving = [
            index
            for index in matched
            if index in source.chunks or self._partners[index] in like.chunks or source.is_unread(index)
        ]
        self._moving = moving
        like.add_ties([self._partners[index] for index in moving])
        self._note_ties()
        for index in moving:
            if self._first(index) != index:  # what goes to one memory is compared
                source.read(index)
                source.read(self._first(index))
        raise_differences(like.verb, unfit(source, like, self._partners, moving, cast=options.cast))
        leaves = [like.leaves[partner] if partner >= 0 else None for partner in self._partners]
        held = [None if like.is_absent(partner) else leaf for partner, leaf in zip(self._partners, leaves, strict=True)]
        fresh = leaves if options.in_place else allocated(like.verb, held, source.spec)
        super().__init__(
            source, [leaf if keeps is None else made for leaf, keeps, made in zip(leaves, held, fresh, strict=True)]
        )
        if options.in_place:
            stored = [
                (index, "a tensor to move", IN_A_FILE) for index in matched if like.is_stored(self._partners[index])
            ]
            self._refuse("writability", stored, "Load what shall be written.")
        self._chunks = {index: self._chunks_of(index) for index in moving if self._partners[index] in like.chunks}
        #: This rank's tensors that elements are put into.
        self._pieces = {
            index: self._chunks[index].pieces if index in self._chunks else [self.leaves[index]] for index in moving
        }
        self._check_writable()
        self._check_disjoint()
        moved = set(moving)
        self._local = sorted(index for index in matched if index not in moved)
        self._filled = self._filled_at_once() if options.in_place and source.received is not None else {}
        copied, self._write = self._prepared_copy(source)
        for index, leaf in copied.items():
            self.leaves[index] = leaf
        if options.on_missing is not None:
            for difference in self._missing:
                options.on_missing(difference)

    def selection(self) -> list[Entry]:
        """Return which leaves of ``like`` are meant, as the ranks compare it."""
        return self._options.selection(self.like, self._leaf_of)

    def sources(self) -> list[int]:
        """Return the distributed leaves of the source that move."""
        source = self.source
        if self.like.canonical != self._canonical:  # of tensors that this rank holds nothing of, others know more
            self._note_ties()
            self.check_ties(source)
        return list(dict.fromkeys(source.canonical[index] for index in self._moving if index in source.chunks))

    def transfers(self, sources: dict[int, Chunked], layouts: dict[int, ChunkLayout] | None = None) -> list[Transfer]:
        """Return what moves from where to where."""
        source = self.source
        found: dict[int, Transfer] = {}
        self._check_range(source)
        self._check_compared(sources)
        for index in self._moving:
            if self._first(index) == index and not source.is_unread(index):
                canonical = source.canonical.get(index, index)
                if canonical not in sources:
                    sources[canonical] = self._whole(source.leaves[index])
                given = source.chunks[index].dtype if index in source.chunks else source.leaves[index].dtype
                target = self._target(index, layouts or {})
                found[index] = converting_transfer(sources[canonical], target, given, self._dtype(index))
        self._check_sources(found)
        return list(found.values())

    def arriving(self, pending: Sequence[Transfer]) -> Sequence[Transfer]:
        """Return what moves the elements of a described tree: what is all of a tensor of ``like``, straight there."""
        moved = list(pending)
        for number, tensor in self._filled.values():
            transfer = moved[number]
            place = flat_bytes(as_sendable(tensor))
            moved[number] = transfer._replace(target=transfer.target._replace(pieces=[place]))
        return moved

    def _filled_at_once(self) -> dict[Any, tuple[int, torch.Tensor]]:
        """Return which tensors of ``like`` can be what pending transfers fill, by the storages of those made for that.

        Then no second model is written. Elements that some rank looks at before it writes them do not wait until here,
        nor do those of leaves that are made of several tensors: so here no two tensors that are written lie in the same
        memory, on any rank, and each that was made is a leaf, or several.
        """
        source, pending = self.source, self.source.received.pending
        if not pending:
            return {}
        filling = {storage_key(move.target.pieces[0].untyped_storage()): number for number, move in enumerate(pending)}
        spans = [_extents(move.source.pieces) for move in pending]
        sent = [*chain(*spans), *_extents([piece for chunks in source.chunks.values() for piece in chunks.memory])]
        starts, stops = (sorted([extent[end] for extent in sent]) for end in (0, 1))
        found: dict[Any, tuple[int, torch.Tensor]] = {}
        plain = [index for index in self._local if is_cuttable(source.leaves[index])]
        keys = [storage_key(source.leaves[index].untyped_storage()) for index in plain]
        leaves = Counter(keys)  # a tensor may be several of them
        for index, key in zip(plain, keys, strict=True):
            made, target = source.leaves[index], self.leaves[index]
            number = filling.get(key) if leaves[key] == 1 else None
            if number is not None and is_cuttable(target) and _are_alike(made, target):
                start, stop = target.data_ptr(), target.data_ptr() + target.nbytes
                over = bisect_left(starts, stop) - bisect_right(stops, start)  # how many of them lie there
                if not over or (over == 1 and spans[number] == [(start, stop)]):
                    found[key] = number, target
        return found

    def read_stored(self) -> None:
        """Read what is made of stored tensors into its place."""
        for index in self._moving:
            if self.source.is_unread(index) and self._first(index) == index:
                held = self._chunks.get(index)
                boxes = [whole_box(self.leaves[index].shape)] if held is None else held.boxes
                for box, piece in zip(boxes, self._pieces[index], strict=True):
                    stored = self.source.unread[id(self.source.leaves[index])][1]
                    stored.read_into(box.start, as_plain(piece))

    def write(self) -> None:
        """Copy what this rank has itself."""
        self._write()

    def check_values(self, source: Manifest) -> None:
        """Raise ``TreeMismatch`` if leaves that hold different values by now would go to one memory."""
        self.check_ties(source)
        self._check_range(source)
        if self._local and self._depends_on_values:
            self._prepared_copy(source)

    @cached_property
    def _depends_on_values(self) -> bool:
        """Whether not all values fit into the leaves that are copied here."""
        return _depends_on_values([self.leaves[index] for index in self._local], cast=self._options.cast)

    def touched(self) -> Iterable[int]:
        """Return the leaves whose elements are read in the source, and written in the result."""
        return [*self._moving, *self._local]

    def _first(self, index: int) -> int:
        """Return the first of the moving leaves that lie in the same memory as this one."""
        return self._firsts[self._canonical[self._partners[index]]]

    def _note_ties(self) -> None:
        """Take note, for the canonical leaf of each memory, of the first of the moving leaves that lie in it."""
        self._canonical = dict(self.like.canonical)
        self._firsts: dict[int, int] = {}
        for index in self._moving:
            self._firsts.setdefault(self._canonical[self._partners[index]], index)

    def _target(self, index: int, layouts: dict[int, ChunkLayout]) -> Chunked:
        """Return where the elements of a leaf are put."""
        chunks = self._chunks.get(index)
        if chunks is None:
            return self._whole(self.leaves[index])
        layout = layouts[self._partners[index]]
        return Chunked(layout, sendable_pieces(chunks, layout, self._group.rank))

    def _whole(self, leaf: torch.Tensor) -> Chunked:
        """Return where the elements of a tensor are that is not distributed: on every rank."""
        layout = whole_on(leaf.shape, range(self._group.size))
        return Chunked(layout, [as_sendable(leaf)] if leaf.numel() else [])

    def _dtype(self, index: int) -> torch.dtype:
        found: torch.dtype = (self._chunks[index] if index in self._chunks else self.leaves[index]).dtype
        return found

    def _chunks_of(self, index: int) -> LocalChunks:
        """Return what this rank holds of a leaf of the result that is distributed."""
        partner = self._partners[index]
        if self._options.in_place or self.like.is_absent(partner):
            return self.like.chunks[partner]
        return chunks_of(self.leaves[index], self._group) or partly_held(self.leaves[index], "")

    def _refuse(self, kind: str, found: Sequence[tuple[int, str, str]], remedy: str = "") -> None:
        named = self.source.spec.paths() if found else []
        differences = [Difference(named[index], kind, left, right) for index, left, right in found]
        raise_differences(self.like.verb, differences, remedy)

    def _check_writable(self) -> None:
        """Raise ``TreeMismatch`` if elements cannot be put into some of the leaves."""
        columns = Columns([piece for pieces in self._pieces.values() for piece in pieces])
        kinds = {device.type for device in set(columns.devices)} | {held.device for held in self._chunks.values()}
        if columns.whole and "meta" not in kinds and not any(columns.inference):
            return
        found = [(index, "a tensor to move", why) for index in self._moving for why in sorted(self._unwritable(index))]
        self._refuse("writability", found)

    def _unwritable(self, index: int) -> set[str]:
        found = set(map(why_unwritable, self._pieces[index]))
        absent = self.like.is_absent(self._partners[index])
        if index in self._chunks and not absent and self._chunks[index].device == "meta":
            found.add(WITHOUT_MEMORY)  # also on ranks that hold nothing of it
        found.discard("")
        return found

    def _check_disjoint(self) -> None:
        """Raise ``TreeMismatch`` if elements that move would be put over those of another leaf."""
        if not self._moving:
            return
        moved = set(self._moving)
        local = [index for index, partner in enumerate(self._partners) if index not in moved and partner >= 0]
        pieces, owners = parts_of([self.leaves[index] for index in local])
        owners = [local[owner] for owner in owners]
        for index in self._moving:
            if self._first(index) == index or self._first(index) not in moved:
                held = self._pieces[index]
                pieces += held
                owners += [index] * len(held)
        shared = [(owners[a], owners[b]) for a, b in shared_elements(Columns(pieces))]
        shared = [pair for pair in shared if not moved.isdisjoint(pair)]  # of others, prepared_copy knows more
        shared = [(a, b) for a, b in shared if not self.like.are_blocks_of_one(self._partners[a], self._partners[b])]
        named = self.source.spec.paths() if shared else []
        self._refuse("overlap", [(b, "values of its own", f"a tensor that overlaps {named[a]}") for a, b in shared])

    def _check_compared(self, sources: dict[int, Chunked]) -> None:
        """Raise ``TreeMismatch`` if leaves go to one memory, and no rank holds both to see that they are the same."""
        canonical, lost = self.source.canonical, {}
        for index in self._moving:
            first = self._first(index)
            if first == index:
                continue
            one, other = sources.get(canonical.get(first, -1)), sources.get(canonical.get(index, -1))
            if one is None or other is None or one.layout.digest == other.layout.digest:
                continue  # what all ranks hold, or the same ones, they have compared
            shared = {
                rank: one.layout.boxes_of(rank)
                for rank in range(self._group.size)
                if one.layout.boxes_of(rank) and other.layout.boxes_of(rank)
            }
            if not layout_of(one.layout.shape, shared).is_complete:
                lost[index] = first
        paths = self.source.spec.paths() if lost else []
        found = [(index, f"a tensor on a rank that holds {paths[at]}, too", "a tied one") for index, at in lost.items()]
        remedy = "Nothing was written. No rank can compare what they hold: pass tensors of their own."
        self._refuse("ties", found, remedy)

    def _check_range(self, source: Manifest) -> None:
        """Raise ``TreeMismatch`` where values are too large for the dtype that they are converted to."""
        if self._options.cast:
            moving = [index for index in self._moving if not source.is_unread(index)]
            raise_differences(self.like.verb, beyond_range(source, moving, self._dtype))

    def check_ties(self, source: Manifest) -> None:
        """Raise ``TreeMismatch`` where different values would go to one memory, as far as this rank holds them."""
        raise_differences(self.like.verb, tied_differently(source, self.like, self._partners, self._moving))

    def _check_sources(self, transfers: dict[int, Transfer]) -> None:
        """Raise ``TreeMismatch`` if what is sent or copied lies in memory that other elements are moved into."""
        written = set(Columns([piece for pieces in self._pieces.values() for piece in pieces]).storage_keys)
        if not (self._options.in_place and written):
            return
        parts, owners = parts_of([self.source.leaves[index] for index in self._local])
        read: list[tuple[int, torch.Tensor, torch.Tensor | None]]
        read = [(self._local[owner], part, None) for owner, part in zip(owners, parts, strict=True)]
        read += [(index, *pair) for index, transfer in transfers.items() for pair in _with_places(transfer)]
        keys = Columns([piece for _, piece, _ in read]).storage_keys
        inside = [at for at, key in zip(read, keys, strict=True) if key in written]
        lost = dict.fromkeys(
            index for index, piece, place in inside if place is None or location_of(piece) != location_of(place)
        )
        remedy = "Nothing was written. Copy it first, or do without in_place."
        found = [(index, "a tensor in the memory that is written", "one elsewhere") for index in lost]
        self._refuse("overlap", found, remedy)

    def finish(self) -> Any:
        """Return the resulting tree: of the source's structure, or of that of ``like`` if some of its leaves stay."""
        if not self._options.keeps_like:
            return self.source.lift(self.leaves, {**self.source.recipes, **self.like.recipes})
        leaves = list(self.like.leaves)
        for partner, index in self._leaf_of.items():
            leaves[partner] = self.leaves[index]
        return self.like.lift(leaves)

    def _prepared_copy(self, source: Manifest) -> tuple[dict[int, Any], Callable[[], None]]:
        """Prepare copying the leaves that this rank has itself: return them as they will be, and what writes them."""
        spec, verb = self.source.spec, self.like.verb
        keys = spec.flat_keys()
        left, right = ({keys[i]: leaves[i] for i in self._local} for leaves in (source.leaves, self.leaves))
        try:
            result, write = prepared_copy(verb, left, right, cast=self._options.cast, arriving=self._filled)
        except TreeMismatch as error:
            path_of = dict(zip(keys, spec.paths(), strict=True))
            raise_differences(verb, [found._replace(path=path_of[found.path[0]]) for found in error.differences])
            raise
        return {index: result[keys[index]] for index in self._local}, write


def reads_values(like: Manifest, *, cast: bool) -> bool:
    """Whether values are looked at before they are written into those leaves that are not distributed."""
    whole = [leaf for index, leaf in enumerate(like.leaves) if index not in like.chunks]
    copied = [leaf for leaf in whole if not is_cuttable(leaf)]  # the others are converted on their way
    return _depends_on_values(whole, cast=False) or _depends_on_values(copied, cast=cast)


def _depends_on_values(leaves: Iterable[Any], *, cast: bool) -> bool:
    """Whether leaves may be converted, or lie over each other: not all values fit into them then."""
    written = [leaf for leaf in leaves if not is_plain(leaf)]
    if cast or len(set(map(id, written))) < len(written):
        return bool(written)
    parts = parts_of(written, meta=True)[0]
    without_memory = Columns([part for part in parts if part.is_meta]).storage_keys
    if len(set(without_memory)) < len(without_memory):
        return True
    if any(not part.is_contiguous() and overlaps_itself(part.shape, part.stride()) for part in parts):
        return True
    held = Columns([part for part in parts if not part.is_meta])
    return bool(shared_elements(held))


def _extents(pieces: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return from where to where tensors lie at most."""
    columns = Columns(list(pieces))
    reach = zip(columns.pointers, extents(columns), strict=True)
    return [(start, start + nbytes) for start, nbytes in reach if nbytes]


def _are_alike(made: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, in one piece, if they have the same elements."""
    facts = [(tensor.dtype, tensor.shape, tensor.device) for tensor in (made, target)]
    are_plain = [tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) for tensor in (made, target)]
    return facts[0] == facts[1] and all(are_plain)


def _with_places(transfer: Transfer) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the pieces that are sent, each with where its elements go on this rank if the layout stays the same."""
    source, target = transfer.source, transfer.target
    alike = source.layout.digest == target.layout.digest and len(source.pieces) == len(target.pieces)
    places = target.pieces if alike else [None] * len(source.pieces)  # both in the order of one layout
    return zip(source.pieces, places, strict=True)
