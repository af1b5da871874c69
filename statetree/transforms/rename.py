"""``rename``: a tree whose leaves lie at other paths."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from statetree.errors import TreeMismatch, check_iterable, shown
from statetree.tree.flatten import flatten_for
from statetree.tree.name_patterns import NamePattern, shown_capture
from statetree.tree.renaming import located, renamed
from statetree.tree.selection import suggestion

T = TypeVar("T")


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
        check_iterable("rename", "rules", rules, "pairs of patterns")
        pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or [isinstance(text, str) for text in pair] != [True, True]:
                msg = f"rename: the rules are no pairs of patterns: expected two texts, got {reprlib.repr(pair)}."
                raise TypeError(msg)
        self._rules = [(NamePattern(source), NamePattern(target)) for source, target in pairs]
        for source, target in self._rules:
            lost = {*target.captures} - {*source.captures}
            if lost:
                what = ", ".join(sorted(map(shown_capture, lost)))
                msg = f"rename: {target!r} asks for what {source!r} does not capture: expected no {what}. Capture it."
                raise ValueError(msg)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The rules, as pairs of patterns."""
        return [(source.text, target.text) for source, target in self._rules]

    @property
    def inverse(self) -> Renaming:
        """The rules the other way round.

        They give back every name that a rule changed, as long as no other rule makes one that looks like it, and no
        path that kept its name does, and it is clear where each capture ends. (``rename`` says if two paths collide.) A
        list, a tuple or another class than dict does not come back where a rule takes its items apart
        (``state.{i}.{n}`` to ``{n}.{i}``): they come back in a dict, under their indices or names.

        Raises:
            ValueError: If a rule does not keep all that it captures.
        """
        for source, target in self._rules:
            if {*source.captures} != {*target.captures}:
                raise ValueError(
                    f"rename: the rule from {source!r} to {target!r} has no inverse: expected the same captures on "
                    "both sides. Write the inverse by hand."
                )
        return Renaming([(target, source) for source, target in self.pairs])

    def __call__(self, path: str) -> str | None:
        """Return what a rendered path becomes, or ``None`` if no rule matches."""
        found = self.match(path)
        return None if found is None else found[1]

    def match(self, path: str) -> tuple[int, str] | None:
        """Return the first rule that matches a rendered path, and what it makes of it; ``None`` if there is none."""
        for index, (source, target) in enumerate(self._rules):
            if (found := source.match(path)) is not None:
                return index, target.fill(found.groupdict())
        return None

    def __repr__(self) -> str:
        return f"Renaming({self.pairs!r})"


def rename(tree: T, rules: Renaming | Mapping[str, str] | Iterable[tuple[str, str]], *, missing_ok: bool = False) -> T:
    """Return a tree whose leaves have other paths, by patterns with captures.

    It works on flat state dicts and on nested trees alike: a name is cut into keys as the old one was. What lies in a
    mapping with dots in its keys gets one key, and what lies in nested mappings gets nested ones; where nothing tells,
    in a tree that is one mapping with texts as keys, it is one key. Containers keep their classes and attributes (also
    ``OrderedDict._metadata``, as it is), and go with their leaves; new ones are dicts. A capture that is a whole
    component keeps its key (``0``, not ``"0"``). Where no list goes with the items of one, they lie in a dict under
    their indices.

    Args:
        tree: Any tree.
        rules: Pairs of patterns, a mapping, or a ``Renaming``, which says how they are read, and has an ``inverse``.
        missing_ok: Whether a rule may match nothing.

    Returns:
        A tree with fresh containers.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        TreeMismatch: If a rule matches nothing, two leaves would get one path, or two that read the same (``0`` and
            ``"0"``), a path would go through a leaf, the tree is a single leaf, or a list, a tuple or another container
            would get a hole or keys that it cannot have.
        ValueError: If a rule asks for what it does not capture.
        TypeError: If the rules are no pairs of texts.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st
        >>> rules = st.Renaming({"model.layers.{i}.self_attn.{p}_proj.weight": "layers.{i}.attention.w{p}.weight"})
        >>> renamed = st.rename({"model.layers.0.self_attn.q_proj.weight": 1}, rules)
        >>> renamed
        {'layers.0.attention.wq.weight': 1}
        >>> st.rename(renamed, rules.inverse)
        {'model.layers.0.self_attn.q_proj.weight': 1}
    """
    rules = rules if isinstance(rules, Renaming) else Renaming(rules)
    leaves, spec = flatten_for("rename", tree)
    names: dict[int, str] = {}
    used: set[int] = set()
    texts = []
    for item in located(spec):
        texts.append(item.text)
        found = rules.match(item.text)
        if found is None:
            continue
        index, name = found
        rule = rules.pairs[index]
        if name and not item.text and not spec.nodes:
            raise TreeMismatch(
                "rename: a single leaf has no path to change: expected a container, got the rule "
                f"{rule}. Put the leaf into a dict."
            )
        if item.text and not name:
            raise TreeMismatch(f"rename: the path {item.text} would be lost: expected a name, got none. Change {rule}.")
        used.add(index)
        names[item.ref] = name
    unused = [pair for index, pair in enumerate(rules.pairs) if index not in used]
    if unused and not missing_ok:
        lines = []
        for source, target in unused:
            is_late = any(map(Renaming([(source, target)]), texts))
            why = " that no rule before it matches." if is_late else suggestion(source, texts)
            lines.append(f"no path matches the rule {source!r}{why}")
        raise TreeMismatch(f"rename: {shown(lines)} Change it, or pass missing_ok=True.")
    return renamed("rename", spec, leaves, names)
