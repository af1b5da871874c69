"""Counts the processor's instructions on hot paths, under valgrind: a measure that other processes do not disturb.

``python -m benchmarks.instructions`` counts them and compares with what is recorded; ``--record`` records them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optree
import torch

import statetree as st

if TYPE_CHECKING:
    from collections.abc import Callable

#: The counts that are kept beside the code.
RECORDED: Final = Path(__file__).parent / "results" / "instructions.json"
#: By which part a count may exceed what is recorded. From run to run they differ by less than a hundredth of that.
TOLERANCE: Final = 0.05
NUM_LEAVES: Final = 1_000
TIMEOUT_S: Final = 280
_COUNTING: Final = "--counting"

# What valgrind takes for a request: an address of six words in rax and a default answer in rdx, then four rotations
# of rdi that leave it as it was, and an exchange of rbx with itself. Without valgrind nothing happens. As a function:
_REQUEST: Final = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
_CALLGRIND: Final = ord("C") << 24 | ord("T") << 16
_ZERO, _DUMP, _START, _STOP = _CALLGRIND + 1, _CALLGRIND + 3, _CALLGRIND + 4, _CALLGRIND + 5


def versions() -> dict[str, str]:
    """Return what counts depend on: others are not to be compared."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "optree": optree.__version__,
    }


def unavailable() -> str | None:
    """Say why there can be no counts here, if so."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "instructions are counted on Linux on x86-64"
    return None if shutil.which("valgrind") else "valgrind, which counts instructions, is not installed"


def count() -> dict[str, float]:
    """Return how many instructions a leaf takes on each path. Starts a process under valgrind: half a minute."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        command = ["valgrind", *options, sys.executable, "-m", __spec__.name, _COUNTING]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, check=True, env=environment, cwd=Path(__file__).parents[1], timeout=TIMEOUT_S, capture_output=True
        )
        return dict(_read(path) for path in sorted(Path(folder).iterdir()) if path.suffix)


def _read(path: Path) -> tuple[str, float]:
    text = path.read_text()
    name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
    total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
    assert name is not None
    assert total is not None
    return name[1], round(int(total[1]) / NUM_LEAVES, 1)


def regressions(counts: dict[str, float], recorded: dict[str, Any]) -> list[str]:
    """Say which paths take more instructions than what is recorded allows."""
    return [
        f"{name}: {counts[name]:,.0f} instructions a leaf, {counts[name] / expected - 1:+.1%} of the {expected:,.0f} "
        "recorded. If that is worth it, record them again: make instructions ARGS=--record."
        for name, expected in recorded["instructions_per_leaf"].items()
        if counts[name] > expected * (1 + recorded["tolerance"])
    ]


def hot_paths() -> dict[str, Callable[[], Any]]:
    """Return the work that is counted, on tensors so small that their bytes do not matter."""
    tensors = torch.arange(16 * NUM_LEAVES, dtype=torch.float32).split(16)
    state = {f"layers.{index}.weight": tensor.clone() for index, tensor in enumerate(tensors)}
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    stager = st.Stager()

    def flatten_unflatten() -> Any:
        leaves, spec = st.flatten(state)
        return st.unflatten(spec, leaves)

    return {
        "flatten + unflatten": flatten_unflatten,
        "stage again": lambda: stager.stage(state),
        "copy_into": lambda: st.copy_into(state, target),
        "similarity": lambda: st.similarity(state, target, values=False),
    }


def _count_here() -> None:
    """Run each path, in a process under valgrind, and have it write down what it counted."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(_REQUEST)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    send = ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.POINTER(ctypes.c_ulong))(address)

    def request(number: int, argument: int = 0) -> None:
        send((ctypes.c_ulong * 6)(number, argument))

    for name, run in hot_paths().items():
        label = ctypes.create_string_buffer(name.encode())
        for _ in range(3):  # caches are filled, and Python has specialised its bytecode
            run()
        request(_START)
        # When garbage is collected, and how much is looked at, must not depend on what was imported before.
        gc.collect()
        gc.freeze()
        run()  # once more, since valgrind translates anew what it is to count, and collecting empties free lists
        request(_ZERO)
        run()
        request(_DUMP, ctypes.addressof(label))
        request(_STOP)


def main() -> None:
    """Compare with what is recorded, or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}")
    parser.add_argument(_COUNTING, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counting:
        _count_here()
        return
    if reason := unavailable():
        sys.exit(reason)
    counts = count()
    for name, number in counts.items():
        print(f"{name}: {number:,.0f} instructions a leaf")
    if options.record:
        document = {"versions": versions(), "tolerance": TOLERANCE, "instructions_per_leaf": counts}
        RECORDED.write_text(json.dumps(document, indent=1) + "\n")
        print(f"Written to {RECORDED}.")
        return
    recorded = json.loads(RECORDED.read_text())
    if recorded["versions"] != versions():
        sys.exit(f"These are of {versions()}, those recorded of {recorded['versions']}: not compared.")
    sys.exit("\n".join(regressions(counts, recorded)) or None)


if __name__ == "__main__":
    main()
