"""Pickles as records, and what these stand for. (Hostile ones: test_deep_pickles.py, tests/cli, tests/dcp.)"""

import collections
import copyreg
import gc
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress

import pytest

from statetree.files.pickled_values import Rules, made
from statetree.files.safe_pickle import BadPickle, Record, StoredObject, collection_paused, read_records
from tests.pace import units

PLAIN = [
    None,
    [True, False, 0, 255, 256, 65536, -1, 2**31, -(2**80), 0.5, "text", "\ud800", "x" * 300],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": ()},
    [{}, [], [[1], [2, 3]], {1: {2: 3}, (4, "5"): None}],
    OrderedDict(b=1, a=[OrderedDict(c=2)]),
    collections.Counter("abca"),
    complex(1, -2),
    {number: str(number) for number in range(3000)},
    [list(range(1000)), *([[]] * 3)],
    {1, 2, "a"},
    bytearray(b"xy"),
    b"x" * 300,
]


class Point:
    def __init__(self, x):
        self.x = x


def read(data, **names):
    rules = Rules()
    rules.foreign = {"a.Unknown"}
    for name, method in names.items():
        setattr(rules, name, method)
    return made(read_records(data)[0], rules)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_are_what_pickle_makes_of_them(value, protocol):
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert type(found) is type(value)


def test_objects_stay_one():
    one = [1]
    first, second = read(pickle.dumps([one, one], 2))
    assert first is second


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_are_recorded_and_not_made(protocol):
    found, names = read_records(pickle.dumps(Point([1]), protocol))
    assert isinstance(found, Record)
    assert f"{__name__}.Point" in names
    assert found.state == {"x": [1]}


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


@pytest.mark.parametrize("target", [b"ca\nb\n", b"]", b"}", b"K\x01", b"ca\nb\n)R", b"ccollections\nCounter\n)R"])
def test_nothing_else_has_a_state(target):
    with pytest.raises(BadPickle):
        read(b"\x80\x02" + target + STATE, called=lambda name, args: [name])
    assert Record.name == ""


def test_classes_of_records_cannot_be_changed():
    """BUILD would set attributes of a class, and find what the class has for its instances."""
    for state in (b"N}X\x06\x00\x00\x00forgedK\x01s\x86b.", b"ca\nb\n)R\x62."):
        with pytest.raises(BadPickle):
            read_records(b"\x80\x02ca\nb\n" + state)
    assert not hasattr(Record, "forged")


def test_a_name_is_never_what_it_names():
    found, names = read_records(b"\x80\x02cos\nmkdir\n.")
    assert issubclass(found, Record)
    assert set(names) == {"os.mkdir"}


def test_nor_is_a_number_that_pickle_knows_a_name_for():
    """Pickle would return what it found before, and not ask again."""
    copyreg.add_extension("os", "getcwd", 77)
    try:
        by_number = b"\x80\x02\x82\x4d."
        assert pickle.loads(by_number) is os.getcwd
        assert issubclass(read_records(by_number)[0], Record)
        assert pickle.loads(by_number) is os.getcwd
    finally:
        copyreg.remove_extension("os", "getcwd", 77)


def test_functions_are_asked_for_and_foreign_ones_stand_for_their_results():
    assert read(b"\x80\x02ca\nb\nK\x01\x85R.", called=lambda *call: call) == ("a.b", (1,))
    assert isinstance(read(b"\x80\x02ca\nUnknown\nK\x01\x85R}b."), StoredObject)
    with pytest.raises(BadPickle, match=r"makes a a\.b in an unknown way"):
        read(b"\x80\x02ca\nb\nK\x01\x85R.")


def test_storages_are_admitted_only_where_asked_for():
    with pytest.raises(BadPickle, match="outside of it"):
        read(b"\x80\x02K\x01Q.")
    assert read(b"\x80\x02K\x01Q.", stored=lambda pid: ("storage", pid)) == ("storage", 1)


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
