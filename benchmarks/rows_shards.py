"""What each rank does with its own shards, without the others: ``stage`` and ``copy_into`` of DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import statetree as st
from benchmarks.measure import Contender, floor, ours, peer
from benchmarks.peers import StateDictStager, copy_state_dict, foreach_clone, foreach_copy_
from benchmarks.ranks import RankRow
from benchmarks.rows import faster
from benchmarks.rows_exchange import holds_parts, small, zeros_like

if TYPE_CHECKING:
    from typing import Any

    from benchmarks.rows_exchange import Sharded


def stage(state: Sharded) -> list[Contender]:
    """Stage shards again, when both stagers have their memory."""
    stager, their_stager = st.Stager(), StateDictStager()
    parts, locals_ = holds_parts(state), [leaf.to_local() for leaf in state.tree.values()]
    return [
        ours(lambda: stager.stage(state.tree), parts),
        peer("StateDictStager", lambda: their_stager.stage(state.tree), parts),
        floor("_foreach_clone", lambda: foreach_clone(locals_), lambda result: len(result) == len(locals_)),
    ]


def copy_into(state: Sharded) -> list[Contender]:
    """Copy shards into others."""
    target, their_target = zeros_like(state), zeros_like(state)
    parts = holds_parts(state)
    sources = [leaf.to_local() for leaf in state.tree.values()]
    targets = [leaf.to_local() for leaf in zeros_like(state).values()]

    def theirs() -> Any:
        copy_state_dict(state.tree, their_target)
        return their_target

    return [
        ours(lambda: st.copy_into(state.tree, target), parts),
        peer("_copy_state_dict", theirs, parts),
        floor("_foreach_copy_", lambda: foreach_copy_(targets, sources), lambda _: bool(targets[0].equal(sources[0]))),
    ]


ROWS = (
    RankRow("shards", "stage again", small, stage, (faster("StateDictStager", 8.5),)),
    RankRow("shards", "copy_into", small, copy_into),
)
