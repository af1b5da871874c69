"""LocatedChange: a change, and the memory of the tensor that it is read from or written to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.leaves.changes import TensorChange, damaged, mismatch
from statetree.spans.bits import as_bits, from_bits
from statetree.spans.positions import in_box, places_of, put, stored, take
from statetree.spans.sums import FEW, piece_sums, sums_at
from statetree.torch_internals import copy_all, copy_each, plain_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.leaves.tensor_entries import TensorEntry


class _Part(NamedTuple):
    """What of a change lies in one piece.

    Attributes:
        piece: The tensor.
        places: Where in its ``hull``; ``None`` for all of it.
        chosen: Which of the change's elements, as a mask or a slice.
    """

    piece: torch.Tensor
    places: torch.Tensor | None
    chosen: torch.Tensor | slice


class LocatedChange:
    """A change of a tensor whose pieces this rank holds.

    Args:
        verb: On whose behalf, for messages.
        name: The tensor's name.
        change: What changes.
        entry: The tensor.

    Raises:
        TreeMismatch: If the change is damaged, or lies outside of what this rank holds.
    """

    def __init__(self, verb: str, name: str, change: TensorChange, entry: TensorEntry) -> None:
        self.verb, self.name, self.change, self.entry = verb, name, change, entry
        fault, self.positions = change.checked()
        if fault:
            raise damaged(verb, name, fault)
        expected = entry.held if change.is_whole else change.values.numel()
        numel = torch.Size(entry.shape).numel()
        if change.values.dtype != entry.dtype:
            fault = f"expected values of {entry.dtype}, got {change.values.dtype}"
        elif change.values.numel() != expected:
            fault = f"expected {expected} values, got {change.values.numel()}"
        elif change.numel != numel:
            fault = f"expected a tensor of {numel} elements, got one of {change.numel}"
        if fault:
            raise damaged(verb, name, fault)
        self._parts = list(self._locate())

    def _locate(self) -> Iterator[_Part]:
        first, found = 0, 0
        for box, piece in zip(self.entry.boxes, self.entry.pieces, strict=True):
            if self.positions is None:
                alone = self.entry.overlaps_itself and len(self.entry.pieces) == 1
                # torch copies nothing into a tensor that overlaps itself: its elements are put where they lie.
                places = places_of(torch.arange(box.volume, device=piece.device), piece) if alone else None
                yield _Part(piece, places, slice(first, first + box.volume))
                first += box.volume
                continue
            inside, local = in_box(self.positions, box.start, box.sizes, self.entry.shape)
            found += local.numel()
            if local.numel():
                yield _Part(piece, places_of(local.to(piece.device), piece), slice(None) if inside is None else inside)
        if self.positions is not None and found < self.positions.numel():
            got = f"{self.positions.numel() - found} positions elsewhere"
            raise mismatch(self.verb, self.name, "what this rank holds", got, "Use reshard to bring the delta here.")

    def read(self) -> torch.Tensor:
        """Return a copy of the elements that the change writes over, in the order of its values."""
        if len(self._parts) == 1:
            found = self._read(self._parts[0])
            return found.view(self.change.values.shape)
        count, device = self.change.values.numel(), self.entry.pieces[0].device if self.entry.pieces else "cpu"
        values = torch.empty(count, dtype=self.entry.dtype, device=device)
        bits = as_bits(values)
        for part in self._parts:
            chosen = part.chosen if isinstance(part.chosen, slice) else part.chosen.to(device)
            bits[chosen] = as_bits(self._read(part)).to(device)
        return values

    def _read(self, part: _Part) -> torch.Tensor:
        if part.places is not None:
            return take(part.piece, part.places)
        return plain_copies([part.piece])[0].view(-1)

    def found_sums(self) -> torch.Tensor:
        """Return the sums of the elements that the change writes over, as they are now."""
        if self.positions is None:
            return self.entry.sums(FEW)
        return self.sums(self.read())

    def both_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of the elements that the change writes over, and of its values."""
        if self.positions is None:
            return self.found_sums(), self.sums(self.change.values)
        found = self.read()
        device = found.device
        values = from_bits(as_bits(self.change.values).to(device), self.entry.dtype)
        before, after = sums_at(self.positions.to(device), found, values)
        return before.cpu(), after.cpu()

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of elements in the places of the change's values."""
        flat = values.reshape(-1)
        if self.positions is not None:
            return sums_at(self.positions.to(flat.device), flat)[0].cpu()
        total = torch.zeros(FEW, dtype=torch.int64, device="cpu")
        first = 0
        for box in self.entry.boxes:
            part = flat[first : first + box.volume].view(box.sizes)
            total += piece_sums(part, box, self.entry.shape, FEW).cpu()
            first += box.volume
        return total

    def write(self) -> Callable[[], None]:
        """Return the function that writes the change, in one call of torch. Its memory is taken now."""
        bits, dtype = as_bits(self.change.values.reshape(-1)), self.entry.dtype
        chosen = [from_bits(_of(bits, part.chosen).to(part.piece.device), dtype) for part in self._parts]
        for piece, places, _ in self._parts:
            if places is not None and len(self._parts) == 1:
                return partial(put, piece, places, stored(chosen[0], piece))
        pieces = [part.piece for part in self._parts]
        sources = [
            found.view(part.piece.shape) if part.places is None else _replaced(part.piece, part.places, found)
            for part, found in zip(self._parts, chosen, strict=True)
        ]
        pairs = [plain_pair(piece, source) for piece, source in zip(pieces, sources, strict=True)]
        return partial(copy_all, [target for target, _ in pairs], [source for _, source in pairs])


def plain_copies(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies of tensors."""
    copies = [torch.empty(piece.shape, dtype=piece.dtype, device=piece.device) for piece in pieces]
    copy_each(copies, pieces)
    return copies


def _of(bits: torch.Tensor, chosen: torch.Tensor | slice) -> torch.Tensor:
    return bits[chosen] if isinstance(chosen, slice) else bits[chosen.to(bits.device)]


def _replaced(piece: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a piece with other elements at some places."""
    fresh = torch.empty_strided(piece.shape, piece.stride(), dtype=piece.dtype, device=piece.device)
    copy_each([fresh], [piece])
    put(fresh, places, stored(values, fresh))
    return fresh
