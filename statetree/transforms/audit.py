"""``audit``: which replicas of a state are not the same, at which paths and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statetree.chunks.ranks import ranks_named
from statetree.declare import collective
from statetree.errors import shown
from statetree.exchange.digesting import Copy, differing_copies
from statetree.exchange.driver import exchange
from statetree.exchange.manifest import Manifest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from statetree.exchange.group import Timeout


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``: true if all replicas are the same.

    Attributes:
        differences: For each chunk whose replicas differ its ``path``, its ``box`` in the global shape (``None`` for a
            leaf that is not distributed), and ``ranks``: those that hold the same, most first.
        count: How many leaves have replicas that differ (``differences`` tells of the first thousand).
    """

    differences: tuple[Copy, ...]
    count: int

    def __bool__(self) -> bool:
        return self.count == 0

    def __str__(self) -> str:
        if not self.count:
            return "all replicas are the same"
        lines = [
            f"{found.path or '<root>'}{_place(found)}: {' against '.join(map(ranks_named, found.ranks))}"
            for found in self.differences
        ]
        return f"replicas differ in {self.count:,} {'leaf' if self.count == 1 else 'leaves'}:\n  {shown(lines)}"

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold something else than most holders do, or than the first ones of as many."""
        return sorted({rank for found in self.differences for others in found.ranks[1:] for rank in others})


def _place(found: Copy) -> str:
    return "" if found.box is None else f" from {found.box.start} to {found.box.stop}"


@collective
def audit(tree: Any, *, group: ProcessGroup | None = None, timeout: Timeout = None) -> Audit:
    """Find replicas that are not the same: chunks that several ranks hold, and leaves that are not distributed.

    Every rank reads what it holds once, and the ranks compare digests of 64 bits, which miss a difference with a chance
    of 2⁻⁶⁴. It detects accidental differences, and is no defence against forgers.

    Args:
        tree: Any tree, of one structure on every rank. Leaves that are not distributed (the parameters of a model under
            DDP, plain values) are replicas on all ranks.
        group: The ranks to compare; by default all.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        An ``Audit``, the same on every rank: true or false, with the paths and ranks, and a report as its ``str``.

    Collective:
        Every rank of the group calls it.

    Raises:
        RankMismatch: If the ranks hold trees of different structures, dtypes, shapes or layouts, or one of them failed
            or did not answer in time.
        UnsupportedLeaf: If a leaf cannot be taken apart, or is ``Partial``.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> report = st.audit({"w": torch.ones(2)})
        >>> bool(report), str(report)
        (True, 'all replicas are the same')
    """
    with exchange("audit", group, timeout) as run:
        manifest = Manifest("audit", tree, run.group)
        found, count = differing_copies(run, manifest)
        return Audit(tuple(found), count)
