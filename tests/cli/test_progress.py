"""The line that says how far a command has come: on a terminal alone, and gone when it is done."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest
import torch

import statetree as st
from statetree.cli import app, progress


class Terminal(io.StringIO):
    """Standard error that is a terminal, or not; it is told when something was written."""

    def __init__(self, *, is_terminal=True):
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        super().write(text)
        self.written.set()
        return len(text)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_NEXT_S", 0.001)
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    return found


def test_items_are_counted_and_the_line_is_taken_away(terminal):
    for item in progress.tracked("show", range(3), 3):
        if item == 2:
            terminal.written.clear()
            assert terminal.written.wait(30)
    assert "show: 2 of 3" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_the_line_is_taken_away_after_an_error(terminal):
    def fail():
        with progress.progress("diff", 9, lambda: 4):
            assert terminal.written.wait(30)
            raise KeyError("w")

    with pytest.raises(KeyError, match="w"):
        fail()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_what_is_no_terminal_gets_no_line(terminal):
    terminal.is_terminal = False
    assert list(progress.tracked("show", "ab", 2)) == ["a", "b"]
    assert terminal.getvalue() == ""


def test_what_is_soon_done_shows_no_line(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_S", 60.0)
    assert list(progress.tracked("show", "ab", 2)) == ["a", "b"]
    assert terminal.getvalue() == ""


def test_bytes_that_are_written_are_counted(tmp_path):
    before = progress.bytes_written()
    (tmp_path / "a").write_bytes(bytes(1000))
    assert progress.bytes_written() >= before + 1000


@pytest.mark.parametrize("command", ["show --stats", "show --stats --json", "diff", "convert"])
def test_commands_show_how_far_they_are(command, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    st.save({"w": torch.arange(9.0), "v": torch.ones(2)}, "a.pt")
    shown = []

    class Thread:
        def __init__(self, target, daemon):
            self.target = target

        def start(self):
            shown.append(self)

        def join(self):
            assert self in shown

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Thread=Thread, Event=threading.Event))
    more = {"diff": ["a.pt"], "convert": ["b.safetensors"]}
    assert app.main([*command.split(), "a.pt", *more.get(command, [])]) == 0
    assert len(shown) == (2 if command == "convert" else 1)
