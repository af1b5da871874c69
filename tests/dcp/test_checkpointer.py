"""A series of checkpoints: complete or not there, pruned, replaced, restored."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from stat import S_ISDIR

import pytest
import torch

import statetree
from statetree.dcp import AsyncStager, Checkpointer, data_files, restoring, saving, series
from tests.judge import assert_trees_equal
from tests.pace import units

#: Many tests here save steps in any order.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not above that of the latest checkpoint")


def state_of(step):
    return {"w": torch.arange(4.0) + step, "step": step}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_saves_are_listed_and_restored(tmp_path):
    with Checkpointer(tmp_path / "new" / "run") as saved:
        assert saved.steps() == []
        for step in (3, 1, 20):
            saved.save(step, state_of(step))
        assert saved.steps() == [1, 3, 20]
        assert_trees_equal(saved.restore(), state_of(20))
        template = {"w": torch.zeros(4), "step": None}
        restored = saved.restore(template, step=3)
        assert restored["w"] is template["w"]
        assert_trees_equal(restored, state_of(3))
    assert_trees_equal(Checkpointer(tmp_path / "new" / "run").restore(), state_of(20))


def test_old_ones_are_pruned(tmp_path):
    with Checkpointer(tmp_path, keep=2) as saved:
        for step in range(4):
            saved.async_save(step, state_of(step))
        saved.restore()
        assert names(tmp_path) == ["step-00000002", "step-00000003"]
        saved.save(1, state_of(1))  # the one just saved stays, though it is not among the highest
        assert saved.steps() == [1, 2, 3]


def test_a_step_is_replaced(tmp_path, monkeypatch):
    seen = []
    prune = series.Series.prune

    def looking(self, keep, latest):
        seen.append(Checkpointer(tmp_path).restore()["w"][0].item())
        return prune(self, keep, latest)

    monkeypatch.setattr(series.Series, "prune", looking)
    with Checkpointer(tmp_path) as saved:
        for value in range(3):
            saved.save(7, state_of(value))
            assert_trees_equal(saved.restore(step=7), state_of(value))
        assert saved.steps() == [7]
    assert seen == [0.0, 1.0, 2.0]
    assert names(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("name", [".statetree_manifest", "__0_0.distcp"])
def test_a_step_with_a_link_to_itself_is_damaged(name, tmp_path):
    saved = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        saved.save(step, state_of(step))
    (saved.path(2) / name).unlink()
    (saved.path(2) / name).symlink_to(name)
    with pytest.warns(UserWarning, match="took the checkpoint of step 1"):
        assert_trees_equal(saved.restore(fallback=True), state_of(1))


def test_a_step_whose_folder_is_removed_while_it_is_written(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    publish = series.Series.publish

    def remove(own, partial):
        shutil.rmtree(partial.path)
        publish(own, partial)

    monkeypatch.setattr(series.Series, "publish", remove)
    with pytest.raises(statetree.CheckpointError, match=r"save: .*partial-\w+ has no .metadata any more"):
        saved.save(1, state_of(1))


def test_what_another_publishes_while_old_ones_are_pruned_stays(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep=1) as saved:
        saved.save(0, state_of(0))
        listed, pending = series.Series.all, [9]

        def listing(self):
            found = listed(self)
            for step in pending[:] if len(found) == 2 else ():
                pending.clear()
                shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-{step:08}")
            return found

        monkeypatch.setattr(series.Series, "all", listing)
        saved.save(1, state_of(1))
    assert not pending
    assert saved.steps() == [1, 9]


def test_a_step_that_another_writer_prunes_as_soon_as_it_has_its_name_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "sync", lambda _: shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True))
    with Checkpointer(tmp_path) as saved:
        saved.save(1, state_of(1))
        assert saved.steps() == []


def test_the_directory_of_all_steps_is_no_checkpoint(tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(3, state_of(3))
        saved.save(4, state_of(4))
    with pytest.raises(
        statetree.CheckpointError, match=r"2 checkpoints lie in it, the last of them step-00000004\. Pass"
    ):
        statetree.load(tmp_path)


def test_what_is_foreign_is_ignored_and_left_alone(tmp_path):
    for name in ("step-1", "step-00000009", "step-00000008.0", "notes", ".step-00000001.partial-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-1" / ".metadata").touch()
    (tmp_path / "step-00000008.0" / ".metadata").touch()
    (tmp_path / "step-00000005").touch()
    before = names(tmp_path)
    with Checkpointer(tmp_path, keep=1) as saved:
        assert saved.steps() == []
        with pytest.raises(
            statetree.CheckpointError, match=r"no complete checkpoint in .*: expected a checkpoint, got"
        ):
            saved.restore()
        with pytest.raises(statetree.CheckpointError, match=r"save: .*step-00000005 is no complete checkpoint: exp"):
            saved.save(5, state_of(5))
        saved.save(6, state_of(6))
        assert saved.steps() == [6]
        with pytest.raises(statetree.CheckpointError, match=r"expected one of step 5, got steps: 6"):
            saved.restore(step=5)
    assert set(names(tmp_path)) - set(before) == {"step-00000006"}
    assert set(before) <= set(names(tmp_path))


def test_leftovers_are_removed_but_not_those_of_a_running_save(tmp_path):
    old = tmp_path / f".step-00000001.partial-{'a' * 32}"
    removed = tmp_path / f".step-00000001.removed-{'b' * 32}"
    for path in (old, removed):
        path.mkdir()
        (path / "file").touch()
    running = series.Series(tmp_path).begin(2, [])  # as another process would
    assert not old.exists()
    assert not removed.exists()
    Checkpointer(tmp_path).save(3, state_of(3))
    assert names(tmp_path) == [running.path.name, "step-00000003"]
    running.close()
    Checkpointer(tmp_path).save(4, state_of(4))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


class Held:
    """Holds the writing up until it is let go."""

    def __init__(self, monkeypatch):
        self.go = threading.Event()
        run = saving.StateSave.run

        def wait_and_run(*args):
            assert self.go.wait(units(10))
            return run(*args)

        monkeypatch.setattr(saving.StateSave, "run", wait_and_run)


def test_a_running_save_is_waited_for(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    weight = torch.zeros(2)
    with Checkpointer(tmp_path) as saved:
        first = saved.async_save(1, {"w": weight})
        weight += 1
        assert saved.steps() == []
        threading.Timer(0.1, held.go.set).start()
        second = saved.async_save(2, {"w": weight})
        assert first.done()
        second.result(units(10))
        saved.async_save(3, {"w": weight})
        assert saved.restore(step=1)["w"].tolist() == [0, 0]
        assert saved.steps() == [1, 2, 3]
        assert saved.restore(step=2)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("call", ["save", "async_save", "restore", "close"])
def test_errors_of_the_background_surface_at_the_next_call(call, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("planted")

    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(saving.StateSave, "run", fail)
        future = saved.async_save(2, state_of(2))
        assert "planted" in str(future.exception(units(10)))
    arguments = (3, state_of(3)) if call.endswith("save") else ()
    with pytest.raises(statetree.CheckpointError, match=r"planted"):
        getattr(saved, call)(*arguments)
    assert saved.steps() == [1]
    assert names(tmp_path) == ["step-00000001"]
    saved.close()
    with pytest.raises(statetree.CheckpointError, match=r"is closed"):
        saved.save(4, state_of(4))


def test_an_error_beside_another_is_a_note(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("planted")

    monkeypatch.setattr(saving.StateSave, "run", fail)

    def leave_with_another():
        with Checkpointer(tmp_path) as saved:
            saved.async_save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        leave_with_another()
    assert "planted" in caught.value.__notes__[0]


def test_a_failed_rename_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))

    def fail(*args):
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(series.Series, "publish", fail)
        with pytest.raises(statetree.CheckpointError, match=r"could not use the directory: OSError: planted"):
            saved.save(2, state_of(2))
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("step", [-1, True, "1", 1.0, None])
def test_steps_are_numbers(step, tmp_path):
    with pytest.raises(ValueError, match=r"save: step must be a number"):
        Checkpointer(tmp_path).save(step, {})


@pytest.mark.parametrize("step", [-1, True, "1", 1.0])
def test_steps_to_restore_are_numbers(step, tmp_path):
    saved = Checkpointer(tmp_path)
    saved.save(1, {"a": 1})
    with pytest.raises(ValueError, match=r"restore: step must be a number"):
        saved.restore(step=step)


@pytest.mark.parametrize("stager", [3, statetree.Stager])
def test_a_stager_can_stage(stager, tmp_path):
    with pytest.raises(TypeError, match=r"stager must have a stage method: expected .*, got "):
        Checkpointer(tmp_path, stager=stager)


def test_every_nth_stays(tmp_path):
    with Checkpointer(tmp_path, keep=2, keep_every=3) as saved:
        for step in range(1, 9):
            saved.save(step, state_of(step))
        assert saved.steps() == [3, 6, 7, 8]


METRICS = {1: float("nan"), 2: 0.1, 3: None, 4: 0.1, 5: float("nan"), 6: -float("inf"), 7: 0.7}


def test_the_best_stay(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=3) as saved:
        assert saved.best_step() is None
        for step, metric in METRICS.items():
            saved.save(step, state_of(step), metric=metric)
            assert saved.latest_step() == step
            assert saved.best_step() == (None if step == 1 else 2 if step < 4 else 4 if step < 6 else 6)
        assert saved.steps() == [2, 4, 6, 7]
        assert saved.best_step() == 6
    with Checkpointer(tmp_path, keep=1, keep_best=2, keep_every=4) as later:  # another process, after a crash
        later.async_save(8, state_of(8), metric=torch.tensor(0.2)).result()
        later.save(9, state_of(9))
        assert later.steps() == [4, 6, 8, 9]
        for step in later.steps():
            assert_trees_equal(later.restore(step=step), state_of(step))


def test_a_step_that_is_replaced_is_as_good_as_it_is_now(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=1) as saved:
        saved.save(1, state_of(1), metric=1)
        saved.save(2, state_of(2), metric=2)
        saved.save(1, state_of(1), metric=3)
        assert saved.best_step() == 2
        assert saved.steps() == [1, 2]
        saved.save(3, state_of(3))
        assert saved.steps() == [2, 3]


def test_a_step_whose_manifest_cannot_be_read_may_be_the_best_and_stays(tmp_path):
    with Checkpointer(tmp_path, keep=2, keep_best=1) as saved:
        for step in (1, 2, 3):
            saved.save(step, state_of(step), metric=step)
        assert saved.steps() == [1, 2, 3]
        (tmp_path / "step-00000001" / ".statetree_manifest").write_bytes(b"damaged")
        with pytest.warns(UserWarning, match="one may be better"):
            assert saved.best_step() == 2
        saved.save(4, state_of(4), metric=4)
        saved.save(5, state_of(5), metric=5)
        assert saved.steps() == [1, 2, 4, 5]


@pytest.mark.parametrize("metric", ["low", [1.0], torch.zeros(2)], ids=["text", "list", "two elements"])
def test_a_metric_is_a_number(metric, tmp_path):
    with Checkpointer(tmp_path) as saved:
        for save in (saved.save, saved.async_save):
            with pytest.raises(TypeError, match=r"save: metric must be a number, or None: expected a float, got "):
                save(1, state_of(1), metric=metric)
        assert saved.steps() == []


def test_keep_is_positive(tmp_path):
    for name in ("keep", "keep_every", "keep_best"):
        with pytest.raises(ValueError, match=rf"{name} must be at least 1"):
            Checkpointer(tmp_path, **{name: 0})


@pytest.mark.parametrize("keep", [2.0, True, "2"])
def test_keep_is_a_whole_number(keep, tmp_path):
    with pytest.raises(TypeError, match=r"keep must be a whole number, or None: expected an int, got "):
        Checkpointer(tmp_path, keep=keep)


@pytest.mark.parametrize("error", [PermissionError("planted"), TypeError("planted")])
def test_what_fails_after_the_rename_does_not_deny_the_checkpoint(error, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    saved = Checkpointer(tmp_path, keep=1)
    saved.save(1, state_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(series.Series, "prune", fail)
        with pytest.raises(statetree.CheckpointError, match=r"save: .*planted") as caught:
            saved.save(2, state_of(2))
    assert "incomplete" not in str(caught.value)
    assert ("is complete, but older ones could not be removed" in str(caught.value)) == isinstance(error, OSError)
    assert_trees_equal(saved.restore(), state_of(2))


def save_elsewhere_while_reading(monkeypatch, directory, step, value):
    """Let another process' save, which keeps one, fall into the next reading of a checkpoint."""
    read_described, pending = data_files.read_described, [value]

    def read_after_a_save(*args, **options):
        if pending:
            Checkpointer(directory, keep=1).save(step, state_of(pending.pop()))
        return read_described(*args, **options)

    monkeypatch.setattr(data_files, "read_described", read_after_a_save)


def test_the_latest_is_looked_for_again_if_it_is_removed_while_it_is_read(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))
    save_elsewhere_while_reading(monkeypatch, tmp_path, 2, 2)
    assert_trees_equal(saved.restore(state_of(0)), state_of(2))


@pytest.mark.filterwarnings("ignore:save. step")  # a step is replaced
@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "another"])
def test_a_checkpoint_is_found_although_another_takes_its_place_after_the_names_were_read(step, tmp_path, monkeypatch):
    saved, pending, scandir = Checkpointer(tmp_path), [2], os.scandir
    saved.save(1, state_of(1))

    def scan_before_a_save(directory):
        if not pending or directory != tmp_path:
            return scandir(directory)
        entries, value = list(scandir(directory)), pending.pop()
        Checkpointer(tmp_path, keep=1).save(step, state_of(value))
        return entries

    monkeypatch.setattr(os, "scandir", scan_before_a_save)
    assert saved.steps() == [step]
    pending.append(3)
    assert_trees_equal(saved.restore(step=step), state_of(3))


def test_a_given_step_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))
    save_elsewhere_while_reading(monkeypatch, tmp_path, 1, 7)
    assert_trees_equal(saved.restore(state_of(0), step=1), state_of(7))


def test_a_given_step_that_is_removed_while_it_is_read_is_said_to_be(tmp_path, monkeypatch):
    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))
    save_elsewhere_while_reading(monkeypatch, tmp_path, 2, 2)
    with pytest.raises(statetree.CheckpointError, match=r"restore: the checkpoint of step 1 in .* was removed while"):
        saved.restore(state_of(0), step=1)


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("step", [3, 5])
def test_a_step_that_does_not_become_the_latest_is_said_to(call, step, tmp_path):
    saved = Checkpointer(tmp_path)
    saved.save(5, state_of(5))
    message = rf"{call}: step {step} is not above that of the latest checkpoint in .*, 5: expected a higher one"
    with pytest.warns(UserWarning, match=message) as caught:
        getattr(saved, call)(step, state_of(step))
    assert caught[0].filename == __file__
    saved.close()
    assert saved.steps() == sorted({step, 5})


def test_a_number_is_no_template(tmp_path):
    saved = Checkpointer(tmp_path)
    saved.save(5, state_of(5))
    with pytest.raises(TypeError, match=r"restore: state must be a template, or None: .*number 5\. .*pass step=5"):
        saved.restore(5)
    assert_trees_equal(saved.restore(step=5), state_of(5))
    assert_trees_equal(saved.restore(state_of(0), step=5), state_of(5))


def test_the_latest_step(tmp_path):
    saved = Checkpointer(tmp_path)
    assert saved.latest_step() is None
    for step in (5, 3):
        saved.save(step, state_of(step))
    assert saved.latest_step() == 5


def flip_a_bit(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", ".statetree_manifest"])
def test_where_the_latest_is_damaged_an_older_one_is_named_or_taken(name, tmp_path):
    saved = Checkpointer(tmp_path)
    for step in (1, 2, 3, 4):
        saved.save(step, state_of(step))
    path = tmp_path / "step-00000004" / name
    flip_a_bit(path, path.stat().st_size // 2)
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    with pytest.raises(
        statetree.CheckpointError, match=r"(load|read): .*the newest older .* is of step 2: pass step=2, or fal"
    ):
        saved.restore()
    template = state_of(0)
    with pytest.warns(
        UserWarning, match=r"restore: took the checkpoint of step 2, since a later one is damaged"
    ) as caught:
        restored = saved.restore(template, fallback=True)
    assert caught[0].filename == __file__
    assert_trees_equal(restored, state_of(2))
    assert restored["w"] is template["w"]
    assert_trees_equal(saved.restore(step=2, fallback=True), state_of(2))


def test_damage_that_shows_when_it_is_read_is_passed_over_too(tmp_path):
    saved = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        saved.save(step, state_of(step))
    for step in (2, 3):
        path = tmp_path / f"step-0000000{step}" / "__0_0.distcp"
        flip_a_bit(path, path.read_bytes().index((torch.arange(4.0) + step).numpy().tobytes()) + 5)
    with pytest.warns(UserWarning, match=r"took the checkpoint of step 1, .*step-00000003"):
        assert_trees_equal(saved.restore(fallback=True), state_of(1))
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    path.unlink()
    with pytest.raises(statetree.CheckpointError, match=r"step-00000003.*is damaged"):
        saved.restore(fallback=True)


def test_a_link_in_the_series_is_removed_and_not_what_it_leads_to(tmp_path):
    saved = Checkpointer(tmp_path / "series", keep=1)
    saved.save(1, state_of(1))
    (tmp_path / "series" / "step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "series" / "step-00000001").symlink_to("../elsewhere")
    (tmp_path / "series" / f".step-00000001.removed-{'a' * 32}").symlink_to("../elsewhere")
    assert_trees_equal(saved.restore(), state_of(1))
    saved.save(2, state_of(2))
    assert names(tmp_path / "series") == ["step-00000002"]
    assert_trees_equal(statetree.load(tmp_path / "elsewhere"), state_of(1))


def test_a_directory_that_is_not_yet_locked_is_not_taken_for_a_leftover(tmp_path, monkeypatch):
    """As another process that begins a save at this moment would."""
    init = series.UnfinishedStep.__init__
    other: list[threading.Thread] = []

    def meanwhile(self, path, step):
        if not other:
            other.append(threading.Thread(target=lambda: series.Series(tmp_path).begin(2, []).discard()))
            other[0].start()
            other[0].join(0.3)
        init(self, path, step)

    monkeypatch.setattr(series.UnfinishedStep, "__init__", meanwhile)
    Checkpointer(tmp_path).save(1, state_of(1))
    other[0].join()
    assert names(tmp_path) == ["step-00000001"]


def test_an_interrupt_as_a_checkpoint_is_closed_closes_no_other_file(tmp_path, monkeypatch):
    close = os.close

    def interrupted(handle):
        close(handle)
        raise KeyboardInterrupt

    partial = series.Series(tmp_path).begin(1, [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            partial.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]  # one of them has the number that is free now
    try:
        partial.discard()
        assert all(os.fstat(other) for other in others)
    finally:
        for other in others:
            close(other)
    assert names(tmp_path) == []


def test_what_a_future_has_raised_is_not_raised_again(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("planted")

    saved = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saving.StateSave, "run", fail)
        with pytest.raises(statetree.CheckpointError, match=r"planted"):
            saved.async_save(1, state_of(1)).result(units(10))
    saved.save(2, state_of(2))
    assert saved.steps() == [2]
    saved.close()


def test_a_damaged_checkpoint_is_not_looked_for_again(tmp_path):
    saved = Checkpointer(tmp_path)
    saved.save(1, state_of(1))
    (tmp_path / "step-00000001" / ".metadata").write_bytes(b"damaged")
    with pytest.raises(
        statetree.CheckpointError, match=r"(load|read): the metadata of the checkpoint .* cannot be read"
    ):
        saved.restore()


def test_threads_take_turns(tmp_path):
    errors = []

    def save_some(thread):
        try:
            for number in range(4):
                step = 10 * thread + number
                (saved.save if number % 2 else saved.async_save)(step, state_of(step))
                assert_trees_equal(saved.restore(step=step), state_of(step))
        except BaseException as error:
            errors.append(error)

    with Checkpointer(tmp_path) as saved:
        threads = [threading.Thread(target=save_some, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(units(30))
        assert saved.steps() == [10 * thread + number for thread in range(4) for number in range(4)]
    assert not errors


def test_a_given_stager_stays_open(tmp_path):
    with statetree.Stager() as stager:
        with Checkpointer(tmp_path, stager=stager) as saved:
            saved.async_save(1, state_of(1))
        assert_trees_equal(stager.stage(state_of(2)), state_of(2))


def test_an_asynchronous_stager_overlaps_staging_with_training(tmp_path):
    weight = torch.arange(4.0)
    with AsyncStager(asynchronous=True) as stager, Checkpointer(tmp_path, stager=stager) as saved:
        for step in range(3):
            saved.async_save(step, {"w": weight})
            stager.synchronize()
            weight += 1
        for step in range(3):
            assert_trees_equal(saved.restore(step=step), {"w": torch.arange(4.0) + step})


def test_a_failure_in_staging_reaches_the_caller_once(tmp_path):
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with Checkpointer(tmp_path) as saved:
        with pytest.raises(statetree.UnsupportedLeaf, match=r"stage: .*at w"):
            saved.async_save(1, {"w": freed})
        saved.async_save(2, state_of(2)).result(units(10))
        assert names(tmp_path) == ["step-00000002"]


def test_classes_beyond_plain_data_take_trust(tmp_path):
    state = {"call": len}
    with Checkpointer(tmp_path) as saved:
        with pytest.warns(UserWarning, match=r"save: what restore does not make .*\n  call \(builtin_function"):
            saved.save(1, state)
        with pytest.raises(statetree.CheckpointError, match=r"the plain value at call cannot be read.*weights_only"):
            saved.restore()
        assert saved.restore(weights_only=False) == state


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_listed_checkpoint_that_cannot_be_looked_at_is_not_waited_for(error, tmp_path, monkeypatch):
    """As on a file system whose names are ahead of what they stand for, or in a directory that may only be listed."""
    (tmp_path / "step-00000001").mkdir()

    def refuse(_path):
        raise error

    monkeypatch.setattr(series.os, "lstat", refuse)
    assert Checkpointer(tmp_path).steps() == []


class SameInode:
    """What ``os.stat`` says of a directory, with one number for all inodes."""

    st_ino = 5

    def __init__(self, about):
        self._about = about

    def __getattr__(self, name):
        return getattr(self._about, name)


def test_a_checkpoint_that_takes_the_place_of_another_is_known_by_more_than_its_inode(tmp_path, monkeypatch):
    """ext4 hands their numbers out again: what was replaced was taken for damaged, and an older one restored."""
    stat = os.stat

    def of_directories(path, **how):
        about = stat(path, **how)
        return SameInode(about) if S_ISDIR(about.st_mode) else about

    monkeypatch.setattr(series.os, "stat", of_directories)
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(1, {"w": torch.ones(2)})
    checkpointer.save(2, {"w": torch.full((2,), 2.0)})
    before = checkpointer._series.find("restore", None)
    checkpointer.save(2, {"w": torch.full((2,), 3.0)})
    after = checkpointer._series.find("restore", None)
    assert (before.name, before.identity[0]) == (after.name, after.identity[0])
    load = restoring.load_tree
    found = iter([before])

    def torn(*args, **options):
        monkeypatch.setattr(restoring, "load_tree", load)
        raise statetree.CheckpointError("load: Files of two checkpoints are mixed.")

    find = series.Series.find
    monkeypatch.setattr(restoring, "load_tree", torn)
    monkeypatch.setattr(series.Series, "find", lambda *args: next(found, None) or find(*args))
    assert checkpointer.restore(fallback=True)["w"].tolist() == [3, 3]
    checkpointer.close()


def test_an_alarm_while_an_older_step_is_looked_at_skips_none(tmp_path, monkeypatch):
    def ring(_number, _frame):
        raise TimeoutError("alarm")

    look = restoring.opened

    def opened(path, *args, **options):
        if path == saved.path(2):
            signal.raise_signal(signal.SIGALRM)
        return look(path, *args, **options)

    with Checkpointer(tmp_path) as saved:
        for step in (1, 2, 3):
            saved.save(step, state_of(step))
        for file in saved.path(3).glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:10])
        monkeypatch.setattr(restoring, "opened", opened)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            with pytest.raises(TimeoutError, match="alarm"):
                saved.restore(state_of(0), fallback=True)
        finally:
            signal.signal(signal.SIGALRM, before)
