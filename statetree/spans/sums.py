"""Sums over elements: what only the same bits at the same positions have in common, however they are cut and laid out.

An element at position ``p`` (in row-major order of a *global* shape) is a part of the 8-byte word at which it would lie
in contiguous memory. Each word is multiplied with a coefficient that depends on its place alone, and the products are
added up modulo 2⁶⁴. So the sums of the parts of a tensor add up to those of the whole, whichever ranks hold them.

Modulo 2⁶⁴, differences in the high bits of words are seen with few bits of a product. The high halves of the words are
therefore summed up once more by themselves, and each sum is made twice, with other coefficients: two tensors that
differ have the same four sums with a chance of at most 2⁻⁶⁴. The coefficients are no secret: whoever wants to can make
another tensor with the same sums.

The coefficient of a word is one of its *row* (of 512 words) times one of its place in the row: products with the latter
are those of a matrix with a vector, which take about as long as reading the memory.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from statetree.chunks.boxes import Box, dense_strides, whole_box
from statetree.spans.bits import bits_in_pieces, flat_bytes, is_host_memory
from statetree.spans.threads import call_together, num_threads
from statetree.torch_internals import copy_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: By how many bits words are shifted to the right for each of the four sums.
SHIFTS: Final = (0, 32, 0, 32)
#: How many sums tell accidents from each other: the chance that one goes unseen is 2⁻³³ at worst.
FEW: Final = 2
#: How many sums are needed for a chance of 2⁻⁶⁴ in every case.
ALL: Final = 4

_WORD_BYTES: Final = 8
_ROW_BITS: Final = 9
_ROW_WORDS: Final = 1 << _ROW_BITS
_ROW_BYTES: Final = _ROW_WORDS * _WORD_BYTES
#: What is multiplied at a time on a processor: it stays in the cache, and torch starts no threads for it.
_CACHED_ROWS: Final = 64
#: What is taken apart at a time, on a processor and on a device. (Pieces of a transposed tensor are so large that whole
#: cache lines are read.)
_PIECE_BYTES: Final = 4 << 20
_TRANSPOSED_BYTES: Final = 16 << 20
_DEVICE_PIECE_BYTES: Final = 64 << 20
#: Up to here tensors are summed up together, and so many at a time.
_SMALL_BYTES: Final = 16 << 10
_TOGETHER: Final = 1024
#: How many elements are given coefficients one by one at a time.
_SINGLE: Final = 1 << 15

#: What integers are read as, by their size, so that wider ones have zeros in front. (Eight bytes stay as they are.)
_UNSIGNED: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}

_MASK: Final = (1 << 64) - 1
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def signed(number: int) -> int:
    """Return a number modulo 2⁶⁴, as torch's ``int64`` has it."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _mixed(number: int) -> int:
    """Return a number that has nothing to do with another one (splitmix64)."""
    number = number * _FACTORS[0] & _MASK
    number = (number ^ number >> 30) * _FACTORS[1] & _MASK
    number = (number ^ number >> 27) * _FACTORS[2] & _MASK
    return number ^ number >> 31


@lru_cache(maxsize=16)
def _place_factors(device: torch.device) -> torch.Tensor:
    """Return the coefficients of the places in a row, for each of the sums."""
    numbers = [[signed(_mixed((sum_ << 32) + place + 1)) for place in range(_ROW_WORDS)] for sum_ in range(ALL)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


@lru_cache(maxsize=16)
def _row_seeds(device: torch.device) -> torch.Tensor:
    seeds = [signed(_mixed((sum_ + 1) << 48)) for sum_ in range(ALL)]
    return torch.tensor(seeds, dtype=torch.int64, device="cpu").to(device).unsqueeze(1)


def _row_factors(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the coefficients of rows, for each of some sums: ``[count, len(rows)]``."""
    mixed = rows.unsqueeze(0) * signed(_FACTORS[0]) + _row_seeds(rows.device)[:count]
    mixed.bitwise_xor_(mixed >> 30).mul_(signed(_FACTORS[1]))
    mixed.bitwise_xor_(mixed >> 27).mul_(signed(_FACTORS[2]))
    return mixed.bitwise_xor_(mixed >> 31)


def piece_sums(piece: torch.Tensor, box: Box, shape: Sequence[int], count: int = ALL) -> torch.Tensor:
    """Return the first sums, on its device, of a plain tensor in memory that is a box of a global shape."""
    total = torch.zeros(count, dtype=torch.int64, device=piece.device)
    if not piece.numel():
        return total
    itemsize = piece.dtype.itemsize
    outer, run = _runs(box, shape)
    if outer is None:
        for start, flat in bits_in_pieces(piece, _piece_bytes(piece)):
            first = run + start
            if itemsize > _WORD_BYTES:
                first *= itemsize // _WORD_BYTES
            total += _run_sums(flat, first, count)
        return total
    for part, offsets in _outer_parts(piece, outer, run):
        total += _strided_sums(part, offsets, itemsize, count)
    return total


def whole_sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all sums, on the CPU, of plain tensors in memory, each the whole of its global shape."""
    found: dict[int, torch.Tensor] = {}
    large = [
        index
        for index, tensor in enumerate(tensors)
        if not (0 < tensor.nbytes <= _SMALL_BYTES and is_host_memory(tensor))
    ]

    def add(index: int) -> None:
        shape = tuple(tensors[index].shape)
        found[index] = piece_sums(tensors[index], whole_box(shape), shape).cpu()

    nbytes = sum(tensors[index].nbytes for index in large if tensors[index].is_cpu)
    largest_first = sorted(large, key=lambda index: -tensors[index].nbytes)
    adding = [partial(add, index) for index in largest_first]
    call_together(adding, min(num_threads(2 * nbytes), len(large)))  # to add takes longer than to copy
    small = [index for index in range(len(tensors)) if index not in found]
    for start in range(0, len(small), _TOGETHER):
        chosen = small[start : start + _TOGETHER]
        found.update(zip(chosen, _sums_together([tensors[index] for index in chosen]), strict=True))
    return [found[index] for index in range(len(tensors))]


def _sums_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of small contiguous tensors, of which each begins a row."""
    lengths = [-(-tensor.nbytes // _ROW_BYTES) for tensor in tensors]
    firsts = [0, *accumulate(lengths)]
    padded = torch.zeros(firsts[-1] * _ROW_BYTES, dtype=torch.uint8, device="cpu")
    sources = [flat_bytes(tensor.detach()) for tensor in tensors]
    starts = [_ROW_BYTES * first for first in firsts[:-1]]
    copy_all([padded[at : at + source.numel()] for at, source in zip(starts, sources, strict=True)], sources)
    owners = torch.arange(len(tensors), device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))
    rows = torch.arange(len(owners), device="cpu") - torch.tensor(firsts, device="cpu")[owners]
    products = _row_products(padded.view(torch.int64).view(-1, _ROW_WORDS), rows, ALL)
    return torch.zeros(len(tensors), ALL, dtype=torch.int64, device="cpu").index_add_(0, owners, products.T)


def _piece_bytes(piece: torch.Tensor) -> int:
    if not piece.is_cpu:
        return _DEVICE_PIECE_BYTES
    return _PIECE_BYTES if piece.is_contiguous() else _TRANSPOSED_BYTES


def _runs(box: Box, shape: Sequence[int]) -> tuple[torch.Tensor | None, int]:
    """Return where the stretches of a box begin in row-major order, and how long they are.

    For a box that is one stretch, ``None`` and where it begins.
    """
    sizes = box.sizes
    inner = len(shape)
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # dims from here on are one stretch
    steps = dense_strides(tuple(shape))
    begin = sum(start * step for start, step in zip(box.start, steps, strict=True))
    if prod(sizes[:inner]) == 1:
        return None, begin
    offsets = torch.tensor(begin, dtype=torch.int64, device="cpu")
    for size, step in zip(sizes[:inner], steps[:inner], strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device="cpu") * step
    return offsets.reshape(-1), prod(sizes[inner:])


def _outer_parts(piece: torch.Tensor, outer: torch.Tensor, run: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bits of a box in pieces, as rows of one stretch each, with the positions at which these begin."""
    words = max(1, piece.dtype.itemsize // _WORD_BYTES)
    pending = None
    taken = 0
    for _, flat in bits_in_pieces(piece, _piece_bytes(piece)):  # which may end within a stretch
        flat = flat if pending is None else torch.cat([pending, flat])
        whole = flat.numel() // (run * words)
        if whole:
            yield flat[: whole * run * words].view(whole, run * words), outer[taken : taken + whole].to(flat.device)
        taken += whole
        rest = flat[whole * run * words :]
        pending = rest.clone() if rest.numel() else None


def _run_sums(flat: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return the sums of integers that follow each other from a position on."""
    per = _WORD_BYTES // flat.itemsize
    per_row = _ROW_WORDS * per
    row = first // per_row
    head = first - row * per_row
    rows = -(-(head + flat.numel()) // per_row)
    aligned = not head and flat.numel() == rows * per_row and flat.storage_offset() % per == 0
    if not aligned:
        if flat.numel() > 4 * per_row and not head and flat.storage_offset() % per == 0:
            whole = flat.numel() // per_row * per_row
            return _run_sums(flat[:whole], first, count) + _run_sums(flat[whole:], first + whole, count)
        padded = flat.new_zeros(rows * per_row)
        padded[head : head + flat.numel()] = flat
        flat = padded
    numbers = torch.arange(row, row + rows, dtype=torch.int64, device=flat.device)
    return _row_products(flat.view(torch.int64).view(rows, _ROW_WORDS), numbers, count).sum(1)


def _row_products(words: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return what each of some rows of words adds to the sums: ``[count, len(rows)]``."""
    factors = _place_factors(words.device).unbind()
    products = torch.empty(count, len(words), dtype=torch.int64, device=words.device)
    step = min(len(words), _CACHED_ROWS) if words.is_cpu else len(words)
    buffer = torch.empty(step, _ROW_WORDS, dtype=torch.int64, device=words.device)
    multiply = torch.mv if words.is_cpu else _multiply
    rows_of = [product.split(step) for product in products]
    order = sorted(range(count), key=SHIFTS.__getitem__)  # first what brings the words into the cache as it computes
    for part, *found in zip(words.split(step), *rows_of, strict=True):
        shifted = part
        for number in order:
            if SHIFTS[number] and shifted is part:
                shifted = torch.bitwise_right_shift(part, SHIFTS[number], out=buffer[: len(part)])
            multiply(shifted, factors[number], out=found[number])
    return products.mul_(_row_factors(rows, count))


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum()


def _multiply(rows: torch.Tensor, factors: torch.Tensor, *, out: torch.Tensor) -> None:
    """Do as ``torch.mv``, where torch multiplies no matrices of integers."""
    torch.sum(rows * factors, 1, out=out)


def _strided_sums(part: torch.Tensor, offsets: torch.Tensor, itemsize: int, count: int) -> torch.Tensor:
    """Return the sums of stretches that begin at some positions."""
    words = max(1, itemsize // _WORD_BYTES)
    offsets = offsets * words
    per_row = _ROW_BYTES // part.itemsize
    heads = offsets % per_row
    head = int(heads[0])
    rows = -(-(head + part.shape[1]) // per_row)
    if bool((heads == head).all()) and rows * per_row <= 8 * part.shape[1]:  # each lies alike in its rows
        padded = part.new_zeros(len(part), rows * per_row)
        padded[:, head : head + part.shape[1]] = part
        numbers = (offsets // per_row).unsqueeze(1) + torch.arange(rows, dtype=torch.int64, device=part.device)
        return _row_products(padded.view(torch.int64).view(-1, _ROW_WORDS), numbers.view(-1), count).sum(1)
    positions = offsets.unsqueeze(1) + torch.arange(part.shape[1], dtype=torch.int64, device=part.device)
    return _integer_sums([part.reshape(-1)], positions.view(-1), count)[0]


def sums_at(positions: torch.Tensor, *columns: torch.Tensor, count: int = FEW) -> list[torch.Tensor]:
    """Return the first sums of single elements, for each of several contiguous tensors of one dtype and one dim.

    Positions are in the global shape. (It is quicker if they ascend.)
    """
    totals = [torch.zeros(count, dtype=torch.int64, device=values.device) for values in columns]
    words = columns[0].dtype.itemsize // _WORD_BYTES
    for pieces in zip(*[bits_in_pieces(values, _PIECE_BYTES) for values in columns], strict=True):
        start, first = pieces[0]
        if words > 1:
            found = positions[start : start + first.numel() // words].unsqueeze(1) * words
            places = (found + torch.arange(words, dtype=torch.int64, device=found.device)).view(-1)
        else:
            places = positions[start : start + first.numel()]
        for total, found in zip(totals, _integer_sums([flat for _, flat in pieces], places, count), strict=True):
            total += found
    return totals


def _integer_sums(flats: Sequence[torch.Tensor], positions: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the sums of single integers of up to eight bytes, for each of some tensors of them."""
    first = flats[0]
    bits = first.itemsize * 8
    per = _WORD_BYTES // first.itemsize
    shift = per.bit_length() - 1  # a power of two
    factors = _place_factors(first.device)
    totals = [torch.zeros(count, dtype=torch.int64, device=first.device) for _ in flats]
    dot = torch.dot if first.is_cpu else _dot
    step = _SINGLE if first.is_cpu else max(first.numel(), 1)
    for start in range(0, first.numel(), step):
        position = positions[start : start + step]
        place = position >> shift
        column = place & (_ROW_WORDS - 1)
        by_row = _factors_of_rows(place >> _ROW_BITS, count)
        products = [factors[number].index_select(0, column).mul_(by_row[number]) for number in range(count)]
        within_word = (position & (per - 1)).mul_(bits)
        for total, flat in zip(totals, flats, strict=True):
            word = flat[start : start + step].view(_UNSIGNED[first.itemsize]).to(torch.int64)
            if per > 1:
                word = word.bitwise_left_shift_(within_word)
            high = word >> SHIFTS[1]
            total += torch.stack([dot(high if SHIFTS[number] else word, products[number]) for number in range(count)])
    return totals


def _factors_of_rows(rows: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Return the coefficients of rows of which many are the same: each of those between is worked out once."""
    lowest, highest = (int(bound) for bound in rows.aminmax()) if rows.numel() > _ROW_WORDS else (0, rows.numel())
    if highest - lowest >= rows.numel():
        return _row_factors(rows, count).unbind()
    table = _row_factors(torch.arange(lowest, highest + 1, dtype=torch.int64, device=rows.device), count)
    rows = rows - lowest
    return [column.index_select(0, rows) for column in table]  # three times as fast as along dim 1
