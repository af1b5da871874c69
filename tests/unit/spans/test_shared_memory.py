"""Staging into shared memory: few descriptors, the same memory elsewhere, and clear errors where there is no room."""

import errno
import gc
import os
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.spans import memory as buffers
from statetree.spans.memory import LARGE_BYTES, SLAB_BYTES, Memory
from tests.judge import assert_trees_equal
from tests.pace import units

resource = pytest.importorskip("resource")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc and /dev/shm")

MOST_BLOCKS = 100


def ramp(size, start=0):
    return torch.arange(start, start + size, dtype=torch.float32)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def files_of_this_process():
    """Return what torch left in /dev/shm for this process: others work beside it."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def run(code, *arguments, prefix=()):
    command = [*prefix, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=units(120), check=False, cwd=os.getcwd())


# Few descriptors


@given(
    sizes=hyp.lists(
        hyp.one_of(
            hyp.integers(0, 4096),
            hyp.integers(LARGE_BYTES - 9, LARGE_BYTES + 9),
            hyp.integers(SLAB_BYTES - 9, 40 * SLAB_BYTES),
        ),
        max_size=60,
    ),
    times=hyp.sampled_from([1, 7, 300]),
)
def test_however_many_buffers_and_however_large_they_lie_in_few_blocks(sizes, times):
    sizes = sizes * times
    blocks = list(Memory(share_memory=True).arrange(sizes))
    assert len(blocks) <= MOST_BLOCKS
    assert sorted(index for block in blocks for index, _ in block.offsets) == list(range(len(sizes)))
    for block in blocks:
        stops = [start + sizes[index] for index, start in block.offsets]
        assert all(stop <= start for stop, (_, start) in zip(stops, block.offsets[1:], strict=False))
        assert stops[-1] <= block.nbytes
        assert all(start % buffers.ALIGNMENT == 0 for _, start in block.offsets)
    assert sum(block.nbytes for block in blocks) <= sum(sizes) + buffers.ALIGNMENT * len(sizes)


LIMITED = """
import os, resource, sys, torch, statetree as st

limit, count, size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
state = {}
for number in range(count):
    state[number] = torch.zeros(size)  # of whose pages only those written are there
    state[number][0] = state[number][-1] = number
with st.Stager(share_memory=True, max_snapshots=3) as stager:
    held = [stager.stage(state), stager.stage_async(state).result(), stager.stage(state)]
    for staged in held:
        assert all(tensor[0] == tensor[-1] == number for number, tensor in staged.items())
        assert all(tensor.is_shared() for tensor in staged.values())
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "count", "size"),
    [
        pytest.param(1024, 5000, 10, marks=pytest.mark.slow),
        pytest.param(256, 5000, 10, marks=pytest.mark.slow),
        (128, 150, 290_000),
        pytest.param(256, 40, 1_000_000, marks=pytest.mark.slow),
    ],
    ids=["5,000 small ones", "5,000 small ones and few descriptors", "150 of 1.1 MiB", "40 of 4 MB"],
)
def test_three_snapshots_alive_under_a_limit_of_descriptors(limit, count, size):
    done = run(LIMITED, str(limit), str(count), str(size))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 * MOST_BLOCKS


def test_descriptors_are_given_back():
    before = descriptors()
    stager = st.Stager(share_memory=True, max_snapshots=3)
    for turn in range(5):
        staged = stager.stage({f"w{i}": ramp(100 << (i % 14), turn) for i in range(50)})
    assert before < descriptors() < before + 3 * MOST_BLOCKS
    stager.close()
    del staged
    assert descriptors() == before


# The same memory


def answer(staged, orders, answers):
    """Do as one is told, with a tree that was sent here. What arrives late is not looked at again."""
    while True:
        order = orders.get(timeout=units(60))
        if order == "sums":
            answers.put({key: float(tensor.double().sum()) for key, tensor in staged.items()})
        elif order == "add":
            for tensor in staged.values():
                tensor.add_(1)
            answers.put("added")
        else:
            return


class Elsewhere:
    """A process of its own that holds a tree."""

    def __init__(self, staged):
        context = torch.multiprocessing.get_context("spawn")
        self.orders, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=answer, args=(staged, self.orders, self.answers), daemon=True)
        self.process.start()

    def ask(self, order):
        self.orders.put(order)
        return self.answers.get(timeout=units(60))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.orders.put("end")
        self.process.join(units(15))
        self.process.kill()


def sums(tree):
    return {key: float(tensor.double().sum()) for key, tensor in tree.items()}


def make_state(start=0):
    return {
        "small": ramp(50, start),
        "steps": ramp(90, start)[::3],
        "large": ramp(300_000, start),
        **{f"w{i}": ramp(5, start + i) for i in range(500)},
    }


@pytest.mark.slow
def test_a_staged_tree_is_the_same_memory_in_another_process():
    with st.Stager(share_memory=True, max_snapshots=1) as stager:
        state = make_state()
        staged = stager.stage(state)
        with Elsewhere(staged) as elsewhere:
            assert elsewhere.ask("sums") == sums(state)
            for tensor in staged.values():  # written here, seen there
                tensor.mul_(2)
            assert elsewhere.ask("sums") == sums({key: 2 * tensor for key, tensor in state.items()})
            assert elsewhere.ask("add") == "added"  # written there, seen here
            assert all(torch.equal(staged[key], 2 * tensor + 1) for key, tensor in state.items())


@pytest.mark.slow
def test_what_was_sent_is_never_written_again():
    with st.Stager(share_memory=True, max_snapshots=1) as stager:
        state = make_state()
        expected = sums(state)
        with Elsewhere(stager.stage(state)) as elsewhere:
            assert elsewhere.ask("sums") == expected
            for turn in range(1, 4):
                other = make_state(turn)
                assert_trees_equal(stager.stage(other), other, storages=False)
                assert elsewhere.ask("sums") == expected


# No room

REFUSED = r"share_memory: cannot take a block of shared memory: expected 4194304 bytes on a file descriptor, got: "


@contextmanager
def failing(owner, name, error):
    def fail(*_):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def no_descriptors_left():
    """Return a context in which this process may open no more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))

    @contextmanager
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        taken = []
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(1))
            os.close(taken.pop())  # enough for one, but torch takes two
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in taken:
                os.close(descriptor)

    return limited()


@contextmanager
def files_limited():
    """No file may grow over a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def os_error(code):
    return OSError(code, os.strerror(code))


OBSTACLES = {
    "no space": (
        lambda: failing(os, "posix_fallocate", os_error(errno.ENOSPC)),
        r"No space left on device\. Make room .*--shm-size.*, stage less, or lower max_snapshots\.",
    ),
    "no memory": (
        lambda: failing(os, "memfd_create", os_error(errno.ENOMEM)),
        r"Cannot allocate memory\. Make room",
    ),
    "files limited": (files_limited, r"File too large\. Make room"),
    "no descriptor": (
        no_descriptors_left,
        r"Too many open files\. Make room .* raise the limit of open files",
    ),
    "no mapping": (
        lambda: failing(buffers, "shared_storage", RuntimeError("unable to mmap")),
        r"unable to mmap\. Make room",
    ),
}


@pytest.mark.parametrize(("obstacle", "message"), OBSTACLES.values(), ids=OBSTACLES)
def test_no_room_is_a_clear_error_and_leaves_nothing_behind(obstacle, message):
    state, large = {"w": ramp(50), "v": ramp(60)[::2]}, {"w": ramp(1 << 20)}
    with st.Stager(share_memory=True) as stager:
        staged = stager.stage_async(state).result(units(30))
        before = descriptors(), stager.nbytes, files_of_this_process()
        for verb in (stager.stage, stager.prewarm, lambda tree: stager.stage_async(tree).result(units(30))):
            with obstacle(), pytest.raises(OSError, match=REFUSED + message):
                verb(large)
            assert (descriptors(), stager.nbytes, files_of_this_process()) == before
            assert_trees_equal(staged, state, storages=False)
        assert_trees_equal(stager.stage(large), large)
        assert_trees_equal(staged, state, storages=False)


def test_what_lies_idle_makes_room(monkeypatch):
    """What an idle snapshot of another geometry held is freed before a stage fails."""
    room = 6 << 20
    allocate = Memory.block

    def limited(self, size):
        held = sum(snapshot.nbytes for snapshot in stager._snapshots) + stager._pool.nbytes
        if held + size > room:
            raise os_error(errno.ENOSPC)
        return allocate(self, size)

    monkeypatch.setattr(Memory, "block", limited)
    with st.Stager(share_memory=True) as stager:
        for size in (1_000_000, 1_100_000, 900_000):
            assert_trees_equal(stager.stage({"w": ramp(size)}), {"w": ramp(size)})


TINY = """
import os, sys, torch, statetree as st
torch.multiprocessing.set_sharing_strategy(sys.argv[1])
with st.Stager(share_memory=True) as stager:
    try:
        staged = stager.stage({"w": torch.arange(4e6)})
        assert torch.equal(staged["w"], torch.arange(4e6))
        print("staged", staged["w"].is_shared())
    except OSError as error:
        print(error)
        print(os.listdir("/dev/shm"))
    assert torch.equal(stager.stage({"w": torch.arange(9.0)})["w"], torch.arange(9.0))
"""


@pytest.fixture
def tiny_dev_shm():
    """What to put before a command so that it sees 8 MiB of /dev/shm."""
    prefix = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, timeout=units(30), check=False).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("mounting takes root")
    return prefix


@pytest.mark.slow
def test_a_small_dev_shm_is_no_limit(tiny_dev_shm):
    done = run(TINY, "file_descriptor", prefix=tiny_dev_shm)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "staged True\n"


@pytest.mark.slow
def test_a_small_dev_shm_is_a_clear_error_where_memory_is_shared_by_name(tiny_dev_shm):
    done = run(TINY, "file_system", prefix=tiny_dev_shm)
    assert done.returncode == 0, done.stderr
    message, left = done.stdout.splitlines()
    assert (
        "expected 16000000 bytes on a file descriptor, got: No space left on device in /dev/shm. Make room" in message
    )
    assert left == "[]"


def test_without_anonymous_files_memory_is_shared_all_the_same(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(os_error(errno.ENOSYS)))
    files = files_of_this_process()
    with st.Stager(share_memory=True) as stager:
        staged = stager.stage(make_state())
        assert_trees_equal(staged, make_state(), storages=False)
        assert all(tensor.is_shared() for tensor in staged.values())
        assert files_of_this_process() == files
