"""Whether the leaves of one tree can take the layouts of another, and if not, where and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.chunks.local import location_of
from statetree.errors import Difference, TreeMismatch
from statetree.exchange.consensus import Entry
from statetree.exchange.transfers import as_sendable
from statetree.key_paths import Path
from statetree.leaves.builtin import is_cuttable
from statetree.leaves.casting import castable, is_castable, out_of_range
from statetree.leaves.parts import unpack
from statetree.spans.bits import same_bytes
from statetree.spans.layout import holds_memory
from statetree.spans.overlaps import overlaps_itself
from statetree.tree.matching import matched_where
from statetree.tree.selection import selected_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from statetree.exchange.manifest import Manifest
    from statetree.tree.selection import Where

_REMEDY: Final = "Nothing was written. Pass a tree of the same structure, global shapes and dtypes."
#: What a tensor lacks that has elements, and no memory for them.
WITHOUT_MEMORY: Final = "a tensor without memory"
_STRICT_REMEDY: Final = "Nothing was written. Pass a tree of the same keys, or strict=False to move what both have."
_CAST_REMEDY: Final = (
    "Nothing was written. Pass a tree of the same dtypes, or cast=True where no precision that matters is lost."
)


def raise_differences(verb: str, differences: Sequence[Difference], remedy: str = "") -> None:
    """Raise ``TreeMismatch`` if there are differences."""
    if differences:
        kinds = {difference.kind for difference in differences}
        known = {frozenset({"missing"}): _STRICT_REMEDY}
        if any(map(is_castable, differences)):
            known[frozenset({"dtype"})] = _CAST_REMEDY
        raise TreeMismatch.between(verb, differences, remedy or known.get(frozenset(kinds), _REMEDY))


class LikeOptions(NamedTuple):
    """How a tree takes the layouts of another one."""

    in_place: bool = False  # whether elements are written into the other's tensors; otherwise fresh ones are made
    cast: bool = False  # whether elements are converted to the other's dtypes
    strict: bool = True  # whether both trees must have the same keys; otherwise what only one of them has is left alone
    on_missing: Callable[[Difference], object] | None = None  # is then called with each difference
    #: Which leaves are meant; others are left alone. All if it is ``None``.
    where: Where | None = None

    @property
    def keeps_like(self) -> bool:
        """Whether the result has the structure of ``like``, and its leaves where nothing is moved."""
        return not self.strict or self.where is not None

    def agreed(self) -> dict[str, bool]:
        """Return what the ranks must pass alike, by name; which leaves they mean is compared by ``selection``."""
        found = {"in_place": self.in_place, "cast": self.cast, "strict": self.strict}
        return found if self.where is None else {**found, "where": True}

    def as_chosen_in(self, like: Manifest) -> tuple[LikeOptions, Collection[int]]:
        """Return options without a predicate that mean the same leaves of ``like``, and these leaves."""
        if self.where is None:
            return self, ()
        (mask,) = masks_of(self.where, [like], missing_ok=True)
        paths = like.spec.paths()
        chosen = {paths[index]: index for index, meant in enumerate(mask) if meant}
        told = self._replace(where=lambda path, _: path in chosen) if callable(self.where) else self
        return told, set(chosen.values())

    def selection(self, like: Manifest, chosen: Collection[int]) -> list[Entry]:
        """Return what the ranks compare to make sure that they mean the same leaves of ``like``."""
        if self.where is None:
            return []
        return [
            Entry(f"{key} (where)", "selected" if index in chosen else "left out")
            for key, index in zip(like.keys, like.order, strict=True)
        ]


def masks_of(where: Where, manifests: Sequence[Manifest], *, missing_ok: bool | None = None) -> list[list[bool]]:
    """Return which leaves of trees are meant: with a leaf that is divided, all of its parts."""
    outer = [(one.outline.spec, one.outer or [None] * one.outline.spec.num_leaves) for one in manifests]
    masks = selected_in(where, outer, verb=manifests[-1].verb, missing_ok=missing_ok)
    return [[mask[owner] for owner in one.outline.owners()] for mask, one in zip(masks, manifests, strict=True)]


def partners_of(source: Manifest, like: Manifest, options: LikeOptions) -> tuple[list[int], list[Difference]]:
    """Return, for each leaf of a tree, the one of ``like`` in the same place, and what only one of them has.

    The first is -1 where there is none, if ``options`` allow that; otherwise structures that differ are refused.
    """
    trees = (source.spec, source.leaves), (like.spec, like.leaves)
    masks = None
    if options.where is not None and (source.outline.counts or like.outline.counts):
        masks = masks_of(options.where, [source, like])
    common = matched_where(like.verb, *trees, where=options.where, strict=options.strict, masks=masks)
    raise_differences(like.verb, common.differences)
    return common.order, common.missing


def unfit(
    source: Manifest, like: Manifest, partners: Sequence[int], moving: Sequence[int], *, cast: bool = False
) -> list[Difference]:
    """Return why leaves cannot take the layouts of their partners.

    ``moving`` are those of which one side is distributed. With ``cast``, dtypes may differ as far as ``copy_into``
    converts them.
    """
    found = [difference for index in moving for difference in _unfit(source, index, like, partners[index], cast=cast)]
    tied = [index for index in moving if partners[index] in like.canonical]
    return found or tied_differently(source, like, partners, tied)


def _unfit(source: Manifest, index: int, like: Manifest, partner: int, *, cast: bool) -> list[Difference]:
    leaf, chunks = source.leaves[index], source.chunks.get(index)
    ours, theirs = _facts(source, index), _facts(like, partner)
    found: list[tuple[str, Any, Any]] = []
    if isinstance(ours, str) or isinstance(theirs, str):
        found.append(("leaf type", _shown(ours), _shown(theirs)))
    elif ours != theirs:
        if ours[0] != theirs[0] and not (cast and castable(ours[0], theirs[0])):
            found.append(("dtype", ours[0], theirs[0]))
        if ours[1] != theirs[1]:
            found.append(("shape", ours[1], theirs[1]))
    target = like.chunks.get(partner)
    if target is not None and target.partials is not None:
        found.append(("placements", "elements", f"{target.text}, which cannot be a target"))
    is_whole = chunks is None and not isinstance(ours, str) and not source.is_unread(index)
    if chunks.device == "meta" if chunks else is_whole and (leaf.is_meta or not holds_memory(leaf)):
        found.append(("memory", "a tensor without elements", "elements"))
    return [Difference(source.path(index), *difference) for difference in found]


def _facts(manifest: Manifest, index: int) -> tuple[torch.dtype, tuple[int, ...]] | str:
    """Return the dtype and global shape of a leaf that can be cut into boxes; of others, what they are."""
    leaf, chunks = manifest.leaves[index], manifest.chunks.get(index)
    if chunks is not None:
        return chunks.dtype, chunks.shape
    return (leaf.dtype, tuple(leaf.shape)) if is_cuttable(leaf) else f"a {type(leaf).__qualname__}"


def _shown(found: tuple[torch.dtype, tuple[int, ...]] | str) -> str:
    return found if isinstance(found, str) else f"a tensor {found[0]} {found[1]}"


def beyond_range(source: Manifest, moving: Sequence[int], dtype_of: Callable[[int], torch.dtype]) -> list[Difference]:
    """Return which leaves hold values that are too large for the dtypes that they are converted to, as far as known."""
    found: list[Difference] = []
    for index in moving:
        leaf, chunks, after = source.leaves[index], source.chunks.get(index), dtype_of(index)
        if (leaf.dtype if chunks is None else chunks.dtype) == after or (chunks and chunks.partials is not None):
            continue
        for piece in [leaf.detach()] if chunks is None else chunks.pieces:
            beyond = None if piece.is_meta else out_of_range(piece, after)
            if beyond is not None:
                found.append(Difference(source.path(index), "range", *beyond))
    return found


def tied_differently(
    source: Manifest, like: Manifest, partners: Sequence[int], moving: Sequence[int]
) -> list[Difference]:
    """Return where different values would go to one memory, as far as this rank holds them. Arguments: as ``unfit``."""
    found: list[Difference] = []
    first: dict[int, int] = {}
    for index in moving:
        other = first.setdefault(like.canonical[partners[index]], index)
        if other != index and not _tied_alike(source, index, other):
            tied = f"a tensor that is tied to {source.path(other)}"
            found.append(Difference(source.path(index), "ties", "values of its own", tied))
    return found


def _tied_alike(source: Manifest, index: int, other: int) -> bool:
    """Whether two leaves of the source may go to one memory: they are tied as well, or hold the same elements."""
    if index in source.canonical and source.canonical[index] == source.canonical.get(other):
        return True
    if source.is_absent(index) or source.is_absent(other):  # other ranks know
        return True
    ours, theirs = source.chunks.get(index), source.chunks.get(other)
    if ours is None and theirs is None:
        a, b = as_sendable(source.leaves[index]), as_sendable(source.leaves[other])
        return location_of(a) == location_of(b) or same_bytes(a, b)
    if ours is None or theirs is None or (ours.text, ours.detail) != (theirs.text, theirs.detail):
        return False
    return all(map(same_bytes, ours.pieces, theirs.pieces))


def parts_of(leaves: list[Any], *, meta: bool = False) -> tuple[list[torch.Tensor], list[int]]:
    """Return the plain tensors that leaves consist of, and the index of the leaf of each; meta ones only if asked."""
    unpacked = unpack("", leaves, lambda: [Path()] * len(leaves), memory=False)
    real = [index for index, part in enumerate(unpacked.parts) if meta or not part.is_meta]
    return [unpacked.parts[index] for index in real], [unpacked.owners[index] for index in real]


def why_unwritable(piece: torch.Tensor) -> str:
    """Say why a tensor cannot be written; an empty text if it can."""
    if piece.is_inference():
        return "an inference tensor"
    if not piece.is_contiguous() and overlaps_itself(piece.shape, piece.stride()):
        return "a tensor that overlaps itself"
    if piece.is_meta or not holds_memory(piece):
        return WITHOUT_MEMORY
    return ""
