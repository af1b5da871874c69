import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from statetree.testing import rank_calls, run_ranks
from tests.pace import units
from tests.ranks import close_ranks, rank_outcomes

ROOT = Path(__file__).parents[3]
CALLS = []
ALARM_S = round(units(45))


@pytest.fixture(autouse=True)
def _is_never_for_ever():
    def fail(*_):
        msg = f"the test took longer than {ALARM_S} s"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ALARM_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def end_with(code):
    os._exit(code)  # where coverage is measured, it is a function that cannot be pickled


def nothing():
    pass


def add_up(value):
    total = torch.full((2,), value * 10.0 ** dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total


def pid():
    return os.getpid()


def count_a_call():
    CALLS.append(1)
    return len(CALLS)


def raise_on(ranks, *, barrier=False):
    if dist.get_rank() in ranks:
        msg = f"it is rank {dist.get_rank()}"
        raise ValueError(msg)
    if barrier:
        dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    return dist.get_rank()


def signal_on(rank, number):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
        time.sleep(600 if number == signal.SIGSTOP else 1)
    return dist.get_rank()


def barrier_on(rank):
    if dist.get_rank() == rank:
        dist.barrier(async_op=True)


def wait_for_the_others():
    dist.barrier()


def surroundings(variable):
    return os.environ.get(variable), sys.path


def change_surroundings(variable):
    os.environ[variable] = "changed"
    sys.path.append("nowhere")


def new_tensors_have_no_elements(value):
    torch.set_default_device("meta")
    return value


def settings():
    return dist.get_world_size(), dist.get_backend(), torch.get_num_threads()


def sub_group():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=mine)
    return total.item()


def new_groups(count):
    for _ in range(count):
        dist.new_group([0, 1])
    return os.getpid()


def leave_the_group():
    dist.destroy_process_group()


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_unpicklable():
    raise Unpicklable(1, 2)


def return_unpicklable():
    return lambda: None


def leave(error):
    raise error


class Reduced:
    """What calls a function when it is unpickled."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def signal_when_received(rank, number):
    """Return what makes whoever receives it send a signal to the process that sent it."""
    return Reduced(os.kill, os.getpid(), number) if dist.get_rank() == rank else None


def stop_while_sending(rank, share):
    """Return much, and stop when a share of the answer is written."""
    send = multiprocessing.connection.Connection._send

    def send_and_stop(connection, content, *args):
        if len(content) < 1_000_000:
            return send(connection, content, *args)
        send(connection, content[: int(share * len(content))], *args)
        return os.kill(os.getpid(), signal.SIGSTOP)

    if dist.get_rank() == rank:
        multiprocessing.connection.Connection._send = send_and_stop
    return b"x" * 50_000_000


def exit_and_leave_a_child(rank, folder):
    """End, while a process that this one has started holds all its files open."""
    if dist.get_rank() == rank:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        (folder / "child").write_text(str(child))
        os._exit(3)


def complain(process, text):
    if os.getpid() == process:
        raise RuntimeError(text)


def return_what_cannot_be_unpickled_in(process, rank):
    return Reduced(complain, process, "not here") if dist.get_rank() == rank else dist.get_rank()


class NotUnpickledIn(ValueError):
    def __reduce__(self):
        return complain, self.args


def raise_what_cannot_be_unpickled_in(process):
    raise NotUnpickledIn(process, "not here")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_the_order_of_the_ranks(world_size):
    results = run_ranks(world_size, add_up, 3)
    total = sum(3 * 10.0**rank for rank in range(world_size))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(found, torch.full((2,), total)) for _, found in results)
    assert run_ranks(world_size, settings) == [(world_size, "gloo", 1)] * world_size


def test_partial_functions_and_keywords():
    with pytest.raises(AssertionError, match="it is rank 1"):
        run_ranks(2, partial(raise_on, [1], barrier=False))
    assert run_ranks(2, partial(sleep_on, rank=7)) == [0, 1]


def test_processes_are_kept():
    first = run_ranks(2, pid)
    assert run_ranks(2, pid) == first
    assert os.getpid() not in first
    counts = [run_ranks(2, count_a_call) for _ in range(20)]
    assert counts == [[counts[0][0] + index] * 2 for index in range(20)]


def test_fresh_processes_are_others_and_are_gone_afterwards():
    kept = run_ranks(2, pid)
    fresh = run_ranks(2, pid, fresh=True)
    assert not set(kept) & set(fresh)
    assert not any(map(alive, fresh))
    assert run_ranks(2, pid) == kept


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_ends_the_processes():
    kept = run_ranks(2, pid)
    close_ranks()
    assert not any(map(alive, kept))
    assert not set(run_ranks(2, pid)) & set(kept)


@pytest.mark.slow
def test_the_failure_holds_every_traceback():
    with pytest.raises(AssertionError) as caught:
        run_ranks(4, raise_on, [1, 3])
    text = str(caught.value)
    assert text.startswith("run_ranks: raise_on failed on 2 of 4 ranks.\n")
    assert "--- rank 1 raised" in text
    assert "ValueError: it is rank 1" in text
    assert "ValueError: it is rank 3" in text
    assert "rank 0" not in text
    assert text.count("test_rank_calls.py") == 2
    assert "rank_worker" not in text


@pytest.mark.slow
def test_when_one_rank_raises_the_others_say_where_they_wait_for_it():
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, partial(raise_on, [1], barrier=True))
    assert time.monotonic() - started < units(15)
    text = str(caught.value)
    assert "--- rank 0 hung\nIt did not end in time, and was killed." in text
    assert "in barrier" in text
    assert "in raise_on" in text
    assert "ValueError: it is rank 1" in text


def test_where_a_rank_hangs_is_told_in_full_however_slowly_it_writes(monkeypatch):
    pieces = ["Current thread 0x1 (most recent call first):\n", '  File "own.py", line 1 in own\n']
    pieces += [f'  File "{rank_calls.WORKER_FILE}", line 2 in _answer\n', '  File "process.py", line 3 in run\n']
    pool = rank_calls.RankPool(1, 1.0)
    pool._processes = [SimpleNamespace(pid=0)]
    file, told = pool._stack(0), "".join(pieces[:2]).rstrip()

    def write_on(_seconds):
        file.write_text((file.read_text() if file.exists() else "") + pieces.pop(0))

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)
        patch.setattr(time, "sleep", write_on)
        assert pool._hung(0).report == f"It did not end in time, and was killed. {told}"
    pool._processes.clear()
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: run_ranks(2, raise_on, [0, 1]), "it is rank 0"),
        (lambda: run_ranks(2, sleep_on, 1, timeout=units(2)), "in sleep_on"),
        (lambda: run_ranks(2, end_with, 7), "exit code 7"),
        (lambda: run_ranks(2, signal_on, 0, signal.SIGKILL), "exit code -9"),
        (
            lambda: run_ranks(2, signal_on, 0, signal.SIGSTOP, timeout=units(2)),
            "It does not say where: it may be stopped",
        ),
        (lambda: run_ranks(2, barrier_on, 1), "strayed\n[^\n]*the same collectives[^\n]*\nTraceback.*Error: "),
        (lambda: run_ranks(2, return_unpicklable), "Can't pickle|Can't get local object"),
        (lambda: run_ranks(2, raise_unpicklable), "1 and 2"),
        (lambda: run_ranks(2, leave, SystemExit(3)), "SystemExit: 3"),
        (lambda: run_ranks(2, leave, KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
    ids=["raised", "hung", "exited", "killed", "stopped", "strayed", "result", "exception", "exit", "interrupt"],
)
def test_after_a_failure_there_are_new_processes_in_step(make, reason):
    before = run_ranks(2, pid)
    with pytest.raises(AssertionError, match=f"(?s){reason}"):
        make()
    assert not any(map(alive, before))
    assert not set(run_ranks(2, pid)) & set(before)
    assert run_ranks(2, add_up, 1)[1][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [0, 10])
def test_a_rank_that_was_stopped_between_calls_is_hung(megabytes):
    before = run_ranks(2, pid)
    os.kill(before[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"failed on 1 of 2 ranks.\n--- rank 1 hung\n.*it may be stopped"):
        run_ranks(2, len, b"x" * megabytes * 1_000_000, timeout=units(3))
    assert time.monotonic() - started < units(10)
    assert not any(map(alive, before))
    assert run_ranks(2, add_up, 1)[1][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGSTOP, "hung\n.*it may be stopped"), (signal.SIGKILL, "died\n.*exit code -9")],
    ids=["stops", "dies"],
)
def test_a_rank_that_stops_or_dies_after_its_answer_is_named(number, reason):
    run_ranks(2, pid)  # they have started
    started = time.monotonic()
    with pytest.raises(AssertionError, match=f"failed on 1 of 2 ranks.\n--- rank 1 {reason}"):
        run_ranks(2, signal_when_received, 1, number, timeout=units(3))
    assert time.monotonic() - started < units(10)
    assert run_ranks(2, add_up, 1)[1][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_rank_that_stops_while_it_sends_is_hung(share):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"failed on 1 of 2 ranks.\n--- rank 1 hung\n.*it may be stopped"):
        run_ranks(2, stop_while_sending, 1, share, timeout=units(5))
    assert time.monotonic() - started < units(15)


@pytest.mark.slow
def test_a_rank_has_died_even_if_a_process_that_it_started_has_not(tmp_path):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"--- rank 1 died\nIts process ended with exit code 3."):
        run_ranks(2, exit_and_leave_a_child, 1, tmp_path)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert time.monotonic() - started < units(15)


@pytest.mark.slow
def test_ranks_that_had_no_time_to_begin_are_hung():
    outcomes = rank_outcomes(2, time.sleep, 30, timeout=0)
    assert [outcome.status for outcome in outcomes] == ["hung", "hung"]


def test_large_arguments_and_results_of_all_ranks():
    data = torch.arange(3_000_000)
    assert all(torch.equal(found, data) for found in run_ranks(3, partial(torch.add, data), 0))


def test_a_result_that_cannot_be_unpickled_is_a_failure_of_its_rank():
    with pytest.raises(
        AssertionError, match=r"failed on 1 of 2 ranks.\n--- rank 1 raised\n.*cannot be unpickled"
    ) as caught:
        run_ranks(2, return_what_cannot_be_unpickled_in, os.getpid(), 1)
    assert "RuntimeError: not here" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert run_ranks(2, add_up, 1)[1][0] == 1


def test_an_exception_that_cannot_be_unpickled_is_told_all_the_same():
    outcomes = rank_outcomes(1, raise_what_cannot_be_unpickled_in, os.getpid())
    assert (outcomes[0].status, outcomes[0].value) == ("raised", None)
    assert "in raise_what_cannot_be_unpickled_in" in outcomes[0].report


@pytest.mark.slow
def test_the_failure_has_the_first_exception_of_a_rank_as_its_cause():
    with pytest.raises(AssertionError) as caught:
        run_ranks(4, raise_on, [1, 3])
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "it is rank 1"


@pytest.mark.slow
def test_collectives_have_a_timeout_of_their_own(monkeypatch):
    monkeypatch.setattr(rank_calls, "GRACE_UNITS", 10)
    limit_s = round(units(2))  # the ranks must meet within it
    with pytest.raises(AssertionError, match=f"Timed out waiting {limit_s}000ms"):
        run_ranks(2, partial(raise_on, [1], barrier=True), collective_timeout=limit_s)


@pytest.mark.slow
def test_sub_groups():
    assert run_ranks(4, sub_group) == [1, 1, 5, 5]
    assert run_ranks(4, sub_group) == [1, 1, 5, 5]


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_each_call_begins_with_the_surroundings_of_its_caller(fresh, monkeypatch):
    variable = "STATETREE_TEST_VARIABLE"
    run_ranks(2, change_surroundings, variable, fresh=fresh)
    assert run_ranks(2, surroundings, variable, fresh=fresh) == [(None, sys.path)] * 2
    monkeypatch.setenv(variable, "set")
    monkeypatch.syspath_prepend("elsewhere")
    assert run_ranks(2, surroundings, variable, fresh=fresh) == [("set", sys.path)] * 2


def test_new_processes_join_their_group_in_the_surroundings_of_their_caller(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    outcomes = rank_outcomes(1, pid)
    assert outcomes[0].status == "raised"
    assert "no-such-interface" in outcomes[0].report


def test_a_rank_that_was_killed_between_calls_is_replaced():
    before = run_ranks(2, pid)
    os.kill(before[1], signal.SIGKILL)
    until = time.monotonic() + units(10)
    while all(pool.is_alive for pool in rank_calls._kept.values()) and time.monotonic() < until:
        time.sleep(0.01)  # until this process has been told
    assert not set(run_ranks(2, pid)) & set(before)
    assert not any(map(alive, before))


def test_a_default_device_does_not_look_like_another_collective():
    assert run_ranks(2, new_tensors_have_no_elements, 3, fresh=True) == [3, 3]


def test_processes_that_hold_many_groups_are_replaced():
    first = run_ranks(2, new_groups, 100)
    assert not set(run_ranks(2, new_groups, 1)) & set(first)


def test_a_function_that_ends_the_group_ends_its_processes():
    before = run_ranks(2, pid)
    run_ranks(2, leave_the_group)
    assert not set(run_ranks(2, pid)) & set(before)


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent():
    before = run_ranks(2, pid)
    with pytest.raises(Exception, match="pickle") as caught:
        run_ranks(2, lambda: None)
    assert "top level of a module" in caught.value.__notes__[0]
    assert run_ranks(2, pid) == before


@pytest.mark.slow
def test_outcomes_of_ranks_that_are_meant_to_fail():
    outcomes = rank_outcomes(4, partial(raise_on, [1, 2]))
    assert [outcome.status for outcome in outcomes] == ["returned", "raised", "raised", "returned"]
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]
    assert str(outcomes[1].value) == "it is rank 1"
    assert isinstance(outcomes[1].value, ValueError)
    assert "in raise_on" in outcomes[2].report


@pytest.mark.slow
def test_an_outcome_does_not_cut_the_others_short():
    limit_s = round(units(3.5))  # more than a rank that failed leaves the others in `run_ranks`
    outcomes = rank_outcomes(2, partial(raise_on, [1], barrier=True), collective_timeout=limit_s)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]
    assert f"Timed out waiting {limit_s}000ms" in outcomes[0].report


@pytest.mark.slow
def test_outcomes_of_killed_and_stopped_ranks():
    killed = rank_outcomes(2, signal_on, 1, signal.SIGKILL)
    assert [(outcome.status, outcome.value) for outcome in killed] == [("returned", 0), ("died", None)]
    stopped = rank_outcomes(2, signal_on, 0, signal.SIGSTOP, timeout=units(4))
    assert [outcome.status for outcome in stopped] == ["hung", "returned"]


def test_an_exception_that_cannot_be_sent_is_told_all_the_same():
    outcomes = rank_outcomes(1, raise_unpicklable)
    assert outcomes[0].value is None
    assert "Unpicklable: 1 and 2" in outcomes[0].report


SCRIPT = """
import os
from statetree.testing import run_ranks
if __name__ == "__main__":
    print(*run_ranks(2, os.getpid), flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "os.kill(os.getpid(), 9)"])
def test_processes_end_with_the_one_that_started_them(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    done = run_python([script])
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2, done.stderr
    assert end_soon(pids)


def run_python(arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=units(30),
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def end_soon(pids):
    until = time.monotonic() + units(10)
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


BUSY = """
import os, signal, sys, threading, time
from pathlib import Path
import torch.distributed as dist
from statetree.testing import run_ranks
def work(folder):
    (folder / str(os.getpid())).touch()
    if dist.get_rank():
        dist.barrier()
    while True:
        pass
def kill_when_busy(folder, number):
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), number)
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    threading.Thread(target=kill_when_busy, args=(folder, int(sys.argv[2])), daemon=True).start()
    run_ranks(2, work, folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_processes_that_work_end_with_the_one_that_started_them(number, tmp_path):
    script, busy = tmp_path / "script.py", tmp_path / "busy"
    script.write_text(BUSY)
    busy.mkdir()
    with tempfile.TemporaryDirectory() as temporary:  # whose path is short, as those of sockets have to be
        done = run_python([script, busy, str(int(number))], TMPDIR=temporary)
        assert done.returncode == -number, done.stderr
        assert end_soon([int(file.name) for file in busy.iterdir()])
        assert not list(Path(temporary).glob("statetree-*"))


CHILD = """
import multiprocessing, os, sys
from statetree.testing import run_ranks
def child():
    print(*run_ranks(2, os.getpid), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_child_of_multiprocessing_ends(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    done = run_python([script, method])
    pids = list(map(int, done.stdout.split()))
    assert (done.returncode, len(pids)) == (0, 2), done.stderr
    assert end_soon(pids)


UNGUARDED = """
import os
from statetree.testing import run_ranks
run_ranks(2, os.getpid)
"""


@pytest.mark.slow
def test_a_main_module_that_ranks_cannot_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = run_python([script])
    assert "exit code 1. It had not begun. Ranks import the main module: " in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


def listening():
    """Return the addresses on which this process listens, as Linux writes them: in hexadecimal."""
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")  # the host's name may point to the loopback by itself
    dist.new_group([0, 1])
    mine = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was that of the folder
            mine.add(os.readlink(f"/proc/self/fd/{file}"))
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    entries = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return [entry[1].split(":")[0] for entry in entries if entry[3] == "0A" and f"socket:[{entry[9]}]" in mine]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_ranks_listen_on_the_loopback_only(fresh, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for found in run_ranks(2, listening, fresh=fresh):
        assert set(found) == {"0100007F"}  # 127.0.0.1


def test_threads_take_turns():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda value: run_ranks(2, add_up, value), range(8)))
    assert [total[0].item() for [(_, total), _] in results] == [11.0 * value for value in range(8)]


def start_a_process():
    process = multiprocessing.get_context("spawn").Process(target=nothing)
    process.start()
    process.join(units(30))
    return process.exitcode


@pytest.mark.slow
def test_ranks_may_start_processes():
    assert run_ranks(1, start_a_process) == [0]


@pytest.mark.parametrize(
    ("world_size", "fn", "error", "message"),
    [
        (0, nothing, ValueError, "world_size: expected a number of ranks, at least 1, got 0"),
        ("2", nothing, ValueError, "world_size: expected a number of ranks, at least 1, got '2'"),
        (2, None, TypeError, "fn: expected a function, got None"),
    ],
)
def test_wrong_arguments_are_named(world_size, fn, error, message):
    with pytest.raises(error, match=f"^run_ranks: {message}"):
        run_ranks(world_size, fn)


UNIT = """
import os, time
from statetree.testing import pace, rank_calls, run_ranks

def nothing():
    return None

if __name__ == "__main__":
    os.environ.pop("STATETREE_TESTS_UNIT_S", None)
    pace.subprocess.run = None  # no process is started to measure it
    run_ranks(1, nothing)
    print(pace.units(1) >= pace.LEAST_S)
    first = pace.units(1)
    rank_calls._kept.popitem()[1].close()
    run_ranks(1, nothing)
    print(pace.units(1) == first)
"""


@pytest.mark.slow
def test_limits_of_ranks_are_multiples_of_what_the_first_one_took_to_start(tmp_path):
    (tmp_path / "script.py").write_text(UNIT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=units(30), check=True
    )
    assert done.stdout == "True\nTrue\n"


FORKED = """
import os, sys, threading, time, warnings
import torch.distributed as dist
from statetree.testing import run_ranks

def slow():
    time.sleep(3)

def child():
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(run_ranks(2, dist.get_rank), flush=True)
    os._exit(0)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_ranks(2, dist.get_rank)
    other = threading.Thread(target=run_ranks, args=(2, slow))
    other.start()
    time.sleep(0.5)
    print(child(), flush=True)
    other.join()
    print(child(), run_ranks(2, dist.get_rank, timeout=float("inf")), flush=True)
"""


@pytest.mark.slow
def test_a_forked_child_has_ranks_of_its_own(tmp_path):
    (tmp_path / "forked.py").write_text(FORKED)
    command = [sys.executable, str(tmp_path / "forked.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=units(120))
    assert ran.stdout.splitlines() == ["[0, 1]", "0", "[0, 1]", "0 [0, 1]"], ran.stderr


@pytest.mark.parametrize("name", ["timeout", "collective_timeout"])
@pytest.mark.parametrize("given", [0, -1.0, float("nan"), None, "5"])
def test_timeouts_that_cannot_be_are_refused(name, given):
    with pytest.raises(ValueError, match=f"^run_ranks: {name}: expected a positive number of seconds, got {given!r}"):
        run_ranks(2, os.getpid, **{name: given})


def test_timeouts_may_be_infinite():
    assert len(run_ranks(2, add_up, 1, timeout=float("inf"), collective_timeout=float("inf"), fresh=True)) == 2
