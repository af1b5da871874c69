"""Handlers of signals that save, or raise, while the main thread saves: none waits for what it interrupted."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import statetree
from statetree.dcp import Checkpointer, async_save, background, checkpointer, mirror, series, step_writer
from statetree.files import publishing
from tests.pace import units

pytestmark = pytest.mark.filterwarnings("ignore:save. step . is not above that of the latest")
STATE = {"w": torch.arange(4.0), "b": torch.ones(2, 3)}


@pytest.fixture
def signalled(monkeypatch):
    """Return a function that has a handler called once, when the main thread is in a function of a module."""
    before = signal.getsignal(signal.SIGUSR1)

    def when(owner, name, handle):
        original, handled = getattr(owner, name), []

        def called(*args, **options):
            if not handled and threading.current_thread() is threading.main_thread():
                handled.append(name)
                signal.raise_signal(signal.SIGUSR1)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, called)
        signal.signal(signal.SIGUSR1, lambda _number, _frame: handle())
        return handled

    yield when
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(background, "group_for"), (checkpointer, "is_first"), (step_writer, "write"), (mirror, "aside")],
)
def test_a_handler_saves_while_the_main_thread_does(owner, name, signalled, tmp_path):
    with Checkpointer(tmp_path / "run", mirror=f"file://{tmp_path / 'mirror'}") as saving:
        handled = signalled(owner, name, lambda: saving.save(1, STATE))
        saving.save(2, STATE)
        assert handled
        assert saving.steps() == [1, 2]


@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("owner", ["begin", "publish", "prune"])
def test_a_handler_that_would_wait_for_the_directory_is_refused(owner, other, signalled, tmp_path):
    function = {
        "begin": (series.Series, "_clean"),
        "publish": (series.os, "rename"),
        "prune": (series.Series, "_without_name"),
    }[owner]
    with Checkpointer(tmp_path, keep=1) as saving, Checkpointer(tmp_path) as second:
        saving.save(0, STATE)
        handled = signalled(*function, lambda: (second if other else saving).save(1, STATE))
        with pytest.raises(statetree.CheckpointError, match=r"a signal's handler would .*\(Checkpointer\.save_on\)"):
            saving.save(2, STATE)
        assert handled
        saving.save(3, STATE)
        assert saving.latest_step() == 3
    assert not list(tmp_path.glob(".*partial*"))


def test_a_handler_that_saves_a_file_is_refused_where_it_would_wait(signalled, tmp_path):
    path = tmp_path / "model.pt"
    signalled(publishing, "_check_protected", lambda: statetree.save(STATE, path, overwrite=True))
    statetree.save(STATE, path)  # nobody waits yet
    signalled(publishing, "_shards_of", lambda: statetree.save(STATE, path, overwrite=True))
    with pytest.raises(statetree.CheckpointError, match=r"a signal's handler saves"):
        statetree.save(STATE, path, overwrite=True)
    assert statetree.similarity(statetree.load(path), STATE)
    statetree.save(STATE, path, overwrite=True)


def test_a_handler_does_not_wait_for_a_save_that_waits_for_the_main_thread(signalled, tmp_path, monkeypatch):
    waits, begin = threading.Event(), series.Series.begin

    def begin_late(*args):
        if threading.current_thread() is not threading.main_thread():
            assert waits.wait(units(10))
        return begin(*args)

    def handle():
        waits.set()  # the other save begins, and cannot
        for wait in (future.result, future.exception, lambda: other.save(2, STATE), other.close):
            with pytest.raises(statetree.CheckpointError, match=r"would wait for a save that waits for the thread"):
                wait()

    monkeypatch.setattr(series.Series, "begin", begin_late)
    with Checkpointer(tmp_path) as saving, Checkpointer(tmp_path) as other:
        future = other.async_save(1, STATE)
        handled = signalled(series.Series, "_clean", handle)
        saving.save(3, STATE)
        assert handled
        assert future.result() is None
        assert saving.steps() == [1, 3]


def test_executors_and_threads_take_their_locks_outside_the_main_thread(monkeypatch, tmp_path):
    within = []

    def watched(owner, name):
        original = getattr(owner, name)

        def called(*args, **options):
            within.append((name, threading.current_thread() is threading.main_thread()))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, called)

    watched(ThreadPoolExecutor, "submit")
    watched(threading.Thread, "start")
    options = {"incremental": True, "mirror": f"file://{tmp_path / 'mirror'}"}
    with Checkpointer(tmp_path / "run", **options) as saving, statetree.Stager() as stager:
        saving.save(0, STATE)
        saving.save(1, STATE)
        saving.async_save(2, STATE).result()
        saving.restore(STATE)
        stager.stage_async(STATE).result()
        stager.stage_async(STATE).result()
    async_save(STATE, checkpoint_id=tmp_path / "save").result()
    statetree.load(tmp_path / "save")
    assert {name for name, _ in within} == {"submit", "start"}
    assert not [name for name, is_main in within if is_main]
    assert not [thread for thread in threading.enumerate() if "Dummy" in thread.name]


def test_an_interrupt_after_a_save_was_queued_leaves_it_to_be_waited_for(monkeypatch, tmp_path):
    begun, original = threading.Event(), background.aside
    begin = series.Series.begin

    def begin_and_tell(*args):
        begun.set()
        return begin(*args)

    def interrupted(function):
        original(function)
        assert begun.wait(units(10))
        raise KeyboardInterrupt

    monkeypatch.setattr(series.Series, "begin", begin_and_tell)
    with Checkpointer(tmp_path) as saving:
        monkeypatch.setattr(background, "aside", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saving.async_save(1, STATE)
    assert saving.steps() == [1]


def test_a_save_that_was_not_queued_is_not_made(monkeypatch, tmp_path):
    late, original = [], background.aside

    def interrupted(function):
        late.append(function)
        raise KeyboardInterrupt

    with Checkpointer(tmp_path) as saving:
        monkeypatch.setattr(background, "aside", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saving.async_save(1, STATE)
        monkeypatch.setattr(background, "aside", original)
        late[0]()  # by the other thread, after the interrupt
        saving.save(2, STATE)
        assert saving.steps() == [2]


def test_a_handler_stages_before_a_stage_of_the_main_thread_has_begun(signalled):
    staged = []
    with statetree.Stager() as stager:
        handled = signalled(stager, "_begin", lambda: staged.append(stager.stage(STATE)))
        staged.append(stager.stage(STATE))
        assert handled
    assert all(statetree.similarity(each, STATE) for each in staged)


def test_an_interrupt_as_a_directory_is_made_leaves_no_directory(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    with Checkpointer(tmp_path) as saving:
        with monkeypatch.context() as patched:
            patched.setattr(series.fcntl, "lockf", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saving.save(1, STATE)
        assert not list(tmp_path.iterdir())
        saving.save(1, STATE)


def test_an_interrupt_as_the_lock_of_a_directory_is_released_leaves_it_free(monkeypatch, tmp_path):
    original = publishing.fcntl.flock
    interrupts = []

    def interrupted(handle, operation):
        if operation == publishing.fcntl.LOCK_UN and not interrupts:
            interrupts.append(operation)
            raise KeyboardInterrupt
        original(handle, operation)

    monkeypatch.setattr(publishing.fcntl, "flock", interrupted)
    with Checkpointer(tmp_path) as saving:
        with pytest.raises(KeyboardInterrupt) as kept:  # and with it the frames in which the lock is known
            saving.save(1, STATE)
        saving.save(2, STATE)
        assert saving.latest_step() == 2
        assert kept.value is not None


def test_a_handler_waits_for_the_save_that_the_main_thread_begins_to_wait_for(signalled, tmp_path):
    with Checkpointer(tmp_path) as saving:
        future = saving.async_save(1, {"w": torch.ones(1_000_000)})
        handled = signalled(future, "wait", lambda: saving.save(2, STATE))
        assert future.result() is None
        assert handled
        assert saving.steps() == [1, 2]


def test_a_future_that_is_not_done_in_time(tmp_path, monkeypatch):
    opened, begin = threading.Event(), series.Series.begin

    def late(*args):
        assert opened.wait(units(10))
        return begin(*args)

    monkeypatch.setattr(series.Series, "begin", late)
    with Checkpointer(tmp_path) as saving:
        future = saving.async_save(1, STATE)
        for wait in (future.result, future.exception):
            with pytest.raises(TimeoutError):
                wait(0.01)
            assert not future._waiting
        opened.set()
        assert future.exception(units(10)) is None
        assert future.result(-1) is None


def test_a_handler_does_not_wait_for_a_thread_that_waits_for_the_main_thread(signalled, tmp_path, monkeypatch):
    begun, begin, threads = threading.Event(), series.Series.begin, []

    def begin_and_tell(*args):
        if threading.current_thread() in threads:
            begun.set()
        return begin(*args)

    def handle():
        threads.append(threading.Thread(target=saving.save, args=(2, STATE)))
        threads[0].start()
        assert begun.wait(units(10))  # it holds the checkpointer, and waits for the directory
        saving.save(3, STATE)

    monkeypatch.setattr(series.Series, "begin", begin_and_tell)
    with Checkpointer(tmp_path) as saving, Checkpointer(tmp_path) as other:
        signalled(series.Series, "_clean", handle)
        with pytest.raises(statetree.CheckpointError, match=r"a signal's handler would wait for a save that waits"):
            other.save(1, STATE)
        threads[0].join()
        assert saving.steps() == [2]


def test_an_interrupt_as_a_lock_is_made_leaves_no_descriptor(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = set(os.listdir("/proc/self/fd"))
    with Checkpointer(tmp_path) as saving:
        with monkeypatch.context() as patched:
            patched.setattr(publishing, "renew_after_fork", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saving.save(1, STATE)
        assert set(os.listdir("/proc/self/fd")) <= before
        saving.save(1, STATE)
