"""Hypothesis profiles, limits of time, and which tests are slow or share ranks.

The environment variable HYPOTHESIS_PROFILE chooses the profile: ``quick`` in `make test`, ``ci`` in `make slow` and
wherever CI is set, ``thorough`` in `make thorough`, ``dev`` while working.
"""

import functools
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import kept_calls  # noqa: F401 - which chooses what collectives know again
from tests.pace import units

# How long an example takes says more about the machine than about the code: speed is benchmarks/' concern.
UNTIMED = settings(
    parent=settings.get_profile("default"),  # not the current profile, which is another one where CI is set
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

settings.register_profile("dev", UNTIMED, max_examples=50)
# The same examples every time: a red run must come from the change at hand. dev and thorough explore.
settings.register_profile("quick", UNTIMED, max_examples=15, derandomize=True, database=None)
settings.register_profile("ci", UNTIMED, max_examples=100, derandomize=True, database=None)
settings.register_profile("thorough", UNTIMED, max_examples=3000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
settings.load_profile(PROFILE)
if settings.default.derandomize:
    # One example in twenty is a number or text from the source of what is imported, and that depends on which tests ran
    # before in this worker (hypothesis 6.170; it has no setting for it).
    assert hasattr(providers, "_get_local_constants")
    assert hasattr(providers, "_local_constants")
    providers._get_local_constants = lambda: providers._local_constants

#: After how many units a test is taken to hang.
LIMIT = 3600 if PROFILE == "thorough" else 300
#: What collectives and ranks wait for each other, unless a test says otherwise.
RANKS_LIMIT, COLLECTIVE_LIMIT = 60, 30
#: What each rank would import for itself: for about as long as all tests of most files take.
NEEDED_ON_RANKS = (
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed._shard.sharded_tensor",
    "statetree.dcp",
    "statetree.testing",
    "tests.trees.corpus",
    "tests.kept_calls",
)
#: Worlds of other sizes than two and three are for `make slow`, where a test is run for several.
QUICK_WORLDS = (2, 3)
ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads it
def pytest_configure(config: pytest.Config) -> None:
    """Let limits of time be multiples of how long things take here and now."""
    if config.option.timeout is None:
        config.option.timeout = units(LIMIT)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs one rank or many as slow."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("world_size", QUICK_WORLDS[0]) not in QUICK_WORLDS:
        item.add_marker(pytest.mark.slow)


@functools.cache
def starts_ranks(file: str) -> bool:
    return re.search(r"\b(run_ranks|rank_outcomes|close_ranks)\b", (ROOT / file).read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file's tests to one worker, and all files that start ranks to the same: pools would fight for the cores.

    Not by marks: xdist 3.8 tells groups by the ids of tests, which pytest 9 does not let it change.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if starts_ranks(file) else file

    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_frozen() -> None:
    """Look no more at what was imported, collected and cached: a stager collects garbage whenever it would be busy."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_fast_and_are_waited_for() -> None:
    """Ranks are waited for as long as tests are: what ``run_ranks`` takes for granted is for machines that are idle."""
    from statetree.testing import rank_calls

    rank_calls.PRELOADED.extend(NEEDED_ON_RANKS)
    limits = {"timeout": units(RANKS_LIMIT), "collective_timeout": units(COLLECTIVE_LIMIT)}
    rank_calls.run_ranks.__kwdefaults__ |= limits


# A plan that is used again is compared with the one that would be made now; ranks take over the environment.
os.environ.setdefault("STATETREE_CHECK_PLANS", "1")


@pytest.fixture(autouse=True)
def _state_of_the_thread() -> Iterator[None]:
    """No test may leave torch's modes of this thread changed: others after it would fail, or pass, by chance."""
    yield
    import torch

    state = {
        "__torch_function__ is called": torch._C._is_torch_function_enabled(),
        "operations are recorded for gradients": torch.is_grad_enabled(),
        "inference mode is off": not torch.is_inference_mode_enabled(),
        "no mode of __torch_dispatch__ is on": not torch._C._len_torch_dispatch_stack(),
        "no mode of __torch_function__ is on": not torch._C._len_torch_function_stack(),
        "the default dtype is float32": torch.get_default_dtype() is torch.float32,
    }
    wrong = [what for what, holds in state.items() if not holds]
    assert not wrong, f"left by this test, not so any more: {', '.join(wrong)}"


@pytest.fixture(scope="module")
def one_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default process group of this process alone."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("one_rank") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter by its representation, without addresses: every process must find the same names.

    The elements of a set come in another order in every process.
    """
    if val is None or isinstance(val, bool | int | float | str | type | set | frozenset):
        return None
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(val))
    return shown if len(shown) <= 60 and shown.isprintable() else None
