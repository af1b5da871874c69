"""``DTensor``: its local tensor, and the chunks that its mesh and placements say."""

from __future__ import annotations

from copy import copy
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from statetree.chunks.layouts import ChunkLayout, Split, mesh_layout
from statetree.chunks.local import LocalChunks, MeshSplits, listed_chunks, local_pieces, location_of
from statetree.chunks.reductions import REDUCTIONS, reduces
from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType, LeafPart
from statetree.leaves.types.tensor import attributes_of, set_attributes
from statetree.spans.bits import safely_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from statetree.chunks.cuts import Cut
    from statetree.chunks.ranks import Ranks
    from statetree.leaves.engine_type import LeafContents


class _Wrapper(NamedTuple):
    """What a ``DTensor`` is beside its local tensor and its attributes."""

    cls: Any
    spec: Any
    requires_grad: bool
    is_whole: bool = False


#: What a ``DTensor`` keeps for itself.
OWN: Final = frozenset({"_local_tensor", "_spec"})


class DTensorType(EngineLeafType):
    """``DTensor``: its local tensor, with the mesh and placements kept."""

    distributed = True
    local_tensor = "_local_tensor"

    def contents(self, value: Any) -> LeafContents:
        attributes = vars(value) if type(value) is DTensor else attributes_of(value)
        carried = {name: held for name, held in attributes.items() if name not in OWN}
        return [value._local_tensor], _Wrapper(type(value), value._spec, value.requires_grad), carried

    def assemble(self, context: _Wrapper, parts: Sequence[Any], attributes: Any) -> torch.Tensor:
        local: torch.Tensor = parts[0]
        if context.is_whole:
            return _as_whole(local, context.requires_grad, attributes or {})
        # A DTensor takes over where its local tensor begins in its storage. It has no storage itself: torch would look
        # for elements there when it pickles it, and crash.
        begin = local
        if type(local) is torch.Tensor and local.storage_offset():
            begin = local.as_strided(local.shape, local.stride(), 0)
        # DTensor.__init__ does nothing, inside of wrappers for torch.compile that take as long as making the tensor.
        make = partial(DTensor.__new__, DTensor) if context.cls is DTensor else context.cls
        fresh: Any = make(begin, context.spec, requires_grad=context.requires_grad)
        fresh._local_tensor = local
        set_attributes(fresh, attributes)
        return fresh  # type: ignore[no-any-return]

    def reshaped(self, context: _Wrapper, shape: Sequence[int], stride: Sequence[int]) -> _Wrapper:
        """Return the context of a tensor that is whole: it is no ``DTensor`` any more."""
        return context._replace(is_whole=True)

    def elements_only(self, context: Any) -> bool:
        return True

    def with_dtype(self, context: Any, dtype: torch.dtype) -> Any:
        spec = copy(context.spec)
        if spec.tensor_meta is not None:
            spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        return context._replace(spec=spec)

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {
            "dtype": value.dtype,
            "shape": value.shape,
            "mesh": value.device_mesh,
            "placements": value.placements,
            "local shape": value._local_tensor.shape,
        }

    def local_pair(self, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        # Specs hold mesh, placements, and global shape and dtype. How tensors look is asked of all together.
        x, y = a._local_tensor, b._local_tensor
        same = type(x) is type(y) is torch.Tensor and (a._spec is b._spec or safely_equal(a._spec, b._spec))
        return (x, y) if same and not x.__dict__ and not y.__dict__ else None

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:
        """Return which chunks of a ``DTensor`` this rank holds, and where the others are."""
        spec, local = value._spec, value._local_tensor
        if type(local) is not torch.Tensor and isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        may_list = type(local) is not torch.Tensor or local.__dict__  # some attach it to a plain tensor
        if may_list and hasattr(local, "__create_chunk_list__"):
            return listed_chunks(value, local)
        if type(local) is not torch.Tensor:
            raise UnsupportedLeaf(
                f"cannot tell the chunks of the leaf at %PATH%: expected a DTensor of plain tensors, got one of "
                f"{type(local).__qualname__}. Move it before it is converted, or convert it back first."
            )
        shape, dtype = tuple(value.shape), local.dtype
        key = (id(spec.mesh), spec.placements, spec.shard_order, shape, dtype, local.is_meta)
        known = ranks.memo.get(key)
        if known is None:
            known = ranks.memo[key] = _described(spec, shape, dtype, ranks, on_meta=local.is_meta)
        # On ranks outside of the mesh torch gives a tensor without dims one element, which nobody asked for.
        boxes = known.chunks.boxes
        outside = not boxes and not shape
        pieces = [local] if local.shape == known.only else [] if outside else local_pieces(local, boxes)
        if pieces is None:
            held = tuple([box.sizes for box in boxes])
            raise UnsupportedLeaf(
                f"the local tensor of the leaf at %PATH% does not fit its placements {value.placements}: expected the "
                f"shape of {held}, got {tuple(local.shape)}. Make it with distribute_tensor or from_local(shape=...)."
            )
        return known.chunks._replace(pieces=pieces, tie=location_of(local), device=local.device.type)


def _as_whole(whole: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:  # noqa: FBT001
    """Return a whole tensor as what the ``DTensor`` is beside its elements: a parameter, with a user's attributes."""
    if attributes.get("_is_param", False):  # torch's mark of parameters whose class is another
        whole = torch.nn.Parameter(whole.detach(), requires_grad=requires_grad)
    elif requires_grad:
        whole = whole.detach().requires_grad_()
    set_attributes(whole, {name: held for name, held in attributes.items() if not name.startswith("_")})
    return whole


class _Described(NamedTuple):
    """What all tensors of one shape, dtype, mesh and placements have in common."""

    chunks: LocalChunks  # without their pieces
    only: torch.Size | None  # the shape of the local tensor, if it is the only piece
    kept: Any  # the mesh: so that its id is not handed out again


def _described(spec: Any, shape: tuple[int, ...], dtype: torch.dtype, ranks: Ranks, *, on_meta: bool) -> _Described:
    mesh = spec.mesh
    mesh_shape, digest, listed, members, _ = ranks.positions(mesh)
    splits, summed = _splits(spec)
    layout = mesh_layout(shape, mesh_shape, members, splits)
    boxes = layout.boxes_of(ranks.rank)
    kind = "DTensor on meta" if on_meta else "DTensor"
    text = f"a {kind} {dtype} {shape} {spec.placements} over a mesh {mesh_shape} of {mesh.device_type}"
    only = torch.Size(boxes[0].sizes) if len(boxes) == 1 else None
    partials = None
    if summed:
        reduction, rows = _partials(spec, dtype, mesh_shape, members, summed)
        partials = reduction, tuple([mesh_layout(shape, mesh_shape, row, splits) for row in rows])
    detail, splitting = f"{digest}{spec.shard_order}", MeshSplits(mesh_shape, listed, splits)
    chunks = LocalChunks(text, detail, shape, dtype, layout, boxes, [], None, "", partials, splitting)
    return _Described(chunks, only, mesh)


def _splits(spec: Any) -> tuple[tuple[Split, ...], list[int]]:
    """Return how a mesh cuts a tensor, in the order in which it does, and which of its dims hold partials."""
    splits = []
    summed = []
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_partial():
            summed.append(mesh_dim)
        elif not placement.is_replicate():
            splits.append(Split(mesh_dim, placement.dim, int(getattr(placement, "split_factor", 1))))
    order = spec.shard_order
    if order is not None:  # not left to right, that is
        position = {mesh_dim: place for entry in order for place, mesh_dim in enumerate(entry.mesh_dims)}
        splits.sort(key=lambda split: position[split.mesh_dim])
    return tuple(splits), summed


def _partials(
    spec: Any, dtype: torch.dtype, mesh_shape: tuple[int, ...], members: Sequence[int], summed: list[int]
) -> tuple[str, list[tuple[int, ...]]]:
    """Return how partials are reduced, and for each of them the mesh's ranks that hold it, -1 for the others."""
    kinds = {(type(spec.placements[dim]).__name__, spec.placements[dim].reduce_op) for dim in summed}
    name, reduction = next(iter(kinds))
    if len(kinds) > 1 or name != "Partial" or reduction not in REDUCTIONS or not reduces(reduction, dtype):
        raise UnsupportedLeaf(
            f"cannot reduce the leaf at %PATH%: expected Partial by one of {', '.join(sorted(REDUCTIONS))} of a dtype "
            f"that torch computes with, got {spec.placements} of {dtype}. Redistribute it first."
        )
    places = torch.arange(len(members)).view(mesh_shape).movedim(summed, list(range(len(summed))))
    rows = places.reshape(prod(mesh_shape[dim] for dim in summed), -1)
    held = [torch.full((len(members),), -1).index_copy_(0, row, torch.tensor(members)[row]) for row in rows]
    return reduction, [(*row.tolist(),) for row in held]


class MeshPart(LeafPart):
    """A part of a ``DTensor`` whose local tensor is made of several: cut as that is, or not at all.

    ``cuts`` say how each dim of it follows those of the ``DTensor``, which lies over its mesh by ``spec`` and has the
    shape ``whole``; ``steps`` are the global shape of the part, in the steps in which the ``DTensor`` is cut.
    """

    __slots__ = ("cuts", "spec", "steps")

    def __init__(self, tensor: torch.Tensor, spec: Any, whole: Sequence[int], cuts: tuple[Cut | None, ...]) -> None:
        dims = list(zip(tensor.shape, cuts, strict=True))
        shape = [size if cut is None else whole[cut.dim] * cut.times // cut.over for size, cut in dims]
        super().__init__([tensor], tensor.dtype, shape)
        self.spec = spec
        self.cuts = cuts
        self.steps = tuple([size if cut is None else whole[cut.dim] for size, cut in dims])

    @property
    def is_assumed_equal(self) -> bool:  # type: ignore[override]  # here it depends
        """Whether ranks that hold different chunks of the ``DTensor`` are taken to hold the same of this part."""
        followed = {cut.dim for cut in self.cuts if cut is not None}
        return any(split.dim not in followed for split in _splits(self.spec)[0])

    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds, and where the others are."""
        (tensor,) = self.tensors
        spec = self.spec
        mesh_shape, digest, _, members, _ = ranks.positions(spec.mesh)
        splits, summed = _splits(spec)
        if summed:
            raise UnsupportedLeaf(
                f"the leaf at %PATH% has the placements {spec.placements}, and its local tensor is made of several: "
                "expected no Partial. Redistribute it first."
            )
        cuts = list(enumerate(self.cuts))
        own = tuple([s._replace(dim=d) for s in splits for d, cut in cuts if cut is not None and cut.dim == s.dim])
        if own == splits and self.steps == self.shape:  # as a DTensor would be: it may be tied to one
            known = _described(spec, self.shape, self.dtype, ranks, on_meta=tensor.is_meta).chunks
        else:
            layout = self._layout(splits, mesh_layout(self.steps, mesh_shape, members, own))
            on_meta = " on meta" if tensor.is_meta else ""
            text = f"a part{on_meta} {self.dtype} {self.shape} over a mesh {mesh_shape} cut by {own}"
            held = layout.boxes_of(ranks.rank)
            known = LocalChunks(text, digest, self.shape, self.dtype, layout, held, [], None, "")
        boxes = known.boxes
        pieces = local_pieces(tensor, boxes) if boxes else []
        if pieces is None:
            raise UnsupportedLeaf(
                "the local tensor of the leaf at %PATH% does not fit its placements: expected an inner tensor of "
                f"the shape of {tuple([box.sizes for box in boxes])}, got {tuple(tensor.shape)}. Make it with "
                "from_local(shape=...)."
            )
        return known._replace(pieces=pieces, tie=location_of(tensor), device=tensor.device.type)

    def _layout(self, splits: Sequence[Split], layout: ChunkLayout) -> ChunkLayout:
        """Return the layout of the part, from the one in the steps in which the ``DTensor`` is cut."""
        flat = [cut.dim for cut in self.cuts if cut is not None and cut.is_flat]
        if flat and any(split.dim != flat[0] for split in splits):
            raise self._across_blocks()
        scales = [(1, 1) if cut is None else (cut.times, cut.over) for cut in self.cuts]
        if all(times == over for times, over in scales):
            return layout
        times, over = (torch.tensor(column, dtype=torch.int64) for column in zip(*scales, strict=True))
        starts, stops = layout.starts * times, layout.stops * times
        if bool((starts % over).any()) or bool((stops % over).any()):
            raise self._across_blocks()
        return ChunkLayout(self.shape, layout.ranks, starts // over, stops // over)

    def _across_blocks(self) -> UnsupportedLeaf:
        return UnsupportedLeaf(
            f"the leaf at %PATH% has blocks of elements that lie on several ranks ({self.spec.placements}): expected "
            "rows that the blocks divide, sharded along dim 0. Choose such sizes."
        )


def part_maker(value: Any) -> Callable[[torch.Tensor, tuple[Cut | None, ...]], MeshPart]:
    """Return what makes parts of a ``DTensor``: of a tensor inside its local one, and how that is cut."""
    spec, whole = value._spec, tuple(value.shape)
    if value._local_tensor.dim() != len(whole):  # torch keeps an empty one of one dim where a rank is not in the mesh
        raise UnsupportedLeaf(
            "the leaf at %PATH% lies on other ranks: expected a mesh with this rank, of a DTensor of a wrapper. "
            "Call the verb on the ranks of its mesh, with their group."
        )
    return lambda tensor, cuts: MeshPart(tensor, spec, whole, cuts)


class LocalShardsType(EngineLeafType):
    """``LocalShardsWrapper``: several shards as the local tensor of a ``DTensor`` (torchrec's)."""

    name = "LocalShardsWrapper"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        return value.local_shards(), (type(value), value.local_offsets())

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        cls, offsets = context
        return cls(list(parts), list(offsets))

    def elements_only(self, context: Any) -> bool:
        return True

    def describe(self, value: Any) -> Mapping[str, Any]:
        shapes = [tuple(shard.shape) for shard in value.local_shards()]
        return {"dtype": value.dtype, "shards": list(zip(map(tuple, value.local_offsets()), shapes, strict=True))}


DTENSOR = DTensorType()
LOCAL_SHARDS = LocalShardsType()
