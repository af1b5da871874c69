"""``statetree show`` of a run's folder."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime

import fsspec
import pytest
import torch

from statetree.dcp import Checkpointer
from statetree.dcp.series import Series
from statetree.files.remote import RemotePath


@pytest.fixture
def run(tmp_path):
    with Checkpointer(tmp_path / "run") as saved:
        saved.save(10, {"w": torch.zeros(1000)}, metric=0.25, metadata={"commit": "abc", "tokens": 5})
        saved.save(20, {"w": torch.zeros(1000)})
        saved.save(30, {"w": torch.zeros(1000)}, metadata={"note": "red\x1b[31m"})
    (tmp_path / "run" / "step-00000030" / ".statetree_manifest").write_bytes(b"damaged")
    return tmp_path / "run"


def test_the_steps_of_a_run_are_listed(run, statetree):
    ran = statetree("show", run)
    assert (ran.status, ran.err) == (0, "")
    first, *lines = ran.out.splitlines()
    assert re.fullmatch(r".*/run: 3 complete checkpoints, \d+\.\d KiB", first)
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf'step-00000010  {date}  metric 0\.25 +\d\.\d KiB  commit="abc", tokens=5', lines[0])
    assert re.fullmatch(rf"step-00000020  {date} +\d\.\d KiB", lines[1])
    assert re.fullmatch(rf"step-00000030  {date} +\d\.\d KiB  \.statetree_manifest is damaged: .*", lines[2])


def test_the_steps_of_a_run_as_json(run, statetree):
    found = statetree("show", "--json", run).json
    assert [step["step"] for step in found["steps"]] == [10, 20, 30]
    assert found["steps"][0]["metadata"] == {"commit": "abc", "tokens": 5}
    assert [step["metric"] for step in found["steps"]] == [0.25, None, None]
    assert "damaged" in found["steps"][2]["error"]
    size = sum(file.stat().st_size for file in (run / "step-00000010").iterdir())
    assert found["steps"][0]["bytes"] == size


def test_metadata_are_harmless_on_a_terminal(tmp_path, statetree):
    Checkpointer(tmp_path / "run").save(1, {}, metadata={"a\x1b[31m": "\x1b[2J"})
    assert "\x1b" not in statetree("show", tmp_path / "run").out


def test_a_step_is_shown_as_a_checkpoint(run, statetree):
    assert "w " in statetree("show", run / "step-00000020").out


def test_the_checksums_of_all_steps_are_compared(run, statetree):
    (data,) = (run / "step-00000020").glob("*.distcp")
    text = bytearray(data.read_bytes())
    text[len(text) // 2] ^= 1
    data.write_bytes(text)
    ran = statetree("show", "--verify", run)
    assert ran.status == 2
    _, first, second, third = ran.out.splitlines()
    assert re.search(r"tokens=5, verified: \d+ checksums agree$", first)
    assert re.search(r"damaged|checksum", second)
    assert "verified" not in second + third
    assert statetree("show", run).status == 0
    assert [list(step)[-1] for step in statetree("show", "--verify", "--json", run).json["steps"]] == [
        "verified",
        "error",
        "error",
    ]


@pytest.mark.parametrize("option", [["--stats"], ["--match", "w"], ["--depth", "1"]])
def test_other_options_are_for_one_step(run, option, statetree):
    ran = statetree("show", *option, run)
    assert ran.status == 2
    assert "expected one of its steps" in ran.err


@pytest.fixture
def mirror():
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://mirror"
    system.store.clear()


def test_the_steps_of_a_mirror_are_listed(tmp_path, statetree, mirror):
    with Checkpointer(tmp_path / "run", mirror=mirror, keep=1) as saved:
        saved.save(10, {"w": torch.zeros(1000)}, metric=0.25, metadata={"commit": "abc"})
        saved.save(20, {"w": torch.ones(1000)})
    here, there = (statetree("show", "--verify", "--json", run).json for run in (tmp_path / "run", mirror))
    assert there["run"] == "memory:///mirror"
    assert [step["step"] for step in there["steps"]] == [20]
    fsspec.filesystem("memory").makedirs("/mirror/step-00000030")  # one that is being uploaded
    assert [step | {"saved": ""} for step in there["steps"]] == [step | {"saved": ""} for step in here["steps"]]
    assert all(abs(datetime.fromisoformat(step["saved"]) - datetime.now(UTC)).seconds < 3600 for step in there["steps"])
    system = fsspec.filesystem("memory")
    system.pipe_file("/mirror/step-00000030/__0_0.distcp", b"on its way")
    ran = statetree("show", "--verify", mirror)
    assert ran.status == 0
    first, only = ran.out.splitlines()
    assert re.fullmatch(r".*/mirror: 1 complete checkpoints, \d+\.\d KiB", first)
    assert only.startswith("step-00000020")


def test_a_step_of_a_mirror_that_cannot_be_looked_at_is_listed(tmp_path, statetree, mirror, monkeypatch):
    with Checkpointer(tmp_path / "run", mirror=mirror) as saved:
        saved.save(1, {"w": torch.zeros(10)})
        saved.save(2, {"w": torch.zeros(10)})
    asked = RemotePath.info

    def info(place):
        if "step-00000002" in place.path:
            raise PermissionError("not yours")
        return asked(place)

    monkeypatch.setattr(RemotePath, "info", info)
    first, second = statetree("show", "--json", mirror).json["steps"]
    assert "error" not in first
    assert second["step"] == 2
    assert "not yours" in second["error"]


def test_a_step_that_is_removed_meanwhile_is_not_listed(run, statetree, monkeypatch):
    gone, complete = run / "step-00000020", Series.complete

    def then_removed(series):
        found = complete(series)
        shutil.rmtree(gone)
        return found

    monkeypatch.setattr(Series, "complete", then_removed)
    assert [step["step"] for step in statetree("show", "--json", run).json["steps"]] == [10, 30]


@pytest.mark.parametrize("harm", ["no metadata", "nothing", "a link to nothing"])
def test_a_step_that_is_no_checkpoint_is_named(run, harm, statetree):
    step = run / "step-00000020"
    if harm == "no metadata":
        (step / ".metadata").unlink()
    else:
        shutil.rmtree(step)
        step.mkdir() if harm == "nothing" else step.symlink_to("nowhere")
    (run / "step-00000030" / ".statetree_manifest").unlink()
    (run / ".step-00000040.partial-0").mkdir()
    (run / "step-1").mkdir()
    (run / "step-000000020").mkdir()
    ran = statetree("show", "--verify", run)
    assert ran.status == 2
    first, *lines = ran.out.splitlines()
    assert "2 complete checkpoints" in first
    assert [line.split()[0] for line in lines] == ["step-00000010", "step-00000020", "step-00000030"]
    assert "no complete checkpoint: files are missing" in lines[1]
    assert "it has no .statetree_manifest file" in lines[2]
    assert statetree("show", run).status == 0


@pytest.mark.parametrize("name", ["__0_0.distcp", ".statetree_manifest"])
def test_a_step_of_a_mirror_that_is_damaged_is_named(tmp_path, name, statetree, mirror):
    with Checkpointer(tmp_path / "run", mirror=mirror) as saved:
        saved.save(1, {"w": torch.zeros(10)})
        saved.save(2, {"w": torch.zeros(10)})
    system = fsspec.filesystem("memory")
    if name == ".statetree_manifest":
        system.pipe_file(f"/mirror/step-00000001/{name}", b"damaged")
    else:
        system.rm_file(f"/mirror/step-00000001/{name}")
    ran = statetree("show", "--verify", mirror)
    assert ran.status == 2
    first, damaged, whole = ran.out.splitlines()
    assert "1 complete checkpoints" in first
    assert "no complete checkpoint" in damaged
    assert "verified" in whole


def test_numbers_that_json_lacks_are_texts(tmp_path, statetree):
    with Checkpointer(tmp_path / "run") as saved:
        saved.save(1, {}, metric=float("nan"), metadata={"a": float("inf"), "b": [float("nan"), 1.5, {"c": 2}]})
    ran = statetree("show", "--json", tmp_path / "run")
    (step,) = json.loads(ran.out, parse_constant=pytest.fail)["steps"]
    assert (step["metric"], step["metadata"]) == ("nan", {"a": "inf", "b": ["nan", 1.5, {"c": 2}]})
