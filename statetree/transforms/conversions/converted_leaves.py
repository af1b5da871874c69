"""The leaves that a conversion makes: blocks of others, as views where a view will do."""

from __future__ import annotations

from functools import cache
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.axis_blocks import AxisBlock, AxisRegion, view_over
from statetree.chunks.boxes import Box
from statetree.chunks.ranks import this_rank_alone
from statetree.errors import Difference, TreeMismatch, UnsupportedLeaf
from statetree.leaves.builtin import is_stored, leaf_type_of, materialized
from statetree.leaves.location import located_error
from statetree.leaves.parts import unpack
from statetree.leaves.ties import sharing
from statetree.leaves.types.checkpointable import SHARD_ATTRIBUTES
from statetree.leaves.types.converted import AxisPart, ConvertedLeaf, assembled, note_copy
from statetree.leaves.types.tensor import attributes_of, identified
from statetree.spans.bits import as_plain, safely_equal, same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory
from statetree.torch_internals import copy_each, storage_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.key_paths import Path
    from statetree.leaves.engine_type import EngineLeafType
    from statetree.transforms.conversions.rule import Place, Rule
    from statetree.tree.spec import TreeSpec


class LeafPlan(NamedTuple):
    """How a leaf is made of others."""

    rule: Rule
    place: tuple[Place, Mapping[str, str | None]]  # which of the leaves that it makes, and the captures of its names
    names: Sequence[str]
    shape: tuple[int, ...] | None  # its shape; None if it is another leaf as it is
    #: The blocks that it is made of, each with the index of the leaf that it comes from.
    blocks: Sequence[tuple[int, AxisBlock]]
    #: The leaves that have to be the same as one of these, since their names are tied.
    twins: Mapping[int, Sequence[int]]

    @property
    def sources(self) -> list[int]:
        """The leaves that it comes from."""
        return list(dict.fromkeys(leaf for leaf, _ in self.blocks))

    @property
    def which_empty(self) -> Place | None:
        """Which of several leaves of the rule it is, if it has no elements: its blocks do not tell, being all alike."""
        is_one_of_several = self.place[0][1] or len(self.rule.target) > 1
        return self.place[0] if is_one_of_several and 0 in (self.shape or ()) else None


class LeafMaker:
    """Makes leaves of those of a tree."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._leaves = leaves
        self._paths = cache(spec.paths)
        self._alone = this_rank_alone()
        self._copies: dict[Any, torch.Tensor] = {}  # what was copied, by the views that it was copied from
        self._copied: dict[int, set[Any]] = {}  # for each leaf that was, which copies

    def path(self, leaf: int) -> Path:
        """Return the path of a leaf."""
        return self._paths()[leaf]

    def shape(self, leaf: int) -> tuple[int, ...]:
        """Return the shape of a leaf."""
        value = self._leaves[leaf]
        if (is_stored(value) and value.is_strided) or _is_spread(value):
            return tuple(value.shape)
        value = value if is_stored(value) else materialized(value)
        if not _is_strided(value):
            path = self.path(leaf)
            msg = (
                f"Conversion: a pattern is for the leaf at {path or '<root>'}: expected a strided tensor, got a "
                f"{type(value).__qualname__}. Convert it before, or use a rule without a pattern."
            )
            raise UnsupportedLeaf(msg, path)
        return tuple(value.shape)

    def tie_differences(self, first: int, others: Sequence[int]) -> list[Difference]:
        """Return what is different in leaves whose names are tied, if that can be told without reading them."""
        one = self._leaves[first]
        found = []
        for index in others:
            other = self._leaves[index]
            if _is_spread(one) or _is_spread(other):  # what ranks hold they could compare only together
                same = one is other or _place_of(one) == _place_of(other)
            elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                same = one is other or safely_equal(as_plain(one), as_plain(other))
            elif is_stored(one) and is_stored(other):
                same = one.dtype == other.dtype and one.shape == other.shape  # elements are compared when they are read
            else:
                same = safely_equal(one, other)
            if not same:
                found.append(Difference(self.path(index), "value", "another", f"that of {self.path(first)}, its tie"))
        return found

    def kind_differences(self, plan: LeafPlan) -> list[Difference]:
        """Return where the leaves that one is made of are no tensors of one kind."""
        if plan.shape is None:
            return []
        first, *rest = plan.sources
        expected = self._kind(first)
        found = []
        places = {_place_of(self._leaves[first]): first} if _is_spread(self._leaves[first]) else {}
        for leaf in rest:
            own = self._kind(leaf)
            # Ties of other tensors are looked at once all is made. What has no elements shares none.
            if _is_spread(self._leaves[leaf]) and 0 not in self._leaves[leaf].shape:
                twin = places.setdefault(_place_of(self._leaves[leaf]), leaf)
                if twin != leaf:
                    found.append(Difference(self.path(leaf), "ties", "a copy", f"the tensor at {self.path(twin)}"))
            odd = next((name for name in expected if not safely_equal(own[name], expected[name])), None)
            if odd is not None:
                wanted = f"{expected[odd]}, as {self.path(first)} has"
                found.append(Difference(self.path(leaf), odd, own[odd], wanted))
        return found

    def _kind(self, leaf: int) -> dict[str, Any]:
        value = self._leaves[leaf]
        spread, tensor = _is_spread(value), getattr(value, "outline", value)
        kind = "stored" if is_stored(value) else type(tensor).__qualname__
        return {
            "leaf type": f"distributed {'parameter' if _is_parameter(value) else 'tensor'}" if spread else kind,
            "dtype": value.dtype,
            "device": None if spread else value.device,
            "requires_grad": tensor.requires_grad,
            "attributes": _users_attributes(value) if spread else attributes_of(tensor),
        }

    def make(self, plans: Sequence[LeafPlan]) -> list[Any]:
        """Return the leaves."""
        made: dict[Any, Any] = {}
        numbers: dict[Any, int] = {}  # of copies, which are as long as their blocks are many
        result = []
        for plan in plans:
            key = (plan.shape, plan.which_empty, *((self._place(leaf), block) for leaf, block in plan.blocks))
            if key not in made:
                leaf, copy = self._made(plan)
                made[key] = leaf, None if copy is None else numbers.setdefault(copy, len(numbers))
            leaf, number = made[key]
            result.append(leaf)
            for place, (source, _) in enumerate(plan.blocks if number is not None else ()):
                self._copied.setdefault(source, set()).add((number, place))
        if self._copied:
            self._check_ties(plans)
        return result

    def _place(self, leaf: int) -> Any:
        value = self._leaves[leaf]
        return value.location() if is_stored(value) else id(value)

    def _made(self, plan: LeafPlan) -> tuple[Any, Any]:
        """Return a leaf, and what is equal for the same copies if it is one."""
        first = self._leaves[plan.sources[0]]
        only = plan.blocks[0][1] if len(plan.blocks) == 1 else None
        is_same = plan.shape is None or (only and only.is_whole and self.shape(plan.sources[0]) == plan.shape)
        is_same = is_same and (plan.which_empty is None or _is_spread(first))
        if is_stored(first) and (not is_same or self._unlike(plan)):
            return self._stored(plan, tuple(first.shape) if plan.shape is None else plan.shape), object()
        if not is_same and _is_spread(first):
            return self._spread(plan, plan.shape or ()), None
        return (first, None) if is_same else self._tensor(plan, plan.shape or ())

    def _identified(self, plan: LeafPlan, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as what those that it is made of are: parameters, with attributes."""
        first = self._leaves[plan.sources[0]]
        return identified(tensor, getattr(first, "outline", first))

    def _tensor(self, plan: LeafPlan, shape: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
        sources = {leaf: as_plain(materialized(self._leaves[leaf])) for leaf in plan.sources}
        check_memory("Conversion", Columns([*sources.values()]), lambda index: self.path([*sources][index]))
        blocks = [(block, sources[leaf]) for leaf, block in plan.blocks]
        key = (shape, *((_view_key(tensor), block) for block, tensor in blocks))
        if key not in self._copies:
            self._copies[key] = assembled(shape, blocks)
        fresh = self._copies[key].detach()
        is_fresh = fresh.numel() and storage_key(fresh.untyped_storage()) != storage_key(blocks[0][1].untyped_storage())
        made = self._identified(plan, fresh)
        note_copy(made, [*sources.values()] if is_fresh else [], [self._leaves[leaf] for leaf in plan.sources])
        return made, key if is_fresh else None

    def _spread(self, plan: LeafPlan, shape: tuple[int, ...]) -> Any:
        """Return a leaf that is made of distributed ones: these themselves, if it was made of one before."""
        rows = []
        for index, block in plan.blocks:
            try:
                leaf, leaf_type, region = _origin_of(materialized(self._leaves[index]), block.source, block.sizes)
                rows.append((AxisPart(leaf, leaf_type, region, block.sizes, self._alone), block))
            except UnsupportedLeaf as error:
                raise located_error("Conversion", "convert", error, self._paths, list(self._leaves), index) from error
        filled = [(part, block) for part, block in rows if 0 not in block.sizes]
        origin = (filled or rows)[0][0]
        leaf = origin.leaf
        if all(part.leaf is leaf for part, _ in filled) and tuple(origin.leaf_type.global_shape(leaf)[0]) == shape:
            dense = torch.empty(shape, device="meta").stride()
            blocks = [(AxisBlock(block.sizes, part.region, block.target), 0, dense) for part, block in filled]
            if not blocks or view_over(shape, blocks) == (dense, 0):  # every element is where it was
                return leaf
        first = self._leaves[plan.sources[0]]
        return ConvertedLeaf(
            shape,
            [block.target for _, block in rows],
            [part for part, _ in rows],
            is_parameter=_is_parameter(first),
            requires_grad=first.requires_grad,
            attributes=_users_attributes(first),
        )

    def _stored(self, plan: LeafPlan, shape: tuple[int, ...]) -> Any:
        """Return a leaf that is made when it is read."""
        values = [self._leaves[leaf] for leaf in plan.sources]
        places = {leaf: place for place, leaf in enumerate(plan.sources)}
        blocks = [(places[leaf], block) for leaf, block in plan.blocks if 0 not in block.sizes]
        if plan.shape is None:
            whole = AxisRegion.box([0] * len(shape))
            blocks = [(0, AxisBlock(shape, whole, whole))]
        unlike = {places[leaf]: twins for leaf, twins in self._unlike(plan).items()}
        names = ", ".join(str(self.path(leaf)) for own in (plan.sources, *plan.twins.values()) for leaf in own)

        def fill(start: Sequence[int], target: torch.Tensor) -> None:
            box = Box((*start,), (*map(add, start, target.shape),))
            for place, parts in _parts(blocks, box).items():
                views = [region.view(target, sizes) for _, region, sizes in parts]
                _read(values[place], parts, views)
                for twin in unlike.get(place, ()):
                    others = list(map(torch.empty_like, views))
                    _read(twin, parts, others)
                    if not all(map(same_bytes, views, others)):
                        msg = f"{names} have one name in the result, and hold different values. Leave one out (select)."
                        raise TreeMismatch(msg)

        outline = self._identified(plan, torch.empty(shape, dtype=values[0].dtype, device="meta"))
        tied = [twin for twins in unlike.values() for twin in twins]
        return values[0].derived([*values, *tied], outline, fill)

    def _unlike(self, plan: LeafPlan) -> dict[int, list[Any]]:
        """Return the stored leaves that have to be the same as others, and lie elsewhere."""
        rows = {leaf: [self._leaves[twin] for twin in twins] for leaf, twins in plan.twins.items()}
        unlike = {leaf: [t for t in own if t.location() != self._leaves[leaf].location()] for leaf, own in rows.items()}
        return {leaf: twins for leaf, twins in unlike.items() if twins}

    def _check_ties(self, plans: Sequence[LeafPlan]) -> None:
        """Raise ``TreeMismatch`` if a tensor that was copied shares memory with another one, but not in the result.

        What two blocks of one leaf become is apart, as they are. Leaves that are one view are tied still if the same
        copies were made of them: each is made once.
        """
        tensors: dict[int, torch.Tensor] = {}
        for leaf in {leaf for plan in plans for leaf in plan.sources}:
            tensor = getattr(self._leaves[leaf], "outline", self._leaves[leaf])
            if _is_strided(tensor) and not tensor.is_meta and tensor.numel():
                tensors[leaf] = as_plain(tensor)
        keys = {leaf: storage_key(tensor.untyped_storage()) for leaf, tensor in tensors.items()}
        concerned = {key for leaf, key in keys.items() if leaf in self._copied}
        found = []
        for a, b in sharing([(leaf, tensors[leaf]) for leaf, key in keys.items() if key in concerned]):
            copies = self._copied.get(a, set()), self._copied.get(b, set())
            is_tied = copies[0] == copies[1] and _view_key(tensors[a]) == _view_key(tensors[b])
            if a < b and any(copies) and not is_tied:
                found.append(Difference(self.path(a), "ties", "a copy", f"what shares memory with {self.path(b)}"))
        if found:
            remedy = "They would not be tied any more: leave one out (select), or copy it before."
            raise TreeMismatch.between("Conversion", found, remedy)


#: Parts of a tensor: where each lies in the tensor that it comes from, and in the other, and its sizes.
_Part = tuple[AxisRegion, AxisRegion, tuple[int, ...]]


def _parts(blocks: Sequence[tuple[int, AxisBlock]], box: Box) -> dict[int, list[_Part]]:
    """Return what of some blocks lies in a box of their tensor, by where it comes from. The box begins at zero then."""
    found: dict[int, list[_Part]] = {}
    for place, block in blocks:
        for part, region in block.target.parts_within(box, block.sizes):
            found.setdefault(place, []).append((block.source.moved(part.start), region, part.sizes))
    return found


def _read(stored: Any, parts: Sequence[_Part], views: Sequence[torch.Tensor]) -> None:
    """Fill views with parts of a stored tensor."""
    hulls = [region.hull(sizes) for region, _, sizes in parts]
    start = tuple([min(places) for places in zip(*[hull.start for hull in hulls], strict=True)])
    hull = Box(start, tuple([max(places) for places in zip(*[hull.stop for hull in hulls], strict=True)]))
    needed = sum(view.numel() for view in views)
    if len(parts) > 1 and 20 * hull.volume <= 21 * needed:  # nearly all of it: in one go
        whole = torch.empty(hull.sizes, dtype=stored.dtype, device="cpu")
        stored.read_into(start, whole)
        near = [region._replace(start=(*map(sub, region.start, start),)) for region, *_ in parts]
        copy_each(views, [region.view(whole, view.shape) for region, view in zip(near, views, strict=True)])
        return
    for (region, *_), view in zip(parts, views, strict=True):
        stored.read_block(region, view)


def _origin_of(value: Any, region: AxisRegion, sizes: Sequence[int]) -> tuple[Any, EngineLeafType, AxisRegion]:
    """Return the distributed tensor that a block comes from, its leaf type, and where it lies in that."""
    if not isinstance(value, ConvertedLeaf):
        leaf_type = leaf_type_of(type(value))
        assert leaf_type is not None
        return value, leaf_type, region
    wanted = {axis: place for place, axis in enumerate(zip(region.dims, region.steps, sizes, strict=True))}
    for part, own in zip(value.parts, value.regions, strict=True):
        axes = list(zip(own.dims, own.steps, part.shape, strict=True))
        if own.start == region.start and set(axes) == wanted.keys() and not part.is_moved:
            order = sorted(range(len(axes)), key=lambda axis: wanted[axes[axis]])
            inner = part.region
            dims, steps = ([column[axis] for axis in order] for column in (inner.dims, inner.steps))
            return part.leaf, part.leaf_type, inner._replace(dims=tuple(dims), steps=tuple(steps))
    raise UnsupportedLeaf(
        "the leaf at %PATH% was converted before: expected the blocks that it was made of, where they were, got "
        "others. Gather or reshard it first."
    )


def _is_spread(value: Any) -> bool:
    """Whether ranks hold chunks of a tensor, or of those that it was converted from."""
    leaf_type = leaf_type_of(type(value))
    return leaf_type is not None and (leaf_type.is_distributed(value) or isinstance(value, ConvertedLeaf))


def _is_parameter(value: Any) -> bool:
    return bool(getattr(value, "is_parameter", isinstance(value, torch.nn.Parameter)))


def _place_of(value: Any) -> Any:
    parts = unpack("Conversion", [value], list, memory=False).parts
    return type(value), tuple([_view_key(part) for part in parts if part.numel()]) or id(value)


def _users_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a distributed tensor, without those that classes keep for themselves."""
    held = value.attributes if isinstance(value, ConvertedLeaf) else attributes_of(value)
    return {name: kept for name, kept in held.items() if not name.startswith("_") and name not in SHARD_ATTRIBUTES}


def _view_key(tensor: torch.Tensor) -> Any:
    """Return what is equal for tensors that are the same view, whatever the strides of dims of one element."""
    steps = tuple([step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    place = storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.dtype
    return (*place, tensor.shape, steps, tensor.is_conj(), tensor.is_neg())


def _is_strided(value: Any) -> bool:
    leaf_type = leaf_type_of(type(value))
    is_bare = leaf_type is not None and leaf_type.native
    return is_bare and value.layout is torch.strided and not value.is_nested and not value.is_quantized
