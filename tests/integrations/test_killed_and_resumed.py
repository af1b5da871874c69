"""A run of each framework that is killed and started again ends as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import statetree

ROOT = Path(__file__).parents[2]
RUNS = [
    ("transformers", 9, ["transformers", "accelerate"], []),
    ("transformers", 9, ["transformers", "accelerate"], ["unseeded"]),  # whose order comes from torch's random state
    ("transformers", 9, ["transformers", "accelerate"], ["workers"]),  # which draw what they read
    ("transformers", 9, ["transformers", "accelerate"], ["evaluated"]),
    ("transformers", 9, ["transformers", "accelerate"], ["first"]),
    ("lightning", 7, ["lightning", "torchdata"], ["3"]),  # in the middle of an epoch
    ("lightning", 9, ["lightning", "torchdata"], ["5"]),  # due at its end
    ("lightning", 7, ["lightning", "torchdata"], ["3", "ddp"]),
    ("lightning", 5, ["lightning", "torchdata"], ["3", "accumulating"]),  # due at an epoch's end
    ("lightning", 5, ["lightning", "torchdata"], ["3", "averaging"]),
    ("accelerate", 8, ["accelerate", "torchdata"], []),
    ("accelerate", 9, ["accelerate", "torchdata"], ["within"]),  # a save
    ("torchtitan", 8, ["torchtitan"], []),
]


def run(name, *arguments):
    command = [sys.executable, "-m", f"tests.integrations.run_{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert bool(lines) == (done.returncode == 0), done.stderr
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kill_at", "packages", "more"), RUNS, ids=lambda value: str(value))
def test_a_killed_run_ends_as_if_it_had_not_been(name, kill_at, packages, more, tmp_path):
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make integration installs it")
    whole = run(name, tmp_path / "whole", -1, *more)
    assert run(name, tmp_path / "killed", kill_at, *more) == []
    steps = [path for path in tmp_path.glob("killed/*/step-*") if (path / ".metadata").exists()]
    assert steps, "nothing was saved before the kill"
    assert run(name, tmp_path / "killed", -1, *more) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_at", "saved", "more"),
    [
        (13, 14, []),  # within an epoch
        (9, 10, []),  # before the last step of one
        (13, 14, ["evaluated"]),
        (13, 13, ["last"]),  # the weights of the best epoch are loaded before the run ends, and those are not saved
    ],
)
def test_a_preempted_run_goes_on_as_if_it_had_not_been(stop_at, saved, more, tmp_path):
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("needs transformers, accelerate: make integration installs them")
    whole = run("transformers", tmp_path / "whole", -1, "preempted", *more)
    assert run("transformers", tmp_path / "stopped", stop_at, "preempted", *more) != whole
    assert max(path.parent.name for path in tmp_path.glob("stopped/run/*/.metadata")) == f"step-{saved:08}"
    assert run("transformers", tmp_path / "stopped", -1, "preempted", *more) == whole


@pytest.mark.slow
def test_ranks_stop_together_where_one_is_preempted(tmp_path):
    if find_spec("lightning") is None or find_spec("torchdata") is None:
        pytest.skip("needs lightning and torchdata: make integration installs them")
    whole = run("lightning", tmp_path / "whole", -1, 3, "ddp", "preempted")
    assert run("lightning", tmp_path / "stopped", 7, 3, "ddp", "preempted") != whole
    assert max(path.parent.name for path in tmp_path.glob("stopped/run/*/.metadata")) == "step-00000008"
    assert run("lightning", tmp_path / "stopped", -1, 3, "ddp", "preempted") == whole


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make integration installs them",
)


@needs_transformers
@pytest.mark.filterwarnings("default")  # of theirs
def test_what_could_not_be_resumed_is_refused_before_it_is_saved(tmp_path):
    import torch

    from tests.integrations.run_transformers import Drawn, main

    class WithoutLength(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Drawn())

    with pytest.raises(ValueError, match="save: expected a known number of batches an epoch"):
        main(tmp_path, data=WithoutLength(), max_steps=4)
    with pytest.raises(ValueError, match="save: expected a known number of batches an epoch"):
        main(tmp_path, data=[Drawn()[0]] * 36)  # nine batches, of which two are a step
    assert list(tmp_path.glob("run/step-*")) == []


@needs_transformers
@pytest.mark.filterwarnings("default")
def test_callbacks_whose_state_is_not_saved_are_named(tmp_path):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    from tests.integrations.run_transformers import main

    class Counting(TrainerCallback, ExportableState):
        def state(self):
            return {"args": {}, "attributes": {"count": 1}}

    with pytest.warns(UserWarning, match="begins it anew: the state of Counting"):
        main(tmp_path, Counting())


@needs_transformers
@pytest.mark.filterwarnings("default")
def test_a_run_that_is_over_does_no_step_when_it_is_started_again(tmp_path, capsys):
    from tests.integrations.run_transformers import main

    for _ in range(3):
        main(tmp_path, max_steps=7)  # five are an epoch
    weights = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights")]
    assert weights == weights[:1] * 3
    assert [path.name for path in sorted(tmp_path.glob("run/step-*"))] == ["step-00000006", "step-00000007"]


needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("torchdata") is None,
    reason="needs lightning and torchdata: make integration installs them",
)


@needs_lightning
@pytest.mark.filterwarnings("default")
def test_an_epoch_within_which_nothing_can_be_saved_gives_a_warning(tmp_path):
    from tests.integrations.run_lightning import main

    with pytest.warns(UserWarning, match="save: nothing is saved before the run ends: an epoch is one step"):
        main(tmp_path, 3, accumulate_grad_batches=5)
    assert [path.name for path in tmp_path.glob("run/step-*")] == ["step-00000003"]


def trained_on(trainer, loader):
    trainer.fit_loop.max_epochs += 2
    trainer.fit(trainer.lightning_module, loader)
    return statetree.digest(trainer.lightning_module.state_dict())


@needs_lightning
@pytest.mark.filterwarnings("default")
def test_one_plugin_serves_all_calls_of_a_trainer(tmp_path):
    from tests.integrations.run_lightning import main

    trainer = main(tmp_path / "without", 100)
    without = trained_on(trainer, trainer.train_dataloader)
    trainer = main(tmp_path, 3)
    io = trainer.strategy.checkpoint_io
    assert io.checkpointer.steps() == [12, 15]
    assert trained_on(trainer, trainer.train_dataloader) == without
    assert io.checkpointer.steps() == [21, 24]
    trainer.save_checkpoint(tmp_path / "own")
    saved = io.load_checkpoint(tmp_path / "own")["state_dict"]  # perhaps while it is being saved
    assert statetree.digest(saved) == statetree.digest(trainer.lightning_module.state_dict())


@needs_lightning
@pytest.mark.filterwarnings("default")
def test_a_fit_after_a_validation_draws_its_own_numbers(tmp_path, monkeypatch):
    import torch

    from tests.integrations.run_lightning import Model, main

    monkeypatch.setattr(Model, "validation_step", Model.training_step, raising=False)
    digests = []
    for name in ("without", "with"):
        trainer = main(tmp_path / name, 3)
        loader, path = trainer.train_dataloader, trainer.strategy.checkpoint_io.latest()
        validated = torch.utils.data.DataLoader(loader.dataset, batch_size=4)
        trainer.validate(trainer.lightning_module, validated, ckpt_path=path if name == "with" else None)
        torch.manual_seed(1)
        digests.append(trained_on(trainer, loader))
    assert digests[0] == digests[1]


@needs_lightning
@pytest.mark.filterwarnings("default")
def test_paths_that_lightning_names_are_found_as_long_as_their_steps_are_kept(tmp_path, monkeypatch):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations.run_lightning import Model, main

    monkeypatch.setattr(Model, "validation_step", Model.training_step, raising=False)
    named = ModelCheckpoint(tmp_path / "named", save_top_k=-1, save_last=True)  # an epoch's step under two names
    trainer = main(tmp_path, 15, named, enable_checkpointing=True)  # the last one is the callback's, too
    io, model, loader = trainer.strategy.checkpoint_io, trainer.lightning_module, trainer.train_dataloader
    for path, step in {"best": 15, named.last_model_path: 15, tmp_path / "named" / "epoch=1-step=10.ckpt": 10}.items():
        trainer.validate(model, loader, ckpt_path=path)
        saved = io.checkpointer.restore(step=step)["state_dict"]
        assert statetree.digest(model.state_dict()) == statetree.digest(saved)
    with pytest.raises(
        statetree.CheckpointError, match=r"load: no step that is kept was saved as .*epoch=0-step=5\.ckpt"
    ):
        trainer.validate(model, loader, ckpt_path=tmp_path / "named" / "epoch=0-step=5.ckpt")


@needs_lightning
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_that_never_ask_the_plugin_are_refused(name):
    from lightning.pytorch import strategies

    from statetree.integrations.lightning import Callback

    trainer = SimpleNamespace(strategy=type("Own", (getattr(strategies, name),), {})(), callbacks=[])
    with pytest.raises(statetree.CheckpointError, match="Own has files of its own"):
        Callback().setup(trainer, None, "fit")
