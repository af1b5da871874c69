"""Plain values that a training state holds come back by default; hostile ones are refused, and nothing in them runs."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import os
import pathlib
import random
import types
import uuid
import zipfile
import zoneinfo

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import statetree
from statetree import dcp
from statetree.dcp.plain_values import read_value, why_not_restorable


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1


class Config:
    def __init__(self, width):
        self.width = width


ZONE = datetime.timezone(datetime.timedelta(hours=2), "there")
VALUES = {
    "a NumPy float": np.float64(1.5),
    "a NumPy half": np.float16(-0.0),
    "a NumPy integer": np.int64(-3),
    "a NumPy bool": np.True_,
    "a NumPy complex number": np.complex64(1 - 2j),
    "a NumPy text": np.str_("abc"),
    "NumPy bytes": np.bytes_(b"abc"),
    "an array": np.arange(6).reshape(2, 3),
    "an array by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "an empty array": np.zeros((0, 3)),
    "an array of one": np.array(5),
    "an array of texts": np.array(["a", "bcd"]),
    "a dtype": np.dtype("f4"),
    "NumPy's random state": np.random.RandomState(3).get_state(),
    "Python's random state": random.Random(3).getstate(),
    "a path": pathlib.Path("/a/b"),
    "a pure path": pathlib.PureWindowsPath("c:/a"),
    "a datetime": datetime.datetime(2024, 2, 29, 23, 59, 58, 123456, ZONE),
    "a date": datetime.date(2024, 2, 29),
    "a time": datetime.time(1, 2, 3, 4),
    "a timedelta": datetime.timedelta(1, 2, 3),
    "a timezone": ZONE,
    "a UUID": uuid.UUID(int=3),
    "a frozenset": frozenset([1, (2, "a")]),
    "a set": {1, 2},
    "a range": range(3, 9, 2),
    "a slice": slice(1, None, 2),
    "an ellipsis": ...,
    "an Enum": Color.RED,
    "an Enum of texts": Color.BLUE,
    "an IntEnum": Level.LOW,
    "a Flag": Bits.A | Bits.B,
    "a Namespace": argparse.Namespace(lr=np.float32(0.5), out=pathlib.Path("x"), more=[{2: Color.RED}]),
    "a SimpleNamespace": types.SimpleNamespace(a=1),
    "a tuple of these": (1, Color.RED, np.float64(3)),
    "a Size": torch.Size([2, 3]),
    "a Size of any numbers": torch.Size([-1, *[1] * 70, 1 << 62, 1 << 62]),
    "a dtype of torch": torch.bfloat16,
    "a device": torch.device("cpu"),
    "a layout": torch.sparse_coo,
    "a class": float,
    "a class in a Namespace": argparse.Namespace(c=int),
    "bytes": b"",
    "a bytearray": bytearray(b"x"),
    "a complex number": 1j,
    "a large number": 1 << 80,
}


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.flags.c_contiguous == b.flags.c_contiguous and np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and repr(a) == repr(b)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name, tmp_path):
    statetree.save({"v": VALUES[name], "w": torch.ones(2)}, tmp_path / "c")
    assert same(statetree.load(tmp_path / "c")["v"], VALUES[name])
    assert same(
        statetree.load(tmp_path / "c", {"v": VALUES[name], "w": torch.zeros(2)}, in_place=True)["v"], VALUES[name]
    )
    torch.save({"v": VALUES[name]}, tmp_path / "v.pt")
    assert same(statetree.files.open(tmp_path / "v.pt")["v"], VALUES[name])


def test_a_generator_goes_on_where_it_was(tmp_path):
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    statetree.save({"g": generator}, tmp_path)
    loaded = statetree.load(tmp_path)["g"]
    assert [torch.rand(3, generator=each).tolist() for each in (loaded, loaded)] == [
        torch.rand(3, generator=each).tolist() for each in (generator, generator)
    ]


@pytest.mark.parametrize("value", [np.arange(3_000_000).astype(np.uint8), b"\xff" * 3_000_000], ids=["array", "bytes"])
def test_large_values_come_back(value, tmp_path):
    """What is decoded costs its own length, and no more."""
    statetree.save({"a": value}, tmp_path)
    assert np.array_equal(statetree.load(tmp_path)["a"], value)


def test_tensors_in_values_come_back(tmp_path):
    value = argparse.Namespace(t=torch.arange(6.0).reshape(2, 3).t(), path=pathlib.Path("x"), part=torch.arange(5)[2:])
    statetree.save({"v": value}, tmp_path)
    loaded = statetree.load(tmp_path)["v"]
    assert loaded.path == value.path
    assert torch.equal(loaded.t, value.t)
    assert loaded.t.stride() == (1, 3)
    assert torch.equal(loaded.part, value.part)


@pytest.mark.parametrize(
    "value",
    [
        Config(3),
        len,
        functools.partial(int),
        np.random.default_rng(5),
        random.Random(5),
        np.array([1, "a"], dtype=object),
        [Config(1)],
        decimal.Decimal("1.50"),
        fractions.Fraction(1, 3),
    ],
    ids=["object", "function", "partial", "NumPy generator", "random", "objects", "list", "decimal", "fraction"],
)
def test_the_rest_is_warned_of_at_once(value, tmp_path):
    state = {"deep": [{"x": value}], "w": torch.ones(2)}
    for save in (
        lambda: statetree.save(state, tmp_path / "a"),
        lambda: dcp.async_save(state, checkpoint_id=tmp_path / "b").result(),
        lambda: dcp.Checkpointer(tmp_path / "c").save(1, state),
        lambda: dcp.Checkpointer(tmp_path / "d").async_save(1, state).result(),
    ):
        with pytest.warns(UserWarning, match=r"save: what restore does not make .*\n  deep\.0\.x") as caught:
            save()
        assert len(caught) == 1
    with pytest.raises(statetree.CheckpointError, match=r"(plain value at|the entry) '?deep\.0\.x.* cannot be read"):
        statetree.load(tmp_path / "a")


class Drawn:
    """Pickled as a call of a class method."""

    @classmethod
    def of(cls, _number):
        return cls()

    def __reduce__(self):
        return Drawn.of, (1,)


class Retired(enum.Enum):
    """Has lost a member since it was saved."""

    KEPT = 1

    def __reduce_ex__(self, _protocol):
        return Retired, (7,)


UNKNOWN = {
    "times": np.array(["2020"], "M8[s]"),
    "a time": np.timedelta64(1, "s"),
    "a dtype": np.dtype("M8[s]"),
    "objects": np.array([None, 1]),
    "fields": np.zeros(2, [("a", "f4")]),
    "a time zone": datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "a class method": Drawn(),
    "a lost member": Retired.KEPT,
}


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
@pytest.mark.parametrize("suffix", ["", ".pt"], ids=["directory", "torch file"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_one_value_that_is_not_made_leaves_the_rest_readable(name, suffix, tmp_path):
    state, path = {"v": UNKNOWN[name], "w": torch.arange(2.0)}, tmp_path / f"c{suffix}"
    (torch if suffix else statetree).save(state, path)
    assert statetree.load(path, where="w")["w"].tolist() == [0, 1]
    assert statetree.load(path, {"w": torch.zeros(2)}, strict=False)["w"].tolist() == [0, 1]
    opened = statetree.files.open(path, skip_foreign=True)
    assert isinstance(opened["v"], statetree.files.StoredObject)
    for load in (statetree.load, statetree.files.open):
        with pytest.raises(statetree.CheckpointError, match=r"If you trust it") as refused:
            load(path)
        assert "damaged" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_a_checkpointer_restores_what_lies_beside_a_value_that_is_not_made(tmp_path):
    with statetree.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"v": UNKNOWN["times"], "w": torch.arange(2.0)})
        assert checkpointer.restore({"w": torch.zeros(2)}, strict=False)["w"].tolist() == [0, 1]


def test_what_torch_admits_is_loaded(tmp_path):
    core = np._core.multiarray
    admitted = [core._reconstruct, core.scalar, np.ndarray, np.dtype, np.dtypes.DateTime64DType]
    with torch.serialization.safe_globals(admitted):
        statetree.save({"v": UNKNOWN["times"]}, tmp_path)
        assert np.array_equal(statetree.load(tmp_path)["v"], UNKNOWN["times"])


def test_classes_that_the_user_named_are_not_warned_of(tmp_path):
    with torch.serialization.safe_globals([Config]):
        statetree.save({"v": Config(3)}, tmp_path)
        assert statetree.load(tmp_path)["v"].width == 3


def test_a_device_mesh_is_not_made(tmp_path):
    """Making one starts a process group; torch itself admits it."""
    before = torch.distributed.is_initialized()
    reduced = Reduced(DeviceMesh, ())
    assert "Unsupported class torch.distributed.device_mesh.DeviceMesh" in why_not_restorable(saved(reduced))
    assert torch.distributed.is_initialized() == before


class Reduced:
    """Pickles as a call, with a state."""

    def __init__(self, function, args, state=None):
        self.how = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.how


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


HOSTILE = {
    "a call": Reduced(os.mkdir, ("statetree_was_here",)),
    "a method": Reduced(getattr, (int, "mro")),
    "an import": Reduced(__import__, ("antigravity",)),
    "much memory": Reduced(bytes, (1 << 40,)),
    "much memory of an array": Reduced(np._core.multiarray._reconstruct, (np.ndarray, (1 << 40,), b"b"), 5),
    "a short array": Reduced(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1 << 40,), np.dtype("f8"), False, b"x")
    ),
    "a negative shape": Reduced(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (-1, -8), np.dtype("u1"), False, b"12345678")
    ),
    "addresses": Reduced(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), np.dtype("O"), False, b"12345678")
    ),
    "a scalar of addresses": Reduced(np._core.multiarray.scalar, (np.dtype("O"), b"12345678")),
    "a short scalar": Reduced(np._core.multiarray.scalar, (np.dtype("f8"), b"1")),
    "a dtype with fields": Reduced(
        np.dtype, ("V1", False, True), (3, "|", None, ("a",), {"a": (np.dtype("f8"), 1 << 40)}, 1, 1, 16)
    ),
    "no day": Reduced(datetime.date, (b"\x07\xe8\x02\xff",)),
    "no hour": Reduced(datetime.datetime, (b"\x07\xe8\x02\x01\xff\xff\xff\xff\xff\xff",)),
    "no member": Reduced(Color, (7,)),
    "a number of attributes": Reduced(types.SimpleNamespace, (), {1: 2}),
    "a small state": Reduced(torch.Generator, (torch.device("cpu"),), (1, None, torch.zeros(3, dtype=torch.uint8))),
    "an invalid state": Reduced(
        torch.Generator, (torch.device("cpu"),), (1, None, torch.full((5056,), 255, dtype=torch.uint8))
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = saved(HOSTILE[name])
    assert why_not_restorable(data)
    assert not os.listdir(tmp_path)


def edited(data, edit):
    """A file of torch's, with another pickle."""
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(archive, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, edit(content) if name.endswith("data.pkl") else content)
    return archive.getvalue()


def test_a_tensor_does_not_reach_beyond_its_storage():
    data = saved([torch.arange(5, dtype=torch.uint8)])
    wider = edited(data, lambda content: content.replace(b"K\x05\x85", b"K\x06\x85"))
    assert wider != data
    with pytest.raises(statetree.CheckpointError, match="on a storage, which would end at byte"):
        read_value(wider)


def test_numbers_of_another_machine_are_refused():
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(1.5))) as old, zipfile.ZipFile(archive, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(statetree.CheckpointError, match=r"its byte order is .*: expected little"):
        read_value(archive.getvalue())


def test_an_enum_is_not_imported_for(tmp_path):
    """Its module has to be there already."""
    pickled = b"\x80\x02cantigravity\nColor\nK\x01\x85R."
    data = edited(saved(1), lambda content: pickled)
    assert "antigravity" in why_not_restorable(data)
    assert "antigravity" not in __import__("sys").modules


def test_scheduler_state_comes_back_without_a_template(tmp_path):
    """The milestones of MultiStepLR are a Counter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
    state = {
        "scheduler": scheduler.state_dict(),
        "seen": collections.defaultdict(list, {"a": [1]}),
        "recent": collections.deque([torch.ones(1), 2], 3),
        "plain": collections.defaultdict(None, {1: torch.ones(2)}),
    }
    statetree.save(state, tmp_path)
    loaded = statetree.load(tmp_path)
    statetree.testing.assert_trees_equal(loaded, state)
    assert loaded["seen"].default_factory is list
    assert loaded["recent"].maxlen == 3
    scheduler.load_state_dict(loaded["scheduler"])
    assert scheduler.milestones == collections.Counter({5: 2, 2: 1})


class Versioned:
    """Cannot be made of what an older version of it wrote."""

    def __init__(self):
        self.number = 1

    def __setstate__(self, state):
        raise ValueError("needs version 2")


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_a_class_that_is_admitted_and_fails_is_not_called_unknown(tmp_path):
    statetree.save({"v": Versioned(), "w": torch.ones(2)}, tmp_path)
    with torch.serialization.safe_globals([Versioned]):
        for load in (statetree.files.open, lambda path: statetree.files.open(path, skip_foreign=True)):
            with pytest.raises(statetree.CheckpointError, match=r"'v': the value cannot be read: .*needs version 2"):
                load(tmp_path)
    opened = statetree.files.open(tmp_path, skip_foreign=True)
    assert isinstance(opened["v"], statetree.files.StoredObject)
