"""How values, places and differences are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.judge.values import bits_of_number

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How many characters of a value are shown.
SHORT = 80
#: How many of the elements that are on one side only are shown.
SHOWN_ALONE = 5
#: How many of the places that differ are.
SHOWN = 20


def raise_for(head: str, found: Sequence[str]) -> None:
    """Raise an ``AssertionError`` with what was found, if anything was."""
    if found:
        places = f"{len(found)} place{'s' if len(found) > 1 else ''}"
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise AssertionError("\n  ".join([f"{head} in {places}:", *found[:SHOWN], *more]))


def place(path: str) -> str:
    """Return a path as it is shown: ``model.0.weight``."""
    return path.removeprefix(".") or "<root>"


def brief(value: Any) -> str:
    """Return a short representation of any value."""
    text = _shown(value)
    return text if len(text) < SHORT else f"{text[: SHORT - 3]}..."


def contrast(a: Any, b: Any) -> str:
    """Return short representations of two values that differ: of where they do, if they begin alike."""
    one, other = brief(a), brief(b)
    if one != other:
        return f"{one} against {other}"
    one, other = _shown(a), _shown(b)
    if one == other:
        if isinstance(a, (float, complex)) and isinstance(b, (float, complex)):
            return f"{one} against {other}, of bytes {bits_of_number(a).hex()} against {bits_of_number(b).hex()}"
        return f"both shown as {brief(a)}"
    first = next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    ends = slice(max(0, first - SHORT // 4), first + SHORT // 2)
    return f"...{one[ends]}... against ...{other[ends]}..."


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)
