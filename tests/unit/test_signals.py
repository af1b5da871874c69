"""What the handler of a signal raises comes out of a verb as it is, wherever it comes: it says nothing of a leaf."""

import functools
import operator
import signal
import sys
import tempfile
import traceback
import weakref

import pytest
import torch

import statetree as st
from statetree.errors import clear_frames, unsignalled


class Alarm(Exception):
    """What a handler raises."""


class Alarming:
    """A leaf in the middle of which the alarm rings, as often as it is taken apart."""

    def __init__(self):
        self.values = torch.ones(3)


class AlarmingType(st.LeafType):
    def unpack(self, value):
        signal.raise_signal(signal.SIGALRM)
        return [value.values], None

    def pack(self, context, parts):
        return Alarming()


st.register_leaf_type(Alarming, AlarmingType)


class Pickled:
    """An object in the middle of which the alarm rings as it is pickled."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGALRM)
        return Pickled, ()


def ring(_number, _frame, error=Alarm):
    raise error("alarm")


class Bell:
    def ring(self, number, frame):
        ring(number, frame)

    def __call__(self, number, frame):
        ring(number, frame)


def ring_without_arguments(number, frame):
    del number, frame
    raise Alarm("alarm")


class BellWithFunc(Bell):
    @property
    def func(self):
        raise RuntimeError("no partial")


HANDLERS = {
    "a function that deletes its arguments": ring_without_arguments,
    "an object that has a func": BellWithFunc(),
    "a decorated function": torch.no_grad()(ring),
    "a lambda": lambda *_: ring(*_),
    "a function": ring,
    "a method": Bell().ring,
    "an object": Bell(),
    "a partial": functools.partial(ring, error=Alarm),
}


def staged(tree):
    with st.Stager() as stager:
        stager.stage(tree)


def saved(tree, name="a"):
    with tempfile.TemporaryDirectory() as folder:
        st.save(tree, f"{folder}/{name}")


def kept(tree):
    with tempfile.TemporaryDirectory() as folder, st.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, tree)


VERBS = {
    "offload": st.offload,
    "similarity": lambda tree: st.similarity(tree, tree.copy()),
    "digest": st.digest,
    "delta": lambda tree: st.delta(tree, tree.copy()),
    "stage": staged,
    "gather": st.gather,
    "save": saved,
    "save one file": lambda tree: saved(tree, "a.pt"),
    "checkpointer": kept,
}


@pytest.fixture
def rings(request):
    """Have the alarm ring a bell: the one that is asked for."""
    before = signal.signal(signal.SIGALRM, getattr(request, "param", ring))
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("leaf", [Alarming, Pickled])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("rings")
def test_it_comes_out_of_every_verb(verb, leaf):
    with pytest.raises(Alarm, match=r"^alarm$"):
        VERBS[verb]({"a": torch.ones(2), "b": leaf()})


@pytest.mark.parametrize("rings", HANDLERS.values(), ids=HANDLERS, indirect=True)
@pytest.mark.usefixtures("rings")
def test_whatever_the_handler_is():
    with pytest.raises(Alarm, match=r"^alarm$"):
        st.similarity({"b": Alarming()}, {"b": Alarming()})


class RingsAtImports:
    """A finder of modules at which the alarm rings in a frame of Python's import, which tracebacks leave out."""

    raise_signal = staticmethod(signal.raise_signal)
    find_spec = property(operator.methodcaller("raise_signal", signal.SIGALRM))


class Imports:
    def __reduce__(self):
        __import__("statetree_tests_import_nothing")


@pytest.mark.parametrize("rings", [functools.partial(ring, error=ModuleNotFoundError)], indirect=True)
@pytest.mark.usefixtures("rings")
def test_it_comes_out_of_an_import(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [RingsAtImports()])
    with pytest.raises(ModuleNotFoundError, match=r"^alarm$") as raised:
        st.offload({"b": Imports()})
    assert not any("importlib" in each.filename for each in traceback.extract_tb(raised.value.__traceback__))


@pytest.mark.parametrize("rings", [functools.partial(ring, error=TimeoutError)], indirect=True)
@pytest.mark.parametrize("name", ["a.pt", "a"])
@pytest.mark.usefixtures("rings")
def test_a_file_is_not_blamed_for_it(name, tmp_path):
    """A ``TimeoutError`` is an ``OSError``, as those of disks are."""
    with pytest.raises(TimeoutError, match=r"^alarm$"):
        st.save({"b": Pickled()}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("rings")
def test_a_value_that_is_pickled_is_not_blamed_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.save", lambda *_: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(Alarm, match=r"^alarm$"):
        st.save({"b": {1, 2}}, tmp_path / "a")


@pytest.mark.parametrize("rings", [functools.partial(ring, error=TimeoutError)], indirect=True)
@pytest.mark.usefixtures("rings")
def test_a_read_is_not_blamed_for_it(tmp_path, monkeypatch):
    st.save({"a": torch.arange(4.0)}, tmp_path / "a.pt")
    monkeypatch.setattr("os.preadv", lambda *_: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(TimeoutError, match=r"^alarm$"):
        st.load(tmp_path / "a.pt")


class Failing:
    @torch.no_grad()
    def __reduce__(self):
        raise Alarm("of nobody's handler")


def test_an_alarm_that_rang_before_says_nothing_of_later_errors(tmp_path):
    """Who saves since time is up does so in an ``except`` block: what is raised there has the alarm for context."""
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.raise_signal(signal.SIGALRM)
    except Alarm:
        with pytest.raises(st.UnsupportedLeaf, match=r"save: .* at b"):
            st.save({"b": Failing()}, tmp_path / "a")
        with pytest.raises(st.UnsupportedLeaf, match=r"offload: .* at b"):
            st.offload({"b": Failing()})
        assert not st.similarity({"b": Failing()}, {"b": Failing()})
        with pytest.raises(st.CheckpointError, match="there is no such directory or file"):
            st.load(tmp_path / "none")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("rings", [torch.no_grad()(ring)], indirect=True)
@pytest.mark.usefixtures("rings")
def test_an_error_of_the_leaf_itself_still_names_the_leaf():
    with pytest.raises(st.UnsupportedLeaf, match=r"offload: .* at b") as caught:
        st.offload({"b": Failing()})
    assert str(caught.value.path) == "b"
    assert "of nobody's handler" in str(st.similarity({"b": Failing()}, {"b": Failing()}))


@torch.no_grad()
def fails_with(_tensor):
    raise Alarm("of nobody's handler")


@pytest.mark.parametrize("rings", [torch.no_grad()(ring)], indirect=True)
@pytest.mark.usefixtures("rings")
def test_what_frames_held_is_let_go_of():
    tensor = torch.ones(2)
    seen = weakref.ref(tensor)
    try:
        fails_with(tensor)
    except unsignalled(Alarm) as raised:
        error = raised
    clear_frames(error)
    del tensor
    assert seen() is None
