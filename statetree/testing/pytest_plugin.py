"""The plugin of statetree for pytest: a fixture and a marker, whose names begin with ``statetree_``.

Every session of pytest imports it where statetree is installed: it has no other names, so that it is in nobody's way,
and imports torch when the fixture is used.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    about = "numbers of ranks that the fixture `statetree_ranks` has in turn"
    config.addinivalue_line("markers", f"statetree_world_sizes(*sizes): {about}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test for each of its world sizes."""
    if "statetree_ranks" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("statetree_world_sizes")
        sizes = marker.args if marker else (2,)
        metafunc.parametrize("statetree_ranks", sizes, indirect=True, ids=[f"{size} ranks" for size in sizes])


@pytest.fixture
def statetree_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_ranks`` without the world size: two ranks unless the test is marked with ``statetree_world_sizes``."""
    from statetree.testing import run_ranks
    from statetree.testing.pace import units

    # Deadlines are multiples of what a process takes to start here and now: a busy machine does not fail a test.
    return functools.partial(run_ranks, request.param, timeout=units(30), collective_timeout=units(15))
