"""What ``convert`` does to a tree before it is written."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import CheckpointError
from statetree.files.stored import StoredTensor, whole_tensors
from statetree.files.untrusted import printable
from statetree.leaves.casting import castable
from statetree.transforms.cast import cast
from statetree.tree.mapping import map_leaves, to_flat

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def converted(tree: Any, dtype: torch.dtype, *, keeps_ties: bool) -> Any:
    """Return a tree whose floating-point tensors have another dtype.

    Args:
        tree: Any tree of stored tensors.
        dtype: What they become.
        keeps_ties: Whether tensors that share bytes go on doing so. All are read for that; otherwise each is converted
            as it is written.
    """
    if keeps_ties:  # negative bits are no property of every dtype
        tree = map_leaves(lambda leaf: leaf.to(dtype) if _is_floating(leaf) and leaf.outline.is_neg() else leaf, tree)
        return cast(whole_tensors(tree, keeps_strides=True), dtype, where=lambda _, leaf: _is_floating(leaf))
    return map_leaves(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, tree)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, StoredTensor):
        return leaf.is_strided and castable(leaf.dtype, torch.float64) and leaf.dtype.is_floating_point
    is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_nested
    return is_plain and leaf.dtype.is_floating_point and castable(leaf.dtype, torch.float64)
