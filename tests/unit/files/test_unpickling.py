"""Pickles as records, and what is made of these. (Hostile ones: test_deep_pickles.py, tests/cli, tests/dcp.)"""

import collections
import copyreg
import datetime
import os
import pickle
import subprocess
import sys
import zoneinfo
from collections import OrderedDict

import numpy as np
import pytest

from statetree.files import pickled_values
from statetree.files.unpickling import BadPickle, Known, StoredObject, read_pickle
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
    {"before": 1, "frozen": frozenset({"a"}), "more": [frozenset({1, (2, 3)}), (frozenset(), 5)]},
    bytearray(b"xy"),
    b"x" * 300,
]


class Point:
    def __init__(self, x):
        self.x = x


def read(data, storage=None, **names):
    return read_pickle(data, lambda name: names.get(name.replace(".", "_")) or pickled_values.find(name), storage)[0]


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
def test_objects_of_unknown_classes_are_not_made(protocol):
    found, foreign = read_pickle(pickle.dumps({"p": Point([1])}, protocol), pickled_values.find)
    assert isinstance(found["p"], StoredObject)
    assert [found["p"].name] == foreign == [f"{__name__}.Point"]


def test_what_only_an_unknown_object_holds_need_not_be_made():
    broken = b"c__builtin__\ncomplex\nX\x01\x00\x00\x00x\x85R"
    with pytest.raises(BadPickle, match="ValueError"):
        read(b"\x80\x02" + broken + b".")
    assert isinstance(read(b"\x80\x02ca\nb\n" + broken + b"\x85R."), StoredObject)


class Keyworded:
    """Pickled with keywords: as a ``partial`` by protocol 2, by an instruction of its own from protocol 4 on."""

    def __new__(cls, **_named):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"a": 1}


class Minted:
    """Pickled as a call of a class method, which protocol 2 gets by ``getattr``."""

    @classmethod
    def of(cls, _number):
        return cls()

    def __reduce__(self):
        return Minted.of, (1,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.array(["2020"], "M8[s]"), "numpy.dtype('M8')"),
        (np.timedelta64(1, "s"), "numpy.dtype('m8')"),
        (np.dtype("M8[s]"), "numpy.dtype('M8')"),
        (np.array([None, 1]), "numpy.dtype('O8')"),
        (np.zeros(2, [("a", "f4")]), "numpy.dtype('V4')"),
        (np.dtype("f4", metadata={"a": 1}), "numpy.dtype('f4')"),
        (datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "zoneinfo.ZoneInfo"),
        (Keyworded(), f"{__name__}.Keyworded"),
        (Minted(), f"{__name__}.Minted"),
    ],
    ids=["times", "a time", "a dtype", "objects", "fields", "metadata", "time zone", "keywords", "class method"],
)
def test_what_is_well_formed_and_not_known_has_a_stand_in(value, named, protocol):
    found, foreign = read_pickle(pickle.dumps({"v": value, "w": 1}, protocol), pickled_values.find)
    assert isinstance(found["v"], StoredObject)
    assert found["w"] == 1
    assert any(name.startswith(named) for name in foreign)


def test_what_is_known_takes_no_keywords():
    with pytest.raises(BadPickle, match=r"makes a builtins\.complex in an unknown way"):
        read(b"\x80\x04c__builtin__\ncomplex\n)}X\x04\x00\x00\x00realK\x01s\x92.")


def test_a_failure_that_is_called_is_still_one():
    broken = b"c__builtin__\ncomplex\nX\x01\x00\x00\x00x\x85R"
    with pytest.raises(BadPickle, match="ValueError"):
        read(b"\x80\x02" + broken + b")R.")


@pytest.mark.parametrize("text", [b"Q8", b"M8[s]", b"O8;"])
def test_a_dtype_that_numpy_does_not_write_is_damaged(text):
    written = pickle.dumps(np.dtype("M8[s]"), 2)
    changed = written.replace(b"X\x02\x00\x00\x00M8", b"X" + len(text).to_bytes(4, "little") + text)
    assert changed != written
    with pytest.raises(BadPickle, match="makes a dtype of something else"):
        read(changed)


STATE = b"}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xsb."


@pytest.mark.parametrize("target", [b"]", b"}", b"K\x01", b"ca\nb\n)R", b"ccollections\nCounter\n)R"])
def test_nothing_else_has_a_state(target):
    with pytest.raises(BadPickle):
        read(b"\x80\x02" + target + STATE, a_b=Known(lambda: [1]))


def test_names_cannot_be_changed():
    """Python's own unpickler would set attributes of a class."""
    found = read(b"\x80\x02ca\nb\nN}X\x06\x00\x00\x00forgedK\x01s\x86b.")
    assert isinstance(found, StoredObject)
    assert not hasattr(found, "forged")
    assert not hasattr(StoredObject, "forged")


def test_a_name_is_never_what_it_names():
    found, foreign = read_pickle(b"\x80\x02cos\nmkdir\n.", pickled_values.find)
    assert isinstance(found, StoredObject)
    assert foreign == ["os.mkdir"]


def test_nor_is_a_number_that_pickle_knows_a_name_for():
    copyreg.add_extension("os", "getcwd", 77)
    try:
        by_number = b"\x80\x02\x82\x4d."
        assert pickle.loads(by_number) is os.getcwd
        with pytest.raises(BadPickle, match="refers to what it does not hold"):
            read(by_number)
    finally:
        copyreg.remove_extension("os", "getcwd", 77)


def test_functions_are_called_by_what_is_known_of_them():
    call = b"\x80\x02ca\nb\nK\x01\x85R."
    assert read(call, a_b=Known(lambda *args: ("b", args))) == ("b", (1,))
    assert isinstance(read(call), StoredObject)
    with pytest.raises(BadPickle, match=r"makes a a\.b in an unknown way"):
        read(call, a_b=Known())


def test_storages_are_admitted_only_where_asked_for():
    with pytest.raises(BadPickle, match="outside of it"):
        read(b"\x80\x02K\x01Q.")
    assert read(b"\x80\x02K\x01Q.", storage=lambda *pid: ("storage", pid)) == ("storage", (1,))


def test_importing_the_package_does_not_load_it():
    code = "import sys, statetree; assert 'statetree.files.unpickling' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=units(60))
