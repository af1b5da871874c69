"""``Conversion``: how two forms of a state belong together, both ways."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.errors import Difference, TreeMismatch, check_iterable, unsignalled
from statetree.key_paths import Path
from statetree.torch_internals import quietly
from statetree.transforms.conversions.converted_leaves import LeafMaker, LeafPlan
from statetree.transforms.conversions.rule import Rule
from statetree.tree.flatten import flatten_for
from statetree.tree.renaming import TreeBuilder
from statetree.tree.selection import compiled_glob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.transforms.conversions.rule import Hit, Place
    from statetree.tree.spec import TreeSpec

_REMEDY = "Change the rules or the tree."


class _Instance(NamedTuple):
    """Leaves that a rule takes together: those of one layer, say."""

    rule: Rule
    captures: Mapping[str, str | None]  # what its names have in common
    leaves: dict[Place, dict[int, int]]  # the leaves at each place, by which of the tied names they lie under


class Conversion:
    """How two forms of a state belong together, in names and axes: a function from one to the other, with an inverse.

    A rule is (left, right) or (left, right, pattern). A side is a path, or a list of them. In paths ``{name}`` captures
    characters within a component, and ``*`` and ``**`` as in ``rename``; they are matched against whole rendered paths
    of the tree that is given. Without a pattern tensors stay as they are, and the names of a list are tied: one leaf
    under all of them, of which one is enough on the way back.

    A pattern is in the notation of einops and einx: axes, products ``(a b)``, commas between the tensors of a list,
    sums ``(a + b)`` for concatenation, ``1``. Summands pair with tensors in the order written; equal names are equal
    sizes. What paths of one side capture and the other's do not is an axis there, with a leaf for each index. Sizes
    follow from shapes, or are given.

    The rule ``("**", "**")`` is for the rest: what no other rule takes keeps its name.

    Every rule takes each element to one place, so that ``inverse`` gives back what was there, bit for bit, ties
    included. A rule that matches nothing is skipped. A tree of one level becomes one whose keys are whole names; others
    become nested dicts, whose keys are the components, as texts.

    Args:
        rules: The rules.
        sizes: The sizes of axes.
        ignore: Globs of paths, on either side, that are left out.
        strict: Whether a leaf that no rule takes is an error. If not, it is left out.

    Raises:
        TypeError: If a rule, a size or a glob is none of these.
        ValueError: If a pattern is none, or its sides do not have the same axes.

    Example:
        >>> import statetree as st, torch
        >>> fused = st.Conversion(
        ...     [(["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m")],
        ...     sizes={"q": 2, "d": 2},
        ... )
        >>> state = {"0.q": torch.ones(8, 3), "0.k": torch.zeros(4, 3), "0.v": torch.zeros(4, 3)}
        >>> fused(state)["0.qkv"].shape
        torch.Size([16, 3])
        >>> bool(st.similarity(fused.inverse(fused(state)), state))
        True
    """

    def __init__(
        self,
        rules: Sequence[tuple[Any, ...]],
        *,
        sizes: Mapping[str, int] | None = None,
        ignore: Sequence[str] = (),
        strict: bool = True,
    ) -> None:
        self._rules = list(map(_rule, _listed("rules", rules)))
        try:
            self._sizes = dict(sizes or {})
        except unsignalled(TypeError, ValueError):
            raise TypeError(f"Conversion: sizes cannot be {sizes!r}: expected a mapping.") from None
        self._ignore = (ignore,) if isinstance(ignore, str) else tuple(_listed("ignore", ignore))
        for name, size in self._sizes.items():
            if type(size) is not int or size < 0:
                raise TypeError(f"Conversion: the size of {name} must be a whole number, got {size!r}.")
        if not all(isinstance(glob, str) for glob in self._ignore):
            raise TypeError(f"Conversion: ignore must be globs of paths, got {ignore!r}.")
        self._strict = strict

    @property
    def inverse(self) -> Conversion:
        """The conversion the other way round."""
        made = Conversion([], sizes=self._sizes, ignore=self._ignore, strict=self._strict)
        made._rules = [rule.inverse for rule in self._rules]
        return made

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self._sizes.items())
        lines = [*map(str, self._rules), sizes and f"sizes: {sizes}", *(f"ignored: {glob}" for glob in self._ignore)]
        return "\n".join(filter(None, lines))

    def __repr__(self) -> str:
        return f"Conversion({len(self._rules)} rules)"

    @quietly
    def __call__(self, tree: Any) -> Any:
        """Return a tree in the other form.

        Nothing communicates, and nothing is read: stored tensors become stored tensors, and of these only what is
        needed is read when they are. Classes, ``requires_grad`` and attributes of tensors are kept.

        Args:
            tree: Any tree.

        Returns:
            A fresh tree.

        Aliasing:
            Leaves whose elements stay as they are are the tree's own, and others are views where a view will do. What
            is made of several plain tensors is mostly a copy, in which what is written to these later is not seen. What
            is made of distributed ones is always made of views, so that moving it may be prepared.

        Raises:
            TreeMismatch: If a leaf is taken by no rule or by two, something is missing, sizes do not fit, tied names
                hold different values, or two leaves would get one name. It names all places.
            UnsupportedLeaf: If a pattern is for a leaf that is no strided tensor.
        """
        leaves, spec = flatten_for("Conversion", tree)
        plans = self._planned(leaves, spec)
        made = LeafMaker(leaves, spec).make(plans)
        builder = TreeBuilder("Conversion", spec, made)
        is_flat = len(spec.nodes) == 1
        texts = spec.rendered_paths()
        for ref, plan in enumerate(plans):
            for name in plan.names:
                keys = [name] if is_flat else name.split(".")
                builder.put(ref, [(key, -1) for key in keys], name, texts[plan.sources[0]])
        return builder.tree()

    def explain(self, tree: Any) -> str:
        """Return, line by line, where each leaf of the result would come from, with shapes."""
        leaves, spec = flatten_for("Conversion", tree)
        texts = spec.rendered_paths()
        lines = []
        for plan in self._planned(leaves, spec):
            parts = ", ".join(f"{texts[index]} {_shape(leaves[index])}" for index in plan.sources)
            shape = _shape(leaves[plan.sources[0]]) if plan.shape is None else plan.shape
            pattern = f"\n  {plan.rule.pattern}" if plan.rule.pattern else ""
            lines.append(f"{', '.join(plan.names)} {shape} <- {parts}{pattern}")
        return "\n".join(lines)

    def _planned(self, leaves: Sequence[Any], spec: TreeSpec) -> list[LeafPlan]:
        """Return how the leaves of the result are made, in the order of the leaves that they come from."""
        wrong: list[Difference] = []
        texts = spec.rendered_paths()
        plans = []
        maker = LeafMaker(leaves, spec)
        for instance in self._instances(texts, wrong):
            plans += self._leaf_plans(instance, maker, wrong)
        if plans and not spec.nodes:
            msg = "Conversion: a single leaf has no path to convert: expected a container. Put the leaf into a dict."
            raise TreeMismatch(msg)
        taken: dict[str, str] = {}
        for plan in plans:
            for name in plan.names:
                origin = texts[plan.sources[0]]
                other = taken.setdefault(name, origin)
                if other is not origin:
                    wrong.append(Difference(_path(name), "origin", f"{other} and {origin}", "one leaf"))
                if (back := self._way_back(name)) != (plan.rule, plan.place):
                    wrong.append(Difference(_path(name), "way back", back[0], f"the rule {plan.rule} alone"))
        if wrong:
            raise TreeMismatch.between("Conversion", wrong, _REMEDY)
        return sorted(plans, key=lambda plan: min(plan.sources))

    def _way_back(self, name: str) -> tuple[Any, Any]:
        """Return the rule that takes a name of the result on the way back, and which leaf it is then."""
        if self.ignores(name):
            return "none: it is ignored", None
        hits = self._hits(name, back=True)
        if len(hits) != 1:
            return " and ".join(str(self._rules[number]) for number, _ in hits) or "none", None
        number, (place, _, match) = hits[0]
        rule = self._rules[number]
        return rule, (place, {name: match[name] for name in rule.shared})

    def ignores(self, path: str) -> bool:
        """Whether a path is left out."""
        return any(compiled_glob(glob).fullmatch(path) for glob in self._ignore)

    def _hits(self, name: str, *, back: bool = False) -> list[tuple[int, Hit]]:
        """Return the rules that take a name, and which leaf it is for each. The one for the rest comes after others."""
        hits = [(number, hit) for number, rule in enumerate(self._rules) for hit in rule.matches(name, back=back)]
        return [found for found in hits if not self._rules[found[0]].is_rest] or hits

    def _instances(self, texts: Sequence[str], wrong: list[Difference]) -> list[_Instance]:
        """Return the leaves that each rule takes together, and add what no rule takes, or two do, to ``wrong``."""
        found: dict[tuple[int, tuple[str | None, ...]], _Instance] = {}
        for index, text in enumerate(texts):
            if self.ignores(text):
                continue
            hits = self._hits(text)
            if not hits and self._strict:
                wrong.append(Difference(_path(text), "rules", "none", "one that takes it"))
            if len(hits) > 1:
                got = " and ".join(str(self._rules[number]) for number, _ in hits)
                wrong.append(Difference(_path(text), "rules", got, "one that takes it"))
            if len(hits) != 1:
                continue
            number, (place, which, match) = hits[0]
            rule = self._rules[number]
            captures = {name: match[name] for name in rule.shared}
            instance = found.setdefault((number, (*captures.values(),)), _Instance(rule, captures, {}))
            other = instance.leaves.setdefault(place, {}).setdefault(which, index)
            if other != index:
                wrong.append(Difference(_path(text), "paths", "two that read alike", "one"))
        return list(found.values())

    def _leaf_plans(self, instance: _Instance, maker: LeafMaker, wrong: list[Difference]) -> list[LeafPlan]:
        rule, captures, present = instance
        places, counts = rule.places(list(present), self._sizes)
        before = len(wrong)
        for place in places:
            if place not in present:
                name = rule.source[place[0]].name(0, captures, place[1])
                wrong.append(Difference(_path(name), "missing", "absent", f"a leaf, as {rule} takes others"))
        for place in present.keys() - set(places) if len(wrong) == before else ():
            name = rule.source[place[0]].name(0, captures, place[1])
            wrong.append(Difference(_path(name), "size", f"index {max(place[1])}", f"at most {counts}"))
        if len(wrong) > before:
            return []
        firsts = {place: present[place][min(present[place])] for place in places}
        twins = {place: [present[place][which] for which in sorted(present[place])[1:]] for place in places}
        for place, others in twins.items():
            wrong += maker.tie_differences(firsts[place], others)
        shapes = []
        for number, slot in enumerate(rule.source):
            first, *rest = [firsts[place] for place in places if place[0] == number]
            shapes.append(maker.shape(first) if slot.dims is not None else ())
            wrong += [
                Difference(maker.path(leaf), "shape", maker.shape(leaf), f"{shapes[-1]}, as {maker.path(first)} has")
                for leaf in rest
                if maker.shape(leaf) != shapes[-1]
            ]
        targets, odd = rule.targets(shapes, {**self._sizes, **counts})
        wrong += [Difference(maker.path(firsts[places[0]]), "sizes", text, f"sizes that fit {rule}") for text in odd]
        plans = []
        for target in targets:
            number, index = target.place
            slot = rule.target[number]
            names = [slot.name(which, captures, index) for which in range(len(slot.names))]
            blocks = [(firsts[place], block) for place, block in target.blocks]
            tied = {firsts[place]: twins[place] for place, _ in target.blocks if twins[place]}
            shape = target.shape if rule.pattern is not None else None
            plans.append(LeafPlan(rule, (target.place, captures), names, shape, blocks, tied))
            wrong += maker.kind_differences(plans[-1])
        return plans


def _path(name: str) -> Path:
    return Path((name,)) if name else Path()


def _listed(argument: str, given: Any) -> list[Any]:
    check_iterable("Conversion", argument, given)
    return list(given)


def _rule(given: Any) -> Rule:
    parts = list(given) if isinstance(given, (tuple, list)) else []
    sides = [
        [side] if isinstance(side, str) else list(side) for side in parts[:2] if isinstance(side, (str, list, tuple))
    ]
    is_named = len(sides) == 2 and all(side and all(isinstance(name, str) for name in side) for side in sides)
    if not is_named or len(parts) > 3 or not all(isinstance(part, (str, type(None))) for part in parts[2:]):
        raise TypeError(
            "Conversion: a rule is not valid: expected (left, right) or (left, right, pattern), paths or lists of "
            f"paths and a text, got {reprlib.repr(given)}."
        )
    return Rule(sides[0], sides[1], parts[2] if len(parts) == 3 else None)


def _shape(leaf: Any) -> Any:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else type(leaf).__qualname__
