"""Fixtures for the command line's tests."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cli.states import run


@pytest.fixture
def statetree(capsys):
    """The command: called with its arguments, returns status, standard output and standard error."""
    return partial(run, capsys)
