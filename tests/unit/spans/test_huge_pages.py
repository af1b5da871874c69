"""``huge_pages``: they are used where they are quicker, and the user has the last word."""

import subprocess
import sys

import pytest

from statetree.spans import huge_pages
from statetree.spans.huge_pages import SWITCH, decided
from statetree.spans.memory import Memory


def scripted(huge, small):
    """Return a measure that says what it is told, and a list of what it was asked."""
    coming, asked = {True: iter(huge), False: iter(small)}, []

    def fill(use_huge):
        asked.append(use_huge)
        return next(coming[use_huge])

    return fill, asked


@pytest.mark.parametrize(
    ("huge", "small", "use"),
    [
        ([1, 1, 1], [2, 2, 2], True),
        ([2, 2, 2], [1, 1, 1], False),
        ([1, 1, 1], [1, 1, 1], False),
        ([9, 1, 1], [2, 2, 2], True),  # one disturbed measurement decides nothing
        ([1, 1, 1], [2, 0, 2], True),
        ([3, 3, 1], [2, 2, 2], False),
    ],
)
def test_they_are_used_where_they_are_quicker(huge, small, use):
    fill, asked = scripted(huge, small)
    assert decided("", available=True, fill=fill) is use
    assert asked == [True, False] * 3


@pytest.mark.parametrize(("setting", "use"), [("always", True), ("never", False)])
def test_the_switch_decides_without_measuring(setting, use):
    fill, asked = scripted([], [])
    assert decided(setting, available=True, fill=fill) is use
    assert asked == []


@pytest.mark.parametrize("setting", ["", "always", "never"])
def test_what_is_not_available_is_not_used(setting):
    fill, asked = scripted([], [])
    assert decided(setting, available=False, fill=fill) is False
    assert asked == []


@pytest.mark.parametrize("setting", ["always", "never", ""])
def test_the_environment_variable_is_the_switch(setting):
    script = f"""if True:
        from statetree.spans import huge_pages
        huge_pages._madvise = lambda: lambda *_: 0
        huge_pages.is_reported = lambda _: False
        huge_pages._fill_s = lambda huge: 1.0 if huge else 2.0
        assert huge_pages.are_used() is {setting != "never"}
    """
    subprocess.run([sys.executable, "-c", script], check=True, env={SWITCH: setting})


@pytest.mark.parametrize(
    ("text", "reported"), [("9\n", True), ("10", True), ("4294967295\n", False), ("", False), (None, False)]
)
def test_the_system_says_whether_free_memory_goes_to_a_host(text, reported, tmp_path):
    file = tmp_path / "order"
    if text is not None:
        file.write_text(text)
    assert huge_pages.is_reported(file) is reported


@pytest.mark.parametrize("setting", ["always", "never", ""])
def test_they_are_not_used_where_free_memory_goes_to_a_host(setting, monkeypatch):
    monkeypatch.setenv(SWITCH, setting)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *_: 0)
    monkeypatch.setattr(huge_pages, "is_reported", lambda _: True)
    monkeypatch.setattr(huge_pages, "_fill_s", lambda huge: 1.0 if huge else 2.0)
    assert huge_pages.are_used.__wrapped__() is (setting == "always")


@pytest.fixture
def advised(monkeypatch):
    """What is asked of the system where huge pages are used."""
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *call: asked.append(call) or -1)  # and refused
    monkeypatch.setattr(huge_pages, "are_used", lambda: True)
    return asked


def test_advice_stays_within_the_buffer(advised):
    (buffer,) = Memory().carve([(4 << 20) + 5])
    ((start, length, _),) = advised
    begin = buffer.storage.data_ptr()
    assert begin <= start
    assert start + length <= begin + (4 << 20) + 5
    assert length >= (4 << 20) - 8192


def test_small_memory_is_left_alone(advised):
    Memory().carve([100, (2 << 20) - 1])
    assert advised == []


@pytest.mark.parametrize(
    "make", [lambda size: Memory().carve([size])[0].storage, Memory().block], ids=["carve", "block"]
)
def test_no_advice_is_given_where_they_are_not_used(make, advised, monkeypatch):
    monkeypatch.setattr(huge_pages, "are_used", lambda: False)
    assert make(4 << 20).nbytes() == 4 << 20
    assert advised == []


def test_measuring_ends_well_where_memory_cannot_be_mapped(monkeypatch):
    def refused(size):
        raise OSError

    monkeypatch.setattr(huge_pages, "mapped", refused)
    assert decided("", available=True, fill=huge_pages._fill_s) is False
