"""Which of accelerate's folders is loaded: those that a kill left half written have no number, or another one."""

from __future__ import annotations

import pytest
import torch

from statetree.integrations.accelerate import Registered


def test_the_newest_folder_that_was_written_to_the_end(tmp_path):
    registered = Registered(tmp_path / "run", {"w": torch.ones(2)})
    assert registered.latest(tmp_path / "accelerate") is None
    for number in (1, 2, 3, 10):
        folder = tmp_path / "accelerate" / f"step-{number}"
        folder.mkdir(parents=True)
        torch.save({"step": 7, "statetree": "another"}, folder / "custom_checkpoint_9.pkl")  # of others
        torch.save(registered.state_dict(), folder / "custom_checkpoint_10.pkl")
    assert registered.checkpointer.steps() == [0, 1, 2, 3]
    assert registered.latest(tmp_path / "accelerate").name == "step-10"
    (folder / "custom_checkpoint_10.pkl").write_bytes(b"PK")
    assert registered.latest(tmp_path / "accelerate").name == "step-3"
    (tmp_path / "accelerate" / "step-3" / "custom_checkpoint_10.pkl").unlink()
    assert registered.latest(tmp_path / "accelerate").name == "step-2"


def test_a_folder_of_another_run_is_not_taken(tmp_path):
    (tmp_path / "accelerate" / "step-1").mkdir(parents=True)
    for name in ("one", "other"):
        registered = Registered(tmp_path / name, {"w": torch.ones(2)})
        torch.save(registered.state_dict(), tmp_path / "accelerate" / "step-1" / "custom_checkpoint_0.pkl")
    assert registered.latest(tmp_path / "accelerate").name == "step-1"
    assert Registered(tmp_path / "one", {}).checkpointer.steps() == [0]
    assert Registered(tmp_path / "one", {}).latest(tmp_path / "accelerate") is None


def test_saves_go_on_while_the_mirror_cannot_be_reached(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    system = type(fsspec.filesystem("memory"))

    def fails(*_, **__):
        raise OSError("104 Connection reset by peer")

    registered = Registered(tmp_path / "run", {"w": torch.ones(2)}, mirror="memory://registered")
    assert registered.state_dict()["step"] == 0
    monkeypatch.setattr(system, "ls", fails)
    assert [registered.state_dict()["step"] for _ in range(2)] == [1, 2]
