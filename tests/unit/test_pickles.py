"""Pickles read as data: what comes out of sound ones. (Bad ones: tests/cli/test_hostile_torch.py, tests/dcp.)"""

import gc
import pickle
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress

import pytest

from statetree.pickles import BadPickle, Foreign, Named, Reader, Record, Recorded, collection_paused
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
    if name == "Point":
        return Recorded(name)
    return Foreign(name) if name == "Unknown" else Named(f"{module}.{name}")


def read(data, **options):
    return Reader(data, lambda name, args: (name, args), names, **options).load()


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


def test_what_lies_in_records_counts():
    deep = [1]
    for _ in range(60):
        deep = [deep, deep]
    with pytest.raises(BadPickle, match="shared so often"):
        read(pickle.dumps(Point(deep), 4), is_modern=True)


def test_records_that_hold_themselves_are_refused():
    point = Point(None)
    point.x = point
    with pytest.raises(BadPickle, match="holds itself"):
        read(pickle.dumps(point, 4), is_modern=True)


def test_functions_are_asked_for_and_foreign_ones_stand_for_their_results():
    assert read(b"\x80\x02ca\nb\nK\x01\x85R.") == ("a.b", (1,))
    assert isinstance(read(b"\x80\x02ca\nUnknown\nK\x01\x85R}b."), Foreign)


def test_storages_are_admitted_only_where_asked_for():
    with pytest.raises(BadPickle, match="outside of it"):
        read(b"\x80\x02K\x01Q.")
    assert read(b"\x80\x02K\x01Q.", storage=lambda pid: ("storage", pid)) == ("storage", 1)


def test_pickles_follow_each_other():
    reader = Reader(pickle.dumps([1], 2) + pickle.dumps("second", 2), dict, names)
    assert [reader.load(), reader.load()] == [[1], "second"]
    with pytest.raises(BadPickle, match="cut off"):
        reader.load()


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


def test_many_keys_whose_hashes_may_be_chosen_are_read_if_they_are_spread():
    mappings = [{number * 10**12 + index: index for index in range(20)} for number in range(3000)]
    assert read(pickle.dumps(mappings, 2)) == mappings


def test_importing_the_package_does_not_load_it():
    code = "import sys, statetree; assert 'statetree.pickles' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=units(60))
