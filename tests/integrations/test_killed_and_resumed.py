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
@pytest.mark.parametrize("stop_at", [13, 9])  # within an epoch, and before the last step of one
def test_a_preempted_run_goes_on_as_if_it_had_not_been(stop_at, tmp_path):
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("needs transformers, accelerate: make integration installs them")
    whole = run("transformers", tmp_path / "whole", -1, "preempted")
    assert run("transformers", tmp_path / "stopped", stop_at, "preempted") != whole
    assert (tmp_path / "stopped" / "run" / f"step-{stop_at + 1:08}" / ".metadata").exists()
    assert run("transformers", tmp_path / "stopped", -1, "preempted") == whole


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


@needs_lightning
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_that_never_ask_the_plugin_are_refused(name):
    from lightning.pytorch import strategies

    from statetree.integrations.lightning import Callback

    trainer = SimpleNamespace(strategy=type("Own", (getattr(strategies, name),), {})(), callbacks=[])
    with pytest.raises(statetree.CheckpointError, match="Own has files of its own"):
        Callback().setup(trainer, None, "fit")
