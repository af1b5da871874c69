"""What importing the package costs and needs, seen from fresh interpreters."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import statetree
from tests.pace import units

PACKAGE = Path(statetree.__file__).parent

# Slow to import, or there only with an extra.
LAZY = ("hypothesis", "pytest", "rich", "safetensors", "torch.distributed.checkpoint", "torch.distributed.tensor")

# Neither torch nor optree needs them, so the core may not either.
NOT_REQUIRED = ("attr", "attrs", "click", "hypothesis", "numpy", "rich", "safetensors", "tqdm")

# Modules that are there only with an extra, by their path under the package.
EXTRAS = ("testing", "cli", "integrations", "__main__")

# Forked from an interpreter that holds torch already, and DCP where it is imported anyway: a fresh one for each would
# take minutes.
FORK_EACH = """
import json, os, sys, tempfile, traceback
import torch

if "dcp" in sys.argv:
    import torch.distributed.checkpoint
ran = []
for code in json.load(sys.stdin):
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            status = 0
            try:
                exec(code, {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                status = 1
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        ran.append((status, printed.read().decode()))
json.dump(ran, sys.stdout)
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


def run_each(codes: list[str], *arguments: str) -> list[str]:
    """Run each in a process that has imported torch alone; return what it printed, or the traceback that ended it."""
    ran = json.loads(run_fresh(FORK_EACH, *arguments, stdin=json.dumps(codes)))
    return [printed if status == 0 else f"failed: {printed or status}" for status, printed in ran]


def module_names() -> list[str]:
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in EXTRAS:
            continue
        names.append(".".join(["statetree", *(part for part in parts if part != "__init__")]))
    return names


@pytest.mark.slow  # that imports make no circles is for `make lint` to see
@pytest.mark.parametrize("dcp", [False, True], ids=["engines", "dcp"])
def test_each_module_imports_on_its_own(dcp):
    names = [name for name in module_names() if name.startswith("statetree.dcp") == dcp]
    ran = run_each([f"import {name}" for name in names], *["dcp"] * dcp)
    assert {name: said for name, said in zip(names, ran, strict=True) if said} == {}


def test_import_alone_loads_nothing():
    loaded = run_fresh("import sys, statetree; statetree.__version__; print(*sys.modules)").split()
    assert "statetree" in loaded
    assert [name for name in loaded if name.startswith(("statetree.", "torch", "optree"))] == []


@pytest.mark.slow
def test_names_load_nothing_slow_or_optional():
    loaded = json.loads(
        run_fresh("import json, sys, statetree; statetree.gather; print(json.dumps(list(sys.modules)))")
    )
    assert "statetree.transforms.gather" in loaded
    assert [name for name in LAZY if name in loaded] == []


@pytest.mark.slow
def test_names_do_not_depend_on_what_was_imported_first():
    code = """if True:
        import {first}, statetree, sys
        assert statetree.paths({{"a": [1, 2]}})[1] == "a.1"
        assert statetree.key_paths.Path is statetree.Path
    """
    firsts = ("statetree.key_paths", "statetree.errors", "statetree.compose", "statetree.testing")
    assert run_each([code.format(first=first) for first in firsts]) == [""] * len(firsts)


@pytest.mark.slow
def test_all_names_are_seen_whichever_way_they_are_asked_for():
    ways = (
        "import statetree; print(*statetree.__all__)",
        "from statetree import *; print(*sorted(name for name in dir() if name[0] != '_'))",
        "import statetree; print(*[name for name in sorted(set(dir(statetree))) if name in statetree.__all__])",
        "from statetree import flatten; import statetree; print(*statetree.__all__)",
        "import importlib, statetree; importlib.reload(statetree); print(*statetree.__all__)",
    )
    (seen,) = {printed.strip() for printed in run_each(list(ways))}
    assert seen.split() == statetree.__all__
    assert {"Stager", "gather", "paths", "stream"} <= set(seen.split())
    assert {"Any", "sys", "transforms"}.isdisjoint(seen.split())


@pytest.mark.parametrize("package", ["statetree", "statetree.files"])
def test_type_checkers_are_told_of_the_names_that_python_finds(package):
    """Each lazy package lists its names twice: as imports for type checkers, and in a table."""
    module = importlib.import_module(package)
    checked = next(node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If))
    told = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    submodules = {name for name, parent in told.items() if parent == package}
    assert told.keys() - submodules == set(module.__all__)
    for name, parent in told.items():
        if name not in submodules:
            assert getattr(module, name) is getattr(importlib.import_module(parent), name)


def test_a_name_costs_its_own_modules_alone():
    loaded = run_fresh("import sys, statetree; statetree.Path; print(*sys.modules)").split()
    assert "statetree.key_paths" in loaded
    assert [name for name in loaded if name.startswith(("statetree.t", "torch", "optree"))] == []


@pytest.mark.slow
def test_what_is_asked_for_is_an_attribute_from_then_on():
    code = "import statetree; statetree.flatten; assert 'flatten' in vars(statetree); assert statetree.files.open"
    assert run_each([code, "import statetree; assert statetree.files.save is statetree.save"]) == ["", ""]


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="module 'statetree' has no attribute 'gathr'"):
        statetree.gathr  # noqa: B018
    assert not hasattr(statetree, "_gathr")


@pytest.mark.slow
def test_an_import_that_fails_can_be_made_again():
    code = """if True:
        import sys, statetree
        sys.modules["optree"] = None
        try:
            statetree.flatten
        except ImportError as error:
            assert "optree" in str(error)
        else:
            raise AssertionError
        del sys.modules["optree"]
        assert statetree.flatten([1])[0] == [1]
    """
    assert run_each([code]) == [""]


@pytest.mark.slow
def test_threads_may_ask_for_names_at_once():
    code = """if True:
        import statetree, statetree.files, sys, threading
        sys.setswitchinterval(1e-5)
        failed = []
        def ask(package, name):
            try:
                getattr(package, name)
            except BaseException as error:
                failed.append(error)
        names = ["flatten", "gather", "similarity", "stream", "Stager", "TreeSpec", "digest", "prepare", "load"]
        asked = [(statetree, name) for name in names] + [(statetree.files, name) for name in ("open", "StoredTensor")]
        threads = [threading.Thread(target=ask, args=pair) for pair in asked * 2]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed, failed
    """
    assert run_each([code] * 8) == [""] * 8


@pytest.mark.slow
def test_import_needs_only_the_declared_dependencies():
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in NOT_REQUIRED)
    run_fresh(f"import sys\n{blocked}from statetree import flatten")


@pytest.mark.slow
def test_import_warns_of_nothing():
    run_fresh("import warnings, torch, optree\nwarnings.simplefilter('error')\nfrom statetree import flatten")


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
