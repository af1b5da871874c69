"""States that are written by torch, safetensors and DCP themselves, and the command run over them."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

import statetree as st
from statetree.cli.app import main

#: Every dtype that all three formats hold.
COMMON_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


class Ran(NamedTuple):
    """What a run of the command came to."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def bits(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """A tensor whose bytes are all different from one position to the next."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(start, start + count) * 7 % 251
    if dtype is torch.bool:
        data %= 2
    return data.to(torch.uint8).view(dtype).view(shape)


def flat_state() -> dict[str, torch.Tensor]:
    """Tensors of all common dtypes, under flat keys."""
    state = {f"x.{str(dtype).split('.')[1]}": bits(3, 5, dtype=dtype) for dtype in COMMON_DTYPES}
    return {**state, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "deep": bits(2, 1, 3, 2)}


def nested_state() -> dict[Any, Any]:
    """A training state: nested, with plain values of all sorts, typed keys, and no ties."""
    weights = OrderedDict({"layers.0.weight": bits(4, 3), "layers.0.bias": bits(4, start=5)})
    weights._metadata = OrderedDict({"": {"version": 1}})
    return {
        "model": weights,
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": bits(4, 3, start=9)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        },
        "list": [bits(2), {"a": bits(1, start=3)}, "text", ()],
        "values": {"nan": float("nan"), "big": 2**70, "bytes": b"\x00\xff", "complex": 1 - 2j, "set": {1, 2}},
        "torch": [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
        3: "three",
        "3x": [],
    }


def tied_state() -> dict[str, torch.Tensor]:
    """Views that share storages in every way."""
    base = bits(6, 8)
    half = torch.arange(200.0)
    return {
        "whole": base,
        "same": base,
        "transposed": base.t(),
        "row": base[2],
        "strided": base[1::2, ::3],
        "apart": half[20:30],
        "far": half[150:160],
        "overlapping": half[25:40],
        "own": bits(3, start=50),
        "expanded": torch.tensor([4.0, 5.0]).expand(3, 2),
    }


def write(state: Any, path: Path) -> Path:
    """Write a state by the library whose format a name stands for."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    elif path.suffix:
        torch.save(state, path)
    else:
        st.save(state, path)
    return path


def load(path: Path) -> Any:
    """Load a checkpoint by the library of its format."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix:
        return torch.load(path, weights_only=True)
    return st.load(path)


def run(capsys: Any, *args: Any) -> Ran:
    """Run the command in this process."""
    capsys.readouterr()
    status = main([str(arg) for arg in args])
    return Ran(status, *capsys.readouterr())
