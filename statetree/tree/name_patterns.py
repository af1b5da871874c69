"""Patterns of names: rendered paths with captures, which are matched, and filled in again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from statetree.tree.selection import glob_expression, glob_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class NamePattern:
    """A pattern of names, in which ``{name}`` captures one or more characters of a component.

    Where it stands again, it is the same text. ``*`` captures within one component, and ``**`` any number of
    components, also none. A backslash takes the meaning from the character after it. The captures in ``numbers`` stand
    for whole numbers alone.
    """

    def __init__(self, text: str, numbers: Collection[str] = ()) -> None:
        self.text = text
        self._parts: list[tuple[str, str | None]] = []  # the literal text before each capture, and the names of all
        literal, expression, counts = "", "", {"*": 0, "**": 0}
        seen: set[str] = set()
        for before, meant, behind in glob_tokens(text):
            literal += before
            inner = ""
            if meant:
                if meant in counts:
                    counts[meant] += 1
                    name, kind = f"_{len(meant)}_{counts[meant]}", "[^.]*" if meant == "*" else ".*"
                else:
                    name = meant[1:-1]
                    kind = "0|[1-9][0-9]{0,17}" if name in numbers else "[^.]+"
                inner = f"(?P={name})" if name in seen else f"(?P<{name}>{kind})"
                seen.add(name)
                self._parts.append((literal, name))
                literal = behind
            expression += glob_expression(before, inner, behind)
        self._parts.append((literal, None))
        self._compiled = re.compile(expression, re.DOTALL)
        self.captures = [*self._compiled.groupindex]

    def __repr__(self) -> str:
        return repr(self.text)

    def match(self, name: str) -> re.Match[str] | None:
        """Return what a whole name is made of, by the names of captures; ``None`` if it does not match."""
        return self._compiled.fullmatch(name)

    def fill(self, values: Mapping[str, str | None]) -> str:
        """Return the name with these captures."""
        result, is_bare = "", False
        for index, (literal, name) in enumerate(self._parts):
            # A ``**`` that stands for no component takes the dot after it with it, or else the one before.
            result += literal[1:] if is_bare and literal.startswith(".") and result[-1:] in {"", "."} else literal
            if name is None:
                continue
            value = values[name]
            is_bare = value is None
            if is_bare and not self._parts[index + 1][0] and index + 2 == len(self._parts):
                result = result.removesuffix(".")
            result += value or ""
        return result


def shown_capture(name: str) -> str:
    """Return a capture as it stands in a pattern."""
    return "**" if name.startswith("_2_") else "*" if name.startswith("_1_") else f"{{{name}}}"
