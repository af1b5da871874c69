"""Silent faults of stagers: of objects with ``stage``, ``wait`` and ``close``."""

import contextlib
import gc
from typing import Any

import torch


def torn_snapshot(stager: Any) -> None:
    """What was staged does not change when the next state is staged."""
    state = {"w": torch.zeros(64)}
    first = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    stager.wait(stager.stage(state))
    assert first["w"].tolist() == [0.0] * 64, "the first snapshot has become the second one"


def source_changed_after_staging(stager: Any) -> None:
    """What was staged does not change when training goes on."""
    state = {"w": torch.zeros(64)}
    staged = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    assert staged["w"].tolist() == [0.0] * 64, "the snapshot has the state's memory"


def view_of_a_snapshot(stager: Any) -> None:
    """A kept view of a snapshot does not change."""
    state = {"w": torch.zeros(64)}
    view = stager.wait(stager.stage(state))["w"][2:4]
    gc.collect()
    for value in (1.0, 2.0, 3.0):
        state["w"].fill_(value)
        stager.wait(stager.stage(state))
    assert view.tolist() == [0.0, 0.0], view


def address_used_again(stager: Any) -> None:
    """A new tensor at an old address is staged as it is."""
    for size, dtype in ((64, torch.float32), (32, torch.float64), (64, torch.int32), (16, torch.float32)):
        tensor = torch.arange(size).to(dtype)
        staged = stager.wait(stager.stage({"w": tensor}))
        assert staged["w"].dtype is dtype, (staged["w"].dtype, dtype)
        assert staged["w"].tolist() == list(range(size)), staged
        del tensor, staged


def resized_tensor(stager: Any) -> None:
    """A tensor that is resized is staged as it is now."""
    tensor = torch.arange(8.0)
    stager.wait(stager.stage({"w": tensor}))
    tensor.resize_(3).copy_(torch.tensor([5.0, 6.0, 7.0]))
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == [5.0, 6.0, 7.0], staged


def data_swapped(stager: Any) -> None:
    """A tensor whose data was swapped is staged as it is now."""
    tensor = torch.zeros(8)
    stager.wait(stager.stage({"w": tensor}))
    tensor.data = torch.arange(8.0)
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == list(range(8)), staged


def ties_changed_between_stages(stager: Any) -> None:
    """Ties that change between two stages are as they are now."""
    weight = torch.zeros(4)
    stager.wait(stager.stage({"a": weight, "b": weight}))
    staged = stager.wait(stager.stage({"a": weight, "b": torch.ones(4)}))
    assert staged["a"].tolist() == [0.0] * 4, staged
    assert staged["b"].tolist() == [1.0] * 4, staged


def structure_changed_between_stages(stager: Any) -> None:
    """A state of another structure can be staged next."""
    stager.wait(stager.stage({"a": torch.zeros(4), "n": 1}))
    staged = stager.wait(stager.stage({"a": torch.ones(2), "b": [torch.ones(3)], "n": 2}))
    assert staged["a"].tolist() == [1.0, 1.0], staged
    assert staged["b"][0].tolist() == [1.0] * 3, staged
    assert staged["n"] == 2, staged


def snapshot_after_a_failed_stage(stager: Any) -> None:
    """A failed stage changes no earlier snapshot."""

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("no")

    state: dict[str, Any] = {"w": torch.zeros(64)}
    first = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    with contextlib.suppress(Exception):
        stager.wait(stager.stage({**state, "x": Unpicklable()}))
    assert first["w"].tolist() == [0.0] * 64, "the first snapshot has a part of the one that failed"


def snapshot_after_close(stager: Any) -> None:
    """A snapshot outlives its stager."""
    staged = stager.wait(stager.stage({"w": torch.arange(64.0)}))
    stager.close()
    gc.collect()
    others = [torch.full((64,), -1.0) for _ in range(8)]
    assert staged["w"].tolist() == list(range(64)), staged
    del others
