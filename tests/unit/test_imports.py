"""What importing the package costs and needs, seen from fresh interpreters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import statetree
from tests.pace import units

PACKAGE = Path(statetree.__file__).parent

# Slow to import, or there only with an extra.
LAZY = ("hypothesis", "rich", "safetensors", "torch.distributed.checkpoint", "torch.distributed.tensor")

# Neither torch nor optree needs them, so the core may not either.
NOT_REQUIRED = ("attr", "attrs", "click", "hypothesis", "numpy", "rich", "safetensors", "tqdm")

# Modules that are there only with an extra, by their path under the package.
EXTRAS = ("testing", "cli", "__main__")

# Forked from an interpreter that holds torch already, and DCP where it is imported anyway: a fresh one for every module
# would take minutes.
IMPORT_EACH = """
import json, os, sys, traceback
import torch

if "dcp" in sys.argv:
    import torch.distributed.checkpoint
failed = {}
for name in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            try:
                __import__(name)
            except BaseException:
                pipe.write(traceback.format_exc())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        error = pipe.read()
    _, status = os.waitpid(child, 0)
    if error or status:
        failed[name] = error or f"ended with wait status {status}"
json.dump(failed, sys.stdout)
"""


def run_fresh(code: str, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=units(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_names() -> list[str]:
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in EXTRAS:
            continue
        names.append(".".join(["statetree", *(part for part in parts if part != "__init__")]))
    return names


@pytest.fixture(scope="module")
def import_failures() -> dict[str, str]:
    """The traceback of each module that does not import as the first of the package."""
    dcp = [name for name in module_names() if name.startswith("statetree.dcp")]
    others = [name for name in module_names() if name not in dcp]
    return json.loads(run_fresh(IMPORT_EACH, "dcp", stdin=json.dumps(dcp))) | json.loads(
        run_fresh(IMPORT_EACH, stdin=json.dumps(others))
    )


@pytest.mark.parametrize("name", module_names())
def test_each_module_imports_on_its_own(name, import_failures):
    assert name not in import_failures, import_failures[name]


def test_import_loads_nothing_slow_or_optional():
    loaded = json.loads(run_fresh("import json, sys, statetree; print(json.dumps(sorted(sys.modules)))"))
    assert "statetree" in loaded
    assert [name for name in LAZY if name in loaded] == []


def test_import_needs_only_the_declared_dependencies():
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in NOT_REQUIRED)
    run_fresh(f"import sys\n{blocked}import statetree")


def test_import_warns_of_nothing():
    run_fresh("import warnings, torch, optree\nwarnings.simplefilter('error')\nimport statetree")


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
