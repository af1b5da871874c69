"""Files that other packages write and read, with statetree on the other side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel

import statetree as st
from statetree.cli.app import main
from statetree.testing import run_ranks
from statetree.testing.pace import units
from tests.integration.subjects import VOCABULARY, gpt2, learn, transformers_gpt2
from tests.judge import assert_trees_equal
from tests.ranks import close_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HEAD = "lm_head.weight"
EMBEDDING = "transformer.wte.weight"


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_the_module():
    yield
    close_ranks()


def seeded(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return gpt2()


def sharded() -> GPT2LMHeadModel:
    model = seeded()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save_gathered(folder: Path) -> dict[str, Any]:
    """Write a sharded model's weights from rank 0, as plain safetensors and as transformers does."""
    model = sharded()
    full = st.chain(partial(st.gather, dst=0), st.offload)(model.state_dict())
    found = {key: (leaf.device.type, tuple(leaf.shape)) for key, leaf in full.items()}
    if dist.get_rank() == 0:
        assert full[HEAD].data_ptr() == full[EMBEDDING].data_ptr()
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file(full, folder / "tied.safetensors")
        safetensors.torch.save_file({key: leaf for key, leaf in full.items() if key != HEAD}, folder / "w.safetensors")
        gpt2().save_pretrained(folder / "pretrained", state_dict=full)  # which empties the dict
    return found


def distribute_file(folder: Path) -> bool:
    """Read a file on rank 0 into a sharded model. Returns whether every rank has its part of it."""
    model = sharded()
    wanted = st.offload(model.state_dict())
    with torch.no_grad():
        for part in model.parameters():
            part.zero_()
    like = {key: leaf for key, leaf in model.state_dict().items() if key != HEAD}
    full = safetensors.torch.load_file(folder / "w.safetensors") if dist.get_rank() == 0 else None
    st.distribute(full, like=like, src=0, in_place=True)
    return bool(st.similarity(wanted, model.state_dict(), values=True))


def test_a_gathered_model_is_saved_and_distributed_again(tmp_path):
    on_0, on_1 = run_ranks(2, save_gathered, tmp_path, timeout=units(60))
    expected = seeded().state_dict()
    assert on_0 == {key: ("cpu", tuple(leaf.shape)) for key, leaf in expected.items()}
    assert on_1 == {key: ("meta", tuple(leaf.shape)) for key, leaf in expected.items()}
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert st.similarity(found, {key: leaf for key, leaf in expected.items() if key != HEAD}, values=True)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained")
    assert st.similarity(loaded.state_dict(), expected, values=True)
    assert run_ranks(2, distribute_file, tmp_path, timeout=units(60)) == [True, True]


def test_a_staged_model_is_saved_by_transformers(tmp_path):
    model = seeded()
    with st.Stager() as stager:
        staged = stager.stage(model.state_dict())
        with torch.no_grad():
            model.lm_head.weight.zero_()
        model.save_pretrained(tmp_path, state_dict=staged)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_trees_equal(st.offload(loaded.state_dict()), st.offload(seeded().state_dict()))


def test_the_command_reads_shards_of_transformers(tmp_path, capsys):
    model = seeded()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert index.is_file()
    st.save(model.state_dict(), tmp_path / "checkpoint")
    assert main(["convert", str(index), str(tmp_path / "model.pt")]) == 0
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert st.similarity(loaded, {key: leaf for key, leaf in model.state_dict().items() if key != HEAD}, values=True)
    capsys.readouterr()
    assert main(["diff", "--values", str(tmp_path / "checkpoint"), str(index)]) == 1
    assert f"\n- {HEAD}" in capsys.readouterr().out  # what is tied, transformers writes once


def test_adapters_move_from_one_model_to_another(tmp_path):
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(seeded(), config)
    learn(model, torch.optim.SGD(model.parameters(), lr=1.0))
    adapters = st.offload(get_peft_model_state_dict(model))
    assert len(adapters) == 4
    other = get_peft_model(seeded(), config)
    assert not st.similarity(adapters, get_peft_model_state_dict(other), values=True)
    set_peft_model_state_dict(other, adapters)
    assert st.similarity(model.state_dict(), other.state_dict(), values=True)
    model.save_pretrained(tmp_path)
    found = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert st.similarity(adapters, found, values=True)


class Counter:
    """Something that accelerate saves by torch.save: what statetree copies of it."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3, dtype=torch.int64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return st.offload({"seen": self.seen})

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        st.copy_into(state, {"seen": self.seen})


def test_accelerate_saves_what_was_rolled_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, counter = seeded(), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(counter)

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (2, 8))
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        counter.seen += 1

    def state() -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counter": counter.seen}

    step()
    snapshot = st.offload(state())
    accelerator.save_state(str(tmp_path / "first"), safe_serialization=True)
    step()
    assert not st.similarity(snapshot, state(), values=True)
    st.copy_into(snapshot, state())
    accelerator.save_state(str(tmp_path / "second"), safe_serialization=True)
    for name in ("model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"):
        one, other = (tmp_path / folder / name for folder in ("first", "second"))
        if name.endswith(".safetensors"):
            assert main(["diff", "--values", str(one), str(other)]) == 0
        else:
            assert st.similarity(torch.load(one), torch.load(other), values=True)
    step()
    accelerator.load_state(str(tmp_path / "first"))
    report = st.similarity(snapshot, state(), values=True)
    assert report, str(report)


def test_a_trained_model_goes_on_alike_from_a_checkpoint(tmp_path):
    subject = transformers_gpt2()
    st.save(subject.state(), tmp_path / "checkpoint")

    def two_steps() -> Any:
        torch.manual_seed(7)
        subject.step()
        subject.step()
        return st.offload(subject.state())

    first = two_steps()
    st.load(tmp_path / "checkpoint", subject.state(), in_place=True)
    assert_trees_equal(two_steps()["model"], first["model"])
