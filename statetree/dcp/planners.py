"""How DCP plans a save or a load of ours: prepared inside its first step, in which it tells every rank what fails."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from statetree.chunks.boxes import Box, is_covered
from statetree.dcp.flat_state import STRUCTURE_KEY
from statetree.dcp.local_pieces import LocalPieces
from statetree.dcp.plain_values import gist, read_value
from statetree.dcp.tensors import pieces_of
from statetree.errors import CheckpointError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.storage import StorageReader


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


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load.

    Args:
        reader: Reads the structure while the load is planned.
        choose: Given the structure's text (or ``None``) and the metadata, returns the tensors to fill, and ``None`` for
            each plain value to read.
        finish: Called when everything was read. What it raises reaches every rank.
        weights_only: Whether plain values are unpickled by the rules of ``torch.load(weights_only=True)``.

    Attributes:
        values: The plain values that were read.
    """

    def __init__(
        self,
        reader: CarefulReader,
        choose: Callable[[str | None, Metadata], dict[str, Any]],
        finish: Callable[[], None],
        *,
        weights_only: bool,
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self.values: dict[str, Any] = {}
        self._reader = reader
        self._choose = choose
        self.finish = finish
        self._weights_only = weights_only

    def create_local_plan(self) -> LoadPlan:
        """Read the structure, and choose what to load."""
        if self._reader.failure is not None:
            raise self._reader.failure
        assert self.metadata is not None
        text = None
        if isinstance(self.metadata.state_dict_metadata.get(STRUCTURE_KEY), BytesStorageMetadata):
            text = self._read_structure()
        flat = self._choose(text, self.metadata)
        by_pieces = {key: value for key, value in flat.items() if isinstance(value, LocalPieces)}
        super().set_up_planner(flat, self.metadata, self.is_coordinator)
        self.state_dict.update(by_pieces)  # DCP has put None in the place of objects
        plan = create_default_local_load_plan(self.state_dict, self.metadata)
        self._check_coverage(plan)
        return plan

    def _read_structure(self) -> str:
        index = MetadataIndex(STRUCTURE_KEY)
        none = torch.Size([0])
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        trusting, self._weights_only = self._weights_only, True
        self._reader.inner.read_data(LoadPlan([item]), self).wait()
        self._weights_only = trusting
        return self.values.pop(STRUCTURE_KEY)  # type: ignore[no-any-return]

    def _check_coverage(self, plan: LoadPlan) -> None:
        """Raise if the pieces in the checkpoint do not make up the tensors: elements would keep what they were."""
        covered: defaultdict[tuple[str, int | None], list[Box]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                box = Box(tuple(item.dest_offsets), (*map(sum, zip(item.dest_offsets, item.lengths, strict=True)),))
                covered[item.dest_index.fqn, item.dest_index.index].append(box)
        for key, target in self.state_dict.items():
            for index, piece in enumerate(pieces_of(target) if isinstance(target, (torch.Tensor, LocalPieces)) else ()):
                self._check_boxes(key, piece.shape, covered[key, index])

    def _check_boxes(self, key: str, shape: Sequence[int], boxes: list[Box]) -> None:
        whole = Box((0,) * len(shape), tuple(shape))
        if is_covered(whole, boxes):
            return
        held, need = sum(box.volume for box in boxes), whole.volume
        what = f"{held} of the {need} elements" if held < need else f"pieces that overlap, but not all {need} elements,"
        msg = (
            f"load: the checkpoint holds {what} of {key} that this rank needs: expected all. It was saved without some "
            "of its ranks, or is damaged. Load another one."
        )
        raise CheckpointError(msg)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return what is to be read into."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, LocalPieces) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a plain value."""
        key = read_item.dest_index.fqn
        try:
            data = value.getvalue()
            self.values[key] = read_value(data) if self._weights_only else torch.load(value, weights_only=False)
        except Exception as error:  # noqa: BLE001 - damaged or hostile bytes may raise anything
            reason = f"{type(error).__name__}: {gist(error)}"
            remedy = (
                "If you trust where the checkpoint comes from, pass weights_only=False, or name its classes with "
                "torch.serialization.add_safe_globals."
                if self._weights_only
                else "Load another checkpoint."
            )
            msg = f"load: the plain value at {key} cannot be read: {reason}. {remedy}"
            raise CheckpointError(msg) from None


class CarefulReader:
    """Passes everything on to a reader, but keeps what reading the metadata raises for the planner to raise.

    DCP itself logs such errors, and goes on to look for files of another kind.
    """

    def __init__(self, inner: StorageReader) -> None:
        self.inner = inner
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_metadata(self, *_args: Any) -> Metadata:
        """Read the metadata, or return an empty one."""
        try:
            return self.inner.read_metadata()
        except Exception as error:  # noqa: BLE001 - whatever it is, the planner raises it
            self.failure = error
            return Metadata({}, storage_data={})

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Pass on, and wait: the planner finishes while DCP still tells every rank what fails."""
        reading = self.inner.read_data(plan, planner)
        reading.wait()
        planner.finish()
        return reading
