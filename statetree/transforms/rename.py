"""``rename``: a tree whose leaves lie at other paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statetree.errors import TreeMismatch, shown
from statetree.tree.flatten import flatten_for
from statetree.tree.rename_rules import Match, Renaming
from statetree.tree.renaming import located, renamed
from statetree.tree.selection import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")


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
    names: dict[int, Match] = {}
    used: set[int] = set()
    texts = []
    for item in located(spec):
        texts.append(item.text)
        found = rules.match(item.text)
        if found is not None:
            if found.name and not item.text and not spec.nodes:
                msg = (
                    f"rename: a single leaf has no path to change: expected a container, got the rule "
                    f"{rules.pairs[found.rule]}. Put the leaf into a dict."
                )
                raise TreeMismatch(msg)
            used.add(found.rule)
            names[item.ref] = found
            if item.text and not found.name:
                rule = rules.pairs[found.rule]
                msg = f"rename: the path {item.text} would be lost: expected a name, got none. Change {rule}."
                raise TreeMismatch(msg)
    unused = [pair for index, pair in enumerate(rules.pairs) if index not in used]
    if unused and not missing_ok:
        lines = []
        for source, target in unused:
            is_late = any(map(Renaming([(source, target)]).match, texts))
            why = " that no rule before it matches." if is_late else suggestion(source, texts)
            lines.append(f"no path matches the rule {source!r}{why}")
        raise TreeMismatch(f"rename: {shown(lines)} Change it, or pass missing_ok=True.")
    return renamed("rename", spec, leaves, names)
