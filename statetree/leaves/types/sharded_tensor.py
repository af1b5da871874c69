"""``ShardedTensor``, which FSDP1 state dicts hold: any number of local shards."""

from __future__ import annotations

from copy import deepcopy
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import layout_of
from statetree.chunks.local import LocalChunks, location_of
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.tensor import attributes_of, set_attributes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.ranks import Ranks
    from statetree.leaves.engine_type import LeafContents


class ShardedTensorType(EngineLeafType):
    """``ShardedTensor``: the tensors of its local shards, with metadata, sharding spec and process group kept."""

    name = "ShardedTensor"
    distributed = True

    def contents(self, value: Any) -> LeafContents:
        shards = value.local_shards()
        context = (
            [shard.metadata for shard in shards],
            value.metadata(),
            value._process_group,
            value._init_rrefs,
            value.sharding_spec(),
        )
        # What ShardedTensor keeps for itself begins with an underscore.
        carried = {name: held for name, held in attributes_of(value).items() if not name.startswith("_")}
        return [shard.tensor for shard in shards], context, carried

    def assemble(self, context: Any, parts: Sequence[Any], attributes: Any) -> Any:
        metadata, whole, group, init_rrefs, sharding_spec = context
        expected = (metadata[0].placement.device(), whole.tensor_properties.pin_memory) if metadata else None
        if metadata and (parts[0].device, parts[0].is_pinned()) != expected:
            metadata, whole, sharding_spec = _moved(parts[0], metadata, whole)
        shards = [Shard(tensor, shard) for tensor, shard in zip(parts, metadata, strict=True)]
        fresh = ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, whole, process_group=group, init_rrefs=init_rrefs, sharding_spec=sharding_spec
        )
        set_attributes(fresh, attributes)
        return fresh

    def elements_only(self, context: Any) -> bool:
        return True

    def with_dtype(self, context: Any, dtype: torch.dtype) -> Any:
        metadata, whole, *rest = context
        whole = deepcopy(whole)
        whole.tensor_properties.dtype = dtype
        return (metadata, whole, *rest)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        return value.size(), value.dtype

    def describe(self, value: Any) -> Mapping[str, Any]:
        metadata = value.metadata()
        return {
            "dtype": metadata.tensor_properties.dtype,
            "shape": metadata.size,
            "shards": [(shard.shard_offsets, shard.shard_sizes) for shard in metadata.shards_metadata],
            "local shards": [shard.metadata.shard_offsets for shard in value.local_shards()],
        }

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:
        """Return which chunks of a ``ShardedTensor`` this rank holds, and where the others are."""
        metadata = value.metadata()
        shape, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
        detail, layout = _layout(metadata, shape, ranks)
        local = [shard for shard in value.local_shards() if all(shard.metadata.shard_sizes)]
        pieces = [shard.tensor.detach() for shard in local]
        kinds = sorted({shard.placement.device().type for shard in metadata.shards_metadata})
        device = kinds[0] if kinds else "cpu"
        kind = "ShardedTensor on meta" if device == "meta" else "ShardedTensor"
        return LocalChunks(
            f"a {kind} {dtype} {shape} in {len(metadata.shards_metadata)} shards",
            detail,
            shape,
            dtype,
            layout,
            [Box.at(shard.metadata.shard_offsets, shard.metadata.shard_sizes) for shard in local],
            pieces,
            (*map(location_of, pieces),) if pieces else id(value),
            device,
        )


def _layout(metadata: Any, shape: tuple[int, ...], ranks: Ranks) -> tuple[str, ChunkLayout]:
    """Return a digest of where all shards are, and the layout: one for all tensors whose shards lie alike."""
    shards = metadata.shards_metadata
    key = (shape, tuple([(*shard.shard_offsets, *shard.shard_sizes, str(shard.placement)) for shard in shards]))
    if key not in ranks.memo:
        held: dict[int, list[Box]] = {}
        for shard in shards:
            rank = ranks.index.get(shard.placement.rank(), -1)
            if rank >= 0 and all(shard.shard_sizes):
                held.setdefault(rank, []).append(Box.at(shard.shard_offsets, shard.shard_sizes))
        digest = blake2b(repr(key).encode(), digest_size=16).hexdigest()
        ranks.memo[key] = digest, layout_of(shape, held)
    found: tuple[str, ChunkLayout] = ranks.memo[key]
    return found


def _moved(tensor: torch.Tensor, metadata: Sequence[Any], whole: Any) -> tuple[list[Any], Any, None]:
    """Return metadata for shards in the memory in which a tensor lies; torch infers the sharding spec from them."""
    local, whole = deepcopy((list(metadata), whole))
    whole.tensor_properties.pin_memory = tensor.is_pinned()
    own = {shard.placement.rank() for shard in local}
    for shard in [*local, *whole.shards_metadata]:
        rank, device = shard.placement.rank(), shard.placement.device()
        if rank in own or device.type != tensor.device.type:
            shard.placement = _remote_device(f"rank:{rank}/{tensor.device}")
    return local, whole, None


SHARDED = ShardedTensorType()
