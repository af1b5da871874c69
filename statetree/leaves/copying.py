"""Copying: the tensors of one tree written into those of another, once everything is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.declare import cached_property
from statetree.errors import Difference, TreeMismatch, UnsupportedLeaf
from statetree.leaves.builtin import settled, taken_over
from statetree.leaves.casting import castable, out_of_range, saturated
from statetree.leaves.pairing import LeafPairing, leave_out_differences, paired_parts
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.ties import ObjectTies, object_ties
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents
from statetree.spans.memory import Memory
from statetree.spans.overlaps import all_disjoint, conflicts, once, overlaps_itself, reads_of_written
from statetree.spans.replicate import replicate_columns
from statetree.spans.threads import copy_together
from statetree.torch_internals import (
    COPIED_AS_INTEGERS,
    can_negate,
    copy_all,
    plain_pair,
)
from statetree.tree.flatten import unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from statetree.key_paths import Path
    from statetree.tree.selection import Where


def prepared_copy(
    verb: str,
    src: Any,
    dst: Any,
    *,
    cast: bool = False,
    saturate: bool = False,
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
    if not differences:
        job.tie_objects()
    differences = [*differences, *job.differences(cast=cast)]
    if not differences and not saturate:
        differences = job.out_of_range()
    job.saturate = saturate
    if differences:
        raise _refusal(verb, differences, pairing)
    if on_missing is not None:
        for difference in pairing.missing:
            on_missing(difference)
    # Both may fail, in code that is not ours, or do anything at all.
    result = unflatten(pairing.spec, job.result()) if where is None and strict else pairing.completed(job.result())
    if pairing.others or any(node[0].compares_aux for node in pairing.spec.nodes):
        job.look_again()
    return result, job.write


def _refusal(verb: str, differences: Sequence[Difference], pairing: LeafPairing) -> TreeMismatch:
    kinds = {difference.kind for difference in differences}
    classes = {(found.left, found.right) for found in differences if found.kind == "leaf type"}
    remedies = {
        "Nothing was written.": not kinds <= {"dtype"},
        "Convert the source, or pass cast=True where no precision that matters is lost.": "dtype" in kinds,
        "Pass strict=False to copy what both trees have.": "missing" in kinds and not pairing.missing,
        "Pass saturate=True to store the largest value that there is instead.": kinds <= {"range"},
        "Use reshard to change a layout.": bool(kinds & {"placements", "mesh"}),
        "Use distribute to cut whole tensors into shards.": ("Tensor", "DTensor") in classes,
        "Use gather to make whole tensors of shards.": ("DTensor", "Tensor") in classes,
    }
    remedy = " ".join(text for text, is_meant in remedies.items() if is_meant)
    names = (pairing.spec.rendered_paths(), pairing.right_spec.rendered_paths()) if "missing" in kinds else None
    return TreeMismatch.between(verb, differences, remedy, names)


class _CopyJob:
    """The plain tensors of a validated pairing: which is copied into which."""

    def __init__(self, pairing: LeafPairing) -> None:
        self.pairing = pairing
        self.leaves = list(pairing.bare)  # the leaf that each pair of tensors belongs to
        self.sources, self.targets = pairing.columns
        self.found: list[Difference] = []
        self.saturate = False
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
        if not all(self.targets.contiguous):
            self._leave_out_repeated()
        self._check_dtypes(cast=cast)
        self._check_negatives()
        self._check_memory(self.sources)
        self._check_memory(self.targets)
        if any(self.targets.inference):
            self._refuse_targets(self.targets.inference, "writability", "an inference tensor")
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

    def _leave_out_repeated(self) -> None:
        """Leave to be copied, of targets that overlap themselves, what is there once; refuse those that cannot be."""
        pairs = list(zip(self.targets.tensors, self.sources.tensors, strict=True))
        crossing = [
            index
            for index, contiguous in enumerate(self.targets.contiguous)
            if not contiguous and overlaps_itself(self.targets.shapes[index], self.targets.strides[index])
        ]
        for index in crossing:
            found = once(*pairs[index])
            if found is None:
                self._refuse(self.leaves[index], "overlap", "a tensor to copy", "a tensor that overlaps itself")
            else:
                pairs[index] = found
        if crossing:
            self.targets, self.sources = (Columns(list(side)) for side in zip(*pairs, strict=True))

    def _refuse_targets(self, flags: Sequence[bool], kind: str, what: str) -> None:
        for index, flag in zip(self.leaves, flags, strict=True):
            if flag:
                self._refuse(index, kind, "a tensor to copy", what)

    def _check_dtypes(self, *, cast: bool) -> None:
        for index in self._converted():
            a, b = self.sources.dtypes[index], self.targets.dtypes[index]
            if not (cast and castable(a, b)):
                self._refuse(self.leaves[index], "dtype", a, b)

    def _converted(self) -> list[int]:
        """Return which tensors are given another dtype."""
        if len(self._dtypes) <= 1:
            return []
        pairs = zip(self.sources.dtypes, self.targets.dtypes, strict=True)
        return [index for index, (source, target) in enumerate(pairs) if source != target]

    @cached_property
    def _dtypes(self) -> set[torch.dtype]:
        """All dtypes of sources and targets."""
        return {*self.sources.dtypes, *self.targets.dtypes}

    def out_of_range(self) -> list[Difference]:
        """Return which tensors hold values that are too large for the dtype that they are converted to."""
        for index in self._converted():
            dtype = self.targets.dtypes[index]
            if found := out_of_range(self.sources.tensors[index], dtype):
                self._refuse(self.leaves[index], "range", *found)
        return self.found

    def _check_negatives(self) -> None:
        """Refuse negative bits on what torch cannot negate: only its private functions set them there."""
        if all(map(can_negate, self._dtypes)):
            return
        bits = zip(self.sources.neg, self.targets.neg, self.sources.dtypes, self.targets.dtypes, strict=True)
        for index, (neg, target_neg, dtype, target_dtype) in enumerate(bits):
            if neg == target_neg and dtype == target_dtype:
                continue
            if (neg and not can_negate(dtype)) or (target_neg and not can_negate(target_dtype)):
                self._refuse(self.leaves[index], "negative bit", neg, target_neg)

    def _check_memory(self, columns: Columns) -> None:
        check_memory("copy_into", columns, lambda index: self._path(self.leaves[index]))

    def look_again(self) -> None:
        """Raise ``UnsupportedLeaf`` if code of objects that were taken apart has changed what is about to be copied."""
        for side in (self.sources, self.targets):
            now = Columns(side.tensors)
            self._check_memory(now)
            for index, found in enumerate(zip(now.pointers, now.shapes, now.strides, now.dtypes, strict=True)):
                if found != (side.pointers[index], side.shapes[index], side.strides[index], side.dtypes[index]):
                    path = self._path(self.leaves[index])
                    msg = (
                        f"copy_into: the tensor at {path or '<root>'} was changed by an object that was taken apart: "
                        "expected the same memory, shape and dtype afterwards. Mend the object's __reduce__."
                    )
                    raise UnsupportedLeaf(msg, path)

    @cached_property
    def _unpacked(self) -> Unpacked:
        """The leaves that are taken over from the source."""
        pairing, taken = self.pairing, self.taken  # and not this object, which would lie in a cycle with the result
        paths = lambda: [pairing.spec.paths()[index] for index in taken]  # noqa: E731
        return unpack("copy_into", [pairing.left[index] for index in taken], paths)

    @cached_property
    def _ties(self) -> ObjectTies:
        """How the tensors inside these are tied to tensors that are copied."""
        if not self.taken or not self._unpacked.parts:
            return ObjectTies({}, [], [])
        return object_ties(self._unpacked.columns, self.sources, self.targets, self._counterparts)

    def _counterparts(self) -> dict[int, torch.Tensor]:
        """Return what objects of the destination hold in the places of those that are taken over."""
        others = [self.pairing.right[index] for index in self.taken]
        try:
            right = unpack("copy_into", others, lambda: list(map(self._path, self.taken)))
        except UnsupportedLeaf:
            return {}
        pairs = paired_parts(self._unpacked, right)
        return {a: right.parts[b] for _, a, b in pairs if a is not None and b is not None}

    def tie_objects(self) -> None:
        """Let objects be tied to what is written; refuse those that share memory with a source and could not."""
        ties = self._ties
        for part, source in ties.lost:
            partner = self._path(self.leaves[source]) or "<root>"
            index = self.taken[self._unpacked.owners[part]]
            self._refuse(index, "ties", f"a view on the memory of {partner}", "a tensor without such a view")
        if ties.written:
            self.leaves += [self.taken[self._unpacked.owners[part]] for part in ties.written]
            sources = [self._unpacked.parts[part] for part in ties.written]
            self.sources = Columns([*self.sources.tensors, *sources])
            self.targets = Columns([*self.targets.tensors, *[ties.views[part] for part in ties.written]])

    def result(self) -> list[Any]:
        """Return the leaves of the resulting tree."""
        if not self.taken:
            return self.pairing.right
        result = list(self.pairing.right)
        columns, tied = self._unpacked.columns, self._ties.views
        parts = list(columns.tensors)
        copied = [index for index in range(len(parts)) if index not in tied]
        for index, copy in zip(copied, copies_of(Columns([parts[index] for index in copied])), strict=True):
            parts[index] = copy
        for index, view in tied.items():
            parts[index] = view
        fresh = self._unpacked.pack(parts)
        for index, leaf in zip(self.taken, fresh, strict=True):
            result[index] = leaf
        return result

    def write(self) -> None:
        """Copy all tensors, as in one call."""
        targets, sources = list(self.targets.tensors), list(self.sources.tensors)
        moved = [] if self.disjoint else reads_of_written(self.targets, self.sources)
        if moved:
            copies = copies_of(Columns([sources[index] for index in moved]))
            for index, fresh in zip(moved, copies, strict=True):
                sources[index] = fresh
        for index in self._converted() if self.saturate else ():
            if out_of_range(sources[index], targets[index].dtype):
                sources[index] = saturated(sources[index], targets[index].dtype)
        for index in self._special():
            targets[index], sources[index] = plain_pair(targets[index], sources[index])
        if self.targets.on_cpu and self.sources.on_cpu:
            copy_together(targets, sources, self.targets.nbytes)
        else:
            copy_all(targets, sources)

    def _special(self) -> list[int]:
        """Return the tensors of whose bits or dtype a plain copy takes no account."""
        targets = self.targets
        if not any(targets.neg) and not any(targets.conj) and COPIED_AS_INTEGERS.isdisjoint(self._dtypes):
            return []
        bits = zip(targets.neg, targets.conj, targets.dtypes, self.sources.dtypes, strict=True)
        return [
            index
            for index, (neg, conj, *pair) in enumerate(bits)
            if neg or conj or not COPIED_AS_INTEGERS.isdisjoint(pair)
        ]


def copied_leaves(verb: str, leaves: list[Any], paths: Callable[[], Sequence[Path]]) -> list[Any]:
    """Return independent copies of leaves, each on its own device. Atoms are passed by identity."""
    unpacked = unpack(verb, leaves, paths)
    return unpacked.pack(copies_of(unpacked.columns))


def copies_of(columns: Columns) -> list[torch.Tensor]:
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
