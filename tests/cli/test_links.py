"""``--follow-links``: shards that are links to elsewhere, as Hugging Face's cache has them."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from tests.cli.states import bits, write

STATE = {"w": bits(40), "x": bits(20, start=3)}


@pytest.fixture
def cached(tmp_path, statetree):
    """A sharded model in a cache's layout: files named after their contents, and links to them under their names."""
    source = write(STATE, tmp_path / "source.safetensors")
    made = tmp_path / "made"
    made.mkdir()
    target = made / "model.safetensors"
    assert statetree("convert", "--shard-bytes", 100, source, target).status == 0
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in made.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot / "model.safetensors.index.json"


def shards(index):
    return sorted(index.parent.glob("model-*.safetensors"))


@pytest.mark.parametrize("command", ["show", "diff", "convert"])
def test_links_are_refused_unless_asked_for(command, cached, tmp_path, statetree):
    others = {"show": [], "diff": [tmp_path / "source.safetensors"], "convert": [tmp_path / "to.pt"]}[command]
    ran = statetree(command, cached, *others)
    assert ran.status == 2
    assert ran.err.startswith("error: read: ")
    assert "is a link that leads out of its directory. " in ran.err
    assert "pass --follow-links" in ran.err
    assert not (tmp_path / "to.pt").exists()
    assert statetree(command, "--follow-links", cached, *others).status == 0


def test_what_links_lead_to_is_read(cached, tmp_path, statetree):
    assert len(shards(cached)) == 2
    source = tmp_path / "source.safetensors"
    assert statetree("diff", "--follow-links", "--values", cached, source).status == 0
    assert statetree("diff", "--follow-links", "--values", source, cached).status == 0
    assert statetree("convert", "--follow-links", cached, tmp_path / "to.pt").status == 0
    assert statetree("diff", "--values", tmp_path / "to.pt", source).status == 0


@pytest.mark.parametrize("name", ["../../blobs/x.safetensors", "/etc/passwd", "a\0b", "missing.safetensors"])
def test_names_are_refused_all_the_same(name, cached, statetree):
    shards(cached)[0].resolve().with_name("x.safetensors").write_bytes(shards(cached)[0].read_bytes())
    table = json.loads(cached.read_text())
    table["weight_map"] = dict.fromkeys(table["weight_map"], name)
    cached.write_text(json.dumps(table))
    ran = statetree("show", "--follow-links", cached)
    assert ran.status == 2
    assert ran.err.startswith("error: read: ")


@pytest.mark.parametrize("goal", ["nowhere", "/dev/zero", "/etc", "pipe", "loop"])
def test_links_to_no_regular_file_are_refused(goal, cached, statetree):
    os.mkfifo(cached.parent / "pipe")
    shard = shards(cached)[0]
    shard.unlink()
    shard.symlink_to(shard.name if goal == "loop" else goal)
    ran = statetree("show", "--follow-links", cached)
    assert ran.status == 2
    assert ran.err.startswith("error: read: ")
    assert shard.name in ran.err


def test_what_is_no_shard_is_refused(cached, tmp_path, statetree):
    (tmp_path / "secret").write_text("not for you " * 100)
    shard = shards(cached)[0]
    shard.unlink()
    shard.symlink_to(tmp_path / "secret")
    ran = statetree("convert", "--follow-links", cached, tmp_path / "to.pt")
    assert ran.status == 2
    assert "not for you" not in ran.err
    assert not (tmp_path / "to.pt").exists()
