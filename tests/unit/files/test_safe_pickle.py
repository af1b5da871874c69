"""Pickles read as data: what comes out of sound ones. (Bad ones: tests/cli/test_hostile_torch.py, tests/dcp.)"""

import gc
import pickle
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress

import pytest

from statetree.files.safe_pickle import BadPickle, Named, Reader, Record, StoredObject, collection_paused
from tests.pace import units

PLAIN = [
    None,
    [True, False, 0, 255, 256, 65536, -1, 2**31, -(2**80), 0.5, "text", "\ud800", "x" * 300],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": ()},
    [{}, [], [[1], [2, 3]], {1: {2: 3}, (4, "5"): None}],
    OrderedDict(b=1, a=2),
    complex(1, -2),
    {number: str(number) for number in range(3000)},
    [list(range(1000)), *([[]] * 3)],
]


class Point:
    def __init__(self, x):
        self.x = x


def names(module, name):
    return StoredObject(name) if name == "Unknown" else Named(f"{module}.{name}")


def read(data, **options):
    def call(name, args):
        return Record("Point") if name.endswith(".Point") else (name, args)

    return Reader(data, call, names, **options).load()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_are_what_pickle_makes_of_them(value, protocol):
    found = read(pickle.dumps(value, protocol), is_modern=True)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value", [{1, 2, "a"}, set(), b"", b"x" * 300, b"y"], ids=["set", "empty set", "empty", "long", "short"]
)
def test_sets_and_bytes_of_protocol_4(value):
    assert read(pickle.dumps(value, 4), is_modern=True) == value


def test_protocol_4_is_admitted_only_where_asked_for():
    with pytest.raises(BadPickle, match="the instruction 0x"):
        read(pickle.dumps(["text"], 4))


def test_objects_stay_one():
    one = [1]
    first, second = read(pickle.dumps([one, one], 2))
    assert first is second


def test_objects_are_recorded_and_not_made():
    found = read(pickle.dumps(Point([1]), 4), is_modern=True)
    assert type(found) is Record
    assert (found.name, found.state) == ("Point", {"x": [1]})


def test_containers_that_are_shared_often_or_hold_themselves_are_refused():
    deep = [1]
    for _ in range(60):
        deep = [deep, deep]
    with pytest.raises(BadPickle, match="shared so often"):
        read(pickle.dumps(deep, 2))
    deep.append(deep)
    with pytest.raises(BadPickle, match="holds itself"):
        read(pickle.dumps(deep, 2))


STATE = b"}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xsb."


@pytest.mark.parametrize("target", [b"ca\nb\n", b"ca\nb\n)R", b"]", b"}", b"ca\nPoint\n"])
def test_nothing_else_has_a_state(target):
    with pytest.raises(BadPickle, match="or its state"):
        read(b"\x80\x02" + target + STATE)


def test_the_state_of_what_is_not_loaded_is_passed_over():
    assert read(b"\x80\x02ca\nUnknown\n" + STATE).name == "Unknown"


def test_a_state_may_not_pass_for_a_storage():
    with pytest.raises(BadPickle, match="sets items of a int, or its state"):
        read(b"\x80\x02K\x01K\x02K\x03\x87Q.", storage=lambda pid: pid)


def test_functions_are_asked_for_and_foreign_ones_stand_for_their_results():
    assert read(b"\x80\x02ca\nb\nK\x01\x85R.") == ("a.b", (1,))
    assert isinstance(read(b"\x80\x02ca\nUnknown\nK\x01\x85R}b."), StoredObject)


def test_storages_are_admitted_only_where_asked_for():
    with pytest.raises(BadPickle, match="outside of it"):
        read(b"\x80\x02K\x01Q.")
    assert read(b"\x80\x02K\x01Q.", storage=lambda pid: ("storage", pid)) == ("storage", 1)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_stays_as_it_was(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    try:
        with suppress(ValueError), collection_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_importing_the_package_does_not_load_it():
    code = "import sys, statetree; assert 'statetree.files.safe_pickle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=units(60))
