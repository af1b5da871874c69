"""Jobs of several steps in threads, which stop together."""

import _thread
import signal
import threading
import time

import pytest

from statetree.files.job_threads import in_threads


def steps(done, *names):
    for name in names:
        done.append(name)
        yield


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_step_is_done_once_and_those_of_a_job_in_order(count, threads):
    done = []
    in_threads([steps(done, (job, 0), (job, 1), (job, 2)) for job in range(count)], threads)
    assert sorted(done) == [(job, step) for job in range(count) for step in range(3)]
    assert [step for step in done if step[0] == 0] == sorted(step for step in done if step[0] == 0)


def test_two_threads_work_at_the_same_time():
    meet = threading.Barrier(2, timeout=10)
    in_threads([(meet.wait() for _ in "a"), (meet.wait() for _ in "a")], 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["this thread", "the others"])
@pytest.mark.parametrize("threads", [2, 5])
def test_after_an_error_no_further_step_begins(threads, error, where):
    here, meet, failed, begun = threading.get_ident(), threading.Barrier(threads, timeout=10), threading.Event(), []

    def job():
        meet.wait()  # each thread has one
        if (threading.get_ident() == here) == (where == "this thread"):
            failed.set()
            raise error("it failed")
        failed.wait(10)
        yield
        for step in range(1_000_000):
            begun.append(step)
            yield

    with pytest.raises(error, match="it failed"):
        in_threads([*[job() for _ in range(threads)], steps(begun, "later")], threads)
    count = len(begun)
    assert "later" not in begun
    time.sleep(0.05)
    assert len(begun) == count < 1_000_000


@pytest.fixture
def interrupts():
    """Interrupts are handled, even where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_this_thread_waits_stops_the_other():
    begun, waiting = [], threading.Event()

    def short():
        yield

    def long():
        for step in range(1_000_000):
            begun.append(step)
            if step == 10:
                waiting.set()
            yield

    watcher = threading.Thread(target=lambda: (waiting.wait(10), _thread.interrupt_main()))
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        in_threads([short(), long(), long()], 2)
    count = len(begun)
    watcher.join()
    time.sleep(0.05)
    assert len(begun) == count < 1_999_000
