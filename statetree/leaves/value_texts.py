"""Texts for plain values and metadata: other values have other texts, equal ones the same in every process.

An object of a class that nobody knows is told by what pickle would make it of: what it prints may leave things out, or
have an address in it.
"""

from __future__ import annotations

import copyreg
import enum
import struct
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch

from statetree.chunks.boxes import whole_box
from statetree.errors import unsignalled
from statetree.key_paths import ADDRESS, exactly
from statetree.leaves.builtin import OPAQUE, leaf_type_of
from statetree.leaves.parts import unpack
from statetree.leaves.types.arrays import is_array
from statetree.leaves.types.opaque import Rest
from statetree.leaves.types.special import special_layout
from statetree.spans.sums import piece_sums
from statetree.tree.atoms import same_value

#: What prints all that it is, without an address.
_PRINTED: Final = frozenset({type(None), bool, int, str, bytes, bytearray, torch.dtype})
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType)
#: What lies deeper than this is told by its class alone.
_DEEPEST: Final = 120


def _hex(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def value_text(value: Any, *, devices: bool = True) -> str:
    """Render a plain value so that another value has another text (``1`` and ``1.0`` differ, ``0.0`` and ``-0.0``).

    Without ``devices``, all of these are alike.
    """
    return _Texts(devices=devices).of(value)


def equal_values(a: Any, b: Any) -> bool:
    """Whether plain values and objects are equal, and other values have other texts inside them, too.

    What an object says of itself may leave out types (``1 == True``), signs of zeros, or how bytes are kept.
    """
    return same_value(a, b) and (a is b or value_text(a) == value_text(b))


class _Texts:
    """The texts of what lies in one value. An object is looked at once, however many others hold it."""

    def __init__(self, *, devices: bool) -> None:
        self._devices = devices
        self._above: list[int] = []  # the ids of what is being rendered: what holds itself is told by its class there
        self._known: dict[int, tuple[Any, str]] = {}  # of objects, by their ids, which they keep

    def of(self, value: Any) -> str:
        """Return the text of a value."""
        cls = type(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if cls in _PRINTED:
            return f"{name} {value!r}"
        if isinstance(value, float):
            return f"{name} {struct.pack('<d', value).hex()}"  # with the payload of a NaN
        if isinstance(value, complex):
            return f"{name} {struct.pack('<2d', value.real, value.imag).hex()}"
        if isinstance(value, enum.Enum):
            return f"{name} {value.name or value.value}"  # a flag may have no name
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"
        if cls is torch.device and not self._devices:
            return self.of("its device")
        if isinstance(value, torch.Tensor):
            return f"{name} {self._of_tensor(value)}"
        if id(value) in self._above or len(self._above) == _DEEPEST:
            return name
        self._above.append(id(value))
        text = self._inside(value)
        self._above.pop()
        return f"{name} {text}"

    def _of_tensor(self, value: torch.Tensor) -> str:
        """Render what a tensor is made of. The metadata of a wrapper, which may lead back to it, are left out."""
        special = special_layout(value)
        known = {"shape": tuple(value.shape)} if special is None else dict(special.describe(value))
        known.pop("memory", None)
        parts = unpack("read", [value], list, memory=False).parts
        sums = [[] if p.is_meta else piece_sums(p, whole_box(p.shape), tuple(p.shape)).tolist() for p in parts]
        return self.of([value.dtype, known, [(part.dtype, part.is_meta) for part in parts], sums])

    def _inside(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, dict):
            rows = [f"{self.of(key)}: {self.of(held)}" for key, held in value.items()]
            return f"{{{', '.join(rows if isinstance(value, OrderedDict) else sorted(rows))}}}"
        if isinstance(value, Rest):
            buffers = [_hex(buffer.raw()) for buffer in value.buffers]
            return f"{_hex(value.skeleton)} {self.of(value.kept)} {buffers}"
        if is_array(value):
            known = value.dtype.hasobject or value.dtype.names is not None
            return f"{value.dtype} {value.shape} {self.of(value.tolist()) if known else _hex(value.tobytes())}"
        if is_dataclass(value):
            return self.of({each.name: getattr(value, each.name, None) for each in fields(value) if each.compare})
        known = self._known.get(id(value))
        if known is None:
            made = _pickled_as(value)
            text = ADDRESS.sub("", exactly(value)) if made is None else self.of(made)
            told = text if made is None else _hex(text.encode("utf-8", "surrogatepass"))
            known = self._known[id(value)] = value, told
        return known[1]


def _pickled_as(value: Any) -> Any:
    """Return what pickle would make an object of; ``None`` if it prints what it is, or nothing else is known."""
    cls = type(value)
    if isinstance(value, _FUNCTIONS) and getattr(value, "__self__", None) is None:
        return None
    # torch's own objects print what they are: pickle has caches of some, and what is each rank's own of others.
    is_known = leaf_type_of(cls) is not OPAQUE or cls.__module__.partition(".")[0] == "torch"
    by_table = copyreg.dispatch_table.get(cls)
    if is_known and by_table is None:
        return None
    try:
        reduced: Any = value.__reduce_ex__(4) if by_table is None else by_table(value)
        if isinstance(reduced, str):
            return [getattr(value, "__module__", ""), reduced]
        made, arguments, *rest = reduced
        rest = [list(each) if hasattr(each, "__next__") else each for each in rest]
        if rest and isinstance(rest[0], dict):  # but for what was computed of it, and kept
            kept = {key for key in rest[0] if type(getattr(cls, str(key), None)).__name__ == "cached_property"}
            rest[0] = {key: held for key, held in rest[0].items() if key not in kept}
    except unsignalled(Exception):  # a user's own, or what cannot be pickled
        return None
    return [made, arguments, *rest]
