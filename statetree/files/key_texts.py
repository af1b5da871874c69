"""Typed keys as text: how the keys of containers are written into a checkpoint, and read from it."""

from __future__ import annotations

import json
import struct
from typing import Any

from statetree.errors import unsignalled
from statetree.key_paths import ADDRESS, Attr


class UnknownKey(Exception):
    """A key is of a class that is written by its representation only."""


def key_text(key: Any) -> str:
    """Return a key as text that tells its type: ``0``, ``"0"`` and ``False`` give three texts.

    Strings, numbers, booleans, ``None``, bytes, and tuples and frozensets of these can be read back; others are written
    as they print, which is enough to find them again.
    """
    cls = type(key)
    if cls is str:
        return f"s{key}"
    if cls is Attr:
        return f"@{key!s}"
    if cls is int:
        return f"i{key:x}"
    if cls is bool:
        return f"b{key}"
    if key is None:
        return "n"
    if cls is float:
        return f"f{_number_text(key)}"
    if cls is complex:
        return f"c{_number_text(key.real)} {_number_text(key.imag)}"
    if cls is bytes:
        return f"y{key.hex()}"
    if cls is tuple:
        return f"t{json.dumps([key_text(part) for part in key])}"
    if cls is frozenset:
        return f"z{json.dumps(sorted(map(key_text, key)))}"
    return f"?{cls.__module__}.{cls.__qualname__} {without_addresses(key)}"


def key_of(text: str) -> Any:
    """Return the key that ``key_text`` made a text of. Raises ``UnknownKey``, or ``ValueError`` for any other text."""
    sort, rest = text[:1], text[1:]
    if sort == "s":
        return rest
    if sort == "@":
        return Attr(rest)
    if sort == "i":
        return int(rest, 16)
    if sort == "b" and rest in {"True", "False"}:
        return rest == "True"
    if text == "n":
        return None
    if sort == "f":
        return _number(rest)
    if sort == "c":
        return complex(*[_number(part) for part in rest.split(" ")])
    if sort == "y":
        return bytes.fromhex(rest)
    if sort in {"t", "z"}:
        parts = json.loads(rest)
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ValueError(text)
        return (tuple if sort == "t" else frozenset)(map(key_of, parts))
    if sort == "?":
        raise UnknownKey(rest)
    raise ValueError(text)


def is_readable(text: str) -> bool:
    """Whether ``key_of`` makes a key of a text that ``key_text`` returned."""
    try:
        key_of(text)
    except UnknownKey:
        return False
    return True


def _number_text(number: float) -> str:
    """Return a number as text that can be read back bit by bit: ``float.hex`` drops the bits of NaNs."""
    return number.hex() if number == number else f"nan{struct.pack('>d', number).hex()}"


def _number(text: str) -> float:
    if not text.startswith("nan"):
        return float.fromhex(text)
    bits = bytes.fromhex(text[3:])
    found: float = struct.unpack(">d", bits.rjust(8, b"\0")[-8:])[0]
    if len(bits) != 8 or found == found:
        raise ValueError(text)
    return found


def shown_key(text: str) -> Any:
    """Return a key for use in a path that is only shown."""
    try:
        return key_of(text)
    except UnknownKey:
        return text[1:]


def without_addresses(value: Any) -> str:
    """Return a value's representation, the same in every process."""
    try:
        return ADDRESS.sub("", repr(value))
    except unsignalled(Exception):  # a hostile __repr__
        return ADDRESS.sub("", object.__repr__(value))
