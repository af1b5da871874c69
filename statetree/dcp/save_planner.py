"""How DCP plans a save of ours: prepared inside its first step, in which it tells every rank what fails."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from statetree.dcp.local_pieces import LocalPieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta


class ToSave(NamedTuple):
    """What a rank has to save.

    Attributes:
        flat: Tensors, and plain values, pickled, as ``BytesIO``.
        dcp_paths: Where they lie, as DCP has it.
        inseparable: Keys of tensors that are of use together only, so that one rank has to write them all.
    """

    flat: dict[str, Any]
    dcp_paths: dict[str, tuple[str | int, ...]]
    inseparable: set[str]


class SavePlanner(DefaultSavePlanner):
    """Plans a save.

    Args:
        prepare: Given whether this is the coordinating rank, returns what is to be saved. What it raises reaches every
            rank.
    """

    def __init__(self, prepare: Callable[[bool], ToSave]) -> None:
        super().__init__(flatten_state_dict=False)
        self._prepare = prepare
        self._inseparable: set[str] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002 - DCP's signature
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Prepare the state."""
        prepared = self._prepare(is_coordinator)
        self._inseparable = prepared.inseparable
        super().set_up_planner(prepared.flat, storage_meta, is_coordinator)
        self.mappings = prepared.dcp_paths
        self.flatten_state_dict = True  # that is: write the mappings, for tools that nest flat dicts again

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let the first rank that has a value write it, and leave it to DCP who writes which tensor."""
        taken: set[str] = set()
        plans = []
        for plan in all_plans:
            together = [item for item in plan.items if self._is_written_by_one(item)]
            skipped = {item.index for item in together if item.index.fqn in taken}
            plans.append(dataclasses.replace(plan, items=[item for item in plan.items if item.index not in skipped]))
            taken.update(item.index.fqn for item in together)
        return super().create_global_plan(plans)

    def _is_written_by_one(self, item: WriteItem) -> bool:
        return item.type == WriteItemType.BYTE_IO or item.index.fqn in self._inseparable

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be written."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, LocalPieces) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002, ARG002 - DCP's signature
        """Leave values as they are: they are pickled."""
        return object
