"""torchtitan's own adapters between its models and the hub's, and what conversions make of the same states."""

from __future__ import annotations

import itertools
import warnings

import torch

import statetree as st

with warnings.catch_warnings():  # torch's own, as it compiles what torchtitan's models are made of
    warnings.simplefilter("ignore")
    from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3

HUB, OURS = "model.layers.{i}.", "layers.{i}."
COMMON = [
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
    (OURS + "attention_norm.weight", HUB + "input_layernorm.weight"),
    (OURS + "ffn_norm.weight", HUB + "post_attention_layernorm.weight"),
    (OURS + "attention.qkv_linear.wv.weight", HUB + "self_attn.v_proj.weight"),
    (OURS + "attention.wo.weight", HUB + "self_attn.o_proj.weight"),
]
LLAMA = [
    *[
        (f"{OURS}attention.qkv_linear.w{p}.weight", f"{HUB}self_attn.{p}_proj.weight", "(h d two) m -> (h two d) m")
        for p in "qk"
    ],
    (OURS + "feed_forward.w1.weight", HUB + "mlp.gate_proj.weight"),
    (OURS + "feed_forward.w2.weight", HUB + "mlp.down_proj.weight"),
    (OURS + "feed_forward.w3.weight", HUB + "mlp.up_proj.weight"),
]
EXPERTS = OURS + "moe.routed_experts.inner_experts."
QWEN = [
    *[(f"{OURS}attention.qkv_linear.w{p}.weight", f"{HUB}self_attn.{p}_proj.weight") for p in "qk"],
    *[(f"{OURS}attention.{p}_norm.weight", f"{HUB}self_attn.{p}_norm.weight") for p in "qk"],
    (OURS + "moe.router.gate.weight", HUB + "mlp.gate.weight"),
    (EXPERTS + "w1_EFD", HUB + "mlp.experts.{e}.gate_proj.weight", "e f d -> f d"),
    (EXPERTS + "w3_EFD", HUB + "mlp.experts.{e}.up_proj.weight", "e f d -> f d"),
    (EXPERTS + "w2_EDF", HUB + "mlp.experts.{e}.down_proj.weight", "e d f -> d f"),
]


def adapter_of(models, flavor):
    spec = models.model_registry(flavor)
    return spec.model, spec.state_dict_adapter(spec.model, None)


def attention(config):
    found = config.layers[0].attention
    queries = found.n_heads
    return queries, found.n_kv_heads or queries, found.head_dim or config.dim // queries


def made(shapes, layers=2):
    """Return a state whose elements are unique: shapes of each layer by names, and of what is there once."""
    state, start = {}, 0
    for name, shape in shapes.items():
        for key in [name.format(i=i) for i in range(layers)] if "{i}" in name else [name]:
            count = torch.Size(shape).numel()
            state[key] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
            start += count
    return state


def shapes_of(config):
    queries, keys, size = attention(config)
    dim = config.dim
    return {
        "tok_embeddings.weight": (32, dim),
        "norm.weight": (dim,),
        "lm_head.weight": (32, dim),
        OURS + "attention_norm.weight": (dim,),
        OURS + "ffn_norm.weight": (dim,),
        OURS + "attention.qkv_linear.wq.weight": (queries * size, dim),
        OURS + "attention.qkv_linear.wk.weight": (keys * size, dim),
        OURS + "attention.qkv_linear.wv.weight": (keys * size, dim),
        OURS + "attention.wo.weight": (dim, queries * size),
    }


def check(conversion, adapter, state):
    hub = adapter.to_hf(dict(state))
    assert st.similarity(conversion(state), hub), str(st.similarity(conversion(state), hub))
    back = adapter.from_hf(dict(hub))
    assert st.similarity(conversion.inverse(hub), back)
    assert st.similarity(back, state)


def test_llama_is_what_its_adapter_makes():
    config, adapter = adapter_of(llama3, "debugmodel")
    hidden = {f"{OURS}feed_forward.{name}.weight": (48, config.dim) for name in ("w1", "w3")}
    shapes = {**shapes_of(config), **hidden, OURS + "feed_forward.w2.weight": (config.dim, 48)}
    check(st.Conversion([*COMMON, *LLAMA], sizes={"two": 2, "d": attention(config)[2] // 2}), adapter, made(shapes))


def test_qwen_with_experts_is_what_its_adapter_makes():
    config, adapter = adapter_of(qwen3, "debugmodel_moe")
    config.enable_weight_tying = False
    count = next(layer.moe for layer in config.layers if layer.moe is not None).num_experts
    size = attention(config)[2]
    shapes = {
        **shapes_of(config),
        **{f"{OURS}attention.{name}_norm.weight": (size,) for name in "qk"},
        OURS + "moe.router.gate.weight": (count, config.dim),
        **{EXPERTS + name: (count, 24, config.dim) for name in ("w1_EFD", "w3_EFD")},
        EXPERTS + "w2_EDF": (count, config.dim, 24),
    }
    check(st.Conversion([*COMMON, *QWEN]), adapter, made(shapes))


#: Of GPT-OSS, biases are renamed as weights are; only names differ.
GPT_OSS = [
    *[
        (f"{OURS}attention.qkv_linear.w{p}.{kind}", f"{HUB}self_attn.{p}_proj.{kind}")
        for p, kind in itertools.product("qkv", ("weight", "bias"))
        if (p, kind) != ("v", "weight")
    ],
    (OURS + "attention.wo.bias", HUB + "self_attn.o_proj.bias"),
    (OURS + "attention.sinks", HUB + "self_attn.sinks"),
    *[(f"{OURS}moe.router.gate.{kind}", f"{HUB}mlp.router.{kind}") for kind in ("weight", "bias")],
    *[
        (f"{EXPERTS}mlp{number}_{kind}", f"{HUB}mlp.experts.{name}_{named}")
        for number, name in ((1, "gate_up_proj"), (2, "down_proj"))
        for kind, named in (("weight", "blocks"), ("bias", "bias"))
    ],
]
DEEPSEEK = [
    *[(row[0], row[1]) for row in COMMON if "qkv_linear" not in row[0]],
    (OURS + "attention.wq.weight", HUB + "self_attn.q_proj.weight"),
    (OURS + "attention.wkv_a.weight", HUB + "self_attn.kv_a_proj_with_mqa.weight"),
    (OURS + "attention.kv_norm.weight", HUB + "self_attn.kv_a_layernorm.weight"),
    (OURS + "attention.wkv_b.weight", HUB + "self_attn.kv_b_proj.weight"),
    *[
        (f"{OURS}{ours}.{w}.weight", f"{HUB}mlp.{hub}{name}_proj.weight")
        for ours, hub in (("feed_forward", ""), ("moe.shared_experts", "shared_experts."))
        for w, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ],
    (OURS + "moe.router.gate.weight", HUB + "mlp.gate.weight"),
    (OURS + "moe.expert_bias_E", HUB + "mlp.gate.e_score_correction_bias"),
    *QWEN[-3:],
]


def test_gpt_oss_is_what_its_adapter_makes():
    config, adapter = adapter_of(gpt_oss, "debugmodel")
    queries, keys, size = attention(config)
    dim, count = config.dim, 4
    shapes = {
        **shapes_of(config),
        **{f"{OURS}attention.qkv_linear.w{p}.bias": (n * size,) for p, n in (("q", queries), ("k", keys), ("v", keys))},
        OURS + "attention.wo.bias": (dim,),
        OURS + "attention.sinks": (queries,),
        OURS + "moe.router.gate.weight": (count, dim),
        OURS + "moe.router.gate.bias": (count,),
        EXPERTS + "mlp1_weight": (count, 48, dim),
        EXPERTS + "mlp1_bias": (count, 48),
        EXPERTS + "mlp2_weight": (count, dim, 24),
        EXPERTS + "mlp2_bias": (count, dim),
    }
    check(st.Conversion([*COMMON, *GPT_OSS]), adapter, made(shapes))


def test_deepseek_is_what_its_adapter_makes():
    config, adapter = adapter_of(deepseek_v3, "debugmodel")
    count = next(layer.moe for layer in config.layers if layer.moe is not None).num_experts
    dim = config.dim
    shapes = {
        "tok_embeddings.weight": (32, dim),
        "norm.weight": (dim,),
        "lm_head.weight": (32, dim),
        **{f"{OURS}{name}_norm.weight": (dim,) for name in ("attention", "ffn")},
        OURS + "attention.wq.weight": (24, dim),
        OURS + "attention.wkv_a.weight": (12, dim),
        OURS + "attention.kv_norm.weight": (8,),
        OURS + "attention.wkv_b.weight": (40, 8),
        OURS + "attention.wo.weight": (dim, 24),
        OURS + "moe.router.gate.weight": (count, dim),
        OURS + "moe.expert_bias_E": (count,),
        **{EXPERTS + name: (count, 20, dim) for name in ("w1_EFD", "w3_EFD")},
        EXPERTS + "w2_EDF": (count, dim, 20),
    }
    for where in ("feed_forward", "moe.shared_experts"):
        shapes |= {f"{OURS}{where}.{w}.weight": (dim, 20) if w == "w2" else (20, dim) for w in ("w1", "w2", "w3")}
    check(st.Conversion(DEEPSEEK), adapter, made(shapes))
