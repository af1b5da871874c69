"""``stage_async``: what its futures carry, what a stage under way depends on, and who may do what meanwhile."""

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest
import torch

import statetree as st
from tests.faults import fail_each
from tests.judge import assert_trees_equal
from tests.pace import units
from tests.soak import SNAPSHOTS, Model, assert_is_of_turn, eight_threads, stage_fresh_tensors

LARGE = (1 << 18) + 3  # float32 elements: a block of its own


def ramp(size, start=0):
    return torch.arange(start, start + size, dtype=torch.float32)


def make_state(start=0):
    base = ramp(50, start)
    weight = torch.nn.Parameter(ramp(6, start + 1))
    return {
        "base": base,
        "tail": base[3:],
        "steps": ramp(40, start + 2)[::2],
        "square": ramp(25, start + 3).view(5, 5).t(),
        "weight": weight,
        "again": weight,
        "z": torch.complex(ramp(5, start), ramp(5, start + 7)).conj(),
        "large": ramp(LARGE, start),
        "meta": torch.empty(2, 3, device="meta"),
        "plain": {"step": start, "names": ["a", "b"]},
    }


@pytest.fixture(params=["plain", "shared"])
def options(request):
    return {"share_memory": request.param == "shared"}


@pytest.fixture
def stager(options):
    with st.Stager(max_snapshots=4, **options) as made:  # an error that a test keeps holds a tree in its traceback
        yield made


class Gate:
    """An opaque object whose copy is made only when the gate is open."""

    def __init__(self, action=lambda: None):
        self.reached, self.opened, self.action = threading.Event(), threading.Event(), action
        Gate.latest = self

    def __reduce__(self):
        return (pass_gate, ())


def pass_gate():
    gate = Gate.latest
    gate.reached.set()
    assert gate.opened.wait(units(30))
    gate.action()
    return "passed"


def in_thread(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


# What the future carries


def test_a_future_carries_what_stage_returns(stager, options):
    state = make_state()
    future = stager.stage_async(state)
    assert isinstance(future, Future)
    assert_trees_equal(future.result(units(30)), state, storages=not options["share_memory"])
    assert future.exception() is None
    assert stager.stats.stages == 1


@pytest.mark.parametrize("tree", [3, None, {}, [], {"a": (1, "b")}, ramp(3), torch.empty(0)])
def test_any_tree(stager, tree):
    assert_trees_equal(stager.stage_async(tree).result(units(30)), tree)


def test_cycles_and_shared_containers(stager):
    shared = [ramp(3)]
    state = {"a": shared, "b": shared}
    state["self"] = state
    staged = stager.stage_async(state).result(units(30))
    assert staged["self"] is staged
    assert staged["a"] is staged["b"]
    assert torch.equal(staged["a"][0], ramp(3))


class Refuses:
    def __init__(self, error, *, when):
        self.error, self.when = error, when

    def __reduce__(self):
        if self.when == "taken apart":
            raise self.error
        Refuses.error = self.error
        return (refuse, ())


def refuse():
    raise Refuses.error


@pytest.mark.parametrize("when", ["taken apart", "put together"])
def test_a_future_carries_the_error_that_stage_raises(stager, when):
    state = {"w": ramp(3), "m": [Refuses(ValueError("I will not"), when=when)]}
    with pytest.raises(st.UnsupportedLeaf, match=r"stage: .*m\.0.*I will not") as foreground:
        stager.stage(state)
    error = stager.stage_async(state).exception(units(30))
    assert type(error) is st.UnsupportedLeaf
    assert str(error) == str(foreground.value).replace("stage:", "stage_async:", 1)
    assert error.path == foreground.value.path
    assert_trees_equal(stager.stage_async({"w": ramp(3)}).result(units(30)), {"w": ramp(3)})


class Stubborn:
    """Refuses to be taken apart. Neither it nor its error holds the other."""

    def __reduce__(self):
        raise ValueError("not now")


class Sleepless:
    """Refuses to be put together."""

    def __reduce__(self):
        return (stay_apart, ())


def stay_apart():
    raise ValueError("not then")


class Exit(BaseException):
    pass


def test_a_future_carries_the_very_exception(stager):
    error = Exit("I go")
    future = stager.stage_async({"w": ramp(3), "bad": Refuses(error, when="put together")})
    assert future.exception(units(30)) is error
    assert_trees_equal(stager.stage({"w": ramp(3)}), {"w": ramp(3)})


def test_what_is_no_error_is_raised_at_once(stager):
    """An interrupt must end what the caller does."""
    with pytest.raises(Exit, match="I go"):
        stager.stage_async({"bad": Refuses(Exit("I go"), when="taken apart")})


def test_too_many_staged_trees_come_through_the_future(options):
    with st.Stager(max_snapshots=1, **options) as stager:
        held = stager.stage_async({"w": ramp(3)})
        held.result(units(30))
        refused = stager.stage_async({"w": ramp(3)})
        with pytest.raises(st.StagerBusy, match="stage_async: 1 staged tree is alive"):
            refused.result(units(30))
        del held, refused
        assert_trees_equal(stager.stage_async({"w": ramp(3, 5)}).result(units(30)), {"w": ramp(3, 5)})


def test_a_future_holds_its_tree_and_no_more(options):
    with st.Stager(max_snapshots=2, **options) as stager:
        futures = [stager.stage_async({"w": ramp(9, start)}) for start in (1, 2)]
        wait(futures)
        kept = futures.pop(0).result()["w"]
        assert_trees_equal(futures[0].result(), {"w": ramp(9, 2)})
        with pytest.raises(st.StagerBusy, match="alive"):
            stager.stage({"w": ramp(9, 3)})
        futures.clear()
        assert_trees_equal(stager.stage({"w": ramp(9, 4)}), {"w": ramp(9, 4)})
        assert torch.equal(kept, ramp(9, 1))


# What may change meanwhile


def change_nothing(state):
    pass


def change_containers(state):
    state["plain"]["step"] = -1
    state["plain"]["names"].append("c")
    state["more"] = ramp(3)
    del state["tail"]


def swap_data(state):
    for name in ("base", "weight", "large"):
        state[name].data = ramp(11, 900)


def set_on_others(state):
    state["base"].set_(ramp(2, 800))
    state["steps"].set_(state["square"])


def change_geometry(state):
    state["square"].t_()
    state["base"].resize_(7)
    state["steps"].squeeze_().unsqueeze_(0)
    state["large"].as_strided_((5,), (2,), 1)


def change_attributes(state):
    state["weight"].note = "new"
    state["weight"].requires_grad_(False)
    state["base"].requires_grad_()


def grow_storages(state):
    for name in ("base", "weight", "large"):
        state[name].untyped_storage().resize_(6 << 20)


def drop(state):
    state.clear()


def make_real(state):
    state["meta"].data = torch.zeros(5, 5, device="meta")


CHANGES = [
    change_nothing,
    change_containers,
    swap_data,
    set_on_others,
    change_geometry,
    change_attributes,
    grow_storages,
    drop,
    make_real,
]


@pytest.mark.parametrize("before", [0, 2], ids=["first", "again"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_structure_values_and_memory_are_those_at_the_time_of_the_call(stager, change, before):
    for _ in range(before):
        stager.stage(make_state())
    state = make_state(3)
    with stager._lock:  # the worker waits
        future = stager.stage_async(state)
        change(state)
    assert_trees_equal(future.result(units(30)), make_state(3), storages=False)


def test_many_tensors_that_look_as_before(stager):
    """So many that they are recognised as a whole."""
    states = [{f"w{i}": ramp(5, 100 * turn + i) for i in range(100)} for turn in range(6)]
    for turn, state in enumerate(states):
        with stager._lock:
            future = stager.stage_async(state)
            for i in range(0, 100, 3):
                state[f"w{i}"].data = ramp(5)
        assert_trees_equal(
            future.result(units(30)), {f"w{i}": ramp(5, 100 * turn + i) for i in range(100)}, storages=False
        )


@pytest.mark.parametrize("size", [0, 8], ids=["freed", "shrunk"])
@pytest.mark.parametrize("name", ["base", "large", "steps", "z", "weight"])
def test_a_storage_freed_before_its_turn_is_refused(stager, name, size):
    stager.stage(make_state())
    state = make_state()
    with stager._lock:
        future = stager.stage_async(state)
        state[name].untyped_storage().resize_(size)
    with pytest.raises(st.UnsupportedLeaf, match=rf"stage_async: .*{name}.*freed or resized") as caught:
        future.result(units(30))
    assert str(caught.value.path) == name
    assert_trees_equal(stager.stage(make_state()), make_state(), storages=False)


def test_after_synchronize_the_source_may_be_written(stager):
    base = ramp(4000)
    state = {"base": base, "steps": base[::2], "z": torch.complex(ramp(500), ramp(500))}
    previous = expected_previous = None
    for turn in range(50):
        future = stager.stage_async(state)
        expected = copy.deepcopy(state)
        stager.synchronize()
        for tensor in (base, state["z"]):
            tensor.add_(turn + 1)
        assert future.done()
        assert_trees_equal(future.result(), expected, storages=False)
        if previous is not None:
            assert_trees_equal(previous, expected_previous, storages=False)
        previous, expected_previous = future.result(), expected


def test_staging_beside_a_training_step(options):
    """The pattern of the docstring."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = []
    with st.Stager(max_snapshots=2, **options) as stager:
        staged = expected = None
        for step in range(20):
            loss = model(ramp(60, step).view(2, 30)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            stager.synchronize()
            if staged is not None:
                assert_trees_equal(staged.result(), expected, storages=False)
                saved.append(staged.result()["step"])
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            staged, expected = stager.stage_async(state), copy.deepcopy(state)
    assert saved == list(range(19))


# synchronize


def test_synchronize_waits_for_what_is_under_way(stager):
    gate = Gate()
    future = stager.stage_async({"w": ramp(3), "gate": gate})
    later = stager.stage_async({"w": ramp(4)})
    assert gate.reached.wait(units(30))
    waiter = in_thread(stager.synchronize)
    waiter.join(0.2)
    assert waiter.is_alive()
    gate.opened.set()
    waiter.join(units(30))
    assert not waiter.is_alive()
    assert future.done()
    assert later.done()
    assert future.result()["gate"] == "passed"


def test_synchronize_leaves_errors_in_their_futures(stager):
    futures = [
        stager.stage_async({"w": ramp(3), "bad": Refuses(ValueError("no"), when=when)})
        for when in ("taken apart", "put together")
    ]
    stager.synchronize()
    for future in futures:
        assert future.done()
        assert "no" in str(future.exception())


def test_synchronize_with_nothing_to_wait_for(stager):
    threads = set(threading.enumerate())  # those of the tests before may end meanwhile
    stager.synchronize()
    assert set(threading.enumerate()) <= threads
    stager.stage_async({"w": ramp(3)}).result(units(30))
    stager.synchronize()
    stager.close()
    stager.synchronize()


def test_a_stage_not_begun_can_be_cancelled(stager):
    gate = Gate()
    first = stager.stage_async({"w": ramp(3), "gate": gate})
    second, third = (stager.stage_async({"w": ramp(size)}) for size in (4, 5))
    assert gate.reached.wait(units(30))
    assert second.cancel()
    assert not first.cancel()
    gate.opened.set()
    stager.synchronize()
    assert torch.equal(third.result()["w"], ramp(5))
    assert first.result()["gate"] == "passed"
    with pytest.raises(CancelledError):
        second.result()
    assert stager.stats.stages == 2


# Closing, dropping


def test_close_completes_what_is_under_way_and_refuses_what_is_not_begun(stager):
    gate = Gate()
    running = stager.stage_async({"w": ramp(3), "gate": gate})
    queued = stager.stage_async({"w": ramp(4)})
    assert gate.reached.wait(units(30))
    closer = in_thread(stager.close)
    while not stager._closed:
        time.sleep(0.001)
    with pytest.raises(st.StagerClosed, match=r"stage_async: the stager is closed.*Make a new Stager"):
        stager.stage_async({"w": ramp(5)})
    gate.opened.set()
    closer.join(units(30))
    assert not closer.is_alive()
    assert torch.equal(running.result(units(30))["w"], ramp(3))
    with pytest.raises(st.StagerClosed, match="stage_async: the stager is closed"):
        queued.result(units(30))
    stager.synchronize()
    assert stager.nbytes == 0


def test_after_close_it_is_refused_at_once(stager):
    staged = stager.stage_async({"w": ramp(3)}).result(units(30))
    stager.close()
    for tree in ({"w": ramp(3)}, {"step": 1}):
        with pytest.raises(st.StagerClosed, match="stage_async: the stager is closed"):
            stager.stage_async(tree)
    assert torch.equal(staged["w"], ramp(3))


def test_closing_while_threads_stage(options):
    for turn in range(10):
        stager = st.Stager(max_snapshots=3, **options)
        futures, problems = [], []

        def work(stager=stager, futures=futures, problems=problems, turn=turn):
            while True:
                try:
                    futures.append(stager.stage_async({"w": ramp(2000, turn)}))
                    futures[-1].exception(units(30))
                except st.StagerClosed:
                    return
                except BaseException:
                    problems.append(traceback.format_exc())
                    return

        threads = [in_thread(work) for _ in range(3)]
        wait([futures[0]] if futures else [stager.stage_async({"w": ramp(2)})])
        stager.close()
        for thread in threads:
            thread.join(units(30))
        stager.synchronize()
        assert problems == []
        assert stager.nbytes == 0
        for future in futures:
            error = future.exception(units(30))
            assert error is None or isinstance(error, (st.StagerClosed, st.StagerBusy))
            if error is None:
                assert torch.equal(future.result()["w"], ramp(2000, turn))


@pytest.mark.parametrize("verb", ["stage", "stage_async", "prewarm", "synchronize"])
def test_a_nested_call_in_the_worker_is_refused_and_does_not_wait_for_itself(stager, verb):
    seen = []

    def call():
        try:
            getattr(stager, verb)(*([] if verb == "synchronize" else [{"x": ramp(2)}]))
        except st.StagerBusy as error:
            seen.append(str(error))

    gate = Gate(call)
    gate.opened.set()
    staged = stager.stage_async({"w": ramp(3), "gate": gate}).result(units(30))
    assert torch.equal(staged["w"], ramp(3))
    assert len(seen) == 1
    assert seen[0].startswith(f"{verb}: the stager is staging already")


def test_closing_from_inside_the_worker(stager):
    gate = Gate(stager.close)
    gate.opened.set()
    staged = stager.stage_async({"w": ramp(3), "gate": gate}).result(units(30))
    assert torch.equal(staged["w"], ramp(3))
    stager.synchronize()
    assert stager.nbytes == 0


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_causes_of_an_error_name_the_leaf_as_it_does(stager):
    error = stager.stage_async({"a": {"bad": Stubborn()}}).exception(units(30))
    assert isinstance(error, st.UnsupportedLeaf)
    told = "".join(traceback.format_exception(error))
    assert "not now" in told
    assert "a.bad" in str(error.__cause__)
    assert "%PATH%" not in told


@pytest.mark.usefixtures("without_collector")
def test_a_dropped_stager_completes_its_stages_and_is_freed_with_its_thread(options):
    stager = st.Stager(max_snapshots=4, **options)
    gate = Gate()
    futures = [stager.stage_async({"w": ramp(3), "gate": gate}), stager.stage_async({"w": ramp(LARGE)})]
    failed = [stager.stage_async({"w": ramp(3), "bad": bad}) for bad in (Stubborn(), Sleepless())]
    gone = weakref.ref(stager)
    (worker,) = stager._worker._executor._threads
    del stager
    gate.opened.set()
    assert torch.equal(futures[0].result(units(30))["w"], ramp(3))
    assert torch.equal(futures[1].result(units(30))["w"], ramp(LARGE))
    assert all("not" in str(future.exception(units(30))) for future in failed)
    failed.clear()  # tracebacks hold what was called
    worker.join(units(30))
    assert not worker.is_alive()
    assert gone() is None
    assert torch.equal(futures[1].result()["w"], ramp(LARGE))


@pytest.mark.usefixtures("without_collector")
def test_sources_are_let_go_of_when_they_are_staged(stager):
    source = ramp(LARGE)
    future = stager.stage_async({"w": source})
    future.result(units(30))
    storage = weakref.ref(source.untyped_storage())
    stager.stage_async(1).result(units(30))  # the worker has turned to something else
    del source
    assert storage() is None


# Interrupts


@pytest.mark.slow
@pytest.mark.parametrize("file", ["/stager/", "/spans/layout.py", "/leaves/builtin.py"])
def test_an_interrupt_anywhere_leaves_nothing_behind(options, file):
    with st.Stager(**options) as stager:
        kept, expected = stager.stage(make_state()), make_state()
        turn = 0

        def stage_another():
            nonlocal turn, source
            turn += 1
            source = {**make_state(turn), "more": ramp(turn)}
            stager.stage_async(source).result(units(30))

        def after(where):
            thread = in_thread(stager.synchronize)
            thread.join(units(30))
            assert not thread.is_alive(), where
            for tensor in source.values():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
            assert_trees_equal(kept, expected, storages=False)
            assert_trees_equal(stager.stage_async(make_state(7)).result(units(30)), make_state(7), storages=False)

        source = {}
        tried = fail_each(stage_another, after, step="signal", error=KeyboardInterrupt, file=file)
        assert tried > 1


SIGNALS = """
import concurrent.futures.thread, faulthandler, signal, sys, threading, time, torch, statetree as st

faulthandler.dump_traceback_later(2 * float(sys.argv[2]), exit=True)  # who waits for whom, if it hangs

base = torch.arange(300_000.0)
state = {"base": base, "steps": base[::2], **{f"w{i}": torch.full((50,), float(i)) for i in range(300)}}
armed = False

class Struck(Exception):
    pass

# Struck while it takes or releases a lock in Python, the standard library keeps it: only where it waits is it struck.
LOCKING = {threading.__file__, *(sys.modules[f"concurrent.futures.{name}"].__file__ for name in ("_base", "thread"))}

def strike(_, frame):
    global armed
    if armed and not (frame.f_code.co_filename in LOCKING and frame.f_code.co_name != "wait"):
        armed = False
        raise Struck

signal.signal(signal.SIGINT, strike)
print("ready", flush=True)

def right(staged, turn):
    return (
        bool((staged["base"] == torch.arange(300_000.0) + turn).all())
        and bool((staged["steps"] == staged["base"][::2]).all())
        and all(bool((staged[f"w{i}"] == i + turn).all()) for i in range(0, 300, 50))
    )

struck = turn = 0
with st.Stager(max_snapshots=2, share_memory=sys.argv[1] == "shared") as stager:
    kept, kept_turn = stager.stage(state), 0
    until = time.monotonic() + float(sys.argv[2])  # and not for ever, if nobody is there to strike any more
    while struck < 40 and time.monotonic() < until:
        staged = None
        try:
            armed = True
            staged = stager.stage_async(state).result() if turn % 2 else stager.stage(state)
            armed = False
        except Struck:
            struck += 1
        except RuntimeError as error:  # of the standard library's Condition, where it was struck while waiting
            assert isinstance(error.__context__, Struck) and "un-acquired lock" in str(error), error
            struck += 1
        stager.synchronize()
        assert staged is None or right(staged, turn), turn
        assert right(kept, kept_turn), (turn, kept_turn)
        if staged is not None:
            kept, kept_turn = staged, turn
        for name, tensor in state.items():
            if name != "steps":
                tensor.add_(1)
        turn += 1
    del staged
    assert right(stager.stage(state), turn)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")
def test_signals_at_any_moment(options):
    kind = "shared" if options["share_memory"] else "plain"
    # Not measured by coverage, whose collector is Python: struck there, it keeps its lock, and waits for it for ever.
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALS, kind, str(units(30))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unmeasured,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.007)
        _, err = process.communicate(timeout=units(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err


def test_the_worker_is_started_where_no_signal_handler_runs(monkeypatch):
    callers = []

    def submit(self, *args):
        callers.append(threading.current_thread())
        return real(self, *args)

    real = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with st.Stager() as stager:
        assert stager.stage_async(1).result(units(30)) == 1
    assert callers[0] is not threading.main_thread()


# Modes of the calling thread


def test_modes_of_the_calling_thread(stager, options):
    class Noisy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    state = make_state()
    with torch.inference_mode(), torch.device("meta"), Noisy():
        future = stager.stage_async(state)
        stager.synchronize()
    staged = future.result()
    assert_trees_equal(staged, state, storages=not options["share_memory"])
    assert not staged["base"].is_inference()
    assert torch.is_grad_enabled()
    (staged["weight"] * 2).sum().backward()
    assert staged["weight"].grad is not None


# Threads


@pytest.mark.slow
def test_eight_threads_are_right_or_busy_and_never_mixed(options):
    with st.Stager(max_snapshots=SNAPSHOTS, **options) as stager:
        right, busy = eight_threads(stager, 60)
    assert right + busy == 8 * 60
    assert right > 100


# Counters


@pytest.mark.parametrize("verb", ["stage", "stage_async"])
def test_fresh_tensors_take_no_more_memory_after_the_second_stage(options, verb):
    model, held, counts = Model(), None, []
    with st.Stager(**options) as stager:
        for turn in range(30):
            model.mark(turn)
            staged = getattr(stager, verb)({"model": model.state_dict(), "turn": turn})
            held = staged.result(units(30)) if verb == "stage_async" else staged
            del staged
            assert_is_of_turn(held, turn)
            counts.append((stager.stats.allocations, stager.stats.allocated_bytes, stager.nbytes))
        assert stager.stats.stages == 30
    assert 0 < counts[0][0] < counts[1][0]  # the first tree is held while the second is staged
    assert set(counts[1:]) == {counts[1]}


def test_fresh_tensors_in_both_verbs_leave_nothing_behind(options):
    with st.Stager(**options) as stager:
        counts = []
        stage_fresh_tensors(stager, 40, after_each=lambda _: counts.append(stager.stats.allocations))
    assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("verb", ["stage", "stage_async"])
def test_after_prewarm_the_first_stage_takes_no_memory(options, verb):
    with st.Stager(**options) as stager:
        stager.prewarm(make_state())
        ahead = stager.stats
        assert ahead.stages == 0
        assert ahead.allocations > 0
        assert ahead.allocated_bytes == stager.nbytes
        staged = getattr(stager, verb)(make_state(5))
        staged = staged.result(units(30)) if verb == "stage_async" else staged
        assert_trees_equal(staged, make_state(5), storages=False)
        assert stager.stats == (1, *ahead[1:])


# Forks


FORK = """
import os, sys, threading, torch, statetree as st
from statetree.testing.pace import units

limit = units(30)

class Gate:
    reached, opened = threading.Event(), threading.Event()
    def __reduce__(self):
        return (wait, ())

def wait():
    Gate.reached.set()
    Gate.opened.wait(limit)

stager = st.Stager(share_memory=sys.argv[1] == "shared", max_snapshots=2)
state = {"w": torch.arange(1000.0), "l": torch.arange(300_000.0)}
held = stager.stage(state)
stager.stage(state)  # and an idle snapshot
future = stager.stage_async({"x": torch.arange(5.0), "gate": Gate()})
Gate.reached.wait(limit)
child = os.fork()
if child == 0:  # while the worker, which is not here, holds the lock
    for turn in range(1, 4):
        other = {key: -turn - value for key, value in state.items()}
        staged = stager.stage(other) if turn % 2 else stager.stage_async(other).result(limit)
        assert all(torch.equal(staged[key], other[key]) for key in other)
        stager.synchronize()
    stager.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert all(torch.equal(held[key], state[key]) for key in state)
Gate.opened.set()
assert torch.equal(future.result(limit)["x"], torch.arange(5.0))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_the_stager_to_itself(options):
    kind = "shared" if options["share_memory"] else "plain"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # OpenMP's threads do not outlive a fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=units(60), check=False, env=environment)
    assert done.returncode == 0, done.stderr
