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
    args = transformers.TrainingArguments(
        output_dir=f"{directory}/out", save_strategy="no", report_to=[], num_train_epochs=3, logging_strategy="no",
        per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True, disable_tqdm=True,
        **{"gradient_accumulation_steps": 2, **options},
    )  # fmt: skip
    saving = Callback(f"{directory}/run", every=2, keep=2)
    saving.checkpointer.save_on(signal.SIGTERM)
    transformers.Trainer(model, args, train_dataset=data, callbacks=[saving, *callbacks]).train()
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


if __name__ == "__main__":
    _, directory, kill_at, *how = sys.argv
    options = {
        "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
        "workers": {"data": Drawn(), "dataloader_num_workers": 1},
        "preempted": {"accelerator_config": {"use_seedable_sampler": False}, "gradient_accumulation_steps": 1},
    }.get("".join(how), {})
    end = Preempt if how == ["preempted"] else Kill
    main(directory, end(int(kill_at), directory), **options)
