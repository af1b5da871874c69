"""The plugin of statetree for pytest: a fixture and a marker, whose names begin with ``statetree_``.

Every session of pytest imports it where statetree is installed: it has no other names, so that it is in nobody's way,
and imports torch when the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many units a call on ranks may take, and how many a collective waits.
CALL_UNITS, COLLECTIVE_UNITS = 30, 15


class RanksFixture:
    """Real ranks of a world size: call it as ``run_ranks``, without the size, and it returns what each rank returned.

    Deadlines are multiples of what a process takes to start here and now: a busy machine does not fail a test.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run ``fn(*args)`` on every rank."""
        from statetree.testing import run_ranks
        from statetree.testing.pace import units

        limits = {"timeout": units(CALL_UNITS), "collective_timeout": units(COLLECTIVE_UNITS)}
        return run_ranks(self.world_size, fn, *args, **(limits | options))

    def __repr__(self) -> str:
        return f"RanksFixture({self.world_size})"


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
def statetree_ranks(request: pytest.FixtureRequest) -> RanksFixture:
    """Real ranks, two unless the test is marked with ``statetree_world_sizes``."""
    return RanksFixture(request.param)
