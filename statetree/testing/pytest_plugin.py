"""The plugin of statetree for pytest: two fixtures and a marker, whose names begin with ``statetree_``.

Every session of pytest imports it where statetree is installed: it has no other names, so that it is in nobody's way,
and imports torch when a fixture is used.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How many units a call on ranks may take, and how many a collective waits.
CALL_UNITS, COLLECTIVE_UNITS = 30, 15
DEFAULT_WORLD_SIZE = 2


class RanksFixture:
    """Real ranks of a world size: call it with a function, and it returns what each rank returned.

    It takes what ``statetree.testing.run_ranks`` takes. Deadlines are multiples of what a process takes to start here
    and now, so that a busy machine does not fail a test.

    Attributes:
        world_size: How many there are.
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
        sizes = marker.args if marker else (DEFAULT_WORLD_SIZE,)
        metafunc.parametrize("statetree_ranks", sizes, indirect=True, ids=[f"{size} ranks" for size in sizes])


@pytest.fixture
def statetree_ranks(request: pytest.FixtureRequest) -> RanksFixture:
    """Real ranks, two unless the test is marked with ``statetree_world_sizes``."""
    return RanksFixture(request.param)


@pytest.fixture
def statetree_local_ranks() -> Iterator[Callable[[int], Any]]:
    """A function of a number of ranks, which from then on all are in this process until the test ends."""
    from statetree.testing import local_ranks

    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(local_ranks(world_size))
