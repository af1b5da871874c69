"""Tensors compared bit by bit: NaNs, and the signs of zeros, included."""

from __future__ import annotations

from typing import Any, Final

import torch

from statetree.torch_internals import COPIED_AS_INTEGERS, can_negate, negated_view, without_common_bits
from statetree.tree.atoms import same_value


def safely_equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, tensors bit by bit. Never raises."""
    if isinstance(a, torch.Tensor) and type(a) is type(b):
        try:
            return a is b or bool(a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b))
        except Exception:  # noqa: BLE001 - total: a subclass may refuse anything
            return False
    if isinstance(a, dict) and type(a) is type(b):
        return a.keys() == b.keys() and all(safely_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(map(safely_equal, a, b))
    return same_value(a, b)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one dtype and shape hold the same elements, bit by bit (NaNs and zeros' signs)."""
    if is_unreadable(a, b):
        return False
    a, b = without_common_bits(a, b)
    return bits_of(a).equal(bits_of(b))


def is_unreadable(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether only one of two tensors has a negative bit, on what torch cannot negate (private functions set it)."""
    return a.is_neg() != b.is_neg() and not can_negate(a.dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as integers on the CPU, in the order of the elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype in COPIED_AS_INTEGERS:
        plain = plain.view(_BY_SIZE[plain.dtype.itemsize])
    plain = plain.cpu().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    if plain.dtype in _INTEGERS:
        return plain
    if plain.dtype.itemsize in _BY_SIZE:
        return plain.view(_BY_SIZE[plain.dtype.itemsize])
    return plain.view(torch.int64)  # complex128


_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS: Final = frozenset(_BY_SIZE.values())


def first_difference(a: torch.Tensor, b: torch.Tensor) -> tuple[str, str]:
    """Return how two tensors read at the first index at which they differ, and how often they do."""
    if a.is_meta or b.is_meta:
        return ("no bytes" if a.is_meta else "bytes", "no bytes" if b.is_meta else "bytes")
    if is_unreadable(a, b):
        return (f"negative bit {a.is_neg()}", f"negative bit {b.is_neg()}")
    bits_a, bits_b = map(bits_of, without_common_bits(a, b))
    unequal = (bits_a != bits_b).reshape(max(a.numel(), 1), -1).any(1)
    position = int(unequal.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position, device="cpu"), a.shape)) if a.dim() else ()
    count = int(unequal.sum())
    more = f" ({count} of {a.numel()} elements differ)"
    return (f"{_element(a, index)} at index {index}{more}", f"{_element(b, index)} at index {index}")


def _element(tensor: torch.Tensor, index: tuple[int, ...]) -> str:
    if tensor.is_neg() and not can_negate(tensor.dtype):
        return f"-({_element(negated_view(tensor), index)})"
    element = tensor.detach()[index]
    try:
        return str(element.item())
    except RuntimeError:  # a dtype that has no Python number
        return f"0x{bytes(element.view(-1).view(torch.uint8).tolist())[::-1].hex()}"
