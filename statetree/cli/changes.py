"""What ``convert`` does to a tree before it is written."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from statetree.errors import CheckpointError
from statetree.files.checkpoint import is_entry
from statetree.files.stored import StoredTensor
from statetree.files.untrusted import printable
from statetree.leaves.copying import castable
from statetree.tree.flatten import flatten_for
from statetree.tree.mapping import map_leaves, to_flat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_GONE: Final = object()


def select(tree: Any, where: Callable[[Any, Any], bool]) -> Any:
    """Return a tree of the leaves that a predicate takes; mappings become smaller, lists and tuples shorter."""
    leaves, spec = flatten_for("convert", tree, is_leaf=is_entry)
    if not spec.nodes:
        return tree
    taken = [leaf if where(path, leaf) else _GONE for path, leaf in zip(spec.paths(), leaves, strict=True)]
    if not any(leaf is _GONE for leaf in taken):
        return tree
    made: dict[int, Any] = {}  # the containers, under the references of their parents' links
    for index, (kind, steps, aux, *_) in enumerate(spec.nodes):
        refs = spec.links()[index]
        found = [
            (step, taken[ref] if ref >= 0 else made.get(ref, _GONE)) for step, ref in zip(steps, refs, strict=True)
        ]
        items = [(step, value) for step, value in found if value is not _GONE]
        if not items:
            continue
        if len(items) < len(refs) and not issubclass(kind.cls, (dict, list, tuple)):
            msg = f"convert: items of a {kind.cls.__name__} are left out: expected all or none. Choose another --match."
            raise CheckpointError(msg)
        keys = tuple(step for step, _ in items) if issubclass(kind.cls, dict) else tuple(range(len(items)))
        made[~index] = kind.unflatten(aux, keys, [value for _, value in items])
    if spec.root() not in made:
        raise CheckpointError("convert: nothing is left of the checkpoint: expected an entry or more. Check --match.")
    return made[spec.root()]


def rename(tree: Any, rules: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a flat tree under new keys: ``{name}`` stands for what is between dots, ``{name:**}`` for anything."""
    flat, _ = to_flat(tree)
    compiled = [
        (_pattern(old), re.sub(r"\{(\w+)(:\*\*)?\}", r"\\g<\1>", new.replace("\\", r"\\"))) for old, new in rules
    ]
    keys = []
    for key in flat:
        renamed = key
        for pattern, new in compiled:
            renamed = pattern.sub(new, renamed) if pattern.fullmatch(renamed) else renamed
        keys.append(renamed)
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        msg = f"convert: two entries would have the key {printable(twice[0])!r}: expected one each. Change --rename."
        raise CheckpointError(msg)
    return dict(zip(keys, flat.values(), strict=True))


def _pattern(old: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+(?::\*\*)?\})", old)
    names = [part[1:-1].partition(":") for part in parts[1::2]]
    made = [re.escape(part) for part in parts]
    made[1::2] = [f"(?P<{name}>{'.*' if kind else '[^.]*'})" for name, _, kind in names]
    return re.compile("".join(made), re.DOTALL)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree whose floating-point tensors are converted as they are read."""

    def convert(leaf: Any) -> Any:
        is_cast = isinstance(leaf, StoredTensor) and leaf.is_strided and castable(leaf.dtype, dtype)
        is_cast = is_cast and leaf.dtype.is_floating_point
        return leaf.to(dtype) if is_cast else leaf

    return map_leaves(convert, tree)
