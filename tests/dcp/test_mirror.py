"""A mirror of a series of checkpoints: complete or not there, kept like the series, never in the way of training."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

import statetree as st
from statetree import Checkpointer
from statetree.files.remote import RemotePath
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal
from tests.pace import units


def state(step):
    return {"w": torch.arange(4.0) + step, "step": step}


@pytest.fixture
def far():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def mirrored(system):
    return sorted(name.split("/")[2] for name in system.store if name.endswith("/.metadata"))


def test_complete_steps_are_uploaded_and_come_back_from_there(tmp_path, far):
    events = []
    with Checkpointer(tmp_path / "near", mirror="memory://far", on_event=events.append) as saved:
        saved.save(1, state(1))
        saved.async_save(2, state(2))
    assert mirrored(far) == ["step-00000001", "step-00000002"]
    assert sorted(event.step for event in events if event.kind == "upload") == [1, 2]
    assert all(event.bytes > 0 and event.waited == 0 for event in events if event.kind == "upload")
    with Checkpointer(tmp_path / "another machine", mirror="memory://far") as other:
        assert other.steps() == [1, 2]
        assert_trees_equal(other.restore(), state(2))
        template = state(0)
        assert other.restore(template, step=1)["w"] is template["w"]
        assert_trees_equal(template["w"], state(1)["w"])
    assert_trees_equal(st.load("memory://far/step-00000001"), state(1))


def test_what_on_event_calls_does_not_wait_for_close_which_waits_for_the_upload(tmp_path, far):
    answers, is_closing = [], threading.Event()

    def answer(event):
        if event.kind == "upload":
            is_closing.wait(units(10))
            with pytest.raises(st.CheckpointError, match=r"restore: the Checkpointer of .* is closed"):
                saved.restore()
            with pytest.raises(st.CheckpointError, match="close: it would wait for the upload that calls on_event"):
                saved.close()
            answers.append(event.step)

    saved = Checkpointer(tmp_path, mirror="memory://far", on_event=answer)
    saved.save(1, state(1))
    threading.Timer(0.1, is_closing.set).start()
    saved.close()
    assert answers == [1]
    assert mirrored(far) == ["step-00000001"]


def test_the_newest_of_either_is_taken(tmp_path, far):
    with Checkpointer(tmp_path / "one", mirror="memory://far") as saved:
        saved.save(5, state(5))
    with Checkpointer(tmp_path / "two") as saved:
        saved.save(3, state(3))
    with Checkpointer(tmp_path / "two", mirror="memory://far") as both:
        assert_trees_equal(both.restore(), state(5))
        assert_trees_equal(both.restore(step=3), state(3))


def test_retention_holds_on_both_sides(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far", keep=2, keep_every=10, keep_best=1) as saved:
        for step, metric in ((9, 0.1), (10, 3), (11, 2), (12, 4), (13, 5)):
            saved.save(step, state(step), metric=metric)
    kept = ["step-00000009", "step-00000010", "step-00000012", "step-00000013"]
    assert sorted(os.listdir(tmp_path)) == kept
    assert mirrored(far) == kept
    assert sorted({name.split("/")[2] for name in far.store}) == kept


def test_steps_of_another_machine_are_kept_by_the_same_rule(tmp_path, far):
    with Checkpointer(tmp_path / "one", mirror="memory://far", keep=2) as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    with Checkpointer(tmp_path / "two", mirror="memory://far", keep=2) as saved:
        saved.save(3, state(3))
    assert mirrored(far) == ["step-00000002", "step-00000003"]


def test_a_step_that_is_replaced_is_uploaded_again(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
    with Checkpointer(tmp_path, mirror="memory://far") as saved, pytest.warns(UserWarning, match="not above"):
        saved.save(1, state(7))
    assert_trees_equal(st.load("memory://far/step-00000001"), state(7))


def test_a_step_that_is_replaced_in_mid_upload_is_never_mixed(tmp_path, far, monkeypatch):
    uploading, replaced = threading.Event(), threading.Event()

    def upload(self, file, original=RemotePath.upload):
        original(self, file)
        uploading.set()
        assert replaced.wait(units(30))

    monkeypatch.setattr(RemotePath, "upload", upload)
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
        assert uploading.wait(units(30))
        with pytest.warns(UserWarning, match="not above"):
            saved.save(1, state(7))
        replaced.set()
    assert mirrored(far) == ["step-00000001"]
    assert_trees_equal(st.load("memory://far/step-00000001"), state(7))


def test_metadata_are_there_as_a_whole_or_not_at_all(tmp_path, far, monkeypatch):
    def pipe_file(self, path, value, original=MemoryFileSystem.pipe_file, **options):
        original(self, path, value[:10], **options)
        raise OSError("killed")

    with monkeypatch.context() as broken, Checkpointer(tmp_path, mirror="memory://far") as saved:
        broken.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        saved.save(1, state(1))
    assert mirrored(far) == []
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(2, state(2))
    assert mirrored(far) == ["step-00000001", "step-00000002"]
    assert not [name for name in far.store if name.endswith(".partial")]


def test_nothing_is_left_of_what_was_uploaded_before(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
    far.pipe_file("/far/step-00000001/stale", b"old")
    with Checkpointer(tmp_path, mirror="memory://far") as saved, pytest.warns(UserWarning, match="not above"):
        saved.save(1, state(7))
    assert not far.exists("/far/step-00000001/stale")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["lost", "cut off"])
def test_a_step_is_complete_with_all_its_files(tmp_path, far, how):
    with Checkpointer(tmp_path / "near", mirror="memory://far") as saved:
        for step in (1, 2):
            saved.save(step, state(step))
    (data,) = [name for name in far.store if "step-00000002" in name and name.endswith(".distcp")]
    if how == "lost":
        far.rm_file(data)
    else:
        far.pipe_file(data, far.cat_file(data)[:-1])
    with Checkpointer(tmp_path / "another machine", mirror="memory://far", keep=1) as other:
        assert other.steps() == [1]
        assert_trees_equal(other.restore(), state(1))
        other._mirror.upload_later()
    assert mirrored(far) == ["step-00000001", "step-00000002"]  # what is left of the newest may be of use
    with Checkpointer(tmp_path / "near", mirror="memory://far") as saved:
        saved.save(3, state(3))
    with Checkpointer(tmp_path / "another machine", mirror="memory://far") as other:
        assert other.steps() == [1, 2, 3]
        assert_trees_equal(other.restore(step=2), state(2))


def test_a_mirror_that_fails_never_stops_the_training(tmp_path, far, monkeypatch, caplog):
    def put_file(self, *args, **kwargs):
        raise OSError("the network is down")

    caplog.set_level(logging.WARNING, "statetree")
    with monkeypatch.context() as broken, Checkpointer(tmp_path, mirror="memory://far") as saved:
        broken.setattr(MemoryFileSystem, "put_file", put_file)
        saved.save(1, state(1))
        assert_trees_equal(saved.restore(), state(1))
    assert "the network is down" in caplog.text
    assert mirrored(far) == []
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(2, state(2))
    assert mirrored(far) == ["step-00000001", "step-00000002"]


def test_what_is_no_url_or_not_known_is_refused(tmp_path):
    with pytest.raises(st.CheckpointError, match="mirror must be a URL"):
        Checkpointer(tmp_path, mirror="far")
    with pytest.raises(st.CheckpointError, match="cannot be reached"):
        Checkpointer(tmp_path, mirror="nowhere://far")


def save_for_ever(near, far, started):
    with Checkpointer(near, mirror=f"file://{far}", keep=3) as saved:
        for step in range(1, 1000):
            saved.save(max(saved.steps(), default=0) + 1, {"w": torch.full((200_000,), float(step))})
            started.set()


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)], ids="{} kills".format)
def test_a_kill_in_mid_upload_leaves_whole_steps(count, tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    far.mkdir()
    context = multiprocessing.get_context("spawn")
    for number in range(count):
        started = context.Event()
        process = context.Process(target=save_for_ever, args=(near, far, started))
        process.start()
        assert started.wait(units(60))
        time.sleep(0.003 * number)
        os.kill(process.pid, signal.SIGKILL)
        process.join(units(30))
        with Checkpointer(tmp_path / f"fresh {number}", mirror=f"file://{far}") as fresh:
            for step in fresh.steps():
                assert fresh.restore(step=step)["w"].unique().numel() == 1
    with Checkpointer(near, mirror=f"file://{far}", keep=3) as saved:
        last = saved.latest_step() + 1
        saved.save(last, {"w": torch.zeros(3)})
    assert [name for name in sorted(os.listdir(far)) if (far / name / ".metadata").exists()] == sorted(os.listdir(far))
    assert f"step-{last:08}" in os.listdir(far)


def save_on_ranks(folder):
    with Checkpointer(folder / "near", mirror=f"file://{folder}/far") as saved:
        saved.save(1, {"w": torch.ones(3), "rank": 0})
        dist.barrier()
    with Checkpointer(folder / "empty", mirror=f"file://{folder}/far") as other:
        return other.restore()["w"].tolist(), other.steps()


def test_ranks_restore_from_the_mirror(tmp_path):
    (tmp_path / "far").mkdir()

    assert run_ranks(2, save_on_ranks, tmp_path)[0] == ([1.0, 1.0, 1.0], [1])


@pytest.fixture
def requests_fail(far, monkeypatch):
    """Have requests of a file fail: some, by their numbers, or all."""

    def arrange(file, numbers=()):
        original, asked = far.cat_file, []

        def flaky(path, *args, **options):
            asked.append(path.endswith(file))
            if asked[-1] and (not numbers or sum(asked) in numbers):
                raise OSError("503 Slow Down")
            return original(path, *args, **options)

        monkeypatch.setattr(far, "cat_file", flaky)

    return arrange


@pytest.fixture
def three(tmp_path, far):
    """A mirror of three steps, of which the machine has none."""
    with Checkpointer(tmp_path / "one", mirror="memory://far") as saved:
        for step in (1, 2, 3):
            saved.save(step, state(step))
    assert mirrored(far) == [f"step-0000000{step}" for step in (1, 2, 3)]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("numbers", [[1], [1, 2], [3]])
def test_requests_that_fail_and_then_do_not_are_nothing(numbers, tmp_path, far, requests_fail, caplog):
    requests_fail("step-00000003/.statetree_manifest", numbers)
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        assert_trees_equal(other.restore(), state(3))
        other.save(4, state(4))
    assert mirrored(far) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    assert caplog.text == ""


@pytest.mark.usefixtures("three")
def test_a_step_that_cannot_be_looked_at_hides_no_other_and_stays(tmp_path, far, requests_fail, caplog):
    requests_fail("step-00000002/.statetree_manifest")
    with Checkpointer(tmp_path / "two", mirror="memory://far", keep=2) as other:
        assert other.steps() == [1, 3]
        assert_trees_equal(other.restore(), state(3))
        other.save(4, state(4))
    assert mirrored(far) == [f"step-0000000{step}" for step in (2, 3, 4)]
    assert "step 2 of the mirror memory:///far cannot be looked at: " in caplog.text


@pytest.mark.usefixtures("three")
def test_the_newest_that_cannot_be_looked_at_is_not_passed_over(tmp_path, requests_fail):
    requests_fail("step-00000003/.statetree_manifest")
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        assert other.steps() == [1, 2, 3]
        for fallback in (False, True):
            with pytest.raises(st.CheckpointError, match="503 Slow Down") as error:
                other.restore(fallback=fallback)
            assert "older" not in str(error.value)


@pytest.fixture
def listing_fails(far, monkeypatch):
    """Have some of the requests for what lies in the mirror fail, by their numbers, or all of them."""

    def arrange(numbers=()):
        original, asked = MemoryFileSystem.ls, []

        def flaky(self, path, *args, **options):
            asked.append(path.strip("/") == "far")
            if asked[-1] and (not numbers or sum(asked) in numbers):
                raise OSError("104 Connection reset by peer")
            return original(self, path, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, "ls", flaky)

    return arrange


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("numbers", [[1], [1, 2], [2]])
def test_a_listing_that_fails_and_then_does_not_is_nothing(numbers, tmp_path, listing_fails, caplog):
    listing_fails(numbers)
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        assert other.steps() == [1, 2, 3]
        assert_trees_equal(other.restore(), state(3))
    assert caplog.text == ""


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("has_some", [True, False])
def test_no_older_step_passes_for_the_latest_of_a_mirror_that_cannot_be_reached(has_some, tmp_path, listing_fails):
    if has_some:
        Checkpointer(tmp_path).save(1, state(1))
    with Checkpointer(tmp_path, mirror="memory://far") as other:
        listing_fails()
        there = "steps: 1" if has_some else "steps: none"
        asked = (other.restore, other.steps, other.latest_step, other.best_step, other.path, other.metadata)
        for ask in (*asked, lambda: other.restore(step=2)):
            with pytest.raises(
                st.CheckpointError, match=f"memory:///far cannot be reached: .* 104 Connection.*has {there}"
            ):
                ask()
        other.save(4, state(4))
        for step in [1, 4] if has_some else [4]:
            assert_trees_equal(other.restore(step=step, fallback=True), state(step))


@pytest.mark.usefixtures("three")
def test_what_went_wrong_is_told_if_the_mirror_cannot_be_asked_about_it(tmp_path, far, listing_fails, monkeypatch):
    Checkpointer(tmp_path).save(1, state(1))
    original = far.cat_file

    def fails(path, *args, **options):
        data = original(path, *args, **options)
        return bytes(len(data)) if path.endswith(".distcp") else data

    with Checkpointer(tmp_path, mirror="memory://far") as other:
        monkeypatch.setattr(far, "cat_file", fails)
        monkeypatch.setattr(other._mirror, "copy_of", lambda _: listing_fails())  # once it is known to be damaged
        with pytest.raises(st.CheckpointError, match="damaged") as error:
            other.restore(fallback=True)
    assert "the mirror memory:///far cannot be reached" in str(error.value.__cause__)


@pytest.mark.usefixtures("three")
def test_an_older_step_that_is_here_takes_the_place_of_a_damaged_one_without_the_mirror(tmp_path, listing_fails):
    saved = Checkpointer(tmp_path)
    saved.save(1, state(1))
    saved.save(2, state(2))
    next(saved.path(2).glob("*.distcp")).write_bytes(b"")
    with Checkpointer(tmp_path, mirror="memory://far") as other:
        listing_fails()
        with pytest.raises(st.CheckpointError, match=r"step-00000002.*the newest older .* is of step 1"):
            other.restore(step=2)
        with pytest.warns(UserWarning, match="took the checkpoint of step 1"):
            assert_trees_equal(other.restore(step=2, fallback=True), state(1))


def test_the_mirrors_copy_takes_the_place_of_a_damaged_step(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    damaged = next(saved.path(2).glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[data.index(state(2)["w"].numpy().tobytes())] ^= 1
    damaged.write_bytes(data)
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        with pytest.warns(UserWarning, match="took the mirror's copy of step 2, since the local one is damaged"):
            assert_trees_equal(saved.restore(), state(2))
        for name in [name for name in far.store if "/step-00000002/" in name]:
            far.rm_file(name)
        with pytest.raises(st.CheckpointError, match=r"the newest older checkpoint that looks whole is of step 1"):
            saved.restore()


def test_a_copy_of_another_save_takes_nobodys_place(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
    with Checkpointer(tmp_path) as alone, pytest.warns(UserWarning, match="step 1 is not above"):
        alone.save(1, state(5))
    damaged = next(alone.path(1).glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with Checkpointer(tmp_path, mirror="memory://far") as saved, pytest.raises(st.CheckpointError, match="damaged"):
        saved.restore()


def test_a_chained_url_is_kept(tmp_path):
    (tmp_path / "far").mkdir()
    url = f"dir://run::file://{tmp_path}/far"
    with Checkpointer(tmp_path / "near", mirror=url) as saved:
        saved.save(1, state(1))
    with Checkpointer(tmp_path / "other", mirror=url) as other:
        assert_trees_equal(other.restore(), state(1))


def ring(_number, _frame):
    raise TimeoutError("alarm")


@pytest.mark.parametrize("request_number", range(1, 8))
def test_an_alarm_while_the_mirror_is_read_restores_no_older_step(request_number, tmp_path, far, monkeypatch):
    with Checkpointer(tmp_path / "first", mirror="memory://far") as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    read, requests = MemoryFileSystem.cat_file, []

    def cat_file(*args, **options):
        requests.append(args)
        if len(requests) == request_number:
            signal.raise_signal(signal.SIGALRM)
        return read(*args, **options)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with Checkpointer(tmp_path / "other", mirror="memory://far") as other:
            monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
            with pytest.raises(TimeoutError, match="alarm"):
                other.restore(state(0), fallback=True)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("form", ["file://{}", "local://{}", "file://{}/", "file://{}/../near"])
def test_the_directory_itself_is_no_mirror(form, tmp_path):
    near = tmp_path / "near"
    near.mkdir()
    (tmp_path / "link").symlink_to(near)
    for directory in (near, tmp_path / "link"):
        with pytest.raises(st.CheckpointError, match="is the directory of the checkpoints"):
            Checkpointer(directory, mirror=form.format(near))


def a_step_damaged(saved, step):
    next(saved.path(step).glob("*.distcp")).unlink()


def test_an_older_step_is_taken_from_the_mirror_where_the_local_one_is_damaged(tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        for step in (1, 2, 3):
            saved.save(step, state(step))
        saved._mirror.wait()
        a_step_damaged(saved, 2)
        a_step_damaged(saved, 3)
        far.rm("/far/step-00000003", recursive=True)
        with pytest.raises(st.CheckpointError, match=r"the newest older .* is of step 2"):
            saved.restore()
        with pytest.warns(UserWarning, match="took the mirror's copy of step 2, since a later one is damaged"):
            assert_trees_equal(saved.restore(fallback=True), state(2))


@pytest.mark.parametrize("name", [".statetree_manifest", ".metadata", ".distcp"])
def test_a_flipped_byte_in_any_file_is_healed_from_the_mirror(name, tmp_path, far):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
        saved._mirror.wait()
        (file,) = [file for file in saved.path(1).iterdir() if file.name.endswith(name)]
        good = file.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 20)):
            file.write_bytes(bytes([*good[:at], good[at] ^ 4, *good[at + 1 :]]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # most flips are noticed
                assert_trees_equal(saved.restore(), state(1))


@pytest.mark.parametrize("harm", ["a flipped byte", "no manifest", "no data"])
def test_a_damaged_step_stops_no_upload_and_replaces_nothing(harm, tmp_path, far, caplog):
    with Checkpointer(tmp_path, mirror="memory://far") as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    manifest = saved.path(2) / ".statetree_manifest"
    data = bytearray(manifest.read_bytes())
    data[10] ^= 1
    if harm == "a flipped byte":
        manifest.write_bytes(data)
    elif harm == "no manifest":
        manifest.unlink()
    else:
        a_step_damaged(saved, 2)
        far.rm("/far/step-00000002", recursive=True)  # it was not uploaded yet
    with Checkpointer(tmp_path, mirror="memory://far", keep=2) as later:
        later.save(3, state(3))
    assert "step 2 is not uploaded to the mirror memory:///far: " in caplog.text
    whole = [1, 3] if harm == "no data" else [2, 3]
    assert mirrored(far) == [f"step-0000000{step}" for step in whole]
    with Checkpointer(tmp_path / "another", mirror="memory://far") as other:
        for step in whole:
            assert_trees_equal(other.restore(step=step), state(step))


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("number", range(1, 6))
def test_a_range_that_fails_and_then_does_not_is_nothing(number, tmp_path, requests_fail, caplog):
    requests_fail(".distcp", [number])
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        assert_trees_equal(other.restore(fallback=True), state(3))
    assert caplog.text == ""


@pytest.mark.usefixtures("three")
def test_no_older_step_passes_for_one_that_cannot_be_read_now(tmp_path, requests_fail):
    requests_fail("step-00000003/__0_0.distcp")
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        for fallback in (False, True):
            with pytest.raises(st.CheckpointError, match="503 Slow Down") as error:
                other.restore(fallback=fallback)
            assert "fallback" not in str(error.value)
        assert_trees_equal(other.restore(step=2), state(2))


@pytest.mark.usefixtures("three")
def test_what_fails_of_another_step_is_nothing_to_a_damaged_one(tmp_path, far, requests_fail):
    name = "/far/step-00000003/.metadata"
    far.pipe_file(name, bytes(len(far.cat_file(name))))
    requests_fail("step-00000001/.statetree_manifest")
    warned = pytest.warns(UserWarning, match="took the checkpoint of step 2, since a later one is damaged")
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other, warned:
        assert_trees_equal(other.restore(fallback=True), state(2))


@pytest.mark.usefixtures("three")
def test_no_older_step_is_taken_while_one_between_cannot_be_read(tmp_path, far, requests_fail):
    name = "/far/step-00000003/.metadata"
    far.pipe_file(name, bytes(len(far.cat_file(name))))
    requests_fail("step-00000002/.metadata")
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        with pytest.raises(st.CheckpointError, match="step-00000003") as error:
            other.restore(fallback=True)
        assert "503 Slow Down" in str(error.value.__cause__)


def restore_where_one_cannot_read(folder):
    read = RemotePath.read

    def fails(place, *args):
        if "step-00000002" in place.path:
            raise OSError("503 Slow Down")
        return read(place, *args)

    with pytest.MonkeyPatch.context() as patch, Checkpointer(f"{folder}/near", mirror=f"file://{folder}/far") as other:
        if dist.get_rank() == 1:
            patch.setattr(RemotePath, "read", fails)
        try:
            return other.restore(fallback=True)["step"]
        except st.CheckpointError as error:
            return str(error)


def test_no_older_step_passes_for_one_that_a_rank_cannot_read_now(tmp_path):
    (tmp_path / "far").mkdir()
    with Checkpointer(tmp_path / "first", mirror=f"file://{tmp_path}/far") as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    for found in run_ranks(2, restore_where_one_cannot_read, str(tmp_path)):
        assert "503 Slow Down" in str(found)


@pytest.mark.usefixtures("three")
def test_what_is_restored_from_a_mirror_has_bytes(tmp_path):
    events = []
    with Checkpointer(tmp_path / "two", mirror="memory://far", on_event=events.append) as other:
        other.restore()
    nbytes = sum(file.stat().st_size for file in (tmp_path / "one" / "step-00000003").iterdir())
    assert [(event.kind, event.step, event.bytes) for event in events] == [("restore", 3, nbytes)]


def test_a_watcher_that_ends_its_thread_stops_no_upload(tmp_path, far, caplog):
    def watch(event):
        if event.kind == "upload" and event.step == 1:
            raise SystemExit(3)

    with Checkpointer(tmp_path, mirror="memory://far", on_event=watch) as saved:
        saved.save(1, state(1))
        saved._mirror.wait()
        saved.save(2, state(2))
    assert mirrored(far) == ["step-00000001", "step-00000002"]
    assert "SystemExit(3)" in caplog.text


@pytest.mark.usefixtures("far")
def test_an_interrupt_while_an_upload_begins_is_all_that_is_raised(tmp_path, monkeypatch):
    start, began = threading.Thread.start, threading.Event()

    def slow(thread):
        if thread.name == "statetree.mirror":
            began.set()
            time.sleep(units(2))
        start(thread)

    def interrupt():
        began.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    monkeypatch.setattr(threading.Thread, "start", slow)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        saved = Checkpointer(tmp_path, mirror="memory://far")
        start(threading.Thread(target=interrupt, daemon=True))
        with pytest.raises(TimeoutError, match="alarm"):
            saved.save(1, state(1))
        saved.close()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("three")
def test_messages_say_that_checkpoints_are_in_the_mirror(tmp_path):
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        with pytest.raises(st.CheckpointError, match=r"two and its mirror memory:///far: expected one of step 7, got"):
            other.restore(step=7)
        with pytest.warns(UserWarning, match="two and its mirror memory:///far, 3"):
            other.save(1, state(1))


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("step", [None, 3])
def test_a_step_of_the_mirror_that_is_replaced_while_it_is_read_is_searched_again(step, tmp_path, far, monkeypatch):
    with Checkpointer(tmp_path / "later", mirror="memory://later") as later:
        later.save(3, state(30))
    read, replaced = RemotePath.read, []

    def then_replaced(place, *args):
        if place.path.endswith(".distcp") and not replaced:
            replaced.append(place)
            for name in [name for name in far.store if name.startswith("/later/step-00000003/")]:
                far.pipe_file(name.replace("/later/", "/far/"), far.cat_file(name))
        return read(place, *args)

    monkeypatch.setattr(RemotePath, "read", then_replaced)
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        assert_trees_equal(other.restore(step=step), state(30))
    assert replaced


@pytest.mark.usefixtures("three")
def test_a_mirror_that_tells_no_sizes_is_no_damaged_one(tmp_path, far, monkeypatch):
    info = type(far).info

    def without_size(system, path, **options):
        found = info(system, path, **options)
        return {**found, "size": None} if "step-00000003/" in path else found

    monkeypatch.setattr(type(far), "info", without_size)
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        for fallback in (False, True):
            with pytest.raises(st.CheckpointError, match="does not say how large it is"):
                other.restore(fallback=fallback)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("cause", "is_damage"), [(ConnectionResetError, False), (OSError, True)])
def test_an_answer_that_came_of_a_connection_that_broke_off_is_an_outage(cause, is_damage, tmp_path, far, monkeypatch):
    read = type(far).cat_file

    def broken(system, path, **options):
        if "step-00000003/.metadata" not in path:
            return read(system, path, **options)
        try:
            raise cause("what happened")
        except OSError as error:
            raise FileNotFoundError(path) from error

    monkeypatch.setattr(type(far), "cat_file", broken)
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        if is_damage:
            with pytest.warns(UserWarning, match="step 2"):
                assert_trees_equal(other.restore(fallback=True), state(2))
        else:
            with pytest.raises(st.CheckpointError):
                other.restore(fallback=True)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("error", [TimeoutError, ConnectionError, OSError])
def test_what_the_caller_handles_is_no_outage_of_the_mirror(error, tmp_path, far):
    name = "/far/step-00000003/.metadata"
    far.pipe_file(name, bytes(len(far.cat_file(name))))
    with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
        try:
            raise error("of the training")
        except OSError:
            with pytest.warns(UserWarning, match="step 2"):
                assert_trees_equal(other.restore(fallback=True), state(2))


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*", "[r]un1"])
def test_a_url_is_no_pattern(name, tmp_path, far):
    with Checkpointer(tmp_path / "one", mirror="memory://run1") as other:
        other.save(1, state(1))
        other.save(2, state(2))
    others = dict(far.store)
    with Checkpointer(tmp_path / "two", mirror=f"memory://{name}", keep=1) as saved:
        for step in (1, 2):
            saved.save(step, state(step))
            saved._mirror.wait()
    with Checkpointer(tmp_path / "two", mirror=f"memory://{name}", keep=1) as saved:
        with pytest.warns(UserWarning, match="not above"):
            saved.save(2, state(7))
        saved._mirror.wait()
        assert_trees_equal(st.load(f"memory://{name}/step-00000002"), state(7))
    assert {path: file for path, file in far.store.items() if path.startswith("/run1/")} == others
    assert {path.rpartition("/")[0] for path in far.store.keys() - others} == {f"/{name}/step-00000002"}


def test_after_an_interrupt_close_waits_for_the_upload_again(tmp_path, far, monkeypatch):
    put, uploading, go_on = MemoryFileSystem.put_file, threading.Event(), threading.Event()

    def slow(*args, **options):
        uploading.set()
        assert go_on.wait(units(30))
        put(*args, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    saved = Checkpointer(tmp_path, mirror="memory://far")
    saved.save(1, state(1))
    assert uploading.wait(units(30))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError, match="alarm"):
            saved.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.1, go_on.set).start()
    saved.close()
    assert mirrored(far) == ["step-00000001"]


@pytest.mark.parametrize("who", ["retention", "somebody"])
def test_what_is_removed_while_it_is_uploaded_is_there_or_is_told(who, tmp_path, far, monkeypatch, caplog):
    upload, uploading, go_on, events = RemotePath.upload, threading.Event(), threading.Event(), []

    def slow(*args):
        uploading.set()
        assert go_on.wait(units(30))
        upload(*args)

    monkeypatch.setattr(RemotePath, "upload", slow)
    with Checkpointer(tmp_path, mirror="memory://far", keep=1, on_event=events.append) as saved:
        saved.save(1, state(1))
        assert uploading.wait(units(30))
        if who == "somebody":
            shutil.rmtree(saved.path(1))
        saved.save(2, state(2))
        saved.save(3, state(3))
        go_on.set()
        saved._mirror.wait()
        assert os.listdir(tmp_path) == mirrored(far) == ["step-00000003"]
    assert [event.step for event in events if event.kind == "upload"] == ([1, 3] if who == "retention" else [3])
    assert sorted(event.step for event in events if event.kind == "removal") == ([1, 2] if who == "retention" else [2])
    gone = [record.args[0] for record in caplog.records if "was removed before it was uploaded" in record.msg]
    assert gone == ([2] if who == "retention" else [1, 2])


def test_the_newest_step_is_uploaded_first_also_if_it_comes_late(tmp_path, far):
    def save_more(event):
        events.append((event.kind, event.step))
        if events[-1] == ("upload", 3):
            with Checkpointer(tmp_path) as another:
                another.save(4, state(4))
            saved._mirror.upload_later(4)

    events = []
    with Checkpointer(tmp_path) as alone:
        alone.save(1, state(1))
        alone.save(2, state(2))
    with Checkpointer(tmp_path, mirror="memory://far", on_event=save_more) as saved:
        saved.save(3, state(3))
        saved._mirror.wait()
    assert [step for kind, step in events if kind == "upload"] == [3, 4, 2, 1]
    assert mirrored(far) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("best", [None, 1])
def test_a_step_that_takes_anothers_place_while_steps_are_listed_is_found(best, tmp_path, far, monkeypatch):
    listed, later = MemoryFileSystem.ls, [7, 6]

    def listing(system, path, *args, **options):
        found = listed(system, path, *args, **options)
        if path.strip("/") == "far" and later and threading.current_thread() is threading.main_thread():
            step = later.pop()
            saved.save(step, state(step), metric=1)
            saved._mirror.wait()
        return found

    with Checkpointer(tmp_path / "one", mirror="memory://far", keep=1, keep_best=best) as saved:
        for step in (1, 5):
            saved.save(step, state(step), metric=step - 1)
            saved._mirror.wait()
        with Checkpointer(tmp_path / "two", mirror="memory://far") as other:
            monkeypatch.setattr(MemoryFileSystem, "ls", listing)
            assert_trees_equal(other.restore(), state(7))
            assert other.steps() == ([7] if best is None else [1, 7])


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_file_named_like_a_step_is_none_and_stays(kind, tmp_path, far):
    url = "memory://far" if kind == "memory" else f"file://{tmp_path}/far"
    system, path = fsspec.url_to_fs(url)
    system.makedirs(path, exist_ok=True)
    system.pipe_file(f"{path}/step-00000099", b"notes")
    with Checkpointer(tmp_path / "near", mirror=url, keep=1) as saved:
        for step in (1, 2):
            saved.save(step, state(step))
            saved._mirror.wait()
    with Checkpointer(tmp_path / "another", mirror=url) as other:
        assert other.steps() == [2]
        assert_trees_equal(other.restore(), state(2))
    names = sorted(map(os.path.basename, system.ls(path, detail=False)))
    assert names == ["step-00000002", "step-00000099"]
    assert system.cat_file(f"{path}/step-00000099") == b"notes"


def test_a_file_in_the_place_of_a_step_stops_no_other_upload(tmp_path, far, caplog):
    far.makedirs("/far")
    far.pipe_file("/far/step-00000002", b"notes")
    with Checkpointer(tmp_path, mirror="memory://far", keep=1, keep_every=2) as saved:
        for step in (1, 2, 3):
            saved.save(step, state(step))
            saved._mirror.wait()
    assert mirrored(far) == ["step-00000003"]
    assert far.cat_file("/far/step-00000002") == b"notes"
    assert any("step-00000002 is a file" in record.getMessage() for record in caplog.records)


def test_metadata_that_are_cut_are_no_step(tmp_path, far):
    with Checkpointer(tmp_path / "near", mirror="memory://far") as saved:
        saved.save(1, state(1))
        saved.save(2, state(2))
    far.pipe_file("/far/step-00000002/.metadata", far.cat_file("/far/step-00000002/.metadata")[:20])
    assert Checkpointer(tmp_path / "another", mirror="memory://far").steps() == [1]


def test_what_has_a_rename_of_its_own_is_asked_for_it(tmp_path, far, monkeypatch):
    def rename(self, old, new):
        self.store[new if new.startswith("/") else f"/{new}"] = self.store.pop(
            old if old.startswith("/") else f"/{old}"
        )

    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "mv", rename)
    monkeypatch.setattr(MemoryFileSystem, "cp_file", refuse)
    with Checkpointer(tmp_path, mirror="memory://run[1]") as saved:
        saved.save(1, state(1))
    assert mirrored(far) == ["step-00000001"]


def test_a_mirror_behind_a_cache_is_refused(tmp_path):
    with pytest.raises(st.CheckpointError, match=r"Checkpointer: .* is read through a cache"):
        Checkpointer(tmp_path, mirror=f"simplecache::file://{tmp_path}/far")
