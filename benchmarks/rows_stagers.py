"""Staging again, beside the stagers of others."""

from __future__ import annotations

import statetree as st
from benchmarks.checks import is_copy_of
from benchmarks.measure import Contender, floor, ours, peer
from benchmarks.peers import BlockingAsyncStager, foreach_clone, torch_checkpointing_stager
from benchmarks.rows import Row
from benchmarks.states import State, few_large, many_small, training_state


def again(state: State) -> list[Contender]:
    """Stage a state that was staged before. ``BlockingAsyncStager`` keeps its memory only with an accelerator."""
    copied = is_copy_of(state)
    stager, blocking, checkpointing = st.Stager(), BlockingAsyncStager(), torch_checkpointing_stager()
    sources = state.tensors
    contenders = [
        ours(lambda: stager.stage(state.tree), copied),
        peer("BlockingAsyncStager", lambda: blocking.stage(state.tree), copied),
    ]
    if checkpointing is not None:
        contenders.append(peer("torch_checkpointing", lambda: checkpointing.stage(state.tree), copied))
    return [*contenders, floor("_foreach_clone", lambda: foreach_clone(sources), is_copy_of(State("", sources)))]


ROWS = tuple(Row("stagers", "stage again", state, again) for state in (many_small, few_large, training_state))
