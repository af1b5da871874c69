"""What stands for a tensor that is made of stored ones: converted, or combined, when its elements are asked for."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import UnsupportedLeaf
from statetree.files.stored import StoredTensor, fill_by
from statetree.files.strided_reading import in_buckets
from statetree.leaves.types.tensor import identified
from statetree.spans.overlaps import once, overlaps_itself
from statetree.torch_internals import copy_each, quietly
from statetree.tree.stand_ins import STAND_INS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.chunks.axis_blocks import AxisRegion


class DerivedTensor(StoredTensor):
    """A tensor whose elements are made of those of stored tensors when they are read.

    ``fill`` fills a tensor of the outline's dtype with the elements of a box that begins somewhere.
    """

    def __init__(
        self,
        outline: torch.Tensor,
        sources: Sequence[StoredTensor],
        fill: Callable[[Sequence[int], torch.Tensor], None],
    ) -> None:
        super().__init__(outline, lambda: None, lambda _: ())  # a strided tensor, of which no piece lies in a file
        self._sources, self._make = sources, fill

    @property
    def is_made(self) -> bool:
        return True

    def to(self, dtype: torch.dtype) -> StoredTensor:
        if dtype == self.dtype:
            return self
        made = DerivedTensor(self.outline.detach().to(dtype), self._sources, self._make)
        made._kept = self._kept
        return made

    @quietly
    def tensor(self) -> torch.Tensor:
        """Return the tensor, which is read anew each time, with the strides of the outline."""
        found = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="cpu")
        if not overlaps_itself(self.shape, self.stride()):
            self.read_into((0,) * found.dim(), found)
            return identified(found, self.outline)
        pair = once(found, self.read())
        if pair is None:
            raise UnsupportedLeaf(
                "the leaf at %PATH% overlaps itself: expected one value for each place in memory, got several. Copy it "
                "before."
            )
        copy_each(*[[tensor] for tensor in pair])
        return identified(found, self.outline)

    def look_again(self) -> None:
        for source in self._sources:
            source.look_again()

    def read_block(self, region: AxisRegion, target: torch.Tensor) -> None:
        """Fill a tensor with the elements of a block, a bucket at a time, and convert them to its dtype."""
        hull = region.hull(target.shape)
        if not target.numel():
            return
        if hull.sizes != tuple(target.shape):  # what is made of it needs other axes than the dims
            whole = torch.empty(hull.sizes, dtype=self.dtype, device="cpu")
            self.read_into(hull.start, whole)
            copy_each([target], [region._replace(start=(0,) * whole.dim()).view(whole, target.shape)])
            return
        if target.dtype == self._kept.dtype and target.device.type == "cpu":
            for box in in_buckets(target.shape, target.itemsize):
                self._make((*map(add, hull.start, box.start),), target[(*map(slice, box.start, box.stop),)])
            return

        def make(start: tuple[int, ...], scratch: torch.Tensor) -> None:
            self._make((*map(add, hull.start, start),), scratch)

        fill_by(make, target, self._kept.dtype, "what is made of stored tensors")

    def location(self) -> Any:
        return id(self)


STAND_INS.add(DerivedTensor)
