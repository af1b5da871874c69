"""Copying: the tensors of one tree written into those of another, once everything is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.declare import cached_property
from statetree.errors import Difference, TreeMismatch, UnsupportedLeaf
from statetree.leaves.builtin import IN_A_FILE, is_stored, is_value, materialized
from statetree.leaves.casting import RANGE_REMEDY, castable, is_castable, out_of_range
from statetree.leaves.pairing import LeafPairing, leave_out_differences, paired_parts
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.ties import ObjectTies, object_ties, view_key
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents
from statetree.spans.memory import Memory
from statetree.spans.overlaps import all_disjoint, conflicts, once, overlaps_itself, reads_of_written
from statetree.spans.replicate import replicate_apart
from statetree.spans.threads import copy_together
from statetree.torch_internals import COPIED_AS_INTEGERS, can_negate, copy_all, plain_pair
from statetree.tree.flatten import unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from statetree.key_paths import Path
    from statetree.tree.selection import Where

#: How many of a leaf's parts a message shows.
_SHOWN_PARTS: Final = 3


def prepared_copy(
    verb: str,
    src: Any,
    dst: Any,
    *,
    cast: bool = False,
    where: Where | None = None,
    strict: bool = True,
    on_missing: Callable[[Difference], object] | None = None,
    arriving: Collection[Any] = (),
) -> tuple[Any, Callable[[], None]]:
    """Do all of ``copy_into`` but the writing: return what it returns, and the function that writes.

    It does not copy from storages that are ``arriving``, by their keys: somebody else writes what will lie there.
    """
    pairing = LeafPairing(verb, src, dst, where=where, strict=strict)
    differences = leave_out_differences(pairing, plain=False, dtypes=not cast)
    job = _CopyJob(pairing)
    if not differences:
        job.tie_objects()
    differences = [*differences, *job.differences(cast=cast)] or job.out_of_range()
    if differences:
        raise _refusal(verb, differences, pairing)
    if on_missing is not None:
        for difference in pairing.missing:
            on_missing(difference)
    # Both may fail, in code that is not ours, or do anything at all.
    result = unflatten(pairing.spec, job.result()) if where is None and strict else pairing.completed(job.result())
    if pairing.others or any(node[0].compares_aux for node in pairing.spec.nodes):
        job.look_again()
    if arriving:
        job.leave_out(arriving)
    return result, job.write


def _refusal(verb: str, differences: Sequence[Difference], pairing: LeafPairing) -> TreeMismatch:
    kinds = {difference.kind for difference in differences}
    classes = {(found.left, found.right) for found in differences if found.kind == "leaf type"}
    would_help = any(map(is_castable, differences))
    remedies = {
        "Nothing was written.": not kinds <= {"dtype"},
        "Convert the source, or pass cast=True where no precision that matters is lost.": would_help,
        "Convert the source.": "dtype" in kinds and not would_help,
        "Pass strict=False to copy what both trees have.": "missing" in kinds and not pairing.missing,
        RANGE_REMEDY: kinds <= {"range"},
        "Load what shall be written, and save it afterwards.": any(found.right == IN_A_FILE for found in differences),
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
        self.leaves = list(pairing.ordinary)  # the leaf that each pair of tensors belongs to
        self.sources, self.targets = pairing.columns
        self.found: list[Difference] = []
        # The source decides: what it holds in plain form is taken over whatever the destination holds.
        self.taken = [*pairing.atoms, *(index for index in pairing.others if is_value(pairing.left[index]))]
        general = [index for index in pairing.others if not is_value(pairing.left[index])]
        if general:
            self._add_parts(general)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two of all tensors lie over each other (the usual case, in which nothing more need be asked)."""
        return all_disjoint(self.targets, self.sources)

    def _path(self, index: int) -> Any:
        return self.pairing.spec.paths()[index]

    def _refuse(self, index: int, kind: str, left: Any, right: Any) -> None:
        self.found.append(Difference(self._path(index), kind, left, right))

    def _add_parts(self, general: list[int]) -> None:
        sides = self.pairing.left, self.pairing.right
        for index in general:
            held = self.pairing.right[index]
            if is_stored(held) and held is not self.pairing.left[index] and 0 not in held.shape:
                self._refuse(index, "writability", "a tensor to copy", IN_A_FILE)
        paths = lambda: list(map(self._path, general))  # noqa: E731
        left, right = (unpack("copy_into", [materialized(side[index]) for index in general], paths) for side in sides)
        pairs = []
        for position, part_a, part_b in paired_parts(left, right):
            index = general[position]
            if part_a is None or part_b is None:
                found, expected = parts_text(left, position), parts_text(right, position)
                self._refuse(index, "parts", f"{found}, taken apart differently", expected)
                continue
            a, b = left.parts[part_a], right.parts[part_b]
            if a.shape != b.shape:
                self._refuse(index, "shape", tuple(a.shape), tuple(b.shape))
            elif a.is_meta != b.is_meta:
                self._refuse(index, "meta", a.device, b.device)
            elif a.numel() and not a.is_meta:
                self.leaves.append(index)
                pairs.append((a, b))
        self.sources = Columns([*self.sources.tensors, *(a for a, _ in pairs)])
        self.targets = Columns([*self.targets.tensors, *(b for _, b in pairs)])

    def differences(self, *, cast: bool) -> list[Difference]:
        """Return why elements cannot be written there, as far as it does not show in the leaves' facts."""
        self._check_memory(self.sources)  # before elements are looked at
        self._check_memory(self.targets)
        if not all(self.targets.contiguous):
            self._leave_out_repeated()
        for index in self._converted():
            a, b = self.sources.dtypes[index], self.targets.dtypes[index]
            if not (cast and castable(a, b)):
                self._refuse(self.leaves[index], "dtype", a, b)
        self._check_negatives()
        for index, is_inference in zip(self.leaves, self.targets.inference, strict=True):
            if is_inference:
                self._refuse(index, "writability", "a tensor to copy", "an inference tensor")
        if not self.found and not self.disjoint:
            for first, second in conflicts(self.targets, self.sources):
                partner = self._path(self.leaves[second])
                self._refuse(self.leaves[first], "overlap", "values of its own", f"a tensor that overlaps {partner}")
        return self.found

    def out_of_range(self) -> list[Difference]:
        """Return which tensors hold values that are too large for the dtype that they are converted to."""
        for index in self._converted():
            if found := out_of_range(self.sources.tensors[index], self.targets.dtypes[index]):
                self._refuse(self.leaves[index], "range", *found)
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

    def _converted(self) -> list[int]:
        if len(self._dtypes) <= 1:
            return []
        pairs = zip(self.sources.dtypes, self.targets.dtypes, strict=True)
        return [index for index, (source, target) in enumerate(pairs) if source != target]

    @cached_property
    def _dtypes(self) -> set[torch.dtype]:
        return {*self.sources.dtypes, *self.targets.dtypes}

    def _check_negatives(self) -> None:
        """Refuse negative bits on what torch cannot negate: only its private functions set them there."""
        if all(map(can_negate, self._dtypes)):
            return
        bits = zip(self.sources.neg, self.targets.neg, self.sources.dtypes, self.targets.dtypes, strict=True)
        for index, (neg, target_neg, dtype, target_dtype) in enumerate(bits):
            is_kept = neg == target_neg and dtype == target_dtype
            if not is_kept and ((neg and not can_negate(dtype)) or (target_neg and not can_negate(target_dtype))):
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
        return unpack("copy_into", [pairing.left[index] for index in taken], paths, together=True)

    @cached_property
    def _ties(self) -> ObjectTies:
        """How the tensors inside these are tied to tensors that are copied."""
        if not self.taken or not self._unpacked.parts:
            return ObjectTies({}, [], [])
        return object_ties(self._unpacked.columns, self.sources, self.targets, self._counterparts)

    def _counterparts(self) -> dict[int, torch.Tensor]:
        """Return what objects of the destination hold in the places of those that are taken over."""
        sides = ([side[index] for index in self.taken] for side in (self.pairing.left, self.pairing.right))
        try:
            left, right = (unpack("copy_into", side, lambda: list(map(self._path, self.taken))) for side in sides)
        except UnsupportedLeaf:
            return {}
        # Here each object is taken apart by itself, so that they can be paired.
        facing = {
            view_key(left.parts[a]): right.parts[b]
            for _, a, b in paired_parts(left, right)
            if a is not None and b is not None
        }
        found = {part: facing.get(view_key(tensor)) for part, tensor in enumerate(self._unpacked.parts)}
        return {part: tensor for part, tensor in found.items() if tensor is not None}

    def tie_objects(self) -> None:
        """Let objects be tied to what is written; refuse those that share memory with a source and could not."""
        ties, owners, parts = self._ties, self._unpacked.owners, self._unpacked.parts
        self.leaves += [self.taken[owners[part]] for part in ties.written]
        for part, source in ties.lost:
            partner = self._path(self.leaves[source]) or "<root>"
            wanted = f"a view on the memory of {partner}"
            self._refuse(self.taken[owners[part]], "ties", wanted, "a tensor without such a view")
        if ties.written:
            self.sources = Columns([*self.sources.tensors, *(parts[part] for part in ties.written)])
            self.targets = Columns([*self.targets.tensors, *(ties.views[part] for part in ties.written)])

    def result(self) -> list[Any]:
        """Return the leaves of the resulting tree."""
        if not self.taken:
            return self.pairing.right
        views = self._ties.views
        parts = list(self._unpacked.parts)
        copied = [index for index in range(len(parts)) if index not in views]
        fresh = dict(zip(copied, copies_of(Columns([parts[index] for index in copied])), strict=True))
        # What an object holds of the source's leaves themselves becomes the leaf, and no view on it, if that is of the
        # same class: the optimizer's parameter is the model's.
        left, right = self.pairing.left, self.pairing.right
        others = sorted({*self.pairing.others, *self.pairing.ordinary}.difference(self.taken)) if parts else []
        pairs = [(left[index], right[index]) for index in reversed(others)]
        kinds = [[(type(leaf), getattr(leaf, "requires_grad", None)) for leaf in pair] for pair in pairs]
        written = {id(a): b for (a, b), (kind, other) in zip(pairs, kinds, strict=True) if kind == other}
        made = [written.get(id(part), views.get(index, fresh.get(index, part))) for index, part in enumerate(parts)]
        leaves = self._unpacked.pack(made, written)
        result = list(self.pairing.right)
        for index, leaf in zip(self.taken, leaves, strict=True):
            result[index] = leaf
        return result

    def leave_out(self, arriving: Collection[Any]) -> None:
        """Do not copy from some storages."""
        kept = [index for index, key in enumerate(self.sources.storage_keys) if key not in arriving]
        self.sources, self.targets = (
            Columns([side.tensors[index] for index in kept]) for side in (self.sources, self.targets)
        )

    def write(self) -> None:
        """Copy all tensors, as in one call."""
        targets, sources = list(self.targets.tensors), list(self.sources.tensors)
        moved = [] if self.disjoint else reads_of_written(self.targets, self.sources)
        if moved:
            copies = copies_of(Columns([sources[index] for index in moved]))
            for index, fresh in zip(moved, copies, strict=True):
                sources[index] = fresh
        neg, conj = self.targets.neg, self.targets.conj
        if any(neg) or any(conj) or not COPIED_AS_INTEGERS.isdisjoint(self._dtypes):
            dtypes = zip(self.targets.dtypes, self.sources.dtypes, strict=True)
            for index, pair in enumerate(dtypes):  # a plain copy takes no account of their bits or dtype
                if neg[index] or conj[index] or not COPIED_AS_INTEGERS.isdisjoint(pair):
                    targets[index], sources[index] = plain_pair(targets[index], sources[index])
        if self.targets.on_cpu and self.sources.on_cpu:
            copy_together(targets, sources, self.targets.nbytes)
        else:
            copy_all(targets, sources)


def parts_text(unpacked: Unpacked, leaf: int) -> str:
    """Say which tensors a leaf was taken apart into: how many, and the first of them."""
    parts = [unpacked.parts[part] for part in unpacked.parts_of(leaf)[::-1]]  # it lists the last one first
    shown = [f"{part.dtype} {tuple(part.shape)}" for part in parts[:_SHOWN_PARTS]]
    listed = ", ".join([*shown, "…"] if len(parts) > len(shown) else shown)
    return f"{len(parts)} part{'s' * (len(parts) != 1)}" + (f" ({listed})" if listed else "")


def copied_leaves(verb: str, leaves: list[Any], paths: Callable[[], Sequence[Path]]) -> list[Any]:
    """Return independent copies of leaves, each on its own device. Atoms are passed by identity.

    What several objects share, their copies do, too.
    """
    unpacked = unpack(verb, leaves, paths, together=True)
    return unpacked.pack(copies_of(unpacked.columns))


def copies_of(columns: Columns) -> list[torch.Tensor]:
    """Return independent copies of tensors, each on its own device."""
    memories = {device: Memory(device) for device in set(columns.devices)}
    return replicate_apart(columns, extents(columns), columns.devices, memories, copy=True)
