"""Pruning: the structure of a tree without some of its leaves, and without the containers that they leave empty."""

from __future__ import annotations

from itertools import compress
from operator import or_
from typing import TYPE_CHECKING, Any

from statetree.errors import TreeMismatch
from statetree.key_paths import Attr, Path
from statetree.tree.atoms import HOLE
from statetree.tree.renaming import located

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.spec import TreeSpec

_GONE = object()


def pruned(verb: str, spec: TreeSpec, leaves: Sequence[Any], kept: Sequence[bool]) -> Any:
    """Return a tree of some of the leaves. The root stays, if it is a container; a leaf that goes becomes ``HOLE``.

    Mappings lose keys, lists, tuples and deques become shorter; containers that lose all their leaves go, and
    empty ones stay only where everything beside them does.

    Raises:
        TreeMismatch: If some children of a container go that it cannot lack.
    """
    if not spec.nodes:
        return leaves[0] if kept[0] else HOLE
    made: list[Any] = []
    empty: list[bool] = []  # for each container, whether there never was a leaf in it
    last = len(spec.nodes) - 1
    for node, ((kind, keys, aux, *_), refs) in enumerate(zip(spec.nodes, spec.links(), strict=True)):
        children = [(leaves[ref] if kept[ref] else _GONE) if ref >= 0 else made[~ref] for ref in refs]
        hollow = [ref < 0 and empty[~ref] for ref in refs]
        empty.append(all(hollow))
        lost = [child is _GONE for child in children]
        if any(lost):
            if all(map(or_, lost, hollow)) and node < last:
                made.append(_GONE)
                continue
            if not kind.can_lack():
                _refuse(verb, spec, node, keys[lost.index(True)])
            stays = [not gone for gone in map(or_, lost, hollow)]
            gone = {str(key) for key, stay in zip(keys, stays, strict=True) if type(key) is Attr and not stay}
            aux = kind.without_attributes(aux, gone)
            keys = (*compress(keys, stays),)
            if not kind.keyed:  # items of sequences are numbered anew
                count = kind.num_items(keys)
                keys = (*range(count), *keys[count:])
            children = list(compress(children, stays))
        made.append(kind.unflatten(aux, keys, children))
    return made[-1]


def _refuse(verb: str, spec: TreeSpec, node: int, key: Any) -> None:
    cls = spec.nodes[node][0].cls.__qualname__
    item = next(item for item in located(spec) if node in item.nodes)
    path = Path(item.keys[: item.nodes.index(node)])
    raise TreeMismatch(
        f"{verb}: a {cls} cannot lack a child at {path.child(key)}: expected all or none of the leaves in "
        f"{str(path) or '<root>'}. Select all of them, or use partition, which keeps the structure."
    )
