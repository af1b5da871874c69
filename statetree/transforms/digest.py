"""``digest``: one number for a state, and one for each of its leaves, whatever their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statetree.chunks.ranks import own_ranks
from statetree.declare import collective, phase
from statetree.exchange.digesting import global_numbers, own_numbers
from statetree.exchange.driver import exchange
from statetree.exchange.manifest import Manifest
from statetree.leaves.leaf_numbers import text_number
from statetree.leaves.lowering import lie_on_ranks
from statetree.leaves.types.converted import joined
from statetree.tree.flatten import flatten_for, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from statetree.exchange.group import Timeout


@dataclass(frozen=True)
class Digest:
    """Numbers of 64 bits that stand for a tree and its leaves. Two are equal if those of the trees are.

    Attributes:
        tree: The number of the tree.
        leaves: The number of each leaf, by its name in ``to_flat``.
    """

    tree: int
    leaves: Mapping[str, int]

    def __hash__(self) -> int:
        return hash(self.tree)

    def __int__(self) -> int:
        return self.tree

    def __str__(self) -> str:
        return f"{self.tree:016x}"

    def differing(self, other: Digest) -> list[str]:
        """Return the names of the leaves that differ, or that only one of the trees has."""
        names = dict.fromkeys((*self.leaves, *other.leaves))
        return [name for name in names if self.leaves.get(name) != other.leaves.get(name)]


@collective
def digest(tree: Any, *, group: ProcessGroup | None = None, timeout: Timeout = None) -> Digest:
    """Compute a number for a tree, and one for each leaf, from types, dtypes, global shapes and bits.

    Two trees have the same number exactly if they are the same in these (but for a chance of 2⁻⁶⁴): ``0.0`` and
    ``-0.0`` differ, and so do ``1`` and ``1.0``. It does not depend on how tensors are laid out over ranks, on meshes,
    strides, devices or processes: ``digest(gather(tree))`` is ``digest(tree)``. Types and order of mappings, attributes
    of tensors and ``requires_grad`` do not matter, nor whether a tensor is a parameter. Nor do lists of whole numbers,
    one for each dim, among the metadata of wrapper subclasses: they may be sizes, of which each rank has its own.

    It detects accidental differences, and is no defence against forgers, who can make another tree with the same
    number.

    Args:
        tree: Any tree. Each tensor is read once, in blocks, on its own device. Of replicas only one is read; ``audit``
            compares them.
        group: The ranks that together hold the distributed tensors of the tree; by default all.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A ``Digest``. Leaves that are not distributed count as this rank has them.

    Collective:
        If the tree holds distributed tensors, every rank of the group calls it. Otherwise there is no communication.

    Raises:
        RankMismatch: If the ranks hold different trees, or one of them failed or did not answer in time.
        UnsupportedLeaf: If a leaf cannot be taken apart, is ``Partial``, or the ranks hold only parts of it.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> w = torch.arange(6.0).view(2, 3)
        >>> st.digest({"w": w}) == st.digest({"w": w.T.contiguous().T})
        True
        >>> st.digest({"w": w, "b": 1}).differing(st.digest({"w": -w, "b": 1}))
        ['w']
    """
    leaves, spec = flatten_for("digest", tree)
    if not lie_on_ranks("digest", leaves, spec):
        manifest = Manifest("digest", tree, own_ranks(), every=True)
        with phase("digest.sum"):
            return _digest(manifest, own_numbers(manifest))
    with exchange("digest", group, timeout) as run:
        manifest = run.manifest(unflatten(spec, list(map(joined, leaves))), complete=True, every=True)
        with phase("digest.sum"):
            return _digest(manifest, global_numbers(run, manifest))


def _digest(manifest: Manifest, numbers: Mapping[int, int]) -> Digest:
    found = {name: number % (1 << 64) for name, number in manifest.leaf_numbers(numbers).items()}
    texts = [text for name, number in found.items() for text in (name, str(number))]
    texts += [text for entry in manifest.structure for text in entry]
    return Digest(text_number("tree", *texts) % (1 << 64), found)
