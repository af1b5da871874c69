"""``Renaming``: rules by which rendered paths get others, by patterns with captures."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from statetree.tree.selection import glob_parts

_CAPTURE: Final = re.compile(r"\\.|\{([A-Za-z_][A-Za-z0-9_]*)\}|(\*\*+|\*)", re.DOTALL)


class Match(NamedTuple):
    """What a rule makes of a path.

    Attributes:
        rule: The index of the rule.
        name: What the path becomes.
        carried: For each component of that which was captured whole, the component of the path that it was.
    """

    rule: int
    name: str
    carried: dict[int, int]


class _Rule:
    """One pattern, and what a path that matches it becomes."""

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self.pattern = _compiled(source)
        self.parts, wanted = _template(target)
        held = set(self.pattern.groupindex)
        if not wanted <= held:
            what = ", ".join(sorted(map(_shown, wanted - held)))
            msg = f"rename: {target!r} asks for what {source!r} does not capture: expected no {what}. Capture it."
            raise ValueError(msg)
        self.is_invertible = wanted == held and _is_unambiguous(source) and _is_unambiguous(target)

    def apply(self, text: str) -> tuple[str, dict[int, int]] | None:
        """Return what a path becomes, and which components it keeps, or ``None`` if it does not match."""
        found = self.pattern.fullmatch(text)
        if found is None:
            return None
        result, is_bare = "", False
        spans: list[tuple[int, int, int]] = []
        for literal, name in self.parts:
            # A ``**`` that stands for no component takes the dot after it with it, or else the one before.
            result += literal[1:] if is_bare and literal.startswith(".") and result[-1:] in {"", "."} else literal
            is_bare = name is not None and found[name] is None
            if is_bare and name == self.parts[-2][1] and not self.parts[-1][0]:
                result = result.removesuffix(".")
            if name is not None and found[name]:
                spans.append((len(result), *found.span(name)))
                result += found[name]
        carried: dict[int, int] = {}
        for at, start, stop in spans:
            if _is_whole(text, start, stop) and _is_whole(result, at, at + stop - start):
                first, count = text.count(".", 0, start), text.count(".", start, stop) + 1
                carried.update((result.count(".", 0, at) + step, first + step) for step in range(count))
        return result, carried


def _is_whole(text: str, start: int, stop: int) -> bool:
    """Whether a part of a path is one component or several."""
    return text[start - 1 : start] in {"", "."} and text[stop : stop + 1] in {"", "."}


def _shown(name: str) -> str:
    return "**" if name.startswith("_many") else "*" if name.startswith("_one") else f"{{{name}}}"


def _template(target: str) -> tuple[list[tuple[str, str | None]], set[str]]:
    """Return the literal text before each capture, and the names of all."""
    parts: list[tuple[str, str | None]] = []
    literal, at, counts = "", 0, {"*": 0, "**": 0}
    for token in _CAPTURE.finditer(target):
        literal += target[at : token.start()]
        at = token.end()
        if token[0].startswith("\\"):
            literal += token[0][1:]
            continue
        parts.append((literal, token[1] or _wildcard_name(token[2], counts)))
        literal = ""
    parts.append((literal + target[at:], None))
    return parts, {name for _, name in parts if name is not None}


def _wildcard_name(stars: str, counts: dict[str, int]) -> str:
    kind = "*" if stars == "*" else "**"
    counts[kind] += 1
    return f"_{'one' if kind == '*' else 'many'}{counts[kind]}"


def _compiled(source: str) -> re.Pattern[str]:
    counts = {"*": 0, "**": 0}
    seen: set[str] = set()

    def wildcard(stars: str) -> str:
        return f"(?P<{_wildcard_name(stars, counts)}>{'[^.]*' if stars == '*' else '.*'})"

    def capture(braced: str) -> str:
        name = braced[1:-1]
        again = name in seen
        seen.add(name)
        return f"(?P={name})" if again else f"(?P<{name}>[^.]+)"

    return re.compile("".join(glob_parts(source, wildcard, capture)), re.DOTALL)


def _is_unambiguous(pattern: str) -> bool:
    """Whether a path can match in one way only: one capture in a component, and one ``**``."""
    bare = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    per_component = [len(re.findall(r"\{\w+\}|\*\*+|\*", component)) for component in bare.split(".")]
    return max(per_component) <= 1 and len(re.findall(r"\*\*+", bare)) <= 1


class Renaming:
    """Rules by which paths get other names, for ``rename``.

    A rule is a pair of patterns. The first is matched against the whole rendered path of a leaf: ``{name}`` captures
    one or more characters within one component, and the same again where it stands a second time; ``*`` captures within
    one component and ``**`` any number of components, also none. The second says what the path becomes: captures by
    their names, wildcards by their order. The first rule that matches a path is the one that counts, and what none
    matches keeps its name. A backslash takes the meaning from the character after it.

    Args:
        rules: Pairs of patterns, or a mapping from one to the other.

    Raises:
        TypeError: If they are no pairs of texts.
        ValueError: If the second pattern of a rule asks for what the first does not capture.

    Example:
        >>> import statetree as st
        >>> rules = st.Renaming({"layers.{i}.{p}_proj.weight": "blocks.{i}.w{p}"})
        >>> rules("layers.0.q_proj.weight"), rules("norm.weight")
        ('blocks.0.wq', None)
        >>> rules.inverse("blocks.0.wq")
        'layers.0.q_proj.weight'
    """

    def __init__(self, rules: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or [isinstance(text, str) for text in pair] != [True, True]:
                msg = f"rename: the rules are no pairs of patterns: expected two texts, got {reprlib.repr(pair)}."
                raise TypeError(msg)
        self._rules = [_Rule(source, target) for source, target in pairs]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The rules, as pairs of patterns."""
        return [(rule.source, rule.target) for rule in self._rules]

    @property
    def inverse(self) -> Renaming:
        """The rules the other way round.

        They give back every name that a rule changed, as long as no other rule makes one that looks like it, and no
        path that kept its name does. (``rename`` says if two paths collide.) A list, a tuple or another class than
        dict does not come back where a rule takes its items apart (``state.{i}.{n}`` to ``{n}.{i}``): they come back
        in a dict, under their indices or names.

        Raises:
            ValueError: If a rule does not keep all that it captures, or could be read in several ways: more than one
                capture in a component, or more than one ``**``.
        """
        for rule in self._rules:
            if not rule.is_invertible:
                msg = (
                    f"rename: the rule from {rule.source!r} to {rule.target!r} has no inverse: expected the same "
                    "captures on both sides, one in a component, and one ** at most. Write the inverse by hand."
                )
                raise ValueError(msg)
        return Renaming([(target, source) for source, target in self.pairs])

    def __call__(self, path: str) -> str | None:
        """Return what a rendered path becomes, or ``None`` if no rule matches."""
        found = self.match(path)
        return None if found is None else found.name

    def match(self, path: str) -> Match | None:
        """Return what the first rule that matches makes of a rendered path; ``None`` if there is none."""
        for index, rule in enumerate(self._rules):
            found = rule.apply(path)
            if found is not None:
                return Match(index, *found)
        return None

    def __repr__(self) -> str:
        return f"Renaming({self.pairs!r})"
