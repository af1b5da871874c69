"""Properties that are computed once, without a lock; phases in the profiler and in the log."""

import gc
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch

import statetree
import statetree as st
from statetree import declare
from statetree.declare import cached_property, phase, with_collections, without_collections
from tests.pace import units


class Squared:
    def __init__(self, number, wait=None):
        self.number = number
        self.wait = wait
        self.calls = 0

    @cached_property
    def square(self):
        """The number times itself."""
        self.calls += 1
        if self.wait is not None:
            self.wait()
        return self.number**2


def test_it_is_computed_once_for_each_instance():
    three, four = Squared(3), Squared(4)
    assert (three.square, four.square, three.square, four.square) == (9, 16, 9, 16)
    assert (three.calls, four.calls) == (1, 1)
    assert Squared.square.__doc__ == "The number times itself."


def test_a_child_forked_while_a_thread_computes_one_computes_others():
    reached, go = threading.Event(), threading.Event()

    def wait():
        reached.set()
        go.wait(units(20))

    thread = threading.Thread(target=lambda: Squared(3, wait).square)
    thread.start()
    assert reached.wait(units(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        child = os.fork()
    if not child:
        os._exit(Squared(4).square)
    deadline = time.monotonic() + units(10)
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go.set()
    thread.join()
    assert ended[0], "the child never ended"
    assert os.waitstatus_to_exitcode(ended[1]) == 16


def test_no_module_uses_the_one_that_locks():
    sources = [path.read_text() for path in pathlib.Path(statetree.__file__).parent.rglob("*.py")]
    assert len(sources) > 100
    assert not any(re.search(r"functools import.*cached_property|functools\.cached_property", text) for text in sources)


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_put_off_and_left_as_they_were(enabled):
    @without_collections
    def fail():
        assert not gc.isenabled()
        nested()
        assert not gc.isenabled()
        raise KeyError("a")

    nested = without_collections(lambda: None)
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(KeyError, match="a"):
            fail()
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


FORKED = """
import gc, os, sys, threading, warnings
from statetree.declare import without_collections

def fork():
    warnings.simplefilter("ignore")  # that there are threads
    child = os.fork()
    if not child:
        os._exit(int(gc.isenabled()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

@without_collections
def run():
    if sys.argv[1] == "main":
        fork()
    else:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

run()
print(int(gc.isenabled()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("by", ["another", "main"])
def test_a_child_forked_while_collections_are_put_off_collects_if_they_would_stay_so(by):
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, by], capture_output=True, text=True, timeout=units(60), check=True
    )
    assert ran.stdout.split() == [str(int(by == "another")), "1"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_collections_are_on_after_any_alarm():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    rng, rung = random.Random(0), 0
    before = signal.signal(signal.SIGALRM, ring)
    call = without_collections(with_collections(lambda: None))
    try:
        for _ in range(1000):
            with suppress(Alarm):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-4))
                while True:
                    call()
            rung += 1
            assert gc.isenabled()
            with_collections(lambda: None)()  # which believes nothing that an alarm left
            assert gc.isenabled()
            assert declare._PutOff.thread is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung == 1000


def test_collections_go_on_in_what_takes_long():
    seen = []

    @with_collections
    def read():
        seen.append(gc.isenabled())
        raise KeyError("a")

    @without_collections
    def load():
        with pytest.raises(KeyError):
            read()
        seen.append(gc.isenabled())

    load()
    assert (seen, gc.isenabled()) == ([True, False], True)
    gc.disable()
    try:
        with pytest.raises(KeyError):
            read()
        assert (seen[2:], gc.isenabled()) == ([False], False)  # whoever called has switched them off
    finally:
        gc.enable()


def test_collections_go_on_beside_other_threads():
    found = []

    @without_collections
    def look():
        found.append(gc.isenabled())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_phase_is_nothing_unless_somebody_watches():
    assert phase("gather.move") is phase("gather.plan")
    assert isinstance(phase("gather.move"), nullcontext)


def test_a_phase_is_a_span_of_the_profiler():
    with torch.profiler.profile(acc_events=True) as profile, phase("gather.move"):
        torch.zeros(3).add_(1)
    assert "statetree.gather.move" in {event.name for event in profile.events()}


def test_a_phase_is_a_line_of_the_log(caplog):
    with caplog.at_level(logging.DEBUG, "statetree"), phase("gather.move"):
        pass
    (message,) = [record.getMessage() for record in caplog.records if record.name == "statetree"]
    assert message.startswith("gather.move: 0.0")


def test_what_a_phase_raises_is_raised(caplog):
    with caplog.at_level(logging.DEBUG, "statetree"), pytest.raises(ZeroDivisionError), phase("gather.move"):
        raise ZeroDivisionError


def test_long_phases_of_verbs_on_one_process_are_spans(tmp_path):
    state = {"w": torch.arange(6.0), "step": 1}
    with torch.profiler.profile(acc_events=True) as profile, st.Stager() as stager:
        st.copy_into(st.offload(state), state)
        st.offload(state, copy=False, device="meta")
        stager.stage(state)
        st.save(state, tmp_path / "state.pt")
        st.load(tmp_path / "state.pt", state)
    spans = [event.name.removeprefix("statetree.") for event in profile.events() if "statetree." in event.name]
    assert spans == [
        *("offload.describe", "offload.move", "copy_into.plan", "copy_into.move"),
        *("offload.describe", "offload.move"),
        *("stage.describe", "stage.move", "save.write"),
        *("load.plan", "load.describe", "load.allocate", "load.read"),
    ]


def test_staging_in_the_background_is_seen(caplog):
    with caplog.at_level(logging.DEBUG, "statetree"), st.Stager() as stager:
        stager.stage_async({"w": torch.ones(2)}).result()
    phases = [record.getMessage().split(":")[0] for record in caplog.records if record.name == "statetree"]
    assert phases == ["stage.describe", "stage.move"]


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda tree: st.similarity(tree, tree), ["similarity.compare"]),
        (st.digest, ["digest.sum"]),
        (lambda tree: st.delta(tree, tree), ["delta.compare"]),
        (
            lambda tree: st.apply_delta(st.delta(tree, tree), tree),
            ["delta.compare", "apply_delta.check", "apply_delta.write"],
        ),
        (lambda tree: st.copy_into(tree, st.offload(tree)), ["copy_into.plan", "copy_into.move"]),
    ],
    ids=["similarity", "digest", "delta", "apply_delta", "copy_into"],
)
def test_what_reads_all_elements_is_seen(call, names, caplog):
    with caplog.at_level(logging.DEBUG, "statetree"):
        call({"w": torch.ones(3), "n": 1})
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [name for name in told if name.partition(".")[0] != "offload"] == names
