"""Hypothesis profiles, chosen by the environment variable HYPOTHESIS_PROFILE.

``dev`` while working, ``ci`` in `make test` and wherever CI is set, ``thorough`` in `make thorough`.
"""

import os
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code: speed is benchmarks/' concern.
UNTIMED = settings(
    parent=settings.get_profile("default"),  # not the current profile, which is another one where CI is set
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

settings.register_profile("dev", UNTIMED, max_examples=50)
# The same examples every time: a red run must come from the change at hand. dev and thorough explore.
settings.register_profile("ci", UNTIMED, max_examples=100, derandomize=True, database=None)
settings.register_profile("thorough", UNTIMED, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


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


@pytest.fixture(scope="session")
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
