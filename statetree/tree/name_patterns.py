"""Patterns of names: rendered paths with captures, which are matched, and filled in again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from statetree.tree.selection import glob_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_CAPTURE: Final = re.compile(r"\\.|\{([A-Za-z_][A-Za-z0-9_]*)\}|(\*\*+|\*)", re.DOTALL)


class Name(NamedTuple):
    """A name that was filled in: its text, and from where on which captures lie in it."""

    text: str
    captures: list[tuple[int, str]]


class NamePattern:
    """A pattern of names, in which ``{name}`` captures one or more characters of a component.

    Where it stands again, it is the same text. ``*`` captures within one component, and ``**`` any number of
    components, also none. A backslash takes the meaning from the character after it. The captures in ``numbers`` stand
    for whole numbers alone.
    """

    def __init__(self, text: str, numbers: Collection[str] = ()) -> None:
        self.text = text
        counts = {"*": 0, "**": 0}

        def wildcard(stars: str) -> str:
            counts[stars] += 1
            return f"(?P<_{len(stars)}_{counts[stars]}>{'[^.]*' if stars == '*' else '.*'})"

        seen: set[str] = set()

        def capture(braced: str) -> str:
            name = braced[1:-1]
            again = name in seen
            seen.add(name)
            kind = "0|[1-9][0-9]*" if name in numbers else "[^.]+"
            return f"(?P={name})" if again else f"(?P<{name}>{kind})"

        self._compiled = re.compile("".join(glob_parts(text, wildcard, capture)), re.DOTALL)
        self._parts = _parts_of(text)
        self.captures = [*self._compiled.groupindex]

    def __repr__(self) -> str:
        return repr(self.text)

    def match(self, name: str) -> re.Match[str] | None:
        """Return what a whole name is made of, by the names of captures; ``None`` if it does not match."""
        return self._compiled.fullmatch(name)

    def fill(self, values: Mapping[str, str | None]) -> Name:
        """Return the name with these captures."""
        result, is_bare = "", False
        captures: list[tuple[int, str]] = []
        for index, (literal, name) in enumerate(self._parts):
            # A ``**`` that stands for no component takes the dot after it with it, or else the one before.
            result += literal[1:] if is_bare and literal.startswith(".") and result[-1:] in {"", "."} else literal
            if name is None:
                continue
            value = values[name]
            is_bare = value is None
            if is_bare and not self._parts[index + 1][0] and index + 2 == len(self._parts):
                result = result.removesuffix(".")
            if value:
                captures.append((len(result), name))
                result += value
        return Name(result, captures)


def _parts_of(text: str) -> list[tuple[str, str | None]]:
    """Return the literal text before each capture, and the names of all."""
    parts: list[tuple[str, str | None]] = []
    literal, at, counts = "", 0, {1: 0, 2: 0}
    for token in _CAPTURE.finditer(text):
        literal += text[at : token.start()]
        at = token.end()
        if token[0].startswith("\\"):
            literal += token[0][1:]
            continue
        name = token[1]
        if name is None:
            kind = min(len(token[2]), 2)
            counts[kind] += 1
            name = f"_{kind}_{counts[kind]}"
        parts.append((literal, name))
        literal = ""
    return [*parts, (literal + text[at:], None)]


def shown_capture(name: str) -> str:
    """Return a capture as it stands in a pattern."""
    return "**" if name.startswith("_2_") else "*" if name.startswith("_1_") else f"{{{name}}}"


def carried(old: re.Match[str], new: Name) -> dict[int, int]:
    """Return the components of a name that are components of an old one: which were captured whole."""
    found: dict[int, int] = {}
    for at, name in new.captures:
        start, stop = old.span(name)
        if _is_whole(old.string, start, stop) and _is_whole(new.text, at, at + stop - start):
            first, count = old.string.count(".", 0, start), old.string.count(".", start, stop) + 1
            found.update((new.text.count(".", 0, at) + step, first + step) for step in range(count))
    return found


def _is_whole(text: str, start: int, stop: int) -> bool:
    """Whether a part of a path is one component or several."""
    return text[start - 1 : start] in {"", "."} and text[stop : stop + 1] in {"", "."}
