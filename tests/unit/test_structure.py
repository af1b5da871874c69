"""The structure of the package, as far as the import contracts of `make lint` do not hold it."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import statetree

ROOT = Path(statetree.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PACKAGES = ["chunks", "cli", "dcp", "exchange", "files", "integrations", "leaves", "spans", "stager", "testing"]
PACKAGES += ["transforms", "tree"]
MODULES = ["__init__.py", "__main__.py", "compose.py", "declare.py", "errors.py", "key_paths.py", "signals.py"]
MODULES += ["torch_internals.py"]
#: A layer and its registry, or its public face, have one name each by design.
SHARED_FILE_NAMES = {"__init__.py", "registry.py"}
ITERATORS = {"accumulate", "chain", "combinations", "enumerate", "filter", "from_iterable", "islice", "iter", "map"}
ITERATORS |= {"pairwise", "permutations", "product", "starmap", "zip"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_the_root_shows_the_engines():
    found = sorted(entry.name for entry in ROOT.iterdir() if entry.name != "__pycache__")
    assert found == sorted([*PACKAGES, *MODULES, "py.typed"])


@pytest.mark.parametrize("package", [*PACKAGES, "leaves/types"])
def test_each_package_says_what_it_is(package):
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert text
    if package != "leaves/types":
        files = [path.stem for path in (ROOT / package).glob("*.py") if not path.name.startswith("_")]
        assert not [name for name in files if f"``{name}``" not in text], "files that its docstring does not list"


def test_no_two_classes_have_one_name():
    where = defaultdict(list)
    for path in FILES:
        if path.parent.name == "integrations":  # which are called what the frameworks call them
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name_of(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_two_files_have_one_name():
    where = defaultdict(list)
    for path in FILES:
        if path.name not in SHARED_FILE_NAMES and path.parent.name != "integrations":
            where[path.name].append(name_of(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_a_file_is_one_idea():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert sorted(lengths.values())[len(lengths) // 2] <= 160


def test_an_integration_takes_80_lines():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "integrations").glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def growing_tuples(text):
    """Return the lines that build a tuple from an iterator without a length, which CPython resizes in place.

    Resizing raises ``SystemError`` if another thread lists all objects (``gc.get_objects()``) at that moment.
    A list does not mind. The arguments of a call are a tuple, too, and are built so if an iterator is all of them.
    """
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and any(map(is_iterator, what_becomes_a_tuple(node)))
    )


def what_becomes_a_tuple(call):
    if isinstance(call.func, ast.Name) and call.func.id in ("tuple", "Path"):  # a path is a tuple
        return call.args
    return [call.args[0].value] if len(call.args) == 1 and isinstance(call.args[0], ast.Starred) else []


def is_iterator(node):
    named = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ITERATORS
    return named or isinstance(node, ast.GeneratorExp)


def test_growing_tuples_are_found():
    growing = ["tuple(x for x in y)", "tuple(map(f, y))", "tuple(chain.from_iterable(y))", "g(*map(f, y), z=1)"]
    others = ["tuple([x for x in y])", "(*map(f, y),)", "g(1, *map(f, y))", "g(*[x for x in y])"]
    assert growing_tuples("\n".join(growing + others)) == [1, 2, 3, 4]


def test_a_monitor_may_list_all_objects_at_any_time():
    found = {
        name_of(path): growing_tuples(path.read_text()) for path in FILES if path.parts[-2] not in ("cli", "testing")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
