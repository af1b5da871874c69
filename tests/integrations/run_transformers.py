"""Train a tiny model with transformers' ``Trainer``; print the digest of its weights."""

from __future__ import annotations

import sys

import torch
import transformers

import statetree
from statetree.integrations.transformers import Callback


def main(directory, *callbacks):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.3, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(16, (40, 8))]
    args = transformers.TrainingArguments(
        output_dir=f"{directory}/out", save_strategy="no", report_to=[], num_train_epochs=3, logging_strategy="no",
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    saving = Callback(f"{directory}/run", every=2, keep=2)
    transformers.Trainer(model, args, train_dataset=data, callbacks=[saving, *callbacks]).train()
    print("weights", statetree.digest(model.state_dict()))


class Kill(transformers.TrainerCallback):
    def __init__(self, at, directory):
        self.at, self.directory = at, directory

    def on_step_end(self, args, state, control, **_):
        from tests.integrations.kills import kill

        if state.global_step == self.at:
            kill(self.directory)


if __name__ == "__main__":
    main(sys.argv[1], Kill(int(sys.argv[2]), sys.argv[1]))
