"""Destinations: where the elements of a tree go. Fresh tensors in layouts that a rule gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from statetree.chunks.layouts import whole_on
from statetree.exchange.plan import Chunked, Transfer
from statetree.exchange.transfers import as_sendable
from statetree.leaves.builtin import is_value
from statetree.leaves.copying import prepared_copy
from statetree.leaves.engine_type import LeafPart
from statetree.leaves.replicas import moved, replicated, with_leaves
from statetree.leaves.types.checkpointable import SHARD_ATTRIBUTES
from statetree.spans.layout import is_dense
from statetree.spans.memory import Memory, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.local import LocalChunks
    from statetree.exchange.consensus import Entry
    from statetree.exchange.manifest import Manifest

#: Where something lies, as users give it; ``None`` for where it lies already.
Device = torch.device | str | int | None
#: Says in which layout a distributed leaf arrives: which ranks of the group hold which boxes of its global shape.
Rule = Callable[["LocalChunks"], "ChunkLayout"]


@dataclass(frozen=True)
class WholeOn:
    """The rule by which some ranks get every leaf as a whole, and the others nothing."""

    ranks: tuple[int, ...]
    _known: dict[tuple[int, ...], ChunkLayout] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, chunks: LocalChunks, /) -> ChunkLayout:
        """Return the layout of one leaf."""
        if chunks.shape not in self._known:  # (There may be many ranks to look it up by.)
            self._known[chunks.shape] = whole_on(chunks.shape, self.ranks)
        return self._known[chunks.shape]


class Destination(ABC):
    """Where the elements of a tree's leaves go.

    Attributes:
        source: The tree.
        leaves: The leaves of the result, in the order of the source's.
        manifests: Trees that say where elements go, if any do: the ranks have to agree on these, too.
        own: The tree whose elements this rank reads, where another rank described the source.
    """

    manifests: Sequence[Manifest] = ()
    own: Manifest | None = None

    def __init__(self, source: Manifest, leaves: list[Any]) -> None:
        self.source = source
        self.leaves = leaves

    def selection(self) -> list[Entry]:
        """Return what the ranks compare to make sure that they mean the same leaves, if not all are meant."""
        return []

    @abstractmethod
    def sources(self) -> list[int]:
        """Return the distributed leaves of the source that move, of tied ones the canonical."""

    @abstractmethod
    def transfers(self, sources: dict[int, Chunked], layouts: dict[int, ChunkLayout] | None = None) -> list[Transfer]:
        """Return what moves: from where ``sources()`` are, into the layouts of the leaves of ``manifests``."""

    def arriving(self, pending: Sequence[Transfer]) -> Sequence[Transfer]:
        """Return what moves the elements of a described tree, which fill its own tensors unless it says otherwise."""
        return pending

    def read_stored(self) -> None:  # noqa: B027 - nothing to do, by default
        """Read what the source has not read yet. By default it has read everything."""

    def write(self) -> None:  # noqa: B027 - nothing to do, by default
        """Write what this rank has itself, once the other elements are there."""

    def written_again(self) -> Callable[[], None]:
        """Return what writes, when elements move once more, what was made with its elements the first time."""
        return lambda: None

    def check_values(self, source: Manifest) -> None:  # noqa: B027 - nothing to do, by default
        """Raise ``TreeMismatch`` if other elements than those of the first time may not move to where these did."""

    def touched(self) -> Iterable[int]:
        """Return the leaves whose elements are written in the result."""
        return self.source.chunks

    def read(self) -> Iterable[int]:
        """Return the leaves whose elements are read in the source; by default those that are written."""
        return self.touched()

    def returned(self) -> Iterable[int]:
        """Return the leaves of the source whose elements the result has; by default those that are read."""
        return self.read()

    def finish(self) -> Any:
        """Return the resulting tree."""
        return self.source.lift(self.leaves)


class FreshDestination(Destination):
    """Fresh tensors: on each rank the box that a rule gives it, of distributed leaves; other leaves as they are.

    Leaves that lie on the same memory do so again. On ranks to which ``WholeOn`` gives nothing, every tensor is a
    ``meta`` tensor of its global shape. Arguments: as for ``Exchange.destination``.
    """

    def __init__(self, source: Manifest, rule: Rule, rank: int, *, device: Device = None) -> None:
        super().__init__(source, list(source.leaves))
        self._rank = rank
        self._whole = isinstance(rule, WholeOn)
        self._moves = device is None or torch.device(device).type != "meta"  # on every rank alike
        self._device = "meta" if isinstance(rule, WholeOn) and rank not in rule.ranks else device
        self._layouts = {index: rule(chunks) for index, chunks in source.chunks.items()}
        self._brought: list[int] = []
        self._bring_others(self._device)
        self._canonical: dict[int, int] = {}
        self._make()

    def _make(self) -> None:
        """Make the tensors. Where ranks see ties differently, it is done again once they have told each other."""
        self._canonical = dict(self.source.canonical)
        made: dict[Any, torch.Tensor] = {}
        for index in self._canonical:
            self.leaves[index] = None  # before memory is taken again
        for index, canonical in self._canonical.items():
            self.leaves[index] = self._fresh(index, canonical, self._device, made)

    def _bring_others(self, device: Device) -> None:
        rest = [index for index in range(len(self.leaves)) if index not in self.source.chunks]
        if device is None or not rest:
            return
        memory = memory_of(device)
        bring = moved if memory.device.type != "meta" else partial(replicated, copy=False)
        brought = with_leaves(self.source.spec, self.leaves, rest, lambda tree: bring(self.source.verb, tree, memory))
        for index, leaf in brought.items():
            self.leaves[index] = leaf
            if memory.device.type != "meta" and leaf is not self.source.leaves[index] and not is_value(leaf):
                self._brought.append(index)

    def written_again(self) -> Callable[[], None]:
        """Return what copies those leaves once more that were brought to another device."""
        keys = self.source.spec.flat_keys()
        before, after = (
            {keys[index]: leaves[index] for index in self._brought} for leaves in (self.source.leaves, self.leaves)
        )
        return prepared_copy(self.source.verb, before, after)[1]

    def touched(self) -> Iterable[int]:
        """Return the leaves whose elements are read in the source, and written in the result."""
        return [*self.source.chunks, *self._brought]

    def returned(self) -> Iterable[int]:
        """Return the leaves of the source whose elements the result has: also those that are passed through."""
        return range(len(self.source.leaves))

    def _fresh(self, index: int, canonical: int, device: Device, made: dict[Any, torch.Tensor]) -> Any:
        leaf, chunks = self.source.leaves[index], self.source.chunks[index]
        if index != canonical:
            first = self.leaves[canonical]
            return first if leaf is self.source.leaves[canonical] else as_leaf(first.detach(), leaf)
        where = chunks.device or None if device is None or chunks.device == "meta" else device
        if self._whole and isinstance(leaf, LeafPart):
            return leaf.whole(lambda shape: _empty(shape, (), chunks.dtype, where), made)
        if self._whole:
            stride = leaf.stride() if isinstance(leaf, torch.Tensor) else ()
            return as_leaf(_empty(chunks.shape, stride, chunks.dtype, where), leaf)
        boxes = self._layouts[index].boxes_of(self._rank)
        if len(boxes) > 1:
            msg = f"the rule gives this rank {len(boxes)} boxes of the leaf at %PATH%: expected one at most. "
            raise self.source.unsupported(index, f"{msg}Gather it, or use reshard.")
        sizes = boxes[0].sizes if boxes else (0,) * len(chunks.shape)
        return as_leaf(_empty(sizes, (), chunks.dtype, where), leaf)

    def sources(self) -> list[int]:
        """Return the distributed leaves of the source that move."""
        if self.source.canonical != self._canonical:
            self._make()
        return self.source.moving() if self._moves else []

    def transfers(self, sources: dict[int, Chunked], layouts: dict[int, ChunkLayout] | None = None) -> list[Transfer]:
        """Return what moves from where to where."""
        assert layouts is None
        found = []
        for index, source in sources.items():
            layout = self._layouts[index]
            pieces = [as_sendable(self.leaves[index])] if layout.boxes_of(self._rank) else []
            found.append(Transfer(source, Chunked(layout, pieces), self.source.chunks[index].dtype))
        return found


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
    if _is_dense(tuple(shape), tuple(stride)):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return len(stride) == len(shape) and is_dense(contiguous=False, shape=shape, stride=stride)


def _is_carried(name: str) -> bool:
    # What torch's classes keep for themselves begins with an underscore.
    return not name.startswith("_") and name not in SHARD_ATTRIBUTES


@lru_cache(maxsize=256)
def _is_ordinary(cls: type, names: tuple[str, ...]) -> bool:
    """Whether a leaf of a class, with certain attributes, is neither a parameter nor a buffer, and carries none."""
    marked = issubclass(cls, (torch.nn.Parameter, torch.nn.Buffer)) or "_is_param" in names or "_is_buffer" in names
    return not marked and not any(map(_is_carried, names))


def as_leaf(fresh: torch.Tensor, leaf: Any) -> torch.Tensor:
    """Return a fresh plain tensor as what a distributed leaf is beside its elements: a parameter, with attributes."""
    requires_grad = bool(getattr(leaf, "requires_grad", False))
    attributes = getattr(leaf, "__dict__", {})
    if not requires_grad and _is_ordinary(leaf.__class__, tuple(attributes)):
        return fresh
    if isinstance(leaf, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=requires_grad)
    elif isinstance(leaf, torch.nn.Buffer):
        fresh = torch.nn.Buffer(fresh, persistent=leaf.persistent)
    elif requires_grad:
        fresh.requires_grad_()
    carried = {name: held for name, held in attributes.items() if _is_carried(name)}
    if carried and isinstance(leaf, torch.Tensor):
        vars(fresh).update(replicated("gather", carried, Memory(), copy=True))
    return fresh
