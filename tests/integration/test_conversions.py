"""Models of transformers in the forms of trainers, and back: bit for bit, with equal outputs."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import statetree as st

HUB, ATTENTION, MLP = "model.layers.{i}.", "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
OURS = "decoder.{i}."
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENDS = [
    ("model.embed_tokens.weight", "tok_embeddings.weight"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "output.weight"),
    (HUB + "{name}_layernorm.weight", OURS + "{name}_norm.weight"),
]
DENSE = [
    ([MLP + "gate_proj.weight", MLP + "up_proj.weight"], OURS + "fc1", "f m, f m -> (f + f) m"),
    (MLP + "down_proj.weight", OURS + "fc2"),
]
OUT = (ATTENTION + "o_proj.weight", OURS + "wo")
QKV = [ATTENTION + f"{name}_proj.weight" for name in "qkv"]
FUSED = (QKV, OURS + "qkv.weight", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m")
TITAN = [
    (ATTENTION + "q_proj.weight", OURS + "wq", "(h two d) m -> (h d two) m"),
    (ATTENTION + "k_proj.weight", OURS + "wk", "(h two d) m -> (h d two) m"),
    (ATTENTION + "v_proj.weight", OURS + "wv"),
]
QWEN = [
    FUSED,
    (ATTENTION + "{name}_norm.weight", OURS + "{name}.norm"),
    (MLP + "experts.gate_up_proj", [OURS + "{e}.w1", OURS + "{e}.w3"], "e (f + f) m -> f m, f m"),
    (MLP + "experts.down_proj", OURS + "{e}.w2", "e m f -> m f"),
    (MLP + "gate.weight", OURS + "router"),
]
GPT_OSS = [
    FUSED,
    ([name.replace("weight", "bias") for name in QKV], OURS + "qkv.bias", FUSED[2].replace(" m", "")),
    (ATTENTION + "o_proj.bias", OURS + "bo"),
    (ATTENTION + "sinks", OURS + "sinks"),
    (MLP + "router.{name}", OURS + "router.{name}"),
    # gate and up alternate, and are stored from left to right
    (MLP + "experts.gate_up_proj", [OURS + "{e}.w1", OURS + "{e}.w3"], "e m (f (1 + 1)) -> f m, f m"),
    (MLP + "experts.gate_up_proj_bias", [OURS + "{e}.b1", OURS + "{e}.b3"], "e (f (1 + 1)) -> f, f"),
    (MLP + "experts.down_proj", OURS + "{e}.w2", "e f m -> m f"),
    (MLP + "experts.down_proj_bias", OURS + "{e}.b2", "e m -> m"),
]
DEEPSEEK = [
    *DENSE,
    (ATTENTION + "q_a_proj.weight", OURS + "q_down"),
    (ATTENTION + "{name}_a_layernorm.weight", OURS + "{name}_a.norm"),
    (ATTENTION + "q_b_proj.weight", OURS + "q_up", "(h (k + (two r))) c -> (h (k + (r two))) c"),
    (ATTENTION + "kv_a_proj_with_mqa.weight", [OURS + "kv_down", OURS + "k_rope"], "(c + (two r)) m -> c m, (r two) m"),
    (ATTENTION + "kv_b_proj.weight", [OURS + "k_up", OURS + "v_up"], "(h (k + v)) c -> (h k) c, (h v) c"),
    *QWEN[2:],
    (MLP + "gate.e_score_correction_bias", OURS + "bias"),
    (MLP + "shared_experts.{name}_proj.weight", OURS + "shared.{name}"),
]
DEEPSEEK_SIZES = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CASES = {
    "llama to torchtitan": (LlamaForCausalLM, LlamaConfig(**SIZES), [*DENSE, *TITAN], {"two": 2, "d": 4}),
    "llama to megatron": (LlamaForCausalLM, LlamaConfig(**SIZES), [*DENSE, FUSED], {"q": 2, "d": 8}),
    "qwen with experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, head_dim=8),
        QWEN,
        {"q": 2, "d": 8},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
        GPT_OSS,
        {"q": 2, "d": 8},
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**SIZES, **EXPERTS, **DEEPSEEK_SIZES}),
        DEEPSEEK,
        {"h": 4, "k": 8, "v": 8, "two": 2, "r": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_through_a_file(name, tmp_path):
    cls, config, rules, sizes = CASES[name]
    conversion = st.Conversion([*ENDS, OUT, *rules], sizes=sizes)
    torch.manual_seed(0)
    model, other = cls(config).eval(), cls(config).eval()
    state = dict(model.state_dict())
    st.save(conversion(state), tmp_path / "ours.safetensors")
    back = conversion.inverse(st.files.open(tmp_path / "ours.safetensors"))
    assert st.similarity(st.offload(back), state)
    assert st.similarity(conversion.inverse(conversion(state)), state)
    st.copy_into(back, other.state_dict())
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, model(tokens).logits)
