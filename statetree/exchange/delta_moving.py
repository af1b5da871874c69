"""Deltas brought to another layout: the positions and values that each rank holds of what changed, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf
from statetree.exchange.executor import flat_bytes
from statetree.exchange.manifest import Manifest
from statetree.leaves.changes import OTHER_CONTENT, TensorChange, change_at, damaged, mismatch
from statetree.leaves.delta_tree import Delta
from statetree.leaves.located_change import LocatedChange
from statetree.leaves.tensor_entries import EVERYBODYS, OTHERS, OWN, TreeEntries
from statetree.spans.bits import as_bits, from_bits
from statetree.spans.positions import in_box
from statetree.spans.sums import FEW, sums_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.chunks.boxes import Box
    from statetree.exchange.driver import Exchange
    from statetree.exchange.group import Group


class _Elements(NamedTuple):
    """Elements of one tensor: its row, where they lie in the global shape, and their bits."""

    row: int
    positions: torch.Tensor
    bits: torch.Tensor


def moved_delta(run: Exchange, delta: Delta, like: Any) -> Delta:
    """Agree with the other ranks, and return the delta that does to another layout what theirs do together.

    A delta does not hold what it writes over, but sums of that. So ``like`` must hold the elements of the base: its
    sums are those of the new delta, and all ranks' together must be those of the old ones.
    """
    manifest = Manifest(run.verb, like, run.group, complete=True)
    manifest.check_readable()
    (layouts,) = run.layouts(manifest)
    run.expect()
    entries = TreeEntries(run.verb, like, run.group)
    _check_rows(run.verb, delta, entries)
    boxes = {
        index: [layouts[index].boxes_of(rank) if index in layouts else entry.boxes for rank in range(run.group.size)]
        for index, entry in entries.tensors.items()
    }
    outgoing = _outgoing(run, delta, entries, boxes)
    run.ready()
    received = _exchanged(run.group, outgoing)
    run.expect()
    changes = _received_changes(run, entries, received)
    balance = _balance(run.group, delta, entries, changes)
    run.ready()
    wrong = run.group.all_reduce(balance).any(1).nonzero().view(-1).tolist()
    if wrong:
        name = entries.keys[entries.order[wrong[0]]]
        raise mismatch(run.verb, name, "the elements of the base in like", "others", "Pass the tree to apply it to.")
    sums = entries.sums()
    rows = [entries.row(index, sums.get(index)) for index in entries.order]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 4)
    return Delta({entries.keys[entries.order[row]]: change for row, change in changes.items()}, delta.values, table)


def _check_rows(verb: str, delta: Delta, entries: TreeEntries) -> None:
    delta.check_table(verb)
    names = set(entries.keys)
    unknown = next((name for name in (*delta.tensors, *delta.values) if name not in names), None)
    if unknown is not None or len(delta.table) != len(entries.order):
        raise mismatch(verb, unknown or "", f"{len(delta.table)} leaves in like", f"{len(entries.order)}")
    for index, entry in entries.tensors.items():
        if entry.on_meta and entries.keys[index] in delta.tensors:
            path = entries.paths()[index]
            msg = f"{verb}: the leaf of like at {path} is on meta: expected the elements of the base. Load it first."
            raise UnsupportedLeaf(msg, path)


def _outgoing(
    run: Exchange, delta: Delta, entries: TreeEntries, boxes: dict[int, list[Sequence[Box]]]
) -> list[list[_Elements]]:
    """Return what of this rank's changes goes to each rank."""
    found: list[list[_Elements]] = [[] for _ in range(run.group.size)]
    for row, index in enumerate(entries.order):
        name, holder = entries.keys[index], int(delta.table[row, 3])
        change, entry = delta.tensors.get(name), entries.tensors.get(index)
        if change is None or holder == OTHERS:
            continue
        if entry is None or change.values.dtype != entry.dtype or change.numel != torch.Size(entry.shape).numel():
            raise damaged(run.verb, name, "like has another dtype or shape there")
        positions = _positions(run.verb, name, change)
        bits = as_bits(change.values.reshape(-1)).to("cpu")
        if not sums_at(positions, bits)[0].equal(change.after):
            raise damaged(run.verb, name, OTHER_CONTENT)
        for rank in [run.group.rank] if holder == EVERYBODYS else range(run.group.size):
            for box in boxes[index][rank]:
                inside, _ = in_box(positions, box.start, box.sizes, entry.shape)
                chosen = slice(None) if inside is None else inside
                if len(positions[chosen]):
                    found[rank].append(_Elements(row, positions[chosen], bits[chosen]))
    return found


def _positions(verb: str, name: str, change: TensorChange) -> torch.Tensor:
    fault, positions = change.checked()
    if fault:
        raise damaged(verb, name, fault)
    return (change.all_positions() if positions is None else positions).to("cpu")


def _exchanged(group: Group, outgoing: Sequence[Sequence[_Elements]]) -> Iterator[_Elements]:
    """Send elements to the ranks that hold their places, and yield those that come here."""
    own = list(outgoing[group.rank])
    if group.size > 1:
        messages = [_message(parts) for parts in outgoing]
        lengths = [torch.tensor([len(parts), len(message)]) for parts, message in zip(outgoing, messages, strict=True)]
        told = [tensor.view(torch.int64).tolist() for tensor in _swapped(group, lengths, [16] * group.size)]
        for (count, _), message in zip(told, _swapped(group, messages, [size for _, size in told]), strict=True):
            yield from _unpacked(count, message)  # of this rank itself there is none
    yield from own


def _message(parts: Sequence[_Elements]) -> torch.Tensor:
    """Return elements as bytes: for each tensor its row and what it takes, then positions and bits."""
    heads = [(part.row, len(part.positions), part.bits.itemsize) for part in parts]
    tensors = [torch.tensor(heads, dtype=torch.int64).view(-1), *(tensor for part in parts for tensor in part[1:])]
    return torch.cat([flat_bytes(tensor.contiguous()) for tensor in tensors])


def _swapped(group: Group, sent: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Send a tensor to each other rank, and return what each sends here, of known sizes in bytes."""
    device = group.device(group.devices[0])
    found = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]  # nothing comes from this rank
    others = [rank for rank in range(group.size) if rank != group.rank]
    outgoing = [(rank, flat_bytes(sent[rank]).to(device)) for rank in others if sent[rank].numel()]
    group.exchange(outgoing, [(rank, found[rank]) for rank in others if sizes[rank]])()
    return [tensor.to("cpu") for tensor in found]


def _unpacked(count: int, message: torch.Tensor) -> Iterator[_Elements]:
    first = 24 * count
    for row, number, itemsize in message[:first].view(torch.int64).view(-1, 3).tolist():
        middle, last = first + 8 * number, first + (8 + itemsize) * number
        yield _Elements(row, message[first:middle].clone().view(torch.int64), message[middle:last])
        first = last


def _received_changes(run: Exchange, entries: TreeEntries, received: Iterator[_Elements]) -> dict[int, TensorChange]:
    parts: dict[int, list[_Elements]] = {}
    for found in received:
        parts.setdefault(found.row, []).append(found)
    changes = {}
    for row, listed in sorted(parts.items()):
        index = entries.order[row]
        entry = entries.tensors[index]
        positions = torch.cat([found.positions for found in listed])
        order = positions.argsort()
        width = as_bits(torch.empty(0, dtype=entry.dtype)).dtype
        bits = torch.cat([found.bits.clone().view(width) for found in listed])[order]
        values = from_bits(bits, entry.dtype)
        nothing = torch.zeros(FEW, dtype=torch.int64)
        after = sums_at(positions[order], values)[0]
        change = change_at(positions[order], values, torch.Size(entry.shape).numel(), nothing, after)
        before = LocatedChange(run.verb, entries.keys[index], change, entry).found_sums()
        changes[row] = change_at(positions[order], values, change.numel, before, after)
    return changes


def _balance(group: Group, delta: Delta, entries: TreeEntries, changes: dict[int, TensorChange]) -> torch.Tensor:
    """Return, for each leaf, sums that add up to zero over the ranks if ``like`` holds the base on all of them.

    The first holders of what ``like`` holds take part with what they write over, less what those of the old layout said
    of it, and among all holders with what makes them differ.
    """
    balance = torch.zeros(len(entries.order), 2 * FEW, dtype=torch.int64, device="cpu")
    for row, index in enumerate(entries.order):
        old, new, entry = delta.tensors.get(entries.keys[index]), changes.get(row), entries.tensors.get(index)
        before = torch.zeros(FEW, dtype=torch.int64) if new is None else new.before
        if entry is None:
            continue
        everywhere = int(delta.table[row, 3]) == EVERYBODYS
        if everywhere and entry.holder == EVERYBODYS:  # each rank its own; the factors keep them from making up
            told = torch.zeros(FEW, dtype=torch.int64) if old is None else old.before
            balance[row, :FEW] = (before - told) * (2 * group.rank + 1)
            continue
        if entry.holder == EVERYBODYS:  # each rank has all of it
            holders, is_first = group.size, group.rank == 0
        else:
            number, holders = entry.replica
            is_first = number == 0
        said = old is not None and (group.rank == 0 if everywhere else int(delta.table[row, 3]) == OWN)
        balance[row, :FEW] = (before if is_first else 0) - (old.before if said and old is not None else 0)
        balance[row, FEW:] = before * ((holders - 1) if is_first else -1)
    return balance
