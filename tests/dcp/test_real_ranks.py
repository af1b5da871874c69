"""Real gloo ranks: FSDP2 with AdamW, resharded from 2 to 4 to 1 ranks, and failures that every rank is told of."""

from __future__ import annotations

import concurrent.futures
import math
import warnings
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

import statetree
from statetree import dcp
from statetree.dcp.groups import new_gloo_group
from statetree.dcp.series import Series
from statetree.testing import run_ranks
from tests.pace import units

STEPS = 2


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def sharded(world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=STEPS):
    for _ in range(steps):
        model(torch.arange(10.0).reshape(2, 5) / 10).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer, step):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counts": (step, {"seen": [step]}), 0: {}}


def summed(state) -> dict[str, float]:
    """Return a number for every tensor, the same whatever the sharding."""
    flat, _ = statetree.to_flat(state)
    totals = {}
    for key, leaf in flat.items():
        if isinstance(leaf, torch.Tensor):
            whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            weights = torch.arange(1.0, whole.numel() + 1).reshape(whole.shape)
            totals[key] = (whole.detach().double() * weights).sum().item()
    return totals


def save_on_ranks(directory: Path) -> dict[str, float]:
    """Save by every means: at once, in the background while training goes on, and with DCP itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(world_size)
    train(model, optimizer)
    state = state_of(model, optimizer, STEPS)
    expected = summed(state)
    statetree.save(state, f"{directory}/saved")
    torch_dcp.save(state, checkpoint_id=f"{directory}/theirs")
    extra = {**state, **({"only": torch.arange(3)} if rank == 1 else {})}
    with statetree.Stager() as stager:
        future = dcp.async_save(extra, checkpoint_id=f"{directory}/async", stager=stager)
        train(model, optimizer, 20)  # collectives on the default group, while the save is under way
        future.result(units(30))
    with dcp.Checkpointer(f"{directory}/series", keep=2) as series:
        for step in range(3):
            series.async_save(step, {"model": model.state_dict(), "step": step, "rank": rank})
            train(model, optimizer, 1)
        with pytest.raises(statetree.CheckpointError, match=r"expected one of step 9"):
            series.restore(step=9)
        restored = series.restore({"model": model.state_dict(), "step": None, "rank": None})
        assert restored["step"] == 2
        assert restored["rank"] == 0  # the first rank's plain values count
        assert series.steps() == [1, 2]
    return expected


def load_on_ranks(directory: Path, expected: dict[str, float]) -> None:
    world_size = dist.get_world_size()
    for name in ("saved", "async", "theirs"):
        model, optimizer = sharded(world_size)
        train(model, optimizer, 1)  # gives the optimizer its state
        template = state_of(model, optimizer, 0)
        loaded = statetree.load(f"{directory}/{name}", template, in_place=True, strict=name != "async")
        assert close(summed(loaded), expected), name
        assert loaded["counts"] == (STEPS, {"seen": [STEPS]})
        assert loaded["model"]["0.weight"] is template["model"]["0.weight"]
    loaded = statetree.load(f"{directory}/async", {"only": torch.zeros(3).long()}, in_place=True, where="only")
    assert loaded["only"].tolist() == [0, 1, 2]
    whole = statetree.load(f"{directory}/saved")
    assert close(summed(whole), expected)
    assert whole[0] == {}
    if world_size > 1:
        statetree.save(loaded_state(world_size, directory), f"{directory}/saved by {world_size}")


def loaded_state(world_size: int, directory: Path) -> Any:
    model, optimizer = sharded(world_size)
    train(model, optimizer, 1)
    return statetree.load(f"{directory}/saved", state_of(model, optimizer, 0), in_place=True)


def close(left: dict[str, float], right: dict[str, float]) -> bool:
    return left.keys() == right.keys() and all(math.isclose(left[key], right[key], rel_tol=1e-6) for key in left)


@pytest.mark.slow
def test_a_sharded_state_is_resharded_from_2_to_4_to_1_ranks(tmp_path):
    expected = run_ranks(2, save_on_ranks, tmp_path)[0]
    run_ranks(4, load_on_ranks, tmp_path, expected)
    run_ranks(1, load_on_ranks, tmp_path, expected)
    assert close(summed(statetree.load(tmp_path / "saved by 4")), expected)  # and without ranks
    assert dcp.Checkpointer(tmp_path / "series").restore({"step": None}) == {"step": 2}


def fail_on_ranks(directory: Path) -> list[str]:
    """Let one rank fail in every way, and return what each rank was told."""
    rank, told = dist.get_rank(), []

    def note(call: Any) -> None:
        try:
            call()
        except statetree.StateTreeError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("nothing")

    mesh = init_device_mesh("cpu", (2,))
    good = {"a": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}
    bad = {"a": torch.empty(2, device="meta")} if rank == 1 else good
    note(lambda: statetree.save(bad, f"{directory}/meta"))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    note(
        lambda: dcp.async_save({"a": freed} if rank == 1 else good, checkpoint_id=f"{directory}/staging").result(
            units(30)
        )
    )
    statetree.save(good, f"{directory}/good")
    wrong = {"a": torch.zeros(5) if rank == 1 else torch.zeros(6)}
    note(lambda: statetree.load(f"{directory}/good", wrong, in_place=True, group=dist.group.WORLD))
    assert not wrong["a"].any()
    note(lambda: statetree.load(f"{directory}/nowhere", {"a": torch.zeros(6)}, group=dist.group.WORLD))
    summand = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    note(lambda: statetree.save({"a": summand}, f"{directory}/partial"))
    with dcp.Checkpointer(f"{directory}/series") as series:
        note(lambda: series.save(1, bad))
        assert series.steps() == []
        series.save(2, {"a": distribute_tensor(torch.arange(6.0), mesh, [Replicate()])})
        assert series.steps() == [2]
        note(lambda: series.async_save(3, {"a": freed} if rank == 1 else good).result(units(30)))
        series.save(5, good)  # nothing was begun, and all have heard of it
        assert series.steps() == [2, 5]
    note(lambda: dcp.Checkpointer(f"{directory}/series/step-00000005/.metadata").save(1, good))
    note(lambda: dcp.Checkpointer(f"{directory}/nowhere").restore(good))
    dist.barrier()  # the groups are still of use
    return told


def test_every_rank_is_told_what_fails_on_one(tmp_path):
    first, second = run_ranks(2, fail_on_ranks, tmp_path)
    assert len(first) == len(second) == 9
    for told in (first, second):
        assert "a meta tensor, which has no elements" in told[0]
        assert "shape differs at a: expected (5,), got (6,)" in told[2]
        assert "there is no such directory" in told[3]
        assert "placements (Partial(sum),)" in told[4]
        assert "a meta tensor" in told[5]
        assert told[7].startswith("CheckpointError: save: the first rank could not use the directory: FileExistsError")
        assert told[8].startswith("CheckpointError: restore: there is no complete checkpoint in")
    for index in (1, 6):
        assert first[index].startswith("UnsupportedLeaf: stage: ")
        assert second[index].startswith("UnsupportedLeaf: stage: ")


def disagree_on_steps(directory: Path) -> None:
    rank = dist.get_rank()
    differs = r"step differs over the ranks: expected the same on all, got:\n  rank 0: {}\n  rank 1: {}\n"
    with dcp.Checkpointer(directory) as series:
        for step in (1, 2):
            series.save(step, {"step": step})
        with pytest.raises(statetree.RankMismatch, match="restore: " + differs.format(1, 2)):
            series.restore(step=1 + rank)
        with pytest.raises(statetree.RankMismatch, match="restore: " + differs.format(None, 2)):
            series.restore(step=2 if rank else None)
        with pytest.raises(statetree.RankMismatch, match="save: " + differs.format(10, 11)):
            series.save(10 + rank, {})
        with pytest.raises(statetree.RankMismatch, match="save: " + differs.format(3, -1)):
            series.save(-1 if rank else 3, {})
        with pytest.raises(ValueError, match="save: step must be a number"):
            series.save(-1, {})
        with pytest.raises(statetree.RankMismatch, match="async_save: " + differs.format(10, 11)):
            series.async_save(10 + rank, {}).result(units(30))
        future = series.async_save(10 + rank, {})
        if rank == 0:
            with pytest.raises(statetree.RankMismatch, match="async_save: " + differs.format(10, 11)):
                future.result(units(30))
        else:
            concurrent.futures.wait([future])
        # One rank has not been told: the next call tells it, and all begin nothing.
        with pytest.raises(statetree.RankMismatch, match="async_save: " + differs.format(10, 11)):
            series.save(3, {})
        assert series.steps() == [1, 2]
        assert series.restore() == {"step": 2}  # the ranks are in step


def test_ranks_that_ask_for_different_steps_are_refused(tmp_path):
    run_ranks(2, disagree_on_steps, tmp_path)


def fail_in_the_directory(directory: Path) -> None:
    begin = Series.begin

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError

    Series.begin = fail
    try:
        with pytest.raises(statetree.CheckpointError, match=r"first rank could not use the directory: ZeroDivision"):
            dcp.Checkpointer(directory).save(1, {})
    finally:
        Series.begin = begin
    dcp.Checkpointer(directory).save(1, {})


def test_whatever_fails_on_the_first_rank_is_told_to_the_others(tmp_path):
    run_ranks(2, fail_in_the_directory, tmp_path)


def call_from_outside(directory: Path) -> None:
    group = dist.new_group([1])
    series = dcp.Checkpointer(directory / "series", process_group=group)
    calls = {
        "save": lambda: statetree.save({"a": 1}, directory / "one", group=group),
        "load": lambda: statetree.load(directory / "one", group=group),
        "async_save": lambda: dcp.async_save({}, checkpoint_id=directory / "two", process_group=group).result(
            units(30)
        ),
        "save ": lambda: series.save(1, {}),
        "async_save ": lambda: series.async_save(2, {}).result(units(30)),
        "restore": series.restore,
    }
    for verb, call in calls.items():
        if dist.get_rank() == 1:
            call()
        else:
            outside = rf"^{verb.strip()}: this process \(global rank 0\) is not in the group"
            with pytest.raises(statetree.RankMismatch, match=outside):
                call()


def test_ranks_outside_of_the_group_are_refused(tmp_path):
    run_ranks(2, call_from_outside, tmp_path)
    assert statetree.load(tmp_path / "one") == {"a": 1}


def save_where_ranks_are_in_unequally_many_groups(directory: Path) -> Any:
    """Ranks 1 and 2 alone are in the groups before the last, so that they count more than rank 3."""
    for others in ([0, 1], [0, 1, 2], [1, 2, 3]):
        group = dist.new_group(others)
    rank = dist.get_rank()
    if rank == 0:
        return None
    for name in ("first", "second"):  # each has a thread and a group of its own
        with dcp.Checkpointer(directory / name, process_group=group) as series:
            series.async_save(1, {"own": {rank: torch.arange(3) + rank}})
            loaded = series.restore({"own": {rank: torch.zeros(3).long()}})
    dcp.async_save({rank: 1}, checkpoint_id=directory / "async", process_group=group).result(units(30))
    return loaded["own"][rank].tolist()


@pytest.mark.slow
def test_ranks_may_be_in_unequally_many_groups(tmp_path):
    found = run_ranks(4, save_where_ranks_are_in_unequally_many_groups, tmp_path, timeout=units(15), fresh=True)
    assert found == [None, [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def make_groups_after_a_save(directory: Path) -> list[int]:
    """Some ranks save, and then all of them make a group."""
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank:
        with dcp.Checkpointer(directory, process_group=group) as series:
            series.async_save(1, {"own": {rank: torch.ones(3)}})
        alone = [new_gloo_group(None) for _ in range(rank)]
        assert len({distributed_c10d._world.pg_names[each] for each in alone}) == rank
    everyone = dist.new_group([0, 1, 2], timedelta(seconds=units(5)))  # torch names it after what it has counted
    ranks = [0, 0, 0]
    dist.all_gather_object(ranks, rank, group=everyone)
    return ranks


@pytest.mark.slow
def test_all_ranks_make_groups_after_some_have_saved(tmp_path):
    assert run_ranks(3, make_groups_after_a_save, tmp_path, timeout=units(30), fresh=True) == [[0, 1, 2]] * 3


def save_in_another_order(directory: Path) -> Any:
    group, rank = dist.new_group([2, 0, 1], sort_ranks=False), dist.get_rank()
    with dcp.Checkpointer(directory, process_group=group) as series:
        series.async_save(1, {"own": {rank: torch.arange(3) + rank}})
        loaded = series.restore({"own": {rank: torch.zeros(3).long()}})
    return dist.get_process_group_ranks(new_gloo_group(group)), loaded["own"][rank].tolist()


@pytest.mark.skipif("sort_ranks" not in signature(dist.new_group).parameters, reason="torch 2.11 sorts ranks")
def test_ranks_of_a_group_may_have_another_order(tmp_path):
    found = run_ranks(3, save_in_another_order, tmp_path, timeout=units(30), fresh=True)
    assert found == [([2, 0, 1], [rank, rank + 1, rank + 2]) for rank in range(3)]


def save_on_the_last_two(directory: Path) -> Any:
    group = dist.new_group([2, 3])
    rank = dist.get_rank()
    if rank < 2:
        return None
    own = {rank: torch.arange(3) + rank}
    with dcp.Checkpointer(directory / "series", process_group=group) as series:
        series.async_save(1, {"own": own, "rank": rank})
        restored = series.restore({"own": {rank: torch.zeros(3).long()}, "rank": None})
    dcp.async_save(own, checkpoint_id=directory / "async", process_group=group).result(units(30))
    like = {rank: torch.zeros(3).long()}
    loaded = statetree.load(directory / "async", like, in_place=True, strict=False, group=group)
    return restored["own"][rank].tolist(), restored["rank"], loaded[rank].tolist()


@pytest.mark.slow
def test_some_of_the_ranks_save_by_themselves(tmp_path):
    found = run_ranks(4, save_on_the_last_two, tmp_path)
    assert found == [None, None, ([2, 3, 4], 2, [2, 3, 4]), ([3, 4, 5], 2, [3, 4, 5])]


def save_with_metrics(directory):
    with dcp.Checkpointer(directory, keep=1, keep_best=1) as saved:
        for step, metric in enumerate((3, 1, 2, 4)):
            saved.save(step, {"w": torch.arange(4.0)}, metric=-step if dist.get_rank() else metric)
        return saved.steps(), saved.best_step()


def test_the_first_rank_says_how_good_a_step_is(tmp_path):
    assert run_ranks(2, save_with_metrics, tmp_path) == [([1, 3], 1)] * 2


class Interrupted:
    """It is interrupted on one rank as it is pickled."""

    def __reduce__(self):
        if dist.get_rank():
            raise KeyboardInterrupt
        return Interrupted, ()


def save_interrupted(directory: Path) -> None:
    with pytest.raises(KeyboardInterrupt if dist.get_rank() else statetree.CheckpointError) as caught:
        statetree.save({"b": Interrupted()}, directory / "a")
    if not dist.get_rank():
        assert str(caught.value) == "save: it failed on other ranks: rank 1: KeyboardInterrupt"
    assert list(directory.iterdir()) == []


def test_a_rank_that_is_interrupted_is_named_once(tmp_path):
    run_ranks(2, save_interrupted, tmp_path)


def call_differently(directory: Path, verbs: tuple[str, str]) -> str:
    checkpointer = statetree.Checkpointer(directory, every=timedelta(seconds=1000))
    checkpointer.due(0)
    checkpointer.async_save(1, {"w": torch.ones(2)}).result()  # the groups that the calls below use are there then
    calls = {
        "due": lambda: checkpointer.due(3),
        "save": lambda: checkpointer.save(3, {"w": torch.ones(2)}),
        "restore": lambda: checkpointer.restore({"w": torch.ones(2)}),
    }
    with pytest.raises(statetree.RankMismatch) as caught:
        calls[verbs[dist.get_rank()]]()
    checkpointer.save(4, {"w": torch.ones(2)})
    return str(caught.value)


@pytest.mark.parametrize("verbs", [("due", "save"), ("save", "due"), ("due", "restore")], ids=str)
def test_ranks_that_call_different_methods_of_a_checkpointer_hear_of_it(verbs, tmp_path):
    for message in run_ranks(2, call_differently, tmp_path, verbs):
        assert all(verb in message for verb in verbs)


def save_other_values(folder: Path) -> list[str]:
    rank = dist.get_rank()
    names = [f"name{number}" for number in range(50)]
    alike = {"lr": 0.1, "nan": math.nan, "names": set(names), "model": make_model(), "again": [1, None, "text"]}
    told: list[str] = []
    moment = datetime(2026, 1, 1, rank, tzinfo=UTC)  # no simple value, of which equal ones may be pickled otherwise
    cases = [{}, {"loader": {"seed": rank, "epoch": 3}}, {f"loader of {rank}": rank}, {"moment": moment}]
    for number, own in enumerate(cases):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.Checkpointer(folder / f"{number}").save(1, {"w": torch.ones(2), **alike, **own})
        told.append("".join(str(each.message) for each in caught if "ranks hold different" in str(each.message)))
    return told


def test_plain_values_that_only_the_first_rank_saves_are_warned_of(tmp_path):
    first, second = run_ranks(2, save_other_values, tmp_path)
    assert [*map(bool, first)] == [False, True, False, False]
    assert "loader.seed" in first[1]
    assert "epoch" not in first[1]
    assert not any(second)


def restore_with_one_that_fails(directory: Path, failing: int, error: type[BaseException]) -> None:
    def where(*_: object) -> bool:
        if dist.get_rank() == failing:
            raise error("no")
        return True

    with statetree.Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((3,), float(step))})
        for fallback in (False, True):
            expected = error if dist.get_rank() == failing else statetree.CheckpointError
            with pytest.raises(expected, match=r"^no|^.no|load: it failed on other ranks: rank \d: \w+: .?no"):
                checkpointer.restore({"w": torch.zeros(3)}, where=where, fallback=fallback)
        assert checkpointer.restore({"w": torch.zeros(3)})["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [KeyError, MemoryError, KeyboardInterrupt])
def test_what_fails_on_one_rank_ends_a_restore_on_all(error, failing, tmp_path):
    run_ranks(2, restore_with_one_that_fails, tmp_path, failing, error)


def save_what_one_cannot_take_apart(directory: Path, name: str) -> None:
    tree = {"w": torch.ones(2)}
    if dist.get_rank():
        tree["self"] = tree
    with pytest.raises(statetree.StateTreeError, match="the container at self is the one at <root>"):
        statetree.save(tree, directory / name, group=dist.group.WORLD)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "a.pt"])
def test_a_tree_that_one_rank_cannot_take_apart_is_told_to_all(name, tmp_path):
    run_ranks(2, save_what_one_cannot_take_apart, tmp_path, name)


def load_with_one_that_names_no_path(directory: Path) -> None:
    statetree.save({"w": torch.ones(2)}, directory / "a")
    rank = dist.get_rank()
    with pytest.raises(TypeError if rank else statetree.CheckpointError, match=r"expected str, bytes or os\.Path"):
        statetree.load(None if rank else directory / "a", {"w": torch.ones(2)}, group=dist.group.WORLD)
    assert statetree.load(directory / "a", group=dist.group.WORLD)["w"].tolist() == [1, 1]


def test_what_is_no_path_on_one_rank_is_told_to_all(tmp_path):
    run_ranks(2, load_with_one_that_names_no_path, tmp_path)
