"""Copies in threads of our own: the same bytes, waited for whatever happens, and none of torch's threads."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from unittest import mock

import pytest
import torch

import statetree as st
from statetree.spans import threads
from statetree.spans.bits import same_bytes
from statetree.spans.threads import call_together, copy_together
from statetree.torch_internals import quietly

SERIAL = threads.SERIAL_ELEMENTS


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """As on a machine of four cores, where a kilobyte is worth a thread."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "_WORTH_BYTES", 1024)


def numbers(count, dtype):
    bits = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(9)
    bits = bits.to(torch.uint8)
    return bits.bitwise_and_(1).view(dtype) if dtype is torch.bool else bits.view(dtype)


def pairs():
    """Tensors to copy, and others of their shapes and strides."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.complex128, torch.float8_e4m3fn)
    sources = [numbers(2 * SERIAL + 3 * index, dtype) for index, dtype in enumerate(dtypes)]
    sources += [numbers(3 * SERIAL, torch.int16)[1:], numbers(3 * SERIAL, torch.float32)[::3], numbers(5, torch.int8)]
    sources += [numbers(SERIAL * 4, torch.float32).view(4, -1).T, numbers(0, torch.float32)]
    return [(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype), each) for each in sources]


def copied(targets, sources):
    quietly(copy_together)(targets, sources, [target.nbytes for target in targets])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_every_byte_is_copied():
    targets, sources = zip(*pairs(), strict=True)
    copied(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert bits(target).equal(bits(source))


def test_bits_are_resolved_and_elements_converted():
    number = torch.arange(2.0 * SERIAL).to(torch.complex64) * 1j
    into = [torch.empty(2 * SERIAL, dtype=torch.complex64), torch.empty(2 * SERIAL), torch.empty(2 * SERIAL)]
    copied(into, [number.conj(), number.conj().imag, torch.arange(2 * SERIAL)])
    assert into[0].equal(number.conj().resolve_conj())
    assert into[1].equal(-torch.arange(2.0 * SERIAL))
    assert into[2].equal(torch.arange(2.0 * SERIAL))
    zeros = torch._efficientzerotensor(2 * SERIAL)
    copied(into[1:2], [zeros])
    assert not into[1].any()


def test_torch_divides_none_of_it_and_keeps_its_setting():
    real, real_move, seen, moved = torch._foreach_copy_, threads.memmove, [], []

    def copy(targets, sources):
        seen.append((threading.get_ident(), max(target.numel() for target in targets)))
        real(targets, sources)

    def move(target, source, size):
        moved.append((threading.get_ident(), size))
        return real_move(target, source, size)

    lying_alike = [pair for pair in pairs() if pair[1].numel() and pair[1].stride() != (3,)]
    converted = [(torch.empty(3 * SERIAL), numbers(3 * SERIAL, torch.int16)) for _ in range(3)]
    with mock.patch.object(torch, "_foreach_copy_", copy), mock.patch.object(threads, "memmove", move):
        copied(*zip(*lying_alike, *converted, strict=True))
    assert len(seen) > 4
    assert len(moved) >= 7
    assert threading.get_ident() not in [thread for thread, _ in [*seen, *moved]]
    assert max(largest for _, largest in seen) <= SERIAL
    assert sum(size for _, size in moved) == sum(target.nbytes for target, _ in lying_alike if target.numel() > 5)


def test_autograd_sees_that_memory_was_written():
    weight = torch.ones(2 * SERIAL, requires_grad=True)
    result = (weight * weight).sum()
    copied([weight.detach()], [torch.zeros(2 * SERIAL)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("size", [10, 2 * SERIAL])
@pytest.mark.parametrize(
    "verb",
    [
        st.offload,
        st.digest,
        st.Stager().stage,
        lambda x: st.copy_into([torch.ones(x[0].shape)], x),
        lambda x: st.delta(x, x),
        lambda x: st.combine(torch.add, x, x),
        lambda x: st.save({"x": x[0]}, "never.safetensors"),
        lambda x: st.save({"x": x[0]}, "never.pt"),
        lambda x: st.save({"x": x[0]}, "never"),
        lambda x: st.reshard({"x": x[0]}, {"x": torch.ones(x[0].shape)}, in_place=True),
        lambda x: st.Conversion([("x", "y", "(a b) -> b a")], sizes={"a": 2})({"x": x[0]}),
    ],
    ids=[
        *("offload", "digest", "stage", "copy_into", "delta", "combine"),
        *("safetensors", "pt", "directory", "reshard", "conversion"),
    ],
)
@pytest.mark.parametrize(
    "inside",
    [torch.func.functionalize, torch.func.vmap, lambda call: torch.func.grad(lambda x: call(x).sum())],
    ids=["functionalize", "vmap", "grad"],
)
def test_tensors_without_memory_of_their_own_are_refused(size, verb, inside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(x):
        with pytest.raises(st.StateTreeError, match=r"torch\.func|expected freed|the leaf at|x:"):
            verb([x])
        return x

    inside(call)(torch.arange(float(size)) if inside is not torch.func.vmap else torch.ones(2, size))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_copies_end_while_the_interpreter_does():
    code = """
    import builtins, torch, statetree as st
    torch.set_num_threads(4)
    class Late:
        def __del__(self, offload=st.offload):
            print(*map(len, offload([self.weight])))
    builtins.late = late = Late()
    late.weight = torch.ones(4_000_000)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "4000000\n")


def test_threads_leave_no_entry_behind():
    def entries():
        return {each for each in threading.enumerate() if isinstance(each, threading._DummyThread)}

    gc.collect()
    gc.disable()  # what other tests left may ask for its thread where it is collected: in ours
    try:
        before = entries()  # of threads that other tests started
        for _ in range(3):
            copied(*zip(*pairs(), strict=True))
        assert entries() <= before
    finally:
        gc.enable()


def test_small_trees_start_no_thread(monkeypatch):
    monkeypatch.setattr(threads, "_WORTH_BYTES", 1 << 20)
    monkeypatch.setattr(threads._thread, "start_new_thread", None)
    target, source = torch.empty(2 * SERIAL), numbers(2 * SERIAL, torch.float32)
    copied([target], [source])
    assert bits(target).equal(bits(source))


@pytest.mark.parametrize("torch_has_one", [True, False])
def test_one_thread_is_enough_where_there_are_no_more(monkeypatch, torch_has_one):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._thread, "start_new_thread", refuse)
    if torch_has_one:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    targets, sources = zip(*pairs(), strict=True)
    copied(targets, sources)
    assert all(bits(target).equal(bits(source)) for target, source in zip(targets, sources, strict=True))


def test_fewer_threads_do_all_of_it(monkeypatch):
    real, started = threads._thread.start_new_thread, []

    def refuse(*args):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(args)
        return real(*args)

    monkeypatch.setattr(threads._thread, "start_new_thread", refuse)
    done = []
    call_together([lambda number=number: done.append(number) for number in range(9)], 4)
    assert sorted(done) == list(range(9))


def test_what_fails_is_raised_when_all_threads_are_over():
    over = []

    def slow():
        time.sleep(0.05)
        over.append(True)

    def fail():
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        call_together([slow, fail], 2)
    assert over == [True]


def test_a_signal_is_handled_when_all_threads_are_over():
    over = []

    def job():
        time.sleep(0.1)
        over.append(True)

    def interrupt(*_):
        raise KeyboardInterrupt(len(over))

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt, match="4"):
            call_together([job] * 4, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_thread_has_left_torch_when_the_call_is_over(monkeypatch):
    class Event:
        def __init__(self):
            self.inner, self.is_left = event(), False
            events.append(self)

        def wait(self):
            self.inner.wait()

        def set_result(self, result):
            self.inner.set_result(result)
            time.sleep(0.05)  # as long as another thread has the GIL
            self.is_left = True

    events, event = [], threads.uninterrupted_event
    monkeypatch.setattr(threads, "uninterrupted_event", Event)
    call_together([lambda: None, lambda: None], 2)
    assert [each.is_left for each in events] == [True]


def test_what_a_handler_raises_while_the_thread_leaves_is_raised(monkeypatch):
    class Event:
        def __init__(self):
            self.inner = event()
            self.wait = self.inner.wait

        def set_result(self, result):
            self.inner.set_result(result)
            time.sleep(0.05)  # until the main thread waits for this one
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)

    def handle(*_):
        raise RuntimeError("of the handler")

    event, done, before = threads.uninterrupted_event, [], signal.signal(signal.SIGUSR1, handle)
    monkeypatch.setattr(threads, "uninterrupted_event", Event)
    try:
        with pytest.raises(RuntimeError, match="of the handler"):
            call_together([lambda: done.append(1), lambda: done.append(2)], 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(done) == [1, 2]


def test_nothing_is_held_afterwards():
    target, source = torch.empty(2 * SERIAL), torch.zeros(2 * SERIAL)
    copied([target], [source])
    held = [weakref.ref(each) for each in (target, source)]

    def fail(*_):
        raise MemoryError("no more")

    with mock.patch.object(threads, "memmove", fail), pytest.raises(MemoryError, match="no more"):
        copied([target], [source])
    del target, source
    assert [each() for each in held] == [None, None]


def test_a_snapshot_is_idle_as_soon_as_its_tree_is_dropped():
    state = {"w": numbers(20 * SERIAL, torch.float32), "t": numbers(4 * SERIAL, torch.float32).view(2, -1).T}
    with st.Stager(max_snapshots=1) as stager, mock.patch.object(threads, "_TURNS", 9):
        for _ in range(20):
            assert st.similarity(stager.stage(state), state, values=True)
            assert stager.stats.allocations == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_forked_meanwhile_copies_too():
    targets, sources = zip(*pairs(), strict=True)
    going_on = threading.Event()

    def stage():
        while not going_on.is_set():
            copied([torch.empty_like(each) for each in sources], sources)

    other = threading.Thread(target=stage)
    other.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                copied(targets, sources)
                os._exit(0 if all(map(same_bytes, targets, sources)) else 1)  # torch's threads would hang here
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        going_on.set()
        other.join()


def test_a_page_shows_tensors_without_memory_of_their_own(tmp_path):
    def call(x):
        st.to_html({"x": x}, tmp_path / "page.html")
        return x

    torch.func.vmap(call)(torch.ones(2, 3))
    assert "x" in (tmp_path / "page.html").read_text()
