"""Numbers for leaves: what only equal values, and tensors with the same bits, have in common, in every process."""

from __future__ import annotations

import io
import pickle
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from statetree.chunks.boxes import whole_box
from statetree.leaves.builtin import OPAQUE, facts, leaf_type_of
from statetree.leaves.pairing import facts_inside, is_made_of_views, paired_parts
from statetree.leaves.parts import PackedRecipe, unpack
from statetree.leaves.types.opaque import Rest, TakeApart
from statetree.leaves.value_texts import value_text
from statetree.spans.sums import piece_sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


#: What there is to say of a tensor that is nothing but a view.
_PLAIN: Final = {"leaf type": value_text("Tensor")}
_SETS: Final = frozenset({set, frozenset})
_HOLDERS: Final = _SETS | {tuple}
_VALUES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def text_number(*texts: str) -> int:
    """Return a number for some texts, as an ``int64`` has it."""
    data = "\0".join([*texts, str(list(map(len, texts)))]).encode("utf-8", "surrogatepass")
    return _number(data)


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def tensor_number(dtype: torch.dtype, shape: Sequence[int], sums: torch.Tensor | None) -> int:
    """Return a number for a tensor of a dtype and shape whose elements have some sums (``None`` without elements)."""
    known = "meta" if sums is None else str(sums.tolist())
    return text_number("tensor", str(dtype), str(tuple(shape)), known)


def value_number(value: Any) -> int:
    """Return a number for a leaf that is no strided tensor: a plain value, a sparse tensor, an opaque object."""
    leaf_type = leaf_type_of(type(value))
    if leaf_type is None:
        return text_number("value", value_text(value))
    if not leaf_type.has_elements:
        return text_number("value", str(_as_texts(facts(value))))
    unpacked = unpack("digest", [value], list)
    found: list[bytes] = [str(_as_texts(facts(value))).encode("utf-8", "surrogatepass")]
    recipe = unpacked.recipe(0)
    if isinstance(recipe, PackedRecipe) and isinstance(recipe.context, Rest):
        rest = recipe.context
        if pickle.EMPTY_SET in rest.skeleton or pickle.FROZENSET in rest.skeleton:
            _, rest = OPAQUE.taken_apart(value, _SetsByValue(io.BytesIO(), leaf_type_of))
        found.append(value_text(rest).encode("utf-8", "surrogatepass"))
    if not is_made_of_views(recipe):
        inside = [_PLAIN if known is None else _as_texts(known) for known in facts_inside(value)]
        if any(known != _PLAIN for known in inside):  # what is waited for, or read, is plain as well
            found += [str(known).encode("utf-8", "surrogatepass") for known in inside]
    for _, index, _ in paired_parts(unpacked, unpacked):
        assert index is not None
        part = unpacked.parts[index]
        shape = tuple(part.shape)
        sums = None if part.is_meta else piece_sums(part, whole_box(shape), shape)
        found.append(struct.pack("<q", tensor_number(part.dtype, shape, sums)))
    lengths = str(list(map(len, found))).encode()
    return _number(b"\0".join([*found, lengths]))


class _SetsByValue(TakeApart):
    """Knows sets of plain values by these, in whatever order Python keeps them. It cannot be put together again."""

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        if type(obj) in _SETS and _is_known_by_value(obj):
            return self._keep((_SetsByValue, value_text(obj)), obj)
        return super().persistent_id(obj)


def _is_known_by_value(value: Any) -> bool:
    return type(value) in _VALUES or (type(value) in _HOLDERS and all(map(_is_known_by_value, value)))


def _as_texts(known: Mapping[str, Any]) -> dict[str, str]:
    return {name: value_text(fact) for name, fact in known.items() if name != "memory"}
