"""Build the package, and try it where nothing else is: ``python -m tests.package build/package tests/unit -x``.

The wheel goes into a new environment, first without any extra, then with all of them and what the tests need. The tests
are those of the source distribution, unpacked elsewhere and without its own ``statetree``: only the installed one can
be what they run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EXTRAS: Final = ("cli", "safetensors", "testing")
#: Without PYTHONPATH and its like, which could lead back to the repository.
ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
#: What none of the core's own dependencies brings along.
NOT_IN_THE_CORE: Final = ("attrs", "click", "hypothesis", "numpy", "rich", "safetensors")
DEFAULT_TESTS: Final = ("tests/unit", "tests/contract", "tests/typing", "--numprocesses=2", "--exitfirst")

CORE: Final = """
import importlib.util, sys, warnings
import torch  # which warns where there is no NumPy

warnings.simplefilter("error")
import statetree as st

present = [name for name in sys.argv[1].split(",") if importlib.util.find_spec(name)]
assert not present, f"the environment is not empty: {present}"
assert "site-packages" in st.__file__, st.__file__
state = {"w": torch.arange(6.0).view(2, 3), "steps": [1, 2]}
with st.Stager() as stager:
    assert st.similarity(stager.stage(state), state, values=True)
assert st.similarity(st.offload(state), state, values=True)
import statetree.dcp, statetree.testing
try:
    statetree.testing.state_trees
except ModuleNotFoundError as error:
    assert "statetree[testing]" in str(error), error
else:
    raise AssertionError("statetree.testing.state_trees was there without hypothesis")
"""


class Failed(Exception):
    """The package is not as it has to be."""


def say(text: str) -> None:
    """Tell what comes next."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def done(*command: object, status: int = 0, **options: object) -> str:
    """Run a command away from the repository. Returns what it printed.

    Raises:
        Failed: If it ends with another status.
    """
    ran = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, **options
    )
    if ran.returncode != status:
        shown = " ".join(map(str, command))
        raise Failed(f"{shown}\nended with status {ran.returncode}: expected {status}\n{ran.stdout}")
    return ran.stdout


def built(folder: Path) -> tuple[Path, Path]:
    """Make the source distribution, and the wheel from it. Returns both."""
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(wheel: Path, package: Path) -> None:
    """Raise unless a wheel holds a package, all of it, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(package.parent).as_posix() for path in files}
    if names != expected:
        raise Failed(f"the wheel lacks {sorted(expected - names)}, and has {sorted(names - expected)} too much")
    if not licences:
        raise Failed("the wheel has no licence")
    missing = [extra for extra in EXTRAS if f"Provides-Extra: {extra}\n" not in metadata]
    if missing:
        raise Failed(f"the wheel does not declare the extras {missing}")


def environment(folder: Path) -> Path:
    """Make an environment. Returns its interpreter."""
    done(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install(python, "--upgrade", "pip")
    return python


def install(python: Path, *what: object) -> None:
    """Install packages, in the versions that development uses."""
    quiet = ("-qq", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    done(python, "-m", "pip", "install", *quiet, *what)


def check_core(python: Path, folder: Path) -> None:
    """Raise unless the core works without the extras, and what needs one says which."""
    done(python, "-c", CORE, ",".join(NOT_IN_THE_CORE), cwd=folder)
    for command in ([python.with_name("statetree")], [python, "-m", "statetree"]):
        told = done(*command, "--help", status=2, cwd=folder)
        if "pip install 'statetree[cli]'" not in told or "Traceback" in told:
            raise Failed(f"without the extra cli, the command does not say that it is missing:\n{told}")


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution, all but the package itself. Returns where."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (place,) = folder.iterdir()
    shutil.rmtree(place / "statetree")
    return place


def check_suite(python: Path, place: Path, arguments: list[str]) -> None:
    """Raise unless tests pass, from where the repository is not."""
    ran = subprocess.run([str(python), "-m", "pytest", *arguments], cwd=place, env=ENVIRONMENT, check=False)
    if ran.returncode:
        raise Failed(f"the tests of the source distribution failed, in {place}")


def main(folder: Path, arguments: list[str]) -> int:
    """Do all of it, in a folder that is made anew. Returns the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        sdist, wheel = built(folder / "dist")
        check_contents(wheel, ROOT / "statetree")
        say(f"built {sdist.name} and {wheel.name}")
        python = environment(folder / "venv")
        install(python, wheel)
        check_core(python, folder)
        say("the core works in an empty environment")
        place = unpacked(sdist, folder / "unpacked")
        install(python, f"{wheel}[{','.join(EXTRAS)}]", "mypy", "--group", f"{place / 'pyproject.toml'}:test")
        done(python.with_name("statetree"), "--help", cwd=folder)
        say("the extras can be installed")
        check_suite(python, place, arguments or list(DEFAULT_TESTS))
    except Failed as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
