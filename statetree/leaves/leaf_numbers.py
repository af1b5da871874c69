"""Numbers for leaves: what only equal values, and tensors with the same bits, have in common, in every process."""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import whole_box
from statetree.key_paths import ADDRESS, exactly
from statetree.leaves.builtin import OPAQUE, facts, leaf_type_of
from statetree.leaves.pairing import facts_inside, is_made_of_views, paired_parts
from statetree.leaves.parts import PackedRecipe, unpack
from statetree.leaves.types.arrays import is_array
from statetree.leaves.types.opaque import Rest, TakeApart
from statetree.spans.sums import ALL, piece_sums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_SETS: Final = frozenset({set, frozenset})
_HOLDERS: Final = _SETS | {tuple}
_VALUES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def text_number(*texts: str) -> int:
    """Return a number for some texts, as an ``int64`` has it."""
    data = "\0".join([*texts, str(list(map(len, texts)))]).encode("utf-8", "surrogatepass")
    return _number(data)


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _hex(pieces: Iterable[bytes]) -> str:
    state = blake2b(digest_size=16)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


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
        return text_number("value", str(_plain_facts(value)))
    unpacked = unpack("digest", [value], list)
    found: list[bytes] = [str(_plain_facts(value)).encode("utf-8", "surrogatepass")]
    recipe = unpacked.recipe(0)
    if isinstance(recipe, PackedRecipe) and isinstance(recipe.context, Rest):
        rest = recipe.context
        if pickle.EMPTY_SET in rest.skeleton or pickle.FROZENSET in rest.skeleton:
            _, rest = OPAQUE.taken_apart(value, _SetsByValue(io.BytesIO(), leaf_type_of))
        found.append(value_text(rest).encode("utf-8", "surrogatepass"))
    if not is_made_of_views(recipe):
        found += [str(known and _as_texts(known)).encode("utf-8", "surrogatepass") for known in facts_inside(value)]
    for _, index, _ in paired_parts(unpacked, unpacked):
        assert index is not None
        part = unpacked.parts[index]
        shape = tuple(part.shape)
        sums = None if part.is_meta else piece_sums(part, whole_box(shape), shape, ALL)
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


def _plain_facts(value: Any) -> dict[str, str]:
    return _as_texts(facts(value))


def _as_texts(known: Mapping[str, Any]) -> dict[str, str]:
    return {name: value_text(fact) for name, fact in known.items() if name != "memory"}


def value_text(value: Any, above: tuple[int, ...] = ()) -> str:
    """Render a plain value so that another value has another text (``1`` and ``1.0`` differ, ``0.0`` and ``-0.0``).

    ``above`` are the ids of what it is in: a cycle is rendered as the way back.
    """
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, float):
        return f"{name} {struct.pack('<d', value).hex()}"  # with the payload of a NaN
    if isinstance(value, complex):
        return f"{name} {struct.pack('<2d', value.real, value.imag).hex()}"
    if isinstance(value, enum.Enum):
        return f"{name} {value.name or value.value}"  # a flag may have no name
    if cls in (str, bytes, bytearray):
        return f"{name} {value!r}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"{name} {value_number(value)}"
    if id(value) in above:
        return f"{name} {len(above) - above.index(id(value))} above"
    text = partial(value_text, above=(*above, id(value)))
    if isinstance(value, (tuple, list)):
        return f"{name} [{', '.join(map(text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{name} {{{', '.join(sorted(map(text, value)))}}}"
    if isinstance(value, dict):
        rows = [f"{text(key)}: {text(held)}" for key, held in value.items()]
        return f"{name} {{{', '.join(rows if isinstance(value, OrderedDict) else sorted(rows))}}}"
    if isinstance(value, Rest):
        buffers = [_hex(buffer.pieces()) for buffer in value.buffers]
        return f"{name} {_hex([value.skeleton])} {text(value.kept)} {buffers}"
    if is_array(value):
        elements = text(value.tolist()) if value.dtype.hasobject else _hex([value.tobytes()])
        return f"{name} {value.dtype} {value.shape} {elements}"
    if is_dataclass(value):
        return f"{name} {text({each.name: getattr(value, each.name, None) for each in fields(value) if each.compare})}"
    if name == "torch.distributed.device_mesh.DeviceMesh":  # it prints its shape
        return f"{name} {value.device_type} {value.mesh.tolist()} {value.mesh_dim_names}"
    held = _made_of(value)
    return f"{name} {ADDRESS.sub('', exactly(value)) if held is None else text(held)}"


def _made_of(value: Any) -> Any:
    """Return what pickle would make an object of that may not print all that it is; ``None`` if nothing is known."""
    cls = type(value)
    # What a placement is, it prints. What pickle makes of other objects of torch.distributed is each rank's own.
    is_opaque = leaf_type_of(cls) is OPAQUE and not cls.__module__.startswith("torch.distributed")
    if not is_opaque and cls not in copyreg.dispatch_table:
        return None
    try:
        reduced: Any = copyreg.dispatch_table[cls](value) if cls in copyreg.dispatch_table else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return reduced
        made, arguments, *rest = reduced
        return [made, arguments, *[list(each) if hasattr(each, "__next__") else each for each in rest]]
    except Exception:  # noqa: BLE001 - a user's own, or what cannot be pickled
        return None
