"""``delta``, ``apply_delta``, and what lies between: ``Delta``, a tree of plain tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from statetree.chunks.local import location_of
from statetree.chunks.ranks import own_ranks
from statetree.declare import phase
from statetree.errors import Difference, TreeMismatch
from statetree.leaves.builtin import IN_A_FILE, facts
from statetree.leaves.copying import copied_leaves
from statetree.leaves.pairing import fact_differences, inner_differences
from statetree.leaves.parts import unpack
from statetree.spans.bits import differ_in_more, differing, is_unreadable
from statetree.spans.sums import FEW, piece_sums, sums_at
from statetree.torch_internals import quietly, storage_key
from statetree.transforms.deltas.change import (
    IN_A_ROW,
    OTHER_CONTENT,
    TensorChange,
    ValueChange,
    as_gaps,
    damaged,
    has_elements,
    merged_changes,
    mismatch,
    out_of_box,
    stem,
)
from statetree.transforms.deltas.state_parts import HeldPart, LocatedChange, StateParts, plain_copy
from statetree.tree.html_fragments import cell, html_escaped, table
from statetree.tree.matching import matched

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Delta:
    """What has to be written into one state (the base) to make it another one, bit for bit.

    It is a tree of plain tensors and of those plain values that changed: it can be offloaded, staged, saved and sent.
    In ``to_flat(delta)``, whose names others may rely on, a tensor ``model.w`` of which some elements changed has

    - ``tensors.model.w.values``: these elements, in its dtype,
    - ``tensors.model.w.gaps`` and ``tensors.model.w.head``: their positions in the global shape, in row-major order,
      are ``head[0] + gaps.cumsum()``. Where ``head[0]`` is -1, there are no gaps: the tensor is replaced as a whole.

    On a rank of several, the delta of a distributed tensor holds what changed of this rank's part. ``save`` takes it
    for the same on all ranks: give each rank a directory and a process group of its own, or bring it into whole tensors
    first (``reshard(delta, like)``, with plain tensors in ``like``).

    Attributes:
        tensors: For each tensor that changed, by its name in ``to_flat`` of the base, what is written over it. Of a
            leaf ``w`` that is made of several tensors, or of which this rank holds several chunks, these are ``w#0``,
            ``w#1`` and so on.
        values: For each other leaf that changed, what takes its place.
        table: For every leaf of the base, in the order of the paths, an ``int64`` by which its name, dtype, shape and
            layout are recognised.
    """

    tensors: dict[str, TensorChange]
    values: dict[str, ValueChange]
    table: torch.Tensor

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)

    def __repr__(self) -> str:
        written = sum(change.values.numel() for change in self.tensors.values())
        return f"<Delta of {len(self.table)} leaves: {written} elements and {len(self.values)} values differ>"

    def _repr_html_(self) -> str:
        rows = [(name, f"{count:,}") for name, count in self.changed.items()]
        title = f"<b>{html_escaped(repr(self))}, {self.nbytes:,} bytes</b>"
        return cell([title, *table(("path", "elements written"), rows)])

    @property
    def changed(self) -> dict[str, int]:
        """How many elements are written, for each tensor that changes (1 for a leaf that is taken whole)."""
        counts = {name: change.values.numel() for name, change in self.tensors.items()}
        return {**counts, **dict.fromkeys(self.values, 1)}

    @property
    def nbytes(self) -> int:
        """The bytes of positions, values and new leaves, without the few by which the base is recognised."""
        tensors = [tensor for change in self.tensors.values() for tensor in (change.gaps, change.values)]
        tensors += unpack("delta", [change.value for change in self.values.values()], list, memory=False).parts
        return sum({storage_key(tensor.untyped_storage()): tensor.nbytes for tensor in tensors}.values())

    @quietly
    def then(self, other: Delta) -> Delta:
        """Return the delta with the effect of this one followed by another one.

        Args:
            other: A delta whose base is what this one makes.

        Aliasing:
            What only one of them changes is shared with it.

        Raises:
            TreeMismatch: If the other's base has another structure, or is known not to be what this one makes; or if
                only one of them takes a leaf whole whose parts have other sizes than before (a sparse tensor, say).
        """
        if not isinstance(cast("Any", other), Delta):
            raise TypeError(f"then: expected a Delta, got {type(other).__qualname__}.")
        if not self.table.equal(other.table):
            got = "trees of other structures, dtypes, shapes or layouts"
            raise mismatch("then", next(iter(other.changed), ""), "deltas of one tree", got, IN_A_ROW)
        for one, another in ((self, other), (other, self)):
            for name in one.tensors:
                if name in another.values or stem(name) in another.values:  # other sizes: nothing is known of the base
                    got = "a leaf that only one of them takes whole"
                    raise mismatch("then", name, "deltas of the same parts", got, "Apply one after the other.")
        tensors, values = {**self.tensors, **other.tensors}, {**self.values, **other.values}
        for name in self.tensors.keys() & other.tensors.keys():
            tensors[name] = merged_changes(name, self.tensors[name], other.tensors[name])
        for name in self.values.keys() & other.values.keys():
            early, late = self.values[name].numbers, other.values[name].numbers
            if early[1] != late[0]:
                raise mismatch("then", name, "what the first delta makes", "another base", IN_A_ROW)
            values[name] = replace(values[name], numbers=torch.stack([early[0], late[1]]))
        return Delta(tensors, values, self.table)

    @quietly
    def inverse(self, base: Any) -> Delta:
        """Return the delta that undoes this one.

        Args:
            base: The tree that this delta is to be applied to, as it is before.

        Returns:
            A delta that shares no memory with this one's values or with ``base``.

        Raises:
            TreeMismatch: If ``base`` differs from the base in what this delta writes over, or holds an object there
                with views on other leaves; or if this delta is damaged.
        """
        state = StateParts("inverse", base, own_ranks())
        leaf_of = self.found_in(state)
        tensors: dict[str, TensorChange] = {}
        for name, change in self.tensors.items():
            located = LocatedChange("inverse", name, change, state.tensors[name])
            if not located.sums()[0].equal(change.sums[0].cpu()):
                raise mismatch("inverse", name, "the elements of the base", "others", "Pass the base.")
            gaps, sums = change.gaps.clone(), change.sums.flip(0)
            tensors[name] = TensorChange(gaps, located.read(), change.head.clone(), sums)
        for name, value in self.values.items():
            if state.number(leaf_of[name]) != value.known("inverse", name)[0]:
                raise mismatch("inverse", name, "the value of the base", "another one", "Pass the base.")
        copies = state.copies([leaf_of[name] for name in self.values])
        pairs = zip(self.values.items(), copies, strict=True)
        values = {name: ValueChange(copy, value.numbers.flip(0)) for (name, value), copy in pairs}
        return Delta(tensors, values, self.table.clone())

    def found_in(self, state: StateParts) -> dict[str, int]:
        """Return the leaves of a tree by their names."""
        self.check_table(state.verb)
        leaf_of = {key: leaf for leaf, key in enumerate(state.keys)}
        found, expected = state.table().tolist(), self.table.tolist()
        known = set(expected)
        for leaf, number in zip(state.manifest.order, found, strict=True):
            if number not in known:
                raise mismatch(state.verb, state.keys[leaf], "a leaf of the base", state.texts[leaf])
        unknown = next(iter([*(self.tensors.keys() - state.tensors), *(self.values.keys() - leaf_of)]), "")
        if unknown or found != expected:
            raise mismatch(state.verb, unknown, f"{len(expected)} leaves", f"{len(found)}")
        return leaf_of

    def check_table(self, verb: str) -> None:
        """Raise ``TreeMismatch`` unless the table can be one."""
        if not has_elements(self.table) or self.table.dtype != torch.int64 or self.table.dim() != 1:
            raise damaged(verb, "table", "expected an int64 for each leaf")


@quietly
def delta(new: Any, base: Any) -> Delta:
    """Find what has to be written into a tree to make it another one, bit for bit.

    For each tensor this is nothing, the positions and values of the elements that differ, or the whole tensor:
    whichever takes the fewest bytes. NaNs are compared by their bits, and ``0.0`` differs from ``-0.0``. A leaf that is
    made of several tensors (sparse, quantized, a wrapper) is compared by these. Where they have other sizes, and for
    everything else (plain values, opaque objects), it is the whole leaf, if it differs, and with it those that share
    objects with it (a scheduler holds its optimizer). Objects of equal values that share them otherwise do not differ.
    Neither tree changes.

    Args:
        new: Any tree.
        base: A tree of the same structure, dtypes, shapes and layouts. Distributed tensors are compared on each rank
            for itself, without communication.

    Returns:
        A ``Delta``, false if nothing differs. It shares no memory with either tree.

    Raises:
        TreeMismatch: If the trees differ in structure, leaf types, dtypes, shapes, layouts, meshes or placements, or if
            a tensor of ``base`` that changes overlaps itself or another one: unless both are the same view and change
            alike. Or if an object that changed holds views on other leaves.
        UnsupportedLeaf: If a leaf cannot be taken apart, among others because its storage was freed.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> base = {"w": torch.zeros(1000), "step": 1}
        >>> new = {"w": torch.zeros(1000).index_fill(0, torch.tensor([7, 9]), 1.0), "step": 2}
        >>> change = st.delta(new, base)
        >>> change.changed, change.nbytes
        ({'w': 2, 'step': 1}, 10)
        >>> _ = st.apply_delta(change, base)
        >>> base["w"].equal(new["w"])
        True
    """
    a, b = StateParts("delta", new, own_ranks()), StateParts("delta", base, own_ranks())
    order, differences = matched(a.manifest.spec, a.leaves, b.manifest.spec, b.leaves)
    pairs = [(leaf, leaf if order is None else order[leaf]) for leaf in a.manifest.order]
    for one, other in pairs if not differences else ():
        if a.texts[one] != b.texts[other]:
            known = [*_differing_facts(a, one, b, other)] or [("layout", a.texts[one], b.texts[other])]
            differences += [Difference(b.paths()[other], *each) for each in known]
    if differences:
        raise TreeMismatch.between("delta", differences, "Pass two states of one structure and layout.")
    seen: dict[Any, TensorChange | None] = {}
    tensors: dict[str, TensorChange] = {}
    whole: dict[int, tuple[int, tuple[int, int]]] = {}  # leaves of the new tree, by those of the base
    alike: dict[int, tuple[int, tuple[int, int]]] = {}
    with phase("delta.compare"):
        for one, other in pairs:
            if not _have_alike_parts(a, one, b, other):
                numbers = b.number(other), a.number(one)
                (whole if numbers[0] != numbers[1] else alike)[other] = one, numbers
                continue
            for new_name, name in zip(a.parts_of[one], b.parts_of[other], strict=True):
                x, y = a.tensors[new_name], b.tensors[name]
                place = x.place, y.place, y.shape, y.box, y.holder
                if place not in seen:  # ties: what lies in one memory on both sides, of one layout, is compared once
                    seen[place] = _change(x, y)
                if (change := seen[place]) is not None:
                    tensors[name] = change
    if any(b.is_object(leaf) for leaf in whole):
        base_of = dict(pairs)
        groups = [*b.sharing_objects(), *({base_of[leaf] for leaf in own} for own in a.sharing_objects())]
        while more := next((own - whole.keys() for own in groups if own & whole.keys() and own - whole.keys()), None):
            whole |= {leaf: alike[leaf] for leaf in more}
    if tensors and (tied := b.entangled(tensors, whole)):
        found = [Difference(b.paths()[leaf], kind, "values of its own", memory) for leaf, kind, memory in tied]
        raise TreeMismatch.between("delta", found, "Take them apart in the base, or make both the same view.")
    copies = a.copies([leaf for leaf, _ in whole.values()])
    values = {
        b.keys[leaf]: ValueChange(copy, torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        for (leaf, (_, numbers)), copy in zip(whole.items(), copies, strict=True)
    }
    return Delta(tensors, values, b.table())


def _differing_facts(a: StateParts, new: int, b: StateParts, old: int) -> list[tuple[str, Any, Any]]:
    return list(fact_differences(facts(a.leaves[new]), facts(b.leaves[old])))


def _have_alike_parts(a: StateParts, new: int, b: StateParts, old: int) -> bool:
    """Whether leaves differ in nothing but the elements of their parts; otherwise they are taken whole."""
    if not a.is_value(new):
        return True
    if new not in a.parts_of or old not in b.parts_of or _differing_facts(a, new, b, old):
        return False
    if inner_differences(a.leaves[new], b.leaves[old]):
        return False
    x, y = ([side.tensors[name].piece for name in side.parts_of[leaf]] for side, leaf in ((a, new), (b, old)))
    known = [[(each.dtype, each.shape, each.is_meta) for each in pieces] for pieces in (x, y)]
    return known[0] == known[1]


def _change(a: HeldPart, b: HeldPart) -> TensorChange | None:
    """Return what has to be written over a part to make it another one, in the fewest bytes; ``None`` for nothing."""
    new, old = a.piece, b.piece
    if old.is_meta or location_of(new) == location_of(old):
        return None
    most = old.nbytes // (old.itemsize + 1)  # of positions: from there on, not even gaps of one byte take fewer bytes
    blocks: list[torch.Tensor] = []
    many, count = is_unreadable(new, old) or differ_in_more(new, old, most), 0
    for block in () if many else differing(new, old):
        blocks.append(block)
        count += block.numel()
        if count > most:
            break
    if not many and not blocks:
        return None
    head = torch.tensor([-1, prod(b.shape), b.holder, *b.shape], dtype=torch.int64, device="cpu")
    if not many and count <= most:
        local = torch.cat(blocks).to(new.device)
        values, before = a.take(a.places(local)), b.take(b.places(local.to(old.device))).to(new.device)
        positions = out_of_box(local, b.box, b.shape)
        gaps, head[0] = as_gaps(positions), positions[0]
        if gaps.nbytes + values.nbytes <= old.nbytes:
            return TensorChange(gaps, values, head, torch.stack(sums_at(positions, before, values)).cpu())
    head[0] = -1
    corners = [] if b.box.sizes == b.shape else [*b.box.start, *b.box.stop]
    gaps = torch.tensor(corners, dtype=torch.int64, device=new.device)
    sums = torch.stack([piece_sums(each, b.box, b.shape, FEW).cpu() for each in (old, new)])
    return TensorChange(gaps, plain_copy(new), head, sums)


@quietly
def apply_delta(delta: Delta, tree: T) -> T:
    """Write a delta into a tree's tensors, all of it or nothing.

    Everything is validated before the first byte is written. A delta is *idempotent*: applying it to its own result
    does nothing, and applying it again after an interrupted call completes that call. (A process that is killed while
    torch writes a tensor, in memory that outlives it, may leave it with neither its old nor its new elements: it is
    then refused.)

    Args:
        delta: From ``delta``. It may have been offloaded, staged, saved or sent meanwhile.
        tree: A tree of the same structure, dtypes, shapes and layouts as the base, with its elements wherever something
            is written. Checksums decide this: they miss an accidental difference with a chance of at most 2⁻³³, and do
            not protect against forgers. Other elements are not looked at (``digest`` compares them). Strides and
            devices may differ.

    Returns:
        A tree with ``tree``'s tensors and their ties, and the delta's plain values, in fresh containers.

    Aliasing:
        The result's leaves are those of ``tree``, but for values that the delta brings, which are copies. So are
        leaves that are made of tensors of other sizes than before (a sparse tensor with more elements).

    Raises:
        TreeMismatch: If ``tree`` is not the base where something is written; if a tensor cannot be written, or overlaps
            itself or another one as ``delta`` refuses it; or if the delta is damaged (opaque objects that it brings
            are not looked into). It names the path. Nothing is written.
        UnsupportedLeaf: If a leaf cannot be taken apart.
        CyclicTree: If a container holds itself.
        TypeError: If ``delta`` is no ``Delta``.

    Example:
        >>> import statetree as st, torch
        >>> base, new = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 1.0, 0.0])}
        >>> replica = st.offload(base)
        >>> st.apply_delta(st.delta(new, base), replica)
        {'w': tensor([0., 1., 0.])}
    """
    verb, given = "apply_delta", cast("object", delta)
    if not isinstance(given, Delta):
        raise TypeError(
            f"apply_delta: the first argument is no delta: expected a Delta, got a {type(given).__qualname__}. Pass "
            "the delta first, and then the tree."
        )
    state = StateParts(verb, tree, own_ranks())
    leaf_of = delta.found_in(state)
    writes: dict[Any, Callable[[], None]] = {}
    with phase("apply_delta.check"):
        for name, change in delta.tensors.items():
            part = state.tensors[name]
            if state.manifest.is_stored(part.leaf):
                found = [Difference(state.paths()[part.leaf], "writability", "what changed", IN_A_FILE)]
                raise TreeMismatch.between(verb, found, "Nothing was written. Load what shall be written.")
            if part.piece.is_inference():
                raise mismatch(verb, name, "a tensor that can be written", "an inference tensor")
            located = LocatedChange(verb, name, change, part)
            (found, brought), (before, after) = located.sums(), change.sums.cpu()
            if not brought.equal(after):
                raise damaged(verb, name, OTHER_CONTENT)
            if found.equal(before):
                if part.place not in writes:  # tied tensors are written once
                    writes[part.place] = located.write()
            elif not found.equal(after):
                raise mismatch(verb, name, "the elements of the base where the delta writes", "others")
    fresh: dict[int, Any] = {}
    objects: dict[int, Any] = {}
    for name, value in delta.values.items():
        numbers, leaf = value.known(verb, name), leaf_of[name]
        number = state.number(leaf)
        if number not in numbers:
            raise mismatch(verb, name, "the value of the base", "another one")
        if state.is_object(leaf):
            objects[leaf] = value.value
        if number == numbers[0] != numbers[1]:
            fresh[leaf] = value.value
    if not objects.keys().isdisjoint(fresh):
        fresh |= objects
    for leaf, _, memory in state.entangled(delta.tensors, fresh) if writes else ():
        raise mismatch(verb, state.keys[leaf], "memory of its own", memory)
    leaves = list(state.leaves)
    for leaf, copy in zip(fresh, copied_leaves(verb, list(fresh.values()), list), strict=True):
        leaves[leaf] = copy
    result: T = state.manifest.lift(leaves)
    with phase("apply_delta.write"):
        for write in writes.values():
            write()
    return result
