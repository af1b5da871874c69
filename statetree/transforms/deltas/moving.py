"""Deltas brought to another layout: the positions and values that each rank holds of what changed, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from statetree.chunks.boxes import whole_box
from statetree.spans.bits import as_bits, flat_bytes, from_bits, same_bytes
from statetree.spans.sums import FEW, sums_at
from statetree.transforms.deltas.change import (
    EVERYBODYS,
    OTHER_CONTENT,
    OWN,
    TensorChange,
    as_gaps,
    damaged,
    in_box,
    mismatch,
    stem,
)
from statetree.transforms.deltas.delta import Delta
from statetree.transforms.deltas.state_parts import LocatedChange, StateParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.exchange.driver import Exchange
    from statetree.exchange.group import Group


#: Elements of one part: its row, where they lie in the global shape, and their bits.
_Elements = tuple[int, torch.Tensor, torch.Tensor]


def moved_delta(run: Exchange, delta: Delta, like: Any) -> Delta:
    """Agree with the other ranks, and return the delta that does to another layout what theirs do together.

    A delta does not hold what it writes over, but sums of that. So ``like`` must hold the elements of the base: its
    sums are those of the new delta, and all ranks' together must be those of the old ones.
    """
    state = StateParts(run.verb, like, run.group)
    state.manifest.check_readable()
    (layouts,) = run.layouts(state.manifest)
    run.expect()
    state.manifest.check_complete(layouts)
    state.share(layouts, run.group.rank)
    delta.check_table(run.verb)
    rows = _rows(state)  # the same on every rank
    told: dict[str, list[TensorChange]] = {key: [] for key in rows}
    for name, change in delta.tensors.items():
        key = name if name in rows else stem(name)  # of one of several chunks
        told.setdefault(key, []).append(change)
    if unknown := sorted([*(told.keys() - rows), *(delta.values.keys() - set(state.keys))]):
        raise mismatch(run.verb, unknown[0], "this leaf in like", "others", "Pass the tree to apply it to.")
    everyone, here = range(run.group.size), [run.group.rank]
    outgoing: list[list[_Elements]] = [[] for _ in everyone]
    for row, (key, (leaf, names)) in enumerate(rows.items()):
        for change in told[key]:
            shape, positions, bits = _checked(state, key, change, leaf, names)
            holder = int(change.head[2])  # of replicas only the first sends
            for rank in everyone if holder == OWN else here if holder == EVERYBODYS else ():
                for box in layouts[leaf].boxes_of(rank) if leaf in layouts else [whole_box(shape)]:
                    chosen, _ = in_box(positions, box, shape)
                    if len(positions[chosen]):
                        outgoing[rank].append((row, positions[chosen], bits[chosen]))
    run.ready()
    arrived: list[list[_Elements]] = [[] for _ in rows]
    for elements in _exchanged(run.group, outgoing):
        arrived[elements[0]].append(elements)
    run.expect()
    changes: dict[str, TensorChange] = {}
    balances = torch.zeros(len(rows), FEW, dtype=torch.int64, device="cpu")
    for row, (key, (leaf, names)) in enumerate(rows.items()):
        found = {name: _received(state, name, arrived[row]) for name in names if arrived[row]}
        changes |= {name: change for name, change in found.items() if change is not None}
        parts = [(changes[name].sums[0], state.tensors[name].replica) for name in names if name in changes]
        balances[row] = _balance(run.group, told[key], parts, is_local=leaf not in layouts)
    run.ready()
    for row in run.group.all_reduce(balances).any(1).nonzero().view(-1).tolist():
        expected = "the elements of the base in like"
        raise mismatch(run.verb, list(rows)[row], expected, "others", "Pass the tree to apply it to.")
    return Delta(changes, delta.values, state.table())


def _rows(state: StateParts) -> dict[str, tuple[int, list[str]]]:
    """Return what moves as one, by its name: a leaf with all chunks of it, or a part of one that has several."""
    rows: dict[str, tuple[int, list[str]]] = {}
    for leaf in state.manifest.order:
        names = state.parts_of.get(leaf, [])
        if leaf in state.manifest.chunks:
            rows[state.keys[leaf]] = leaf, names
        else:
            rows |= {name: (leaf, [name]) for name in names}
    return rows


def _checked(
    state: StateParts, name: str, change: TensorChange, leaf: int, names: Sequence[str]
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Return the global shape of what changes, and the positions and bits on the CPU."""
    change.check(state.verb, name)
    known = state.manifest.chunks.get(leaf) or state.tensors[names[0]].piece  # of this, a rank may hold nothing
    shape, is_meta = tuple(known.shape), isinstance(known, torch.Tensor) and known.is_meta
    if is_meta:
        msg = "the leaf of like at %PATH% is on meta: expected the elements of the base. Load it first."
        raise state.manifest.unsupported(leaf, msg)
    if change.values.dtype != known.dtype or change.shape != shape:
        expected, got = f"{change.values.dtype} {change.shape}", f"{known.dtype} {shape} in like"
        raise mismatch(state.verb, name, expected, got, "Pass the tree to apply it to.")
    positions, bits = change.positions().to("cpu"), as_bits(change.values.reshape(-1)).to("cpu")
    if not sums_at(positions, bits)[0].equal(change.sums[1].cpu()):
        raise damaged(state.verb, name, OTHER_CONTENT)
    return shape, positions, bits


def _exchanged(group: Group, outgoing: Sequence[Sequence[_Elements]]) -> Iterator[_Elements]:
    """Send elements to the ranks that hold their places, and yield those that come here."""
    if group.size > 1:
        messages = [_message(parts) for parts in outgoing]
        lengths = [torch.tensor([len(parts), len(message)]) for parts, message in zip(outgoing, messages, strict=True)]
        told = [tensor.view(torch.int64).tolist() for tensor in _swapped(group, lengths, [16] * group.size)]
        for (count, _), message in zip(told, _swapped(group, messages, [size for _, size in told]), strict=True):
            first = 24 * count  # of this rank itself there is none
            for row, number, itemsize in message[:first].view(torch.int64).view(-1, 3).tolist():
                middle, last = first + 8 * number, first + (8 + itemsize) * number
                yield row, message[first:middle].clone().view(torch.int64), message[middle:last]
                first = last
    yield from outgoing[group.rank]


def _message(parts: Sequence[_Elements]) -> torch.Tensor:
    """Return elements as bytes: for each part its row and what it takes, then positions and bits."""
    heads = [(row, len(positions), bits.itemsize) for row, positions, bits in parts]
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


def _received(state: StateParts, name: str, arrived: Sequence[_Elements]) -> TensorChange | None:
    """Return the change of what has arrived for a part, with the sums of what it writes over."""
    part = state.tensors[name]
    positions, order = torch.cat([positions for _, positions, _ in arrived]).sort()
    octets = torch.cat([bits.view(torch.uint8) for *_, bits in arrived])
    chosen, _ = in_box(positions, part.box, part.shape)
    bits = as_bits(octets.view(part.piece.dtype))[order]  # of bools themselves, indices take any byte but 0 for 1
    again = positions[1:] == positions[:-1]  # from replicas over meshes of their own
    if not same_bytes(bits[1:][again], bits[:-1][again]):
        raise mismatch(state.verb, name, "the same values from all replicas", "others", "Bring them in step (audit).")
    values = from_bits(bits[chosen], part.piece.dtype)
    if not len(values):
        return None
    known = [positions[chosen][0], prod(part.shape), part.holder, *part.shape]
    head = torch.tensor(known, dtype=torch.int64, device="cpu")
    nothing = torch.zeros(2, FEW, dtype=torch.int64, device="cpu")
    change = TensorChange(as_gaps(positions[chosen]), values, head, nothing)
    return replace(change, sums=LocatedChange(state.verb, name, change, part).sums())


def _balance(
    group: Group,
    told: Sequence[TensorChange],
    parts: Sequence[tuple[torch.Tensor, tuple[int, int] | None]],
    *,
    is_local: bool,
) -> torch.Tensor:
    """Return sums that add up to zero over the ranks if ``like`` holds the base on all of them."""
    # Each rank takes part with what `like` holds where it is written over, less what the first holders of the old
    # layout said of it. Replicas have weights that add up to one, and none of which is zero: so the sums are right if
    # all replicas hold the same, and wrong if one does not. Where each rank has all by itself, before and after, none
    # can answer for another one: what differs counts with another weight on each.
    total = torch.zeros(FEW, dtype=torch.int64, device="cpu")
    holders = [int(change.head[2]) for change in told]
    alone = is_local and EVERYBODYS in holders
    for before, replica in parts:
        number, count = replica or (group.rank, group.size)
        total += before * (1 if alone else 2 * number + 1 if number else 2 - count * count)
    for change, holder in zip(told, holders, strict=True):
        if alone or holder == OWN or (holder == EVERYBODYS and group.rank == 0):
            total -= change.sums[0].cpu()
    return total * (2 * group.rank + 1) if alone else total
