"""Runs everything that is about an accelerator: `make gpu`. With ``--dry`` it does so on the CPU, and measures nothing.

python -m tests.gpu [--dry] [--carry [--python-version 3.12]]

That is the tests marked ``gpu`` (collectives over NCCL with one rank, and over gloo with two that share a device, among
them) and the benchmark's group ``gpu``, whose figures are written to ``build/gpu``. The machine needs torch with CUDA,
and neither a network nor an environment of its own: ``--carry`` puts what else is imported into ``build/gpu/packages``,
to be copied there with the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "gpu"
#: What is carried along, and imported only where it is not installed.
PACKAGES: Final = FOLDER / "packages"
CARRIED: Final = ("optree", "typing_extensions", "pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging",
                  "pygments", "hypothesis", "sortedcontainers", "attrs", "numpy", "safetensors")  # fmt: skip
#: How long tests and rows may take each: all is to be over in nine minutes.
LIMIT_S: Final = {"tests": 240, "rows": 270}


def carry(python_version: str) -> None:
    """Put wheels for Linux on x86-64 and a version of Python into the folder, unpacked."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + [
        "--platform=manylinux2014_x86_64"
    ]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    options = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp", *platforms]
    constraints = ["-c", ROOT / "constraints.txt"]
    subprocess.run([*command, *options, *constraints, f"--target={PACKAGES}", *CARRIED], check=True)


def commands(*, dry: bool) -> dict[str, list[str]]:
    """Return what is run, by name. (The tests do the work of the rows as well, small and without timing it.)"""
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "tests/unit/test_benchmarks.py"]
    rows = ["benchmarks", "--only", "gpu", "--attempts", "1", "--json", str(FOLDER / "rows.json")]
    return {"tests": tests} if dry else {"tests": tests, "rows": rows}


def run(*, dry: bool) -> int:
    """Run everything, and return how many parts failed."""
    if not dry and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA here. Pass --dry to run on the CPU.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    # What is installed comes first: the folder is for what is not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:], str(PACKAGES)])}
    failed = 0
    for name, module in commands(dry=dry).items():
        command = [sys.executable, "-m", *module]
        try:
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=LIMIT_S[name])
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name}: FAILED: {error}", flush=True)
            failed += 1
    return failed


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="run on the CPU, and measure nothing")
    parser.add_argument("--carry", action="store_true", help="fetch what the machine lacks, and run nothing")
    parser.add_argument("--python-version", default="3.12", metavar="X.Y", help="of the machine, for --carry")
    options = parser.parse_args()
    if options.carry:
        carry(options.python_version)
    else:
        sys.exit(run(dry=options.dry))


if __name__ == "__main__":
    main()
