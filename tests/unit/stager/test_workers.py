"""Work is queued whole, or not at all, and errors are raised where the call was made."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from statetree.stager.workers import aside
from tests.pace import units


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_calls_are_carried_out_in_order(where):
    done = []

    def queue():
        for number in range(20):
            aside(executor.submit, done.append, number)

    with ThreadPoolExecutor(1) as executor:
        if where == "main thread":
            queue()
        else:
            thread = threading.Thread(target=queue)
            thread.start()
            thread.join()
    assert done == list(range(20))


def test_the_result_is_returned_and_no_thread_stays():
    before = threading.enumerate()
    assert aside(divmod, 7, 2) == (3, 1)
    assert aside(threading.get_ident) != threading.get_ident()
    assert aside(lambda: threading.Thread().daemon)  # it asks which thread this is, which makes it known
    assert threading.enumerate() == before


def test_what_the_executor_refuses_is_raised_here():
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        aside(executor.submit, print)


def test_nothing_of_the_call_is_held_when_it_is_over():
    class Argument:
        pass

    with ThreadPoolExecutor(1) as executor:
        argument = Argument()
        argument.gone = gone = threading.Event()
        Argument.__del__ = lambda self: gone.set()
        aside(executor.submit, id, argument)
        aside(executor.submit, id, None)
        del argument
        assert gone.wait(units(30))
