"""Copying: the tensors of one tree written into those of another, once everything is validated."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import Difference, TreeMismatch
from statetree.leaves.builtin import settled, taken_over
from statetree.leaves.pairing import LeafPairing, leave_out_differences, paired_parts
from statetree.leaves.parts import unpack
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents
from statetree.spans.memory import Memory
from statetree.spans.overlaps import all_disjoint, conflicts, overlaps_itself, reads_of_written
from statetree.spans.replicate import replicate_columns
from statetree.torch_internals import (
    COPIED_AS_INTEGERS,
    WITHOUT_KERNELS,
    can_negate,
    copy_all,
    plain_pair,
)
from statetree.tree.flatten import unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.tree.selection import Where


def prepared_copy(
    verb: str,
    src: Any,
    dst: Any,
    *,
    cast: bool = False,
    where: Where | None = None,
    strict: bool = True,
    on_missing: Callable[[Difference], object] | None = None,
) -> tuple[Any, Callable[[], None]]:
    """Do all of ``copy_into`` but the writing: return what it returns, and the function that writes.

    Raises:
        TreeMismatch, UnsupportedLeaf, CyclicTree: What ``copy_into`` raises. The function does not raise any more.
    """
    pairing = LeafPairing(verb, src, dst, where=where, strict=strict)
    differences = leave_out_differences(pairing, plain=False, dtypes=not cast)
    job = _CopyJob(pairing)
    differences = [*differences, *job.differences(cast=cast)]
    if differences:
        raise _refusal(verb, differences)
    if on_missing is not None:
        for difference in pairing.missing:
            on_missing(difference)
    made = unflatten(pairing.spec, job.result()) if where is None and strict else pairing.completed(job.result())
    return made, job.write  # what comes before may fail, in code that is not ours


def _refusal(verb: str, differences: Sequence[Difference]) -> TreeMismatch:
    kinds = {difference.kind for difference in differences}
    if kinds <= {"dtype"}:
        remedy = "Convert the source, or pass cast=True where no precision that matters is lost."
    elif kinds & {"placements", "mesh"}:
        remedy = "Nothing was written. Use reshard to change a layout."
    else:
        remedy = "Nothing was written."
    return TreeMismatch.between(verb, differences, remedy)


class _CopyJob:
    """The plain tensors of a validated pairing: which is copied into which."""

    def __init__(self, pairing: LeafPairing) -> None:
        self.pairing = pairing
        self.leaves = list(pairing.bare)  # the leaf that each pair of tensors belongs to
        self.sources, self.targets = pairing.columns
        self.found: list[Difference] = []
        # The source decides: what it holds in plain form is taken over whatever the destination holds.
        self.taken = [*pairing.atoms, *(index for index in pairing.others if taken_over(pairing.left[index]))]
        general = [index for index in pairing.others if not taken_over(pairing.left[index])]
        if general:
            sources, targets = list(self.sources.tensors), list(self.targets.tensors)
            self._add_parts(general, sources, targets)
            self.sources, self.targets = Columns(sources), Columns(targets)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two of all tensors lie over each other (the usual case, in which nothing more need be asked)."""
        return all_disjoint(self.targets, self.sources)

    def _path(self, index: int) -> Any:
        return self.pairing.spec.paths()[index]

    def _add_parts(self, general: list[int], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        left, right = (
            unpack(
                "copy_into",
                [settled(leaves[index]) for index in general],
                lambda: list(map(self._path, general)),
            )
            for leaves in (self.pairing.left, self.pairing.right)
        )
        for position, part_a, part_b in paired_parts(left, right):
            index = general[position]
            if part_a is None or part_b is None:
                self._refuse(index, "parts", "taken apart differently", "taken apart differently")
                continue
            a, b = left.parts[part_a], right.parts[part_b]
            if a.shape != b.shape:
                self._refuse(index, "shape", tuple(a.shape), tuple(b.shape))
            elif a.is_meta != b.is_meta:
                self._refuse(index, "meta", a.device, b.device)
            elif a.numel() and not a.is_meta:
                self.leaves.append(index)
                sources.append(a)
                targets.append(b)

    def _refuse(self, index: int, kind: str, left: Any, right: Any) -> None:
        self.found.append(Difference(self._path(index), kind, left, right))

    def differences(self, *, cast: bool) -> list[Difference]:
        """Return why the tensors cannot be copied, as far as it does not show in the leaves' facts."""
        self._check_dtypes(cast=cast)
        self._check_negatives()
        self._check_memory(self.sources)
        self._check_memory(self.targets)
        if any(self.targets.inference) or not all(self.targets.contiguous):
            self._check_writability()
        if not self.found and not self.disjoint:
            for first, second in conflicts(self.targets, self.sources):
                partner = self._path(self.leaves[second])
                self._refuse(
                    self.leaves[first],
                    "overlap",
                    "values of its own",
                    f"a tensor that overlaps {partner}",
                )
        return self.found

    def _check_writability(self) -> None:
        targets = self.targets
        for index, (inference, contiguous) in enumerate(zip(targets.inference, targets.contiguous, strict=True)):
            if inference:
                self._refuse(self.leaves[index], "writability", "a tensor to copy", "an inference tensor")
            if not contiguous and overlaps_itself(targets.shapes[index], targets.strides[index]):
                self._refuse(self.leaves[index], "overlap", "a tensor to copy", "a tensor that overlaps itself")

    def _check_dtypes(self, *, cast: bool) -> None:
        if self.sources.dtypes == self.targets.dtypes:
            return
        for index, (a, b) in enumerate(zip(self.sources.dtypes, self.targets.dtypes, strict=True)):
            if a != b and not (cast and castable(a, b)):
                self._refuse(self.leaves[index], "dtype", a, b)

    def _check_negatives(self) -> None:
        """Refuse negative bits on what torch cannot negate: only its private functions set them there."""
        dtypes = {*self.sources.dtypes, *self.targets.dtypes}
        if all(map(can_negate, dtypes)):
            return
        bits = zip(self.sources.neg, self.targets.neg, self.sources.dtypes, self.targets.dtypes, strict=True)
        for index, (neg, target_neg, dtype, target_dtype) in enumerate(bits):
            if neg == target_neg and dtype == target_dtype:
                continue
            if (neg and not can_negate(dtype)) or (target_neg and not can_negate(target_dtype)):
                self._refuse(self.leaves[index], "negative bit", neg, target_neg)

    def _check_memory(self, columns: Columns) -> None:
        check_memory("copy_into", columns, lambda index: self._path(self.leaves[index]))

    def result(self) -> list[Any]:
        """Return the leaves of the resulting tree."""
        if not self.taken:
            return self.pairing.right
        result = list(self.pairing.right)
        taken = [self.pairing.left[index] for index in self.taken]
        unpacked = unpack("copy_into", taken, lambda: list(map(self._path, self.taken)))
        fresh = unpacked.pack(_copies(unpacked.columns))
        for index, leaf in zip(self.taken, fresh, strict=True):
            result[index] = leaf
        return result

    def write(self) -> None:
        """Copy all tensors, in one call."""
        targets, sources = list(self.targets.tensors), list(self.sources.tensors)
        moved = [] if self.disjoint else reads_of_written(self.targets, self.sources)
        if moved:
            copies = _copies(Columns([sources[index] for index in moved]))
            for index, fresh in zip(moved, copies, strict=True):
                sources[index] = fresh
        for index in self._special():
            targets[index], sources[index] = plain_pair(targets[index], sources[index])
        copy_all(targets, sources)

    def _special(self) -> list[int]:
        """Return the targets of whose bits or dtype a plain copy takes no account."""
        targets = self.targets
        if not any(targets.neg) and not any(targets.conj) and COPIED_AS_INTEGERS.isdisjoint(targets.dtypes):
            return []
        bits = zip(targets.neg, targets.conj, targets.dtypes, strict=True)
        return [index for index, (neg, conj, dtype) in enumerate(bits) if neg or conj or dtype in COPIED_AS_INTEGERS]


def _copies(columns: Columns) -> list[torch.Tensor]:
    """Return independent copies of tensors, each on its own device."""
    result: list[torch.Tensor] = list(columns.tensors)
    reach = extents(columns)
    for device in set(columns.devices):
        chosen = [index for index, own in enumerate(columns.devices) if own == device]
        part = Columns([columns.tensors[index] for index in chosen])
        fresh = replicate_columns(part, [reach[index] for index in chosen], Memory(device), copy=True)
        for index, tensor in zip(chosen, fresh, strict=True):
            result[index] = tensor
    return result


#: Dtypes that torch cannot convert, or only by throwing most of a value away (scales, which are powers of two).
_UNCONVERTIBLE: Final = WITHOUT_KERNELS | {torch.float4_e2m1fn_x2, torch.float8_e8m0fnu}


def castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``cast=True`` converts between two dtypes.

    Losslessly, or between floating point types and between complex types. Never from complex to real, from floating
    point to integer, or to an integer type that does not hold every value.
    """
    if not {source, target}.isdisjoint(_UNCONVERTIBLE):
        return False
    if source.is_complex:
        return target.is_complex
    if source.is_floating_point:
        return target.is_floating_point or target.is_complex
    if source is torch.bool:
        return True
    if target is torch.bool:
        return False
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point or target.is_complex:
        whole = 2 / torch.finfo(target).eps  # every integer up to here is a value of the target
        return -whole <= low and high <= min(whole, torch.finfo(target).max)
    return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max
