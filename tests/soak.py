"""What thousands of stages leave behind: nothing. `make soak` runs all of it, and prints what it found.

python -m tests.soak [--stages 10000] [--turns 1000]
"""

import argparse
import ctypes
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

import statetree as st

WARM_UPS = 50
MAX_GROWTH_BYTES = 8 << 20
SNAPSHOTS = 12  # for eight threads that hold up to three each


class Holdings(NamedTuple):
    """What the process holds of the system (Linux only)."""

    resident_bytes: int
    descriptors: int
    threads: int
    shm_files: int

    @classmethod
    def now(cls):
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: what it keeps of what was freed is noise here
        if trim is not None:
            trim(0)
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        return cls(resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(files))

    def growth_since(self, earlier):
        return Holdings(*(now - then for now, then in zip(self, earlier, strict=True)))

    def assert_nothing(self):
        """Raise ``AssertionError`` if this growth is more than what allocators keep."""
        assert self.resident_bytes <= MAX_GROWTH_BYTES, self
        assert max(self[1:]) <= 0, self


class Model(torch.nn.Module):
    """Its state dict is made of fresh tensors every time."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(20))
        self.embedding = torch.nn.Embedding(600, 500)  # more than a megabyte
        self.register_state_dict_post_hook(clone_all)

    def mark(self, turn):
        """Give every parameter values that are those of this turn alone."""
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + turn % 1000 + number)


def clone_all(module, state_dict, prefix, metadata):
    for key, value in state_dict.items():
        state_dict[key] = value.clone()


def assert_is_of_turn(staged, turn):
    """Raise ``AssertionError`` unless a staged state dict is what ``Model.mark`` made."""
    for number, value in enumerate(staged["model"].values()):
        expected = torch.arange(value.numel()).view_as(value) + turn % 1000 + number
        assert torch.equal(value, expected.to(value.dtype)), (turn, number)
    assert staged["turn"] == turn


def stage_fresh_tensors(stager, stages, *, after_warm_up=lambda: None, after_each=lambda turn: None):
    """Stage fresh tensors again and again, in the foreground and in the background, the last tree being held."""
    model = Model()
    held = None
    for turn in range(stages):
        model.mark(turn)
        state = {"model": model.state_dict(), "turn": turn}
        if turn % 2:
            future = stager.stage_async(state)
            del state
            staged = future.result(60)
            del future
        else:
            staged = stager.stage(state)
        if turn % 100 < 3:
            assert_is_of_turn(staged, turn)
            if held is not None:
                assert_is_of_turn(held, turn - 1)
        held = staged
        if turn == WARM_UPS:
            after_warm_up()
        after_each(turn)


def thread_states(number, turn):
    """Return the state of one thread's turn. No other has an element of it."""
    start = (number * 1_000_000 + turn) * 1_000
    base = torch.arange(start, start + 40)
    return {
        "w": torch.arange(start, start + 300),
        "tied": [base[:20], base[10:]],
        "more": [torch.arange(start + 50, start + 60) for _ in range(number % 3)],
        "who": (number, turn),
    }


def eight_threads(stager, turns):
    """Stage from eight threads at a time. Returns how many stages were right, and how many were refused.

    Raises:
        AssertionError: If a staged tree is not what its thread passed, now or some turns later.
    """
    start = threading.Barrier(8)

    def work(number):
        right = busy = 0
        held = []
        start.wait(60)
        for turn in range(turns):
            state = thread_states(number, turn)
            try:
                staged = stager.stage_async(state).result(60) if (turn + number) % 2 else stager.stage(state)
            except st.StagerBusy:
                busy += 1
            else:
                right += 1
                held.append((staged, state))
            if turn % 3 == number % 3:  # in other turns the next stage comes while this one is held
                while held:
                    assert_same_numbers(*held.pop())
        return right, busy

    gc.collect()
    gc.freeze()  # a stager collects garbage before it says that it is busy: what was there before need not be looked at
    try:
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(work, range(8)))
    finally:
        gc.unfreeze()
    return tuple(map(sum, zip(*counts, strict=True)))


def assert_same_numbers(staged, state):
    """Raise ``AssertionError`` unless two states of ``thread_states`` are equal."""
    assert staged["who"] == state["who"], (staged["who"], state["who"])
    for key in ("w", "tied", "more"):
        left, right = ([tree[key]] if key == "w" else tree[key] for tree in (staged, state))
        assert len(left) == len(right)
        assert all(map(torch.equal, left, right)), (key, state["who"])


def _soak(kind, options, stages):
    begun = time.perf_counter()
    before = None

    def after_warm_up():
        nonlocal before
        before = Holdings.now(), stager.stats

    def after_each(turn):
        if turn % 100 == 0 or turn == stages - 1:
            seconds = time.perf_counter() - begun
            print(f"\r{kind}: {turn + 1:,} of {stages:,} stages, {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    with st.Stager(**options) as stager:
        stage_fresh_tensors(stager, stages, after_warm_up=after_warm_up, after_each=after_each)
        grown = Holdings.now().growth_since(before[0])
        allocations = stager.stats.allocations - before[1].allocations
    print(
        f"\r{kind}: {stages:,} stages of fresh tensors; after {WARM_UPS} of them: resident "
        f"{grown.resident_bytes / (1 << 20):+.1f} MiB, descriptors {grown.descriptors:+d}, threads {grown.threads:+d}, "
        f"/dev/shm {grown.shm_files:+d} files, allocations {allocations:+d}"
    )
    grown.assert_nothing()
    assert allocations == 0


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Stage for a long time, and look back.")
    parser.add_argument("--stages", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=1_000, help="of each of eight threads")
    arguments = parser.parse_args()
    for kind, options in (("plain memory", {}), ("shared memory", {"share_memory": True})):
        _soak(kind, options, arguments.stages)
        with st.Stager(max_snapshots=SNAPSHOTS, **options) as stager:
            right, busy = eight_threads(stager, arguments.turns)
        print(f"{kind}: 8 threads of {arguments.turns:,} stages: {right:,} right, {busy:,} refused as busy, 0 mixed")
        assert right + busy == 8 * arguments.turns
        assert right > 2 * arguments.turns


if __name__ == "__main__":
    main()
