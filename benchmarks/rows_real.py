"""States as users have them: a Llama-shaped transformer with AdamW, a LoRA state of it, a mixture of experts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree as st
import statetree.dcp
from benchmarks.checks import is_copy_of
from benchmarks.measure import Contender, ours, peer
from benchmarks.peers import gather_state_dict
from benchmarks.ranks import RankRow
from benchmarks.rows import Row, faster
from benchmarks.rows_copy import copy_into
from benchmarks.rows_stage import again, for_the_first_time, with_fresh_heap
from benchmarks.states import MB, State

#: The shape of the transformer: as that of Llama, and narrow enough for a small machine.
LAYERS, WIDTH, HIDDEN, VOCABULARY = 20, 512, 1376, 8_000
RANK = 8
EXPERTS, EXPERT_LAYERS = 104, 32


def _parameters(scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return parameters by their names, their elements unique by position as far as the dtype can count."""
    width, hidden, words = (max(round(number * scale**0.5), 2) for number in (WIDTH, HIDDEN, VOCABULARY))
    shapes = {"model.embed_tokens": (words, width)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj": (hidden, width) for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj": (width, hidden)}
        shapes |= {f"{name}.{part}_layernorm": (width,) for part in ("input", "post_attention")}
    shapes["model.norm"] = (width,)
    return {f"{name}.weight": _ramp(shape, dtype) for name, shape in shapes.items()}


def _ramp(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).remainder_(1 << 16).to(dtype).view(shape)


def _with_adamw(model: dict[str, torch.Tensor], trained: list[torch.Tensor]) -> dict[str, Any]:
    per_param = {
        index: {"step": torch.tensor(1.0), "exp_avg": tensor + 1, "exp_avg_sq": tensor + 2}
        for index, tensor in enumerate(trained)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(range(len(trained)))}
    return {"model": model, "optimizer": {"state": per_param, "param_groups": [group]}, "step": 1}


def _titled(what: str, tree: Any) -> State:
    state = State("", tree)
    return State(f"{what}: {len(state.tensors):,} tensors, {state.nbytes / MB:,.0f} MB", tree)


def llama(scale: float) -> State:
    """A transformer in float32, with AdamW."""
    model = _parameters(scale, torch.float32)
    return _titled("a Llama-shaped transformer and AdamW", _with_adamw(model, list(model.values())))


def lora(scale: float) -> State:
    """The same transformer in bfloat16, low-rank adapters of its queries and values, and AdamW of these."""
    model = _parameters(scale, torch.bfloat16)
    adapters = {}
    for name, tensor in model.items():
        if "q_proj" in name or "v_proj" in name:
            stem = name.removesuffix(".weight")
            adapters[f"{stem}.lora_A.weight"] = _ramp((RANK, tensor.shape[1]), torch.float32)
            adapters[f"{stem}.lora_B.weight"] = _ramp((tensor.shape[0], RANK), torch.float32)
    return _titled("LoRA of it", _with_adamw({**model, **adapters}, list(adapters.values())))


def experts(scale: float) -> State:
    """A mixture of experts: 10,000 matrices of 8 KB in bfloat16, nested by layers and experts."""
    count = max(round(EXPERTS * scale), 2)
    layers = [
        [{name: _ramp((64, 64), torch.bfloat16) for name in ("w1", "w2", "w3")} for _ in range(count)]
        for _ in range(EXPERT_LAYERS)
    ]
    return _titled("a mixture of experts", {"model": {"layers": layers}})


def offload(state: State) -> list[Contender]:
    """Copy a state into fresh memory."""
    fresh = partial(with_fresh_heap, None)
    return [
        ours(lambda _: st.offload(state.tree), is_copy_of(state), fresh=fresh),
        peer("copy.deepcopy", lambda _: copy.deepcopy(state.tree), is_copy_of(state), fresh=fresh),
    ]


@dataclass(frozen=True)
class Split(State):
    """A state whose tensors are split over the ranks along their first dim, if they have one.

    Attributes:
        whole: The state that it is a part of, as it is now.
    """

    whole: State

    def change(self) -> None:
        """Add 1 to every element, on all ranks."""
        for tensor in self.tensors:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        self.whole.change()


def split_llama(scale: float) -> Split:
    """This rank's part of the transformer and its optimizer's state."""
    whole, mesh = llama(scale), init_device_mesh("cpu", (dist.get_world_size(),))

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return copy.deepcopy(leaf)
        chunks = leaf.chunk(dist.get_world_size())
        local = chunks[dist.get_rank()].clone() if dist.get_rank() < len(chunks) else leaf[:0]
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=leaf.shape, stride=leaf.stride())

    return Split(f"DTensors of {whole.title}", st.map_leaves(part, whole.tree), whole)


def gather(state: Split) -> list[Contender]:
    """Make it whole on rank 0."""
    copied = is_copy_of(state.whole)

    def complete(result: Any) -> bool:
        return dist.get_rank() != 0 or copied(result)

    return [
        ours(lambda: st.gather(state.tree, dst=0), complete),
        peer("_gather_state_dict", lambda: gather_state_dict(state.tree, ranks_only=(0,)), complete),
    ]


ROWS = (
    *(Row("real", "stage again", state, again, (faster("StateDictStager", 1),)) for state in (llama, lora, experts)),
    *(Row("real", "first stage", state, for_the_first_time, (faster("StateDictStager", 1),), rounds=5)
      for state in (llama, lora, experts)),
    *(Row("real", "offload", state, offload, (faster("copy.deepcopy", 1),), rounds=5)
      for state in (llama, lora, experts)),
    *(Row("real", "copy_into", state, copy_into, (faster("_copy_state_dict", 1),)) for state in (llama, lora, experts)),
    RankRow("real", "gather to one", split_llama, gather, (faster("_gather_state_dict", 1),), rounds=3),
)  # fmt: skip
