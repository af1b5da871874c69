"""Training runs with other packages, tiny ones: each has a state, and can take a step. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

VOCABULARY = 64


class Subject(NamedTuple):
    """A run.

    Attributes:
        state: Returns its state, of the very tensors that it uses.
        step: Trains once.
        ties: Groups of keys whose tensors share memory.
    """

    state: Callable[[], Any]
    step: Callable[[], None]
    ties: tuple[tuple[str, ...], ...] = ()


def gpt2() -> GPT2LMHeadModel:
    """A GPT-2, whose head is its embedding."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    """A Llama, whose head is its embedding unless told otherwise."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, tie_word_embeddings=tied))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step."""
    tokens = torch.randint(VOCABULARY, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile their step, which takes minutes
        optimizer.step()
    optimizer.zero_grad()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, *ties: tuple[str, ...]) -> Subject:
    """A run of a model and an optimizer, one step old."""
    learn(model, optimizer)
    return Subject(
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        lambda: learn(model, optimizer),
        ties,
    )


def trainable(model: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return (part for part in model.parameters() if part.requires_grad)


def transformers_gpt2() -> Subject:
    model = gpt2()
    tie = ("model.transformer.wte.weight", "model.lm_head.weight")
    return run(model, torch.optim.AdamW(model.parameters()), tie)


def transformers_llama() -> Subject:
    model = llama().to(torch.bfloat16)
    tie = ("model.model.embed_tokens.weight", "model.lm_head.weight")
    return run(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), tie)


def peft_lora() -> Subject:
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(gpt2(), config)
    tie = ("model.base_model.model.transformer.wte.weight", "model.base_model.model.lm_head.weight")
    return run(model, torch.optim.AdamW(trainable(model)), tie)


def quantized(config: Any) -> Subject:
    """Frozen quantized weights under adapters that are trained."""
    model = llama(tied=False)
    quantize_(model, config)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return run(adapted, torch.optim.AdamW(trainable(adapted)))


def torchao_int8() -> Subject:
    return quantized(Int8WeightOnlyConfig())


def torchao_float8() -> Subject:
    return quantized(Float8WeightOnlyConfig())


def torchao_intx() -> Subject:
    return quantized(IntxWeightOnlyConfig())


def few_bits(cls: type[torch.optim.Optimizer]) -> Subject:
    """A model whose optimizer keeps its state in few bits. Only of tensors of 4,096 elements or more: it has some."""
    model = llama()
    return run(model, cls(model.parameters()), ("model.model.embed_tokens.weight", "model.lm_head.weight"))


def torchao_adamw_8bit() -> Subject:
    return few_bits(AdamW8bit)


def torchao_adamw_4bit() -> Subject:
    return few_bits(AdamW4bit)


def torchao_adamw_fp8() -> Subject:
    return few_bits(AdamWFp8)


def accelerate_prepared() -> Subject:
    """What accelerate prepares: a model, an optimizer, a schedule and batches."""
    accelerator = Accelerator(cpu=True)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
    batches = torch.utils.data.DataLoader(torch.arange(64).view(8, 8) % VOCABULARY, batch_size=2)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)

    def step() -> None:
        for tokens in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    def state() -> Any:
        return {
            "model": accelerator.get_state_dict(model, unwrap=True),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }

    step()
    return Subject(state, step, (("model.transformer.wte.weight", "model.lm_head.weight"),))


SUBJECTS: tuple[Callable[[], Subject], ...] = (
    transformers_gpt2,
    transformers_llama,
    peft_lora,
    torchao_int8,
    torchao_float8,
    torchao_intx,
    torchao_adamw_8bit,
    torchao_adamw_4bit,
    torchao_adamw_fp8,
    accelerate_prepared,
)
