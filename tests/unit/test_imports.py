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
LAZY = ("hypothesis", "pytest", "rich", "safetensors", "torch.distributed.checkpoint", "torch.distributed.tensor")

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


def test_import_alone_loads_nothing():
    loaded = run_fresh("import sys, statetree; statetree.__version__; print(*sys.modules)").split()
    assert "statetree" in loaded
    assert [name for name in loaded if name.startswith(("statetree.", "torch", "optree"))] == []


def test_names_load_nothing_slow_or_optional():
    loaded = json.loads(
        run_fresh("import json, sys, statetree; statetree.gather; print(json.dumps(list(sys.modules)))")
    )
    assert "statetree.transforms.gather" in loaded
    assert [name for name in LAZY if name in loaded] == []


@pytest.mark.parametrize("first", ["statetree.paths", "statetree.errors", "statetree.compose", "statetree.testing"])
def test_names_do_not_depend_on_what_was_imported_first(first):
    code = """if True:
        import importlib, statetree, sys
        importlib.import_module(sys.argv[1])
        assert statetree.paths({"a": [1, 2]})[1] == ("a", 1)
        assert sys.modules["statetree.paths"].Path is statetree.Path
    """
    run_fresh(code, first)


def test_all_names_are_seen_whichever_way_they_are_asked_for():
    ways = (
        "import statetree; print(*statetree.__all__)",
        "from statetree import *; print(*sorted(name for name in dir() if name[0] != '_'))",
        "import statetree; print(*[name for name in sorted(set(dir(statetree))) if name in statetree.__all__])",
        "from statetree import flatten; import statetree; print(*statetree.__all__)",
        "import importlib, statetree; importlib.reload(statetree); print(*statetree.__all__)",
    )
    (seen,) = {run_fresh(way).strip() for way in ways}
    assert seen.split() == statetree.__all__
    assert {"Stager", "gather", "paths", "stream"} <= set(seen.split())
    assert {"Any", "sys", "transforms"}.isdisjoint(seen.split())


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="module 'statetree' has no attribute 'gathr'"):
        statetree.gathr  # noqa: B018
    assert not hasattr(statetree, "_gathr")


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
    run_fresh(code)


def test_threads_may_ask_for_names_at_once():
    code = """if True:
        import statetree, threading
        failed = []
        def ask(name):
            try:
                getattr(statetree, name)
            except BaseException as error:
                failed.append(error)
        names = ["flatten", "gather", "similarity", "stream", "Stager", "TreeSpec"] * 2
        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed, failed
    """
    run_fresh(code)


def test_import_needs_only_the_declared_dependencies():
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in NOT_REQUIRED)
    run_fresh(f"import sys\n{blocked}from statetree import flatten")


def test_import_warns_of_nothing():
    run_fresh("import warnings, torch, optree\nwarnings.simplefilter('error')\nfrom statetree import flatten")


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
