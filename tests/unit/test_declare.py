"""Properties that are computed once, without a lock."""

import os
import pathlib
import re
import signal
import threading
import time
import warnings

import statetree
from statetree.declare import cached_property
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
