"""Train a tiny model with transformers' ``Trainer``; print the digest of its weights."""

from __future__ import annotations

import os
import signal
import sys

import torch
import transformers

import statetree
from statetree.integrations.transformers import Callback


def main(directory, *callbacks, data=None, **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.3, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    data = data or [{"input_ids": row, "labels": row} for row in torch.randint(16, (40, 8))]
    options = {"gradient_accumulation_steps": 2, "save_strategy": "no", **options}
    args = transformers.TrainingArguments(
        output_dir=f"{directory}/out", report_to=[], num_train_epochs=3, logging_strategy="no", use_cpu=True,
        per_device_train_batch_size=4, learning_rate=0.01, disable_tqdm=True, **options,
    )  # fmt: skip
    saving = Callback(f"{directory}/run", every=2, keep=2)
    saving.checkpointer.save_on(signal.SIGTERM)
    callbacks = [saving, *callbacks]
    transformers.Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks).train()
    print("weights", statetree.digest(model.state_dict()))


class Kill(transformers.TrainerCallback):
    def __init__(self, at, directory):
        self.at, self.directory = at, directory

    def on_step_end(self, args, state, control, **_):
        from tests.integrations.kills import kill

        if state.global_step == self.at:
            kill(self.directory)


class Preempt(Kill):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Drawn(torch.utils.data.Dataset):
    """Rows that are drawn as they are read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = torch.randint(16, (8,))
        return {"input_ids": row, "labels": row}


plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
OPTIONS = {
    "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
    "workers": {"data": Drawn(), "dataloader_num_workers": 1},
    "preempted": {"accelerator_config": {"use_seedable_sampler": False}, "gradient_accumulation_steps": 1},
    "evaluated": {"eval_strategy": "epoch", **plateau},  # as the loss falls, the rate does at each evaluation
    "first": {
        **best,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    },  # epoch's weights are loaded at the end
    "last": best,
}

if __name__ == "__main__":
    _, directory, kill_at, *how = sys.argv
    options = {name: value for word in how for name, value in OPTIONS[word].items()}
    end = Preempt if "preempted" in how else Kill
    main(directory, end(int(kill_at), directory), **options)
