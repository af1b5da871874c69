"""What changed, and what did not: ``delta``, ``apply_delta``, ``digest``, and what is staged or saved once."""

from __future__ import annotations

import shutil
import weakref
from itertools import count, cycle
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch

import statetree as st
from benchmarks.measure import Contender, floor, ours
from benchmarks.peers import foreach_copy_
from benchmarks.rows import Row, within
from benchmarks.states import State, few_large, zeros_like
from statetree.dcp import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable

#: One element in this many changes.
_EVERY = 50


def _states(state: State) -> tuple[Any, Any]:
    """Return a base of bfloat16, and what a step makes of it: 2 % of the elements change, anywhere."""
    base = {name: tensor.view(torch.uint8).view(torch.bfloat16) for name, tensor in zeros_like(state).tree.items()}
    new = st.offload(base)
    chance = torch.Generator().manual_seed(1)
    for tensor in new.values():
        flat = tensor.view(-1)
        flat[torch.randperm(flat.numel(), generator=chance)[: flat.numel() // _EVERY]] = 1.0
    return base, new


def _copied(state: State) -> Contender:
    source, target = state.tensors, zeros_like(state).tensors

    def on_one_thread() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        foreach_copy_(target, source)
        torch.set_num_threads(threads)

    return floor("copy_", on_one_thread, _is_anything)


def _is_anything(_: Any) -> bool:
    return True


def delta(state: State) -> list[Contender]:
    """Compare two states, 2 % of whose elements differ."""
    base, new = _states(state)
    expected = sum(int(tensor.ne(0).sum()) for tensor in new.values())
    return [
        ours(lambda: st.delta(new, base), lambda found: sum(found.changed.values()) == expected),
        _copied(state),
    ]


def apply_delta(state: State) -> list[Contender]:
    """Write such a delta into the base, and its inverse in turns, so that there is always something to write."""
    base, new = _states(state)
    change = st.delta(new, base)
    turns = cycle([change, change.inverse(base)])
    return [ours(lambda: st.apply_delta(next(turns), base), _is_anything), _copied(state)]


def digest(state: State) -> list[Contender]:
    """Compute the digest of a state."""
    return [ours(lambda: st.digest(state.tree), _tells_bits_apart(state)), _copied(state)]


def _tells_bits_apart(state: State) -> Callable[[Any], bool]:
    def check(result: Any) -> bool:
        last = state.tensors[-1].view(-1).view(torch.int32)
        last[-1] ^= 1
        other = st.digest(state.tree)
        last[-1] ^= 1
        return bool(result == st.digest(state.tree) != other)

    return check


def frozen(state: State) -> list[Contender]:
    """Stage a state of which 99 % is frozen."""
    base = {"base": zeros_like(state).tree, "trained": [torch.zeros(max(state.nbytes // 396, 1))]}
    alone = {"trained": base["trained"]}
    ours_, theirs = st.Stager(frozen="base.**"), st.Stager()
    return [
        ours(lambda: ours_.stage(base), lambda staged: bool(st.similarity(staged, base, values=True))),
        floor("stage of the 1 % alone", lambda: theirs.stage(alone), _is_anything),
    ]


def incremental(state: State) -> list[Contender]:
    """Save a state of which 99 % did not change since the last save, and save it whole."""
    trained = torch.zeros(max(state.nbytes // 396, 1))
    tree = {"base": zeros_like(state).tree, "trained": trained}
    here = mkdtemp()
    weakref.finalize(state, shutil.rmtree, here, ignore_errors=True)
    step = count()

    def contender(*, links: bool) -> tuple[Callable[[], Checkpointer], Callable[[Checkpointer], bool]]:
        checkpointer = Checkpointer(f"{here}/{links}", keep=1, incremental=links)

        def run() -> Checkpointer:
            trained.add_(1)
            checkpointer.save(next(step), tree)
            return checkpointer

        return run, lambda saved: bool(st.similarity(saved.restore(), tree, values=True))

    return [ours(*contender(links=True)), floor("a whole save", *contender(links=False))]


ROWS = (
    Row("delta", "delta, 2 % changed", few_large, delta, (within(10, "copy_"),)),
    Row("delta", "apply_delta, 2 % changed", few_large, apply_delta, (within(3, "copy_"),)),
    Row("digest", "digest", few_large, digest, (within(3, "copy_"),)),
    Row("frozen", "stage, 99 % frozen", few_large, frozen, (within(1.5, "stage of the 1 % alone"),)),
    Row(
        "frozen", "incremental save, 99 % unchanged", few_large, incremental, (within(0.15, "a whole save"),), rounds=3
    ),
)
